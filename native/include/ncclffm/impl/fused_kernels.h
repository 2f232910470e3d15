// Bodies of fused.h: the library's own kernels. What is written as fmaf, and only that, is rounded once; so the results
// do not depend on the compiler, nor on which thread computes them.
#ifndef NCCLFFM_IMPL_FUSED_KERNELS_H_
#define NCCLFFM_IMPL_FUSED_KERNELS_H_

namespace ncclffm {

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t scaleAllReduceSqrt(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                               float a, float b) {
  const BlockShare share = shareOf(call.count, sizeof(T), block, nBlocks);
  if (share.count == 0) return ncclSuccess;
  ChannelSession<Coop> session(coop, comm, block, ncclFfmFunctionFusedScaleAllReduceSqrt);
  if (session.result() != ncclSuccess) return session.result();
  return runFusedShare<T>(session, call, share, ScaleAdd{a, b}, SqrtAbs());
}

// 4 elements of a thread, in one access where they are aligned to all of it.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

template <class T>
NCCLFFM_DEVICE bool isAlignedToFour(const T *address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Four<T>) == 0;
}

template <class T>
NCCLFFM_DEVICE Four<T> loadFour(const T *address) {
  return loadAs<Four<T>>(reinterpret_cast<const char *>(address));
}

template <class T>
NCCLFFM_DEVICE void storeFour(T *address, const Four<T> &four) {
  storeAs(reinterpret_cast<char *>(address), four);
}

// Tokens of a block, normed as many at a time as one sum over the threads may take together.
constexpr int kTokensAtOnce = 4;

template <class T>
NCCLFFM_DEVICE float squaresOf(Share share, const T *row, uint64_t hidden, uint64_t fours) {
  float squares = 0;
  NCCLFFM_NO_UNROLL
  for (uint64_t i = share.thread; i < fours; i += share.nThreads) {
    const Four<T> r = loadFour(row + 4 * i);
    NCCLFFM_UNROLL
    for (int k = 0; k < 4; ++k) {
      const float x = ElementType<T>::load(r.x[k]);
      squares = fmaf(x, x, squares);
    }
  }
  NCCLFFM_NO_UNROLL
  for (uint64_t i = 4 * fours + share.thread; i < hidden; i += share.nThreads) {
    const float x = ElementType<T>::load(row[i]);
    squares = fmaf(x, x, squares);
  }
  return squares;
}

template <class T>
NCCLFFM_DEVICE void scaleRow(Share share, const T *row, const T *weight, T *out, float scale, uint64_t hidden,
                             uint64_t fours) {
  auto scaled = [&](T r, T w) {
    return ElementType<T>::store(ElementType<T>::load(r) * scale * ElementType<T>::load(w));
  };
  NCCLFFM_NO_UNROLL
  for (uint64_t i = share.thread; i < fours; i += share.nThreads) {
    const Four<T> r = loadFour(row + 4 * i), w = loadFour(weight + 4 * i);
    Four<T> result;
    NCCLFFM_UNROLL
    for (int k = 0; k < 4; ++k) result.x[k] = scaled(r.x[k], w.x[k]);
    storeFour(out + 4 * i, result);
  }
  NCCLFFM_NO_UNROLL
  for (uint64_t i = 4 * fours + share.thread; i < hidden; i += share.nThreads) out[i] = scaled(row[i], weight[i]);
}

// Rows of `residual` to the same rows of norm.out, by a group that sees them whole.
template <class T, class Coop>
NCCLFFM_DEVICE void normRows(const Coop &coop, const RmsNorm &norm, const T *residual, uint64_t first,
                             uint64_t tokens) {
  const Share share = {coop.rank(), coop.size()};
  const uint64_t hidden = norm.hidden;
  const T *weight = static_cast<const T *>(norm.weight);
  T *out = static_cast<T *>(norm.out);
  const bool aligned = hidden % 4 == 0 && isAlignedToFour(residual) && isAlignedToFour(weight) && isAlignedToFour(out);
  const uint64_t fours = aligned ? hidden / 4 : 0;
  NCCLFFM_NO_UNROLL
  for (uint64_t t = 0; t < tokens; t += kTokensAtOnce) {
    float squares[kTokensAtOnce] = {};
    NCCLFFM_UNROLL
    for (int k = 0; k < kTokensAtOnce; ++k) {
      if (t + k < tokens) squares[k] = squaresOf(share, residual + (first + t + k) * hidden, hidden, fours);
    }
    coop.syncSum(squares);
    NCCLFFM_UNROLL
    for (int k = 0; k < kTokensAtOnce; ++k) {
      if (t + k >= tokens) break;
      const uint64_t row = (first + t + k) * hidden;
      const float scale = 1.0f / sqrtf(squares[k] / static_cast<float>(hidden) + norm.eps);
      scaleRow(share, residual + row, weight, out + row, scale, hidden, fours);
    }
  }
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t allReduceRmsNorm(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                             const RmsNorm &norm) {
  const uint64_t n = static_cast<uint64_t>(nBlocks), most = (norm.tokens + n - 1) / n;
  const uint64_t first = most * static_cast<uint64_t>(block);
  if (first >= norm.tokens) return ncclSuccess;
  const uint64_t tokens = norm.tokens - first < most ? norm.tokens - first : most;
  ChannelSession<Coop> session(coop, comm, block, ncclFfmFunctionFusedRmsNorm);
  if (session.result() != ncclSuccess) return session.result();
  // Zero-copy, recvbuff is this rank's place in the window.
  T *residual = isZeroCopy(call) ? reinterpret_cast<T *>(loadPeer(call.recv.peers, comm.rank) + call.recv.offset)
                                 : static_cast<T *>(call.recvbuff);
  const BlockShare share = {first * norm.hidden, tokens * norm.hidden};
  const ncclResult_t result = runFusedShare<T>(session, call, share, Identity(), AddTo<T>{residual});
  if (result == ncclSuccess) normRows<T>(session.coop(), norm, residual, first, tokens);
  return result;
}

// x^n, the same wherever it is computed.
NCCLFFM_DEVICE double powerOf(double x, uint32_t n) {
  double power = 1;
  NCCLFFM_NO_UNROLL
  for (; n != 0; n >>= 1, x *= x) {
    if ((n & 1) != 0) power *= x;
  }
  return power;
}

// What an update of all elements has in common.
struct Rates {
  float clip;            // of gradients
  float learning;        // of AdamW: learningRate / (1 - beta1^step)
  float rootCorrection;  // of AdamW: 1 / sqrt(1 - beta2^step)
};

template <bool kAdamW>
NCCLFFM_DEVICE void updateElement(const Optimizer &o, const Rates &rates, float gradient, float &weight,
                                  float &momentum, float &variance) {
  const float g = gradient * rates.clip;
  weight = fmaf(-(o.learningRate * o.weightDecay), weight, weight);
  if constexpr (kAdamW) {
    momentum = fmaf(o.beta1, momentum, (1.0f - o.beta1) * g);
    variance = fmaf(o.beta2, variance, (1.0f - o.beta2) * g * g);
    const float root = fmaf(sqrtf(variance), rates.rootCorrection, o.eps);
    weight = fmaf(-rates.learning, momentum / root, weight);
  } else {
    momentum = fmaf(o.beta1, momentum, g);
    weight = fmaf(-rates.learning, momentum, weight);
  }
}

// kAtOnce times 4 elements, each 4 `stride` elements after the last; all in flight together.
template <class T, bool kAdamW, int kAtOnce>
NCCLFFM_DEVICE void updateFours(const Optimizer &o, const Rates &rates, const T *gradients, uint64_t i,
                                uint64_t stride) {
  Four<T> g[kAtOnce];
  Four<float> w[kAtOnce], m[kAtOnce], v[kAtOnce] = {};
  NCCLFFM_UNROLL
  for (int a = 0; a < kAtOnce; ++a) {
    const uint64_t at = i + a * stride;
    g[a] = loadFour(gradients + at);
    w[a] = loadFour(o.weights + at);
    m[a] = loadFour(o.momentum + at);
    if (kAdamW) v[a] = loadFour(o.variance + at);
  }
  NCCLFFM_UNROLL
  for (int a = 0; a < kAtOnce; ++a) {
    const uint64_t at = i + a * stride;
    NCCLFFM_UNROLL
    for (int k = 0; k < 4; ++k) {
      updateElement<kAdamW>(o, rates, ElementType<T>::load(g[a].x[k]), w[a].x[k], m[a].x[k], v[a].x[k]);
    }
    storeFour(o.weights + at, w[a]);
    storeFour(o.momentum + at, m[a]);
    if (kAdamW) storeFour(o.variance + at, v[a]);
    if (o.weightCopy != nullptr) {
      Four<uint16_t> copy;
      NCCLFFM_UNROLL
      for (int k = 0; k < 4; ++k) copy.x[k] = toBfloat16(w[a].x[k]).bits;
      storeFour(o.weightCopy + at, copy);
    }
  }
}

template <class T, bool kAdamW>
NCCLFFM_DEVICE void updateOne(const Optimizer &o, const Rates &rates, const T *gradients, uint64_t i) {
  float weight = o.weights[i], momentum = o.momentum[i], variance = kAdamW ? o.variance[i] : 0;
  updateElement<kAdamW>(o, rates, ElementType<T>::load(gradients[i]), weight, momentum, variance);
  o.weights[i] = weight;
  o.momentum[i] = momentum;
  if (kAdamW) o.variance[i] = variance;
  if (o.weightCopy != nullptr) o.weightCopy[i] = toBfloat16(weight).bits;
}

template <class T, bool kAdamW>
NCCLFFM_DEVICE void update(Share share, const Optimizer &o, const Rates &rates, const T *gradients,
                           const BlockShare &elements) {
  const bool aligned = elements.first % 4 == 0 && isAlignedToFour(gradients) && isAlignedToFour(o.weights) &&
                       isAlignedToFour(o.momentum) && (!kAdamW || isAlignedToFour(o.variance)) &&
                       isAlignedToFour(o.weightCopy);
  const uint64_t end = elements.first + elements.count, stride = 4 * share.nThreads;
  const uint64_t endOfFours = aligned ? end & ~uint64_t{3} : elements.first;
  uint64_t i = elements.first + 4 * share.thread;
  NCCLFFM_NO_UNROLL
  for (; i + (kInFlight - 1) * stride < endOfFours; i += kInFlight * stride) {
    updateFours<T, kAdamW, kInFlight>(o, rates, gradients, i, stride);
  }
  NCCLFFM_NO_UNROLL
  for (; i < endOfFours; i += stride) updateFours<T, kAdamW, 1>(o, rates, gradients, i, 0);
  NCCLFFM_NO_UNROLL
  for (i = endOfFours + share.thread; i < end; i += share.nThreads) updateOne<T, kAdamW>(o, rates, gradients, i);
}

// Of a thread's elements.
template <class T>
NCCLFFM_DEVICE double squaresOfShare(Share share, const T *gradients, const BlockShare &elements) {
  double squares = 0;
  auto add = [&](T g) {
    const float x = ElementType<T>::load(g);
    squares += static_cast<double>(x) * x;  // exact: a product of floats is a double
  };
  const uint64_t end = elements.first + elements.count;
  const bool aligned = elements.first % 4 == 0 && isAlignedToFour(gradients);
  const uint64_t endOfFours = aligned ? end & ~uint64_t{3} : elements.first;
  uint64_t i = elements.first + 4 * share.thread;
  const uint64_t stride = 4 * share.nThreads;
  NCCLFFM_NO_UNROLL
  for (; i + (kInFlight - 1) * stride < endOfFours; i += kInFlight * stride) {
    Four<T> g[kInFlight];
    NCCLFFM_UNROLL
    for (int a = 0; a < kInFlight; ++a) g[a] = loadFour(gradients + i + a * stride);
    NCCLFFM_UNROLL
    for (int a = 0; a < kInFlight; ++a) {
      NCCLFFM_UNROLL
      for (int k = 0; k < 4; ++k) add(g[a].x[k]);
    }
  }
  NCCLFFM_NO_UNROLL
  for (; i < endOfFours; i += stride) {
    const Four<T> g = loadFour(gradients + i);
    NCCLFFM_UNROLL
    for (int k = 0; k < 4; ++k) add(g.x[k]);
  }
  NCCLFFM_NO_UNROLL
  for (i = endOfFours + share.thread; i < end; i += share.nThreads) add(gradients[i]);
  return squares;
}

// The factor that makes a gradient whose blocks have these squares no longer than maxNorm; the same in all blocks.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t clipOfGrid(const Grid<Coop> &grid, const DevComm &comm, double squaresOfThread,
                                       float maxNorm, float &clip) {
  double squares[] = {squaresOfThread};
  grid.block.syncSum(squares);
  if (grid.block.rank() == 0) storeRelaxedGpu(&comm.channels[grid.index].partial, bitCast<uint64_t>(squares[0]));
  const ncclResult_t result = syncGrid(grid, comm);
  if (result != ncclSuccess) return result;
  uint32_t bits = 0;
  if (grid.block.rank() == 0) {
    double sum = 0;
    NCCLFFM_NO_UNROLL
    for (int b = 0; b < grid.nBlocks; ++b) sum += bitCast<double>(loadAcquireGpu(&comm.channels[b].partial));
    const float factor = maxNorm / (sqrtf(static_cast<float>(sum)) + 1e-6f);
    bits = bitCast<uint32_t>(factor < 1.0f || factor != factor ? factor : 1.0f);
  }
  clip = bitCast<float>(static_cast<uint32_t>(grid.block.syncBroadcast(bits)));
  return ncclSuccess;
}

// Which step this is; the last block to ask counts it.
NCCLFFM_DEVICE uint32_t takeStep(const DevComm &comm, const Optimizer &o, int nBlocks) {
  if (o.steps == nullptr) return o.step;
  const uint32_t step = loadRelaxedGpu(o.steps) + 1;
  uint32_t *arrived = &comm.channels[0].arrived;
  if (fetchAddAcqRelGpu(arrived, 1) == static_cast<uint32_t>(nBlocks) - 1) {
    storeRelaxedGpu(arrived, 0);
    storeRelaxedGpu(o.steps, step);
  }
  return step;
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t allReduceUpdate(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                            const Optimizer &optimizer, bool adamW) {
  // The channel is held to the end: a second update of this communicator would count and sum in the same places.
  ChannelSession<Coop> session(coop, comm, block, adamW ? ncclFfmFunctionFusedAdamW : ncclFfmFunctionFusedSgd);
  if (session.result() != ncclSuccess) return session.result();
  const BlockShare share = shareOf(call.count, sizeof(T), block, nBlocks);
  ncclResult_t result = runFusedShare<T>(session, call, share, Identity(), Identity());
  if (result != ncclSuccess) return result;
  const Share threads = {coop.rank(), coop.size()};
  const T *gradients = isZeroCopy(call) ? reinterpret_cast<T *>(loadPeer(call.recv.peers, comm.rank) + call.recv.offset)
                                        : static_cast<T *>(call.recvbuff);
  Rates rates = {1.0f, optimizer.learningRate, 1.0f};
  if (optimizer.maxNorm != 0) {
    result = clipOfGrid(Grid<Coop>{coop, block, nBlocks}, comm, squaresOfShare(threads, gradients, share),
                        optimizer.maxNorm, rates.clip);
    if (result != ncclSuccess) return result;
  }
  if (!adamW) {
    update<T, false>(threads, optimizer, rates, gradients, share);
    return ncclSuccess;
  }
  uint64_t both = 0;
  if (coop.rank() == 0) {
    const uint32_t step = takeStep(comm, optimizer, nBlocks);
    const double ofMomentum = 1 - powerOf(optimizer.beta1, step), ofVariance = 1 - powerOf(optimizer.beta2, step);
    const float learning = static_cast<float>(optimizer.learningRate / ofMomentum);
    const float root = 1.0f / sqrtf(static_cast<float>(ofVariance));
    both = static_cast<uint64_t>(bitCast<uint32_t>(root)) << 32 | bitCast<uint32_t>(learning);
  }
  both = coop.syncBroadcast(both);
  rates.learning = bitCast<float>(static_cast<uint32_t>(both));
  rates.rootCorrection = bitCast<float>(static_cast<uint32_t>(both >> 32));
  update<T, true>(threads, optimizer, rates, gradients, share);
  return ncclSuccess;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_FUSED_KERNELS_H_

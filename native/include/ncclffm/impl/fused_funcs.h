// Bodies of fused.h, but for those of the library's own kernels.
#ifndef NCCLFFM_IMPL_FUSED_FUNCS_H_
#define NCCLFFM_IMPL_FUSED_FUNCS_H_

#ifndef __CUDACC_RTC__
#include <math.h>
#endif

namespace ncclffm {

NCCLFFM_DEVICE float ScaleAdd::operator()(float x, uint64_t) const {
  return fmaf(a, x, b);
}

NCCLFFM_DEVICE float SqrtAbs::operator()(float x, uint64_t) const {
  return sqrtf(fabsf(x));
}

template <class T>
NCCLFFM_DEVICE typename ElementType<T>::Accumulator AddTo<T>::operator()(typename ElementType<T>::Accumulator x,
                                                                         uint64_t i) const {
  return ElementType<T>::load(values[i]) + x;
}

// With one load for a word where that is possible.
template <class T>
NCCLFFM_DEVICE uint64_t mapWord(uint64_t word, const AddTo<T> &f, uint64_t index, uint64_t left) {
  const char *address = reinterpret_cast<const char *>(f.values + index);
  uint64_t old = 0;
  if (left >= 8 && reinterpret_cast<uintptr_t>(address) % 8 == 0) {
    old = loadAs<uint64_t>(address);
  } else {
    NCCLFFM_NO_UNROLL
    for (uint32_t b = 0; b < 8 && b < left; b += sizeof(T)) old |= loadUpTo8(address + b, sizeof(T)) << 8 * b;
  }
  WordReducer<T> sum;
  sum.start(old);
  sum.add(word, ncclSum);
  return sum.finish(ncclSum, 1);
}

template <class T>
constexpr int kDataTypeOf = -1;
template <>
constexpr int kDataTypeOf<int8_t> = ncclInt8;
template <>
constexpr int kDataTypeOf<uint8_t> = ncclUint8;
template <>
constexpr int kDataTypeOf<int32_t> = ncclInt32;
template <>
constexpr int kDataTypeOf<uint32_t> = ncclUint32;
template <>
constexpr int kDataTypeOf<int64_t> = ncclInt64;
template <>
constexpr int kDataTypeOf<uint64_t> = ncclUint64;
template <>
constexpr int kDataTypeOf<Float16> = ncclFloat16;
template <>
constexpr int kDataTypeOf<float> = ncclFloat32;
template <>
constexpr int kDataTypeOf<double> = ncclFloat64;
template <>
constexpr int kDataTypeOf<Bfloat16> = ncclBfloat16;

NCCLFFM_DEVICE bool isFusedProtocol(uint32_t protocol) {
  return protocol == ncclFfmProtocolLL || protocol == ncclFfmProtocolSimple;
}

NCCLFFM_DEVICE bool isFusedAlgorithm(uint32_t algorithm) {
  return algorithm == ncclFfmAlgorithmOneShot || algorithm == ncclFfmAlgorithmTwoShot;
}

// chooseFor without what a fused all-reduce does not have, and so far as the communicator would choose that.
NCCLFFM_DEVICE void chooseFused(const DevComm &comm, Call &call, int nGroups) {
  call.function = ncclFfmFunctionAllReduce;
  const bool zeroCopy = isZeroCopy(call);
  if (call.protocol == ncclFfmProtocolAuto && zeroCopy) call.protocol = ncclFfmProtocolSimple;
  if (call.protocol == ncclFfmProtocolAuto && isFusedProtocol(comm.protocol)) call.protocol = comm.protocol;
  if (call.algorithm == ncclFfmAlgorithmAuto && !zeroCopy && isFusedAlgorithm(comm.algorithm)) {
    call.algorithm = comm.algorithm;
  }
  const Choice choice = choose(call.function, call.protocol, call.algorithm, comm.nRanks,
                               call.count * elementBytesOf(call.datatype), nGroups, comm.path, zeroCopy);
  call.protocol = choice.protocol;
  call.algorithm = choice.algorithm;
}

// problemOf a fused all-reduce.
NCCLFFM_DEVICE Problem problemOfFused(const DevComm &comm, const Call &call, uint32_t groupSize) {
  if (!isFusedProtocol(call.protocol)) return Problem::kProtocol;
  if (!isFusedAlgorithm(call.algorithm)) return Problem::kAlgorithm;
  return problemOf(comm, call, groupSize);
}

template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t runFusedZeroCopy(ChannelSession<Coop> &session, const Call &call, const BlockShare &share,
                                             const CallContext &context, const Prologue &prologue,
                                             const Epilogue &epilogue) {
  const DevComm &comm = session.comm();
  const uint64_t bytes = share.count * sizeof(T), shard = shardBytes(bytes, comm.nRanks);
  const uint64_t start = static_cast<uint64_t>(comm.rank) * shard, first = share.first * sizeof(T) + start;
  const Parts shards = {nullptr, shard, shard, bytes};
  ncclResult_t result = barrier(session, context.hash);
  if (result != ncclSuccess) return result;
  const Places from = {call.send.peers, call.send.offset + first, nullptr, nullptr, 0, 0, comm.nRanks};
  const Places to = {call.recv.peers, call.recv.offset + first, nullptr, nullptr, 0, comm.rank, comm.nRanks};
  reduceMapped<T>({session.coop().rank(), session.coop().size()}, from, kEverybody, to, shards.lengthOf(comm.rank),
                  {context.op, context.nRanks, true}, first / sizeof(T), prologue, epilogue);
  return barrier(session, context.hash);
}

// A checked fused all-reduce with nothing left open, on a group's share of it.
template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t runFusedShare(ChannelSession<Coop> &session, const Call &call, const BlockShare &share,
                                          const Prologue &prologue, const Epilogue &epilogue) {
  if (share.count == 0) return ncclSuccess;
  const DevComm &comm = session.comm();
  const CallContext context = {call.op, comm.nRanks, sizeof(T), hashOf(call, share.count)};
  if (isZeroCopy(call)) return runFusedZeroCopy<T>(session, call, share, context, prologue, epilogue);
  const ShareBuffers buffers = buffersOf(call, share, sizeof(T));
  const Placed<Prologue> in = {prologue, call.sendbuff};
  const Placed<Epilogue> out = {epilogue, call.recvbuff};
  // What is all about latency has code of its own, in which the step is known.
  if (call.protocol == ncclFfmProtocolLL && call.algorithm == ncclFfmAlgorithmOneShot) {
    return runStepOfLines<LL, T>(session, stepOf(comm, call, buffers, 0), context, in, out);
  }
  const Step first = stepOf(comm, call, buffers, 0);
  const ncclResult_t result = call.protocol == ncclFfmProtocolLL
                                  ? runStepOfLines<LL, T>(session, first, context, in, out)
                                  : runStepOfSimple<T>(session, first, context, in, out);
  if (result != ncclSuccess || call.algorithm == ncclFfmAlgorithmOneShot) return result;
  return runStep<Unreduced, Ways::kTasks>(session, call.protocol, stepOf(comm, call, buffers, 1), context);
}

template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceLsa(ChannelSession<Coop> &session, Call call, Prologue prologue,
                                              Epilogue epilogue) {
  static_assert(kDataTypeOf<T> >= 0, "an element type of reduce.h");
  if (session.result() != ncclSuccess) return session.result();
  chooseFused(session.comm(), call, 1);
  if (call.datatype != kDataTypeOf<T> ||
      problemOfFused(session.comm(), call, session.coop().size()) != Problem::kNone) {
    return ncclInvalidArgument;
  }
  return runFusedShare<T>(session, call, {0, call.count}, prologue, epilogue);
}

template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduce(ChannelSession<Coop> &session, const T *sendbuff, T *recvbuff, size_t count,
                                           int op, Prologue prologue, Epilogue epilogue) {
  return fusedAllReduceLsa<T>(session,
                              makeCall(ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, kDataTypeOf<T>, op, 0, 0),
                              prologue, epilogue);
}

template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceKernel(Coop coop, const DevComm &comm, int block, int nBlocks,
                                                 const T *sendbuff, T *recvbuff, size_t count, int op,
                                                 Prologue prologue, Epilogue epilogue) {
  if (!isValid(comm) || block < 0 || block >= nBlocks || nBlocks > comm.nChannels) return ncclInvalidArgument;
  Call call = makeCall(ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, kDataTypeOf<T>, op, 0, 0);
  chooseFused(comm, call, nBlocks);
  if (problemOfFused(comm, call, coop.size()) != Problem::kNone) return ncclInvalidArgument;
  const BlockShare share = shareOf(count, sizeof(T), block, nBlocks);
  if (share.count == 0) return ncclSuccess;
  ChannelSession<Coop> session(coop, comm, block, ncclFfmFunctionAllReduce);
  if (session.result() != ncclSuccess) return session.result();
  return runFusedShare<T>(session, call, share, prologue, epilogue);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_FUSED_FUNCS_H_

// Kernels that compute, all-reduce and go on computing: recvbuff = epilogue(sum over the ranks of prologue(sendbuff)),
// element by element, and bodies made of it. The data is passed over once: the prologue's values go straight into the
// stores to the peers, and the epilogue takes the sum from registers. By one-shot every rank computes the epilogue of
// every element; by two-shot, and zero-copy, the rank that sums an element does, and hands the result on.
//
// A prologue and an epilogue are small functors,
//   A operator()(A x, uint64_t i) const
// where i is the element's number in the buffer and A what T is accumulated in (reduce.h: float for float16, bfloat16
// and float). Their results are rounded to T, as if each had been stored to memory; so is the sum between them.
// - A prologue may be called twice for an element, and must give the same value both times: it writes nothing, and
//   rounds the same way wherever it is inlined (fmaf rather than a * x + b). Zero-copy, the peers call it.
// - An epilogue is called once for an element, by one of the ranks or by each: so it must give the same on all. It may
//   read element i of recvbuff, which holds its old value, and other memory that is equal on all ranks.
// Both see what the group wrote before the call. Call ncclDevAllReduce (or pass Identity) where there is nothing to do.
//
// A kernel of one's own, f32, each block on its share; launched on all ranks with as many blocks, all of which must be
// running at a time (docs/fused.md):
//
//   struct Gelu { __device__ float operator()(float x, uint64_t i) const { ... } };
//   __global__ void kernel(const __grid_constant__ ncclffm::DevComm comm, const float *x, float *y, size_t n) {
//     ncclffm::fusedAllReduceKernel<float>(ncclffm::CoopBlock(), comm, blockIdx.x, gridDim.x, x, y, n,
//                                          ncclffm::ncclSum, ncclffm::Identity(), Gelu());
//   }
//
// After such a call a block sees its own share of recvbuff (shareOf in impl/plans.h says which elements) and may go on
// with it; for what other blocks have, it needs syncGrid.
#ifndef NCCLFFM_FUSED_H_
#define NCCLFFM_FUSED_H_

#include "collectives.h"

namespace ncclffm {

// x -> a * x + b, rounded once.
struct ScaleAdd {
  float a, b;
  NCCLFFM_DEVICE float operator()(float x, uint64_t i = 0) const;
};

// x -> sqrt(|x|).
struct SqrtAbs {
  NCCLFFM_DEVICE float operator()(float x, uint64_t i = 0) const;
};

// x -> values[i] + x; an epilogue of recvbuff itself adds to what is there.
template <class T>
struct AddTo {
  const T *values;
  NCCLFFM_DEVICE typename ElementType<T>::Accumulator operator()(typename ElementType<T>::Accumulator x,
                                                                 uint64_t i) const;
};

// Called by all threads of a group that holds a channel. Arguments, results and memory as for ncclDevAllReduce on a
// session, with T in place of the data type. Protocol and algorithm are those of the communicator where they are LL or
// Simple, one-shot or two-shot, else those of the table.
template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduce(ChannelSession<Coop> &session, const T *sendbuff, T *recvbuff, size_t count,
                                           int op, Prologue prologue, Epilogue epilogue);

// The same for an all-reduce put together by hand: with a protocol (LL, Simple), an algorithm (one-shot, two-shot), or
// zero-copy. call.function is not looked at; ranks whose call.root differs are told so, as of any argument.
template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceLsa(ChannelSession<Coop> &session, Call call, Prologue prologue,
                                              Epilogue epilogue);

// The body of a kernel of nBlocks blocks: this block's share of the buffers, on the channel of its own number. The
// shares depend on count and nBlocks only, which are the same on every rank; nBlocks is at most comm.nChannels.
template <class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceKernel(Coop coop, const DevComm &comm, int block, int nBlocks,
                                                 const T *sendbuff, T *recvbuff, size_t count, int op,
                                                 Prologue prologue, Epilogue epilogue);

// The bodies of the library's own kernels; see ncclffm.h for what they compute. The call is a checked all-reduce with
// nothing left open.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t scaleAllReduceSqrt(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                               float a, float b);
// Every block has whole tokens: those of each are summed and normed by its threads.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t allReduceRmsNorm(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                             const RmsNorm &norm);
// T: of the gradient. With clipping, the blocks wait for each other (syncGrid on channel 0).
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t allReduceUpdate(Coop coop, const DevComm &comm, int block, int nBlocks, const Call &call,
                                            const Optimizer &optimizer, bool adamW);

}  // namespace ncclffm

#include "impl/fused_funcs.h"
#include "impl/fused_kernels.h"

#endif  // NCCLFFM_FUSED_H_

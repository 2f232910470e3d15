// One kernel body from a prologue, an all-reduce and an epilogue: recvbuff = epilogue(sum over the ranks of
// prologue(sendbuff)), element by element, in one pass over memory.
//
// A prologue and an epilogue are small functors with float operator()(float) const. The prologue is called twice for an
// element and must give the same value both times; so it writes nothing, and rounds the same way wherever it is inlined
// (fmaf rather than a * x + b).
#ifndef NCCLFFM_FUSED_H_
#define NCCLFFM_FUSED_H_

#include "collectives.h"

namespace ncclffm {

// x -> a * x + b, rounded once.
struct ScaleAdd {
  float a, b;
  NCCLFFM_DEVICE float operator()(float x) const;
};

// x -> sqrt(|x|).
struct SqrtAbs {
  NCCLFFM_DEVICE float operator()(float x) const;
};

// Called by all threads of a group that holds a channel. Arguments, results and memory as for ncclDevAllReduce on a
// session.
template <class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduce(ChannelSession<Coop> &session, const float *sendbuff, float *recvbuff,
                                           size_t count, Prologue prologue, Epilogue epilogue);

// The body of a kernel of nBlocks blocks: this block's share of the buffers, on the channel of its own number. The
// shares depend on count and nBlocks only, which are the same on every rank; nBlocks is at most comm.nChannels.
template <class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceKernel(Coop coop, const DevComm &comm, int block, int nBlocks,
                                                 ncclFfmFunction function, const float *sendbuff, float *recvbuff,
                                                 size_t count, Prologue prologue, Epilogue epilogue);

}  // namespace ncclffm

#include "impl/fused_funcs.h"

#endif  // NCCLFFM_FUSED_H_

// Bodies of fused.h.
#ifndef NCCLFFM_IMPL_FUSED_FUNCS_H_
#define NCCLFFM_IMPL_FUSED_FUNCS_H_

#ifndef __CUDACC_RTC__
#include <math.h>
#endif

namespace ncclffm {

NCCLFFM_DEVICE float ScaleAdd::operator()(float x) const {
  return fmaf(a, x, b);
}

NCCLFFM_DEVICE float SqrtAbs::operator()(float x) const {
  return sqrtf(fabsf(x));
}

template <class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduce(ChannelSession<Coop> &session, const float *sendbuff, float *recvbuff,
                                           size_t count, Prologue prologue, Epilogue epilogue) {
  return allReduceOneShotLL<float, Sum<float>>(session, sendbuff, recvbuff, count, prologue, epilogue);
}

// Shares are whole cache lines of the GPU, so that aligned buffers stay aligned in every block.
constexpr size_t kShareUnit = 128 / sizeof(float);

template <class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceKernel(Coop coop, const DevComm &comm, int block, int nBlocks,
                                                 ncclFfmFunction function, const float *sendbuff, float *recvbuff,
                                                 size_t count, Prologue prologue, Epilogue epilogue) {
  size_t units = count / kShareUnit + (count % kShareUnit != 0);
  size_t share = (units / nBlocks + (units % nBlocks != 0)) * kShareUnit;
  size_t first = share * block;
  if (first >= count) return ncclSuccess;
  size_t n = count - first < share ? count - first : share;
  ChannelSession<Coop> session(coop, comm, block, function);
  return fusedAllReduce(session, sendbuff + first, recvbuff + first, n, prologue, epilogue);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_FUSED_FUNCS_H_

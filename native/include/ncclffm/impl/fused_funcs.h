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
  if (session.result() != ncclSuccess) return session.result();
  const DevComm &comm = session.comm();
  Call call = makeCall(ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, ncclFloat32, ncclSum, 0, 0);
  call.protocol = ncclFfmProtocolLL;
  call.algorithm = ncclFfmAlgorithmOneShot;
  if (problemOf(comm, call, session.coop().size()) != Problem::kNone) return ncclInvalidArgument;
  if (count == 0) return ncclSuccess;
  const CallContext context = {ncclSum, comm.nRanks, sizeof(float), hashOf(call, count)};
  char *in = const_cast<char *>(reinterpret_cast<const char *>(sendbuff)), *out = reinterpret_cast<char *>(recvbuff);
  const uint64_t bytes = count * sizeof(float);
  return runStepOfLines<LL, float>(session, stepOf(comm, call, {in, out, bytes, bytes}, 0), context, prologue,
                                   epilogue);
}

template <class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t fusedAllReduceKernel(Coop coop, const DevComm &comm, int block, int nBlocks,
                                                 ncclFfmFunction function, const float *sendbuff, float *recvbuff,
                                                 size_t count, Prologue prologue, Epilogue epilogue) {
  const BlockShare share = shareOf(count, sizeof(float), block, nBlocks);
  if (share.count == 0) return ncclSuccess;
  ChannelSession<Coop> session(coop, comm, block, function);
  return fusedAllReduce(session, sendbuff + share.first, recvbuff + share.first, share.count, prologue, epilogue);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_FUSED_FUNCS_H_

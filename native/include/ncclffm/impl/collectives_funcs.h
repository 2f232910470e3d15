// Bodies of collectives.h.
#ifndef NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_
#define NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_

#include "all_reduce.h"

namespace ncclffm {

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op) {
  if (datatype != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  return allReduceOneShotLL<float, Sum<float>>(session, static_cast<const float *>(sendbuff),
                                               static_cast<float *>(recvbuff), count, Identity(), Identity());
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op, int channel) {
  ChannelSession<Coop> session(coop, comm, channel, ncclFfmFunctionAllReduce);
  return ncclDevAllReduce(session, sendbuff, recvbuff, count, datatype, op);
}

NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int op, int channel) {
  return ncclDevAllReduce(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, op, channel);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_

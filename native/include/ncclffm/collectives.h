// Collectives inside a kernel. Called by all threads of a group, with equal arguments, on every rank of the
// communicator with the same count, data type, operation and channel. When a call returns ncclSuccess, recvbuff is
// complete and visible to the group, and sendbuff may be overwritten. A block that calls communicates its own slice:
// what other blocks wrote is visible to it only after a sync of the grid.
//
// Results: ncclInvalidArgument (and memory was not touched) if the communicator or the channel is not one, for a data
// type or an operation that is not supported, a null or misaligned buffer with count > 0, a count whose bytes do not
// fit an address, or buffers that overlap without being equal. Otherwise, what the communicator has failed with; see
// wait.h.
#ifndef NCCLFFM_COLLECTIVES_H_
#define NCCLFFM_COLLECTIVES_H_

#include "reduce.h"

namespace ncclffm {

// recvbuff = sum over the ranks of sendbuff; one-shot LL. Float32 and sum only, so far; datatype and op are
// ncclDataType_t and ncclRedOp_t. Any element offset, any count from 0; in place when the buffers are equal. Summed in
// rank order: bit-identical on all ranks.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op);

// The same, by a group that takes the channel for this call alone.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op, int channel);

// The same, by a block.
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int op, int channel);

}  // namespace ncclffm

#include "impl/collectives_funcs.h"

#endif  // NCCLFFM_COLLECTIVES_H_

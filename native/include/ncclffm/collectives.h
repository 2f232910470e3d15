// Collectives inside a kernel. A call is collective twice over: by all threads of a group on this rank, and by every
// rank of the communicator, with the same arguments but for the buffers, on the same channel, in the same order. Counts
// are in elements; datatype and op are ncclDataType_t and ncclRedOp_t, those of reduce.h. When a call returns
// ncclSuccess, recvbuff is complete and visible to the group, and sendbuff may be overwritten.
//
// Three ways to call each, e.g.
//   ncclDevAllReduce(comm, sendbuff, recvbuff, count, datatype, op, channel)        by all threads of a block
//   ncclDevAllReduce(coop, comm, sendbuff, recvbuff, count, datatype, op, channel)  by a group: CoopThread, CoopWarp,
//                                                                                  CoopBlock or CoopGrid
//   ncclDevAllReduce(session, sendbuff, recvbuff, count, datatype, op)              by a group that holds a channel
// On a session, the group syncs between writing sendbuff and the call, and the other way round for recvbuff; the other
// forms sync when they take the channel.
// A block or a smaller group communicates its own slice: what other blocks wrote is visible to it only after a sync of
// the grid. A CoopGrid works together on one buffer, each block on its share and on channel + its index; it syncs the
// grid before and after, so all blocks must be running (cooperative launch), and sees what all of them wrote.
//
// Any element offset, any count from 0 (which does nothing). Buffers are equal or disjoint, where NCCL allows in place:
// for ncclDevReduceScatter recvbuff is at sendbuff + rank * recvcount, for ncclDevAllGather the other way round.
// Results are bit-identical on all ranks: whoever sums an element does so in rank order (around a ring, one rank after
// the other in ring order).
//
// Results: ncclInvalidArgument (and memory was not touched) if the communicator or the channel is not one, for a data
// type, an operation, a root or a peer that is none, a null or misaligned buffer with count > 0, bytes that do not fit
// an address, buffers that overlap otherwise, a protocol or algorithm that the path, the group or the function does not
// have. Otherwise, what the communicator has failed with; see wait.h.
#ifndef NCCLFFM_COLLECTIVES_H_
#define NCCLFFM_COLLECTIVES_H_

#include "impl/plans.h"

namespace ncclffm {

// recvbuff = sum over the ranks of sendbuff (or another op).
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int op, int channel);

// Rank r's recvbuff = part r, recvcount elements, of the sum of the sendbuffs.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op, int channel);

// Part r, sendcount elements, of recvbuff = rank r's sendbuff.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype, int channel);

// recvbuff = the root's sendbuff; the others' is not looked at.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int root);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int root, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int root, int channel);

// The root's recvbuff = the sum of the sendbuffs; the others' is not looked at.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                          size_t count, int datatype, int op, int root);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                          size_t count, int datatype, int op, int root, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                          int datatype, int op, int root, int channel);

// Part r, count elements, of recvbuff = part (this rank) of rank r's sendbuff. Never in place.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                            size_t count, int datatype);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                            size_t count, int datatype, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                            int datatype, int channel);

// Returns when all ranks have called it. What a group stored before, to its own or to a peer's memory, is visible to
// all ranks' groups after it.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(ChannelSession<Coop> &session);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(Coop coop, const DevComm &comm, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(const DevComm &comm, int channel);

// An all-reduce in groups of ranksPerGroup neighbouring ranks, which divides the number of ranks: reduced in each
// group, then across the groups, and handed back the same way, so that groups exchange 1 / ranksPerGroup of the data.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(ChannelSession<Coop> &session, const void *sendbuff,
                                                         void *recvbuff, size_t count, int datatype, int op,
                                                         int ranksPerGroup);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(Coop coop, const DevComm &comm, const void *sendbuff,
                                                         void *recvbuff, size_t count, int datatype, int op,
                                                         int ranksPerGroup, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                         size_t count, int datatype, int op, int ranksPerGroup,
                                                         int channel);

// One rank sends, the peer receives as many elements on the same channel. A channel carries one send to and one receive
// from each peer at a time, beside a collective. A send returns when sendbuff may be overwritten, which may be before
// the peer receives: two slots (slotBytes of the communicator) are on the way at most.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevSend(Coop coop, const DevComm &comm, const void *buff, size_t count, int datatype,
                                        int peer, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevSend(const DevComm &comm, const void *buff, size_t count, int datatype, int peer,
                                        int channel);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevRecv(Coop coop, const DevComm &comm, void *buff, size_t count, int datatype,
                                        int peer, int channel);
NCCLFFM_DEVICE ncclResult_t ncclDevRecv(const DevComm &comm, void *buff, size_t count, int datatype, int peer,
                                        int channel);
// Sends to one rank and receives from another, as many elements, slot by slot in turn: what a ring of ranks calls
// without standing still.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevSendRecv(Coop coop, const DevComm &comm, const void *sendbuff, int to,
                                            void *recvbuff, int from, size_t count, int datatype, int channel);

// A call put together by hand: another protocol or algorithm than the library would choose, or buffers in windows of
// all ranks (zero-copy: call.send and call.recv), which the peers load from and store to. Not Send, Recv or SendRecv
// where a session is given.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevCallLsa(ChannelSession<Coop> &session, Call call);
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevCallLsa(Coop coop, const DevComm &comm, Call call, int channel);

}  // namespace ncclffm

#include "impl/collectives_funcs.h"

#endif  // NCCLFFM_COLLECTIVES_H_

// Collectives on buffers that lie in windows of all ranks: no slots, every rank loads from and stores to its peers'
// buffers between two barriers.
#ifndef NCCLFFM_IMPL_ZERO_COPY_H_
#define NCCLFFM_IMPL_ZERO_COPY_H_

#include "exchange.h"

namespace ncclffm {

// All ranks have come, and what each stored before is visible to all.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t barrier(ChannelSession<Coop> &session, uint32_t hash) {
  session.beginExchange(hash);
  session.tellReady();
  return session.endExchange(session.awaitReady());
}

// A place in the windows of all ranks.
struct Everywhere {
  void *const *peers;
  uint64_t offset;

  NCCLFFM_DEVICE char *at(int rank) const { return loadPeer(peers, rank) + offset; }
  NCCLFFM_DEVICE Everywhere plus(uint64_t bytes) const { return {peers, offset + bytes}; }
};

// The sum of what lies at `from` on every rank, stored to `to` on every rank, or on one.
template <class T, class Coop>
NCCLFFM_DEVICE void reduceEverywhere(const ChannelSession<Coop> &session, Everywhere from, Everywhere to, int onlyTo,
                                     uint64_t bytes, const CallContext &call) {
  const DevComm &comm = session.comm();
  const Places sources = {from.peers, from.offset, nullptr, nullptr, 0, 0, comm.nRanks};
  const Places all = {to.peers, to.offset, nullptr, nullptr, 0, comm.rank, comm.nRanks};
  reduceSpans<T>({session.coop().rank(), session.coop().size()}, sources,
                 onlyTo == kEverybody ? all : onePlace(to.at(onlyTo)), bytes, {call.op, call.nRanks, true});
}

// Stores this rank's buffer at `to` on one rank, which may be this one.
template <class Coop>
NCCLFFM_DEVICE void storeTo(const ChannelSession<Coop> &session, const char *from, Everywhere to, int rank,
                            uint64_t bytes, uint32_t elementBytes) {
  char *target = to.at(rank);
  if (target != from) copyBytes({session.coop().rank(), session.coop().size()}, target, from, bytes, elementBytes);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_ZERO_COPY_H_

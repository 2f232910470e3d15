// Data from one rank to another, a slot at a time, and the ring made of such pairs.
#ifndef NCCLFFM_IMPL_PAIRS_H_
#define NCCLFFM_IMPL_PAIRS_H_

#include "exchange.h"

namespace ncclffm {

NCCLFFM_DEVICE uint64_t payloadBytesOf(uint32_t protocol, uint64_t slotBytes) {
  return protocol == ncclFfmProtocolLL      ? LL::payloadBytes(slotBytes)
         : protocol == ncclFfmProtocolLL128 ? LL128::payloadBytes(slotBytes)
                                            : slotBytes;
}

template <class P, class Coop>
NCCLFFM_DEVICE void putLines(const PairSession<Coop> &session, char *slot, const ConstSpan &span) {
  const uint32_t flag = flagOf(session.site()), groupSize = session.coop().size();
  const uint32_t units = P::unitsOf(wordsIn(span)), alignment = span.alignment();
  for (uint32_t u = session.coop().rank(); u < units; u += groupSize) {
    uint64_t words[P::kWords];
    loadUnit<P, Unreduced>(span, alignment, u, Identity(), words);
    P::put(slot, u, words, flag);
  }
}

// Gives the peer one slot full; span.bytes is at most payloadBytesOf.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t sendStep(PairSession<Coop> &session, uint32_t protocol, const ConstSpan &span,
                                     uint32_t hash) {
  const ncclResult_t result = session.beginStep(hash);
  if (result != ncclSuccess) return result;
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  char *slot = slotOf(comm, Traffic::kPair, static_cast<ncclFfmProtocol>(protocol), session.peer(), site.channel,
                      site.epoch, comm.rank);
  if (protocol == ncclFfmProtocolSimple) {
    copyBytes({session.coop().rank(), session.coop().size()}, slot, span.base, span.bytes, span.elementBytes);
    session.tellReady();
  } else {
    session.tellBegun();
    if (protocol == ncclFfmProtocolLL) {
      putLines<LL>(session, slot, span);
    } else {
      putLines<LL128>(session, slot, span);
    }
  }
  return session.endStep(ncclSuccess);
}

// What becomes of the data that comes: it goes to `to`; if T reduces and `own` is not null, reduced with what is there,
// this first.
struct Arrival {
  MutableSpan to;
  const char *own;
  Reduction reduction;
};

template <class P, class T, class Coop>
NCCLFFM_DEVICE ncclResult_t getLines(const PairSession<Coop> &session, const char *slot, const Arrival &arrival) {
  const uint32_t groupSize = session.coop().size();
  const ConstSpan own = {arrival.own, arrival.to.bytes, arrival.to.elementBytes};
  const uint32_t units = P::unitsOf(wordsIn(arrival.to)), alignment = arrival.to.alignment();
  const uint32_t ownAlignment = own.alignment();
  const Letter *begun = session.begun();
  auto letterOf = [=](int) { return begun; };
  ncclResult_t result = ncclSuccess;
  for (uint32_t u = session.coop().rank(); u < units && result == ncclSuccess; u += groupSize) {
    uint64_t words[P::kWords];
    result = awaitUnit<P>(session.comm(), session.site(), letterOf, session.peer(), slot, u, words);
    if (result != ncclSuccess) break;
    if constexpr (kReduces<T>) {
      if (arrival.own != nullptr) {
        uint64_t mine[P::kWords];
        loadUnit<P, Unreduced>(own, ownAlignment, u, Identity(), mine);
        NCCLFFM_UNROLL
        for (int w = 0; w < P::kWords; ++w) {
          WordReducer<T> sum;
          sum.start(mine[w]);
          sum.add(words[w], arrival.reduction.op);
          words[w] = sum.finish(arrival.reduction.lastOp(), arrival.reduction.nRanks);
        }
      }
    }
    storeUnit<P, Unreduced>(arrival.to, alignment, u, Identity(), words);
  }
  return result;
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t getSimple(const PairSession<Coop> &session, char *slot, const Arrival &arrival) {
  const Share share = {session.coop().rank(), session.coop().size()};
  const ncclResult_t result = syncReady(session);
  if (result != ncclSuccess) return result;
  const MutableSpan &to = arrival.to;
  if constexpr (kReduces<T>) {
    if (arrival.own != nullptr) {
      reduceSpansApart<T>(share, {nullptr, 0, const_cast<char *>(arrival.own), slot, 0, 0, 2}, onePlace(to.base),
                          to.bytes, arrival.reduction);
      return ncclSuccess;
    }
  }
  copyBytes(share, to.base, slot, to.bytes, to.elementBytes);
  return ncclSuccess;
}

// Takes one slot full from the peer.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t recvStep(PairSession<Coop> &session, uint32_t protocol, const Arrival &arrival,
                                     uint32_t hash) {
  ncclResult_t result = session.beginStep(hash);
  if (result != ncclSuccess) return result;
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  char *slot = slotOf(comm, Traffic::kPair, static_cast<ncclFfmProtocol>(protocol), comm.rank, site.channel, site.epoch,
                      session.peer());
  if (protocol == ncclFfmProtocolLL) {
    result = getLines<LL, T>(session, slot, arrival);
  } else if (protocol == ncclFfmProtocolLL128) {
    result = getLines<LL128, T>(session, slot, arrival);
  } else {
    result = getSimple<T>(session, slot, arrival);
  }
  return session.endStep(result);
}

// Sends one buffer and receives another, slot by slot in turn, so that ranks which all do so never stand still: `next`
// and `previous` may be the same rank, and either may be nobody. nominalBytes, not less than either length, is the same
// on all ranks.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t sendRecv(PairSession<Coop> &next, PairSession<Coop> &previous, uint32_t protocol,
                                     const ConstSpan &send, const Arrival &arrival, uint64_t nominalBytes,
                                     uint32_t hash) {
  const uint64_t capacity = payloadBytesOf(protocol, next.comm().slotBytes);
  NCCLFFM_NO_UNROLL
  for (uint64_t done = 0; done < nominalBytes; done += capacity) {
    if (next.peer() != kNobody) {
      const uint64_t left = done < send.bytes ? send.bytes - done : 0;
      const ConstSpan out = {send.base + done, left < capacity ? left : capacity, send.elementBytes};
      const ncclResult_t result = sendStep(next, protocol, out, hash);
      if (result != ncclSuccess) return result;
    }
    if (previous.peer() != kNobody) {
      const uint64_t left = done < arrival.to.bytes ? arrival.to.bytes - done : 0;
      const Arrival in = {{arrival.to.base + done, left < capacity ? left : capacity, arrival.to.elementBytes},
                          arrival.own == nullptr ? nullptr : arrival.own + done,
                          arrival.reduction};
      const ncclResult_t result = recvStep<T>(previous, protocol, in, hash);
      if (result != ncclSuccess) return result;
    }
  }
  return ncclSuccess;
}

// A ring collective on the ring of all ranks, in phases of n - 1 turns, in each of which every rank hands a part to the
// next and gets one from the previous. If T reduces, the part that arrives in the first phase is added to this rank's
// own (`in`), after which part rank is complete in `out`; a part that was never handed on before comes from `in`. In
// the last phase, the only one if T does not reduce, each rank starts with part rank of `out`, and ends with all.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t ringPhases(PairSession<Coop> &next, PairSession<Coop> &previous, uint32_t protocol,
                                       const Parts &in, const Parts &out, const CallContext &call) {
  const int n = next.comm().nRanks, rank = next.comm().rank, turns = n - 1;
  NCCLFFM_NO_UNROLL
  for (int turn = kReduces<T> ? 0 : turns; turn < 2 * turns; ++turn) {
    const bool adds = turn < turns, finishes = turn == turns - 1;
    // Part p is added up from rank p + 1 to rank p, and then handed on from rank p.
    const int given = (adds ? turn + 1 : turn - turns) % n, give = (rank - given + n) % n, get = (give - 1 + n) % n;
    const Parts &from = kReduces<T> && turn == 0 ? in : out;
    const ConstSpan send = {from.of(give), from.lengthOf(give), call.elementBytes};
    const Arrival arrival = {{out.of(get), out.lengthOf(get), call.elementBytes},
                             adds ? in.of(get) : nullptr,
                             {call.op, call.nRanks, finishes}};
    const ncclResult_t result = sendRecv<T>(next, previous, protocol, send, arrival, in.bytes, call.hash);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PAIRS_H_

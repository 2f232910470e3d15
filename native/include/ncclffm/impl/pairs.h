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
  const uint32_t units = P::unitsOf(static_cast<uint32_t>((span.bytes + 7) / 8)), alignment = span.alignment();
  for (uint32_t u = session.coop().rank(); u < units; u += groupSize) {
    uint64_t words[P::kWords];
    loadUnit<P, uint64_t>(span, alignment, u, Identity(), words);
    P::put(slot, u, words, flag);
  }
}

// Gives the peer one slot full; span.bytes is at least 1, and at most payloadBytesOf.
template <class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t sendStep(PairSession<Coop> &session, uint32_t protocol, const ConstSpan &span,
                                          uint32_t hash) {
  const ncclResult_t result = session.beginStep(hash);
  if (result != ncclSuccess) return result;
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  char *slot = slotOf(comm, Traffic::kPair, static_cast<ncclFfmProtocol>(protocol), session.peer(), site.channel,
                      site.epoch, comm.rank);
  if (protocol == ncclFfmProtocolLL) {
    putLines<LL>(session, slot, span);
  } else if (protocol == ncclFfmProtocolLL128) {
    putLines<LL128>(session, slot, span);
  } else {
    copyBytes({session.coop().rank(), session.coop().size()}, slot, span.base, span.bytes, span.elementBytes);
    session.coop().sync();
    if (session.coop().rank() == 0) storeReleaseSys(&session.outbox()->pairReady[site.epoch % 2], makeLetter(site));
  }
  return session.endStep(ncclSuccess);
}

// What becomes of the data that comes: it goes to `to`; if `own` is not null, reduced with what is there, this first.
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
  const Letter *begun = &session.inbox()->pairBegun[session.site().epoch % 2];
  auto letterOf = [=](int) { return begun; };
  ncclResult_t result = ncclSuccess;
  for (uint32_t u = session.coop().rank(); u < units && result == ncclSuccess; u += groupSize) {
    uint64_t words[P::kWords];
    result = awaitUnit<P>(session.comm(), session.site(), letterOf, session.peer(), slot, u, words);
    if (result != ncclSuccess) break;
    if (arrival.own != nullptr) {
      uint64_t mine[P::kWords];
      loadUnit<P, uint64_t>(own, ownAlignment, u, Identity(), mine);
      NCCLFFM_UNROLL
      for (int w = 0; w < P::kWords; ++w) {
        WordReducer<T> sum;
        sum.start(mine[w]);
        sum.add(words[w], arrival.reduction.op);
        words[w] = sum.finish(arrival.reduction.lastOp(), arrival.reduction.nRanks);
      }
    }
    storeUnit<P, uint64_t>(arrival.to, alignment, u, Identity(), words);
  }
  return result;
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t getSimple(const PairSession<Coop> &session, char *slot, const Arrival &arrival) {
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  const Share share = {session.coop().rank(), session.coop().size()};
  ncclResult_t result = ncclSuccess;
  if (session.coop().rank() == 0) {
    Letter letter = 0;
    const Letter *begun = &session.inbox()->pairBegun[site.epoch % 2];
    const Letter *ready = &session.inbox()->pairReady[site.epoch % 2];
    auto letterOf = [=](int) { return begun; };
    result = waitFor(Alone(), comm, site, letterOf, [&] {
      letter = loadRelaxedSys(ready);
      return isOf(letter, site.epoch) ? kNobody : session.peer();
    });
    letter = loadAcquireSys(ready);
    if (result == ncclSuccess && holds(Rule::kCompareHash) && letter != makeLetter(site)) {
      result = fail(comm, site, ncclInvalidUsage, session.peer(), 0);
    }
  }
  if (session.coop().syncAny(result != ncclSuccess)) return failureOf(comm, site.channel);
  const MutableSpan &to = arrival.to;
  if (arrival.own == nullptr) {
    copyBytes(share, to.base, slot, to.bytes, to.elementBytes);
  } else {
    const Places from = {nullptr, 0, const_cast<char *>(arrival.own), slot, 0, 0, 2};
    reduceSpans<T>(share, from, onePlace(to.base), to.bytes, arrival.reduction);
  }
  return ncclSuccess;
}

// Takes one slot full from the peer.
template <class T, class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t recvStep(PairSession<Coop> &session, uint32_t protocol, const Arrival &arrival,
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

// Sends one buffer and receives another of the same length, slot by slot in turn, so that ranks which all do so never
// stand still: `next` and `previous` may be the same rank. nominalBytes, not less than either length, is the same on
// all ranks.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t sendRecv(PairSession<Coop> &next, PairSession<Coop> &previous, uint32_t protocol,
                                     const ConstSpan &send, const Arrival &arrival, uint64_t nominalBytes,
                                     uint32_t hash) {
  const uint64_t capacity = payloadBytesOf(protocol, next.comm().slotBytes);
  ncclResult_t result = ncclSuccess;
  for (uint64_t done = 0; done < nominalBytes && result == ncclSuccess; done += capacity) {
    const uint64_t sendLeft = done < send.bytes ? send.bytes - done : 0;
    const uint64_t recvLeft = done < arrival.to.bytes ? arrival.to.bytes - done : 0;
    const ConstSpan out = {send.base + done, sendLeft < capacity ? sendLeft : capacity, send.elementBytes};
    result = sendStep(next, protocol, out, hash);
    if (result != ncclSuccess) break;
    const Arrival in = {{arrival.to.base + done, recvLeft < capacity ? recvLeft : capacity, arrival.to.elementBytes},
                        arrival.own == nullptr ? nullptr : arrival.own + done,
                        arrival.reduction};
    result = recvStep<T>(previous, protocol, in, hash);
  }
  return result;
}

// One phase of a ring collective on the ring of all ranks: n - 1 times, every rank hands a part to the next and gets
// one from the previous. Reducing, the part that arrives is added to this rank's own (`in`), and after the phase part
// rank is complete in `out`; a part that was never handed on before comes from `in`. Not reducing, each rank starts
// with part rank of `out`, and ends with all.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t ringPhase(PairSession<Coop> &next, PairSession<Coop> &previous, uint32_t protocol,
                                      bool reduces, const Parts &in, const Parts &out, const CallContext &call) {
  const int n = next.comm().nRanks, rank = next.comm().rank;
  ncclResult_t result = ncclSuccess;
  for (int s = 1; s < n && result == ncclSuccess; ++s) {
    // Reducing, part p starts at rank p + 1 and ends at rank p; otherwise it starts at rank p.
    const int shift = reduces ? 0 : 1;
    const int give = (rank - s + shift + n) % n, get = (give - 1 + n) % n;
    const Parts &from = reduces && s == 1 ? in : out;
    const ConstSpan send = {from.of(give), from.lengthOf(give), call.elementBytes};
    const bool last = s == n - 1;
    const Arrival arrival = {{out.of(get), out.lengthOf(get), call.elementBytes},
                             reduces ? in.of(get) : nullptr,
                             {call.op, call.nRanks, reduces && last}};
    result = sendRecv<T>(next, previous, protocol, send, arrival, in.bytes, call.hash);
  }
  return result;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PAIRS_H_

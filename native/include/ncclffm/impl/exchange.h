// One step of a collective: every rank of a team gives parts to others of it, and gets theirs, to keep or to reduce; in
// as many exchanges as the slots ask for. All collectives are sequences of steps (impl/plans.h).
#ifndef NCCLFFM_IMPL_EXCHANGE_H_
#define NCCLFFM_IMPL_EXCHANGE_H_

#include "../channel.h"
#include "../protocol_ll.h"
#include "../protocol_ll128.h"
#include "reduce_spans.h"

namespace ncclffm {

// Some ranks, evenly spaced, and this rank's number among them.
struct Team {
  int first;
  int stride;
  int size;
  int self;

  NCCLFFM_DEVICE int rank(int member) const { return first + member * stride; }
  // The member that a rank is, kNobody if it is none.
  NCCLFFM_DEVICE int memberOf(int rank) const {
    const int distance = rank - first;
    if (stride == 1) return distance >= 0 && distance < size ? distance : kNobody;
    return distance >= 0 && distance % stride == 0 && distance / stride < size ? distance / stride : kNobody;
  }
  // The k-th after this one, around the ring: starting at the next spreads the load over the links.
  NCCLFFM_DEVICE int after(int k) const { return self + k < size ? self + k : self + k - size; }
};

// A buffer in parts, one for each member of a team: part k from k * stride on, at most `bytes` long, and not beyond
// total. With stride 0 every member's part is the same.
struct Parts {
  char *base;
  uint64_t stride;
  uint64_t bytes;
  uint64_t total;

  NCCLFFM_DEVICE uint64_t lengthOf(int k) const {
    const uint64_t start = static_cast<uint64_t>(k) * stride, left = start < total ? total - start : 0;
    return left < bytes ? left : bytes;
  }
  NCCLFFM_DEVICE char *of(int k) const { return base + static_cast<uint64_t>(k) * stride; }
  // What of part k goes in the exchange that starts at `done`.
  NCCLFFM_DEVICE MutableSpan chunk(int k, uint64_t done, uint64_t capacity, uint32_t elementBytes) const {
    const uint64_t length = lengthOf(k), left = done < length ? length - done : 0;
    return {of(k) + done, left < capacity ? left : capacity, elementBytes};
  }
};

constexpr int kEverybody = -1;

struct Step {
  Team team;
  Parts send;  // send.bytes, the same on every rank, says how many exchanges there are
  int to;      // the member that gets its part, or kEverybody
  int from;    // the member that gives, or kEverybody; always so where the step reduces
  // Kept: part k is what member k gave. Reduced: base is where the sum of what all gave to this member goes.
  Parts recv;
  bool reduces;
  bool finishes;  // the reduction of the whole collective ends with this step

  NCCLFFM_DEVICE bool givesAllTheSame() const { return to == kEverybody && from == kEverybody && send.stride == 0; }
  // Whether member `giver` gives its part to another, or would to itself.
  NCCLFFM_DEVICE bool gives(int giver, int taker) const {
    return (to == kEverybody || to == taker) && (from == kEverybody || from == giver);
  }
};

// What the steps of a call have in common.
struct CallContext {
  int op;
  int nRanks;
  uint32_t elementBytes;
  uint32_t hash;
};

NCCLFFM_DEVICE ConstSpan asConst(const MutableSpan &span) {
  return {span.base, span.bytes, span.elementBytes};
}

// Bytes that member m gives to this one in an exchange.
NCCLFFM_DEVICE uint64_t incoming(const Step &step, int m, uint64_t done, uint64_t capacity) {
  if (!step.gives(m, step.team.self)) return 0;
  return step.reduces ? step.send.chunk(step.team.self, done, capacity, 1).bytes
                      : step.recv.chunk(m, done, capacity, 1).bytes;
}

// Waits for the ranks that give nothing in this exchange to have begun it.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t waitForTheSilent(const ChannelSession<Coop> &session, const Step &step, uint64_t done,
                                             uint64_t capacity) {
  const DevComm &comm = session.comm();
  // In a one-shot all-reduce, everybody gives everybody as much.
  if (step.reduces && step.send.stride == 0 && step.to == kEverybody && step.team.size == comm.nRanks) {
    return ncclSuccess;
  }
  ncclResult_t result = ncclSuccess;
  for (int peer = static_cast<int>(session.coop().rank()); peer < comm.nRanks && result == ncclSuccess;
       peer += static_cast<int>(session.coop().size())) {
    const int member = step.team.memberOf(peer);
    if (peer == comm.rank || (member != kNobody && incoming(step, member, done, capacity) != 0)) continue;
    result = awaitLetter(comm, session.site(), session.begun(peer), peer);
  }
  return result;
}

template <class P, class T, class Prologue>
NCCLFFM_DEVICE void loadUnit(const ConstSpan &span, uint32_t alignment, uint32_t unit, Prologue prologue,
                             uint64_t (&words)[P::kWords]) {
  NCCLFFM_UNROLL
  for (int w = 0; w < P::kWords; ++w) {
    const uint64_t i = P::firstWord(unit) + w, left = i * 8 < span.bytes ? span.bytes - i * 8 : 0;
    words[w] = w < P::wordsOf(unit) ? mapWordAt<T>(loadWord(span, alignment, i), prologue, span.base + i * 8, left) : 0;
  }
}

template <class P, class T, class Epilogue>
NCCLFFM_DEVICE void storeUnit(const MutableSpan &span, uint32_t alignment, uint32_t unit, Epilogue epilogue,
                              const uint64_t (&words)[P::kWords]) {
  NCCLFFM_UNROLL
  for (int w = 0; w < P::kWords; ++w) {
    const uint64_t i = P::firstWord(unit) + w, left = i * 8 < span.bytes ? span.bytes - i * 8 : 0;
    if (w < P::wordsOf(unit)) {
      storeWord(span, alignment, i, mapWordAt<T>(words[w], epilogue, span.base + i * 8, left));
    }
  }
}

template <class Byte>
NCCLFFM_DEVICE uint32_t wordsIn(const Span<Byte> &span) {
  return static_cast<uint32_t>((span.bytes + 7) / 8);
}

// Waits for a unit of one peer.
template <class P, class LetterOf>
NCCLFFM_DEVICE ncclResult_t awaitUnit(const DevComm &comm, const Site &site, LetterOf letterOf, int peer,
                                      const char *slot, uint32_t unit, uint64_t (&words)[P::kWords]) {
  const uint32_t flag = flagOf(site);
  typename P::Line line = {};
  const ncclResult_t result = waitFor(typename P::Lanes(), comm, site, letterOf, [&] {
    if (!P::isComplete(line, unit, flag)) line = P::poll(slot, unit);
    return P::isComplete(line, unit, flag) ? kNobody : peer;
  });
  if (result == ncclSuccess) P::unpack(P::reload(slot, unit, line), words);
  return result;
}

// A unit of the result: this member's words and those of all others, in the order of the team.
template <class P, class T, class Coop>
NCCLFFM_DEVICE ncclResult_t reduceUnit(const ChannelSession<Coop> &session, const Team &team, const char *inbox,
                                       uint32_t unit, const Reduction &reduction, uint64_t (&words)[P::kWords]) {
  const DevComm &comm = session.comm();
  const uint32_t flag = flagOf(session.site());
  WordReducer<T> sum[P::kWords];
  auto letterOf = [&](int peer) { return session.begun(peer); };
  if (team.size == 2) {
    const int peer = team.rank(1 - team.self);
    uint64_t theirs[P::kWords] = {};
    const ncclResult_t result = awaitUnit<P>(comm, session.site(), letterOf, peer,
                                             inbox + static_cast<uint64_t>(peer) * comm.slotBytes, unit, theirs);
    NCCLFFM_UNROLL
    for (int w = 0; w < P::kWords; ++w) {
      sum[w].start(team.self == 0 ? words[w] : theirs[w]);
      sum[w].add(team.self == 0 ? theirs[w] : words[w], reduction.op);
      words[w] = sum[w].finish(reduction.lastOp(), reduction.nRanks);
    }
    return result;
  }
  NCCLFFM_NO_UNROLL
  for (int base = 0; base < team.size; base += P::kPeersAtOnce) {
    typename P::Line line[P::kPeersAtOnce] = {};
    auto slotOf = [&](int k) { return inbox + static_cast<uint64_t>(team.rank(base + k)) * comm.slotBytes; };
    auto isPeer = [&](int k) { return base + k < team.size && base + k != team.self; };
    const ncclResult_t result = waitFor(typename P::Lanes(), comm, session.site(), letterOf, [&] {
      NCCLFFM_UNROLL
      for (int k = 0; k < P::kPeersAtOnce; ++k) {
        if (isPeer(k) && !P::isComplete(line[k], unit, flag)) line[k] = P::poll(slotOf(k), unit);
      }
      int missing = kNobody;
      NCCLFFM_UNROLL
      for (int k = P::kPeersAtOnce - 1; k >= 0; --k) {
        if (isPeer(k) && !P::isComplete(line[k], unit, flag)) missing = team.rank(base + k);
      }
      return missing;
    });
    if (result != ncclSuccess) return result;
    NCCLFFM_UNROLL
    for (int k = 0; k < P::kPeersAtOnce; ++k) {
      if (isPeer(k)) line[k] = P::reload(slotOf(k), unit, line[k]);
    }
    NCCLFFM_UNROLL
    for (int k = 0; k < P::kPeersAtOnce; ++k) {
      if (base + k >= team.size) break;
      uint64_t theirs[P::kWords];
      P::unpack(line[k], theirs);
      NCCLFFM_UNROLL
      for (int w = 0; w < P::kWords; ++w) {
        const uint64_t word = base + k == team.self ? words[w] : theirs[w];
        if (base == 0 && k == 0) {
          sum[w].start(word);
        } else {
          sum[w].add(word, reduction.op);
        }
      }
    }
  }
  NCCLFFM_UNROLL
  for (int w = 0; w < P::kWords; ++w) words[w] = sum[w].finish(reduction.lastOp(), reduction.nRanks);
  return ncclSuccess;
}

// What this member gives, by LL or LL128. What a thread gives first, it also sums first: if all get the same, the words
// are left in firstWords.
template <class P, class T, class Coop, class Prologue>
NCCLFFM_DEVICE void giveLines(const ChannelSession<Coop> &session, const Step &step, uint64_t done,
                              uint32_t elementBytes, Prologue prologue, uint64_t (&firstWords)[P::kWords]) {
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  const Team &team = step.team;
  const uint32_t threadRank = session.coop().rank(), groupSize = session.coop().size(), flag = flagOf(site);
  const uint64_t capacity = P::payloadBytes(comm.slotBytes);
  const uint64_t offset = slotOffset(comm, Traffic::kCollective, P::kProtocol, site.channel, site.epoch, comm.rank);
  if (step.givesAllTheSame()) {
    const ConstSpan span = asConst(step.send.chunk(0, done, capacity, elementBytes));
    const uint32_t units = P::unitsOf(wordsIn(span)), alignment = span.alignment();
    NCCLFFM_NO_UNROLL
    for (uint32_t u = threadRank; u < units; u += groupSize) {
      uint64_t words[P::kWords];
      loadUnit<P, T>(span, alignment, u, prologue, words);
      for (int k = 1; k < team.size; ++k) {
        P::put(loadPeer(comm.peers, team.rank(team.after(k))) + offset, u, words, flag);
      }
      if (u == threadRank) {
        NCCLFFM_UNROLL
        for (int w = 0; w < P::kWords; ++w) firstWords[w] = words[w];
      }
    }
    return;
  }
  NCCLFFM_NO_UNROLL
  for (int k = 1; k < team.size; ++k) {
    const int member = team.after(k);
    if (!step.gives(team.self, member)) continue;
    const ConstSpan span = asConst(step.send.chunk(member, done, capacity, elementBytes));
    const uint32_t units = P::unitsOf(wordsIn(span)), alignment = span.alignment();
    char *slot = loadPeer(comm.peers, team.rank(member)) + offset;
    NCCLFFM_NO_UNROLL
    for (uint32_t u = threadRank; u < units; u += groupSize) {
      uint64_t words[P::kWords];
      loadUnit<P, T>(span, alignment, u, prologue, words);
      P::put(slot, u, words, flag);
    }
  }
}

// What the others give, with what this member has, reduced.
template <class P, class T, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t reduceLines(const ChannelSession<Coop> &session, const Step &step, uint64_t done,
                                        const CallContext &call, Prologue prologue, Epilogue epilogue,
                                        const uint64_t (&firstWords)[P::kWords]) {
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  const uint32_t threadRank = session.coop().rank(), groupSize = session.coop().size();
  const uint64_t capacity = P::payloadBytes(comm.slotBytes);
  const char *inbox = slotOf(comm, Traffic::kCollective, P::kProtocol, comm.rank, site.channel, site.epoch, 0);
  const Reduction reduction = {call.op, call.nRanks, step.finishes};
  const ConstSpan own = asConst(step.send.chunk(step.team.self, done, capacity, call.elementBytes));
  const MutableSpan out = {step.recv.base + done, own.bytes, call.elementBytes};
  const uint32_t units = P::unitsOf(wordsIn(out)), ownAlignment = own.alignment(), outAlignment = out.alignment();
  const bool hasFirst = step.givesAllTheSame();
  ncclResult_t result = ncclSuccess;
  NCCLFFM_NO_UNROLL
  for (uint32_t u = threadRank; u < units && result == ncclSuccess; u += groupSize) {
    uint64_t words[P::kWords];
    if (hasFirst && u == threadRank) {
      NCCLFFM_UNROLL
      for (int w = 0; w < P::kWords; ++w) words[w] = firstWords[w];
    } else {
      loadUnit<P, T>(own, ownAlignment, u, prologue, words);
    }
    result = reduceUnit<P, T>(session, step.team, inbox, u, reduction, words);
    if (result == ncclSuccess) storeUnit<P, T>(out, outAlignment, u, epilogue, words);
  }
  return result;
}

// What the others give, as it is.
template <class P, class Coop>
NCCLFFM_DEVICE ncclResult_t keepLines(const ChannelSession<Coop> &session, const Step &step, uint64_t done,
                                      uint32_t elementBytes) {
  const DevComm &comm = session.comm();
  const Site &site = session.site();
  const Team &team = step.team;
  const uint32_t threadRank = session.coop().rank(), groupSize = session.coop().size();
  const uint64_t capacity = P::payloadBytes(comm.slotBytes);
  const char *inbox = slotOf(comm, Traffic::kCollective, P::kProtocol, comm.rank, site.channel, site.epoch, 0);
  auto letterOf = [&](int peer) { return session.begun(peer); };
  ncclResult_t result = ncclSuccess;
  for (int k = 1; k < team.size && result == ncclSuccess; ++k) {
    const int member = team.after(k), peer = team.rank(member);
    if (!step.gives(member, team.self)) continue;
    const MutableSpan out = step.recv.chunk(member, done, capacity, elementBytes);
    const uint32_t units = P::unitsOf(wordsIn(out)), alignment = out.alignment();
    const char *slot = inbox + static_cast<uint64_t>(peer) * comm.slotBytes;
    for (uint32_t u = threadRank; u < units && result == ncclSuccess; u += groupSize) {
      uint64_t words[P::kWords];
      result = awaitUnit<P>(comm, site, letterOf, peer, slot, u, words);
      if (result == ncclSuccess) storeUnit<P, Unreduced>(out, alignment, u, Identity(), words);
    }
  }
  return result;
}

struct NothingToTell {
  NCCLFFM_DEVICE void operator()(uint32_t) const {}
};

// A step by LL or LL128. The prologue is applied to what this member gives, the epilogue to the result; the prologue is
// evaluated twice for an element, once to send it and once to sum it, which is cheaper than to store it. tell(epoch)
// stores what else the peers are to know of an exchange, once its lines are on their way.
template <class P, class T, class Coop, class Prologue, class Epilogue, class Tell = NothingToTell>
NCCLFFM_DEVICE ncclResult_t runStepOfLines(ChannelSession<Coop> &session, const Step &step, const CallContext &call,
                                           Prologue prologue, Epilogue epilogue, Tell tell = Tell()) {
  const uint64_t capacity = P::payloadBytes(session.comm().slotBytes);
  uint64_t done = 0;
  do {
    session.beginExchange(call.hash);
    uint64_t firstWords[P::kWords] = {};
    giveLines<P, T>(session, step, done, call.elementBytes, prologue, firstWords);
    tell(session.site().epoch);
    session.tellBegun();
    ncclResult_t result = ncclSuccess;
    if (!step.reduces) {
      result = keepLines<P>(session, step, done, call.elementBytes);
    } else if constexpr (kReduces<T>) {
      if (step.gives(step.team.self, step.team.self)) {
        result = reduceLines<P, T>(session, step, done, call, prologue, epilogue, firstWords);
      }
    }
    if (result == ncclSuccess) result = waitForTheSilent(session, step, done, capacity);
    result = session.endExchange(result);
    if (result != ncclSuccess) return result;
    done += capacity;
  } while (done < step.send.bytes);
  return ncclSuccess;
}

// All threads of the group go on, once what all ranks stored before their tellReady is there; or none does.
template <class Session>
NCCLFFM_DEVICE ncclResult_t syncReady(const Session &session) {
  return session.coop().syncAny(session.awaitReady() != ncclSuccess) ? failureOf(session.comm(), session.site().channel)
                                                                     : ncclSuccess;
}

// Copies a buffer, through a prologue.
template <class T>
NCCLFFM_DEVICE void copyThrough(Share share, char *to, const ConstSpan &from, const Identity &) {
  copyBytes(share, to, from.base, from.bytes, from.elementBytes);
}

template <class T>
NCCLFFM_DEVICE void copyThrough(Share share, char *to, const ConstSpan &from, const Placed<Identity> &) {
  copyBytes(share, to, from.base, from.bytes, from.elementBytes);
}

template <class T, class F>
NCCLFFM_DEVICE void copyThrough(Share share, char *to, const ConstSpan &from, const Placed<F> &prologue) {
  reduceMapped<T>(share, onePlace(const_cast<char *>(from.base)), kEverybody, onePlace(to), from.bytes,
                  {ncclSum, 1, true}, indexOf<T>(prologue, from.base), prologue.f, Identity());
}

// What a kernel can do: everything, or what tasks need (no LL128, no ring, no zero-copy), which is half the code.
enum class Ways { kAll, kTasks };

// Reduces buffers, this member's through a prologue, the result through an epilogue.
template <class T, Ways kWays>
NCCLFFM_DEVICE void reduceThrough(Share share, const Places &from, char *to, uint64_t bytes, const Reduction &reduction,
                                  const Identity &, const Identity &) {
  if constexpr (kWays == Ways::kAll) {
    reduceSpans<T>(share, from, onePlace(to), bytes, reduction);
  } else {
    reduceSpansApart<T>(share, from, onePlace(to), bytes, reduction);
  }
}

template <class T, Ways, class Prologue, class Epilogue>
NCCLFFM_DEVICE void reduceThrough(Share share, const Places &from, char *to, uint64_t bytes, const Reduction &reduction,
                                  const Placed<Prologue> &prologue, const Placed<Epilogue> &epilogue) {
  reduceMapped<T>(share, from, from.self, onePlace(to), bytes, reduction, indexOf<T>(epilogue, to), prologue.f,
                  epilogue.f);
}

// A step by Simple: data, then one letter, which also says that the exchange has begun. Prologue and epilogue as in
// runStepOfLines; both are Identity, or both are Placed.
template <class T, Ways kWays = Ways::kAll, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t runStepOfSimple(ChannelSession<Coop> &session, const Step &step, const CallContext &call,
                                            Prologue prologue, Epilogue epilogue) {
  const DevComm &comm = session.comm();
  const Team &team = step.team;
  const Share share = {session.coop().rank(), session.coop().size()};
  const uint64_t capacity = comm.slotBytes;
  uint64_t done = 0;
  do {
    session.beginExchange(call.hash);
    const Site &site = session.site();
    const uint64_t outOffset =
        slotOffset(comm, Traffic::kCollective, ncclFfmProtocolSimple, site.channel, site.epoch, comm.rank);
    char *inbox = slotOf(comm, Traffic::kCollective, ncclFfmProtocolSimple, comm.rank, site.channel, site.epoch, 0);
    if (!holds(Rule::kDataBeforeFlag)) {
      session.tellReady();
      NCCLFFM_STALL();
    }
    for (int k = 1; k < team.size; ++k) {
      const int member = team.after(k);
      if (!step.gives(team.self, member)) continue;
      const ConstSpan span = asConst(step.send.chunk(member, done, capacity, call.elementBytes));
      acquireForSanitizer(mailboxOf(comm, team.rank(member), site.channel, team.rank(member)));
      copyThrough<T>(share, loadPeer(comm.peers, team.rank(member)) + outOffset, span, prologue);
    }
    if (holds(Rule::kDataBeforeFlag)) session.tellReady();
    ncclResult_t result = syncReady(session);
    if (result == ncclSuccess && step.reduces) {
      if constexpr (kReduces<T>) {
        const uint64_t stride = static_cast<uint64_t>(team.stride) * comm.slotBytes;
        char *slots = inbox + static_cast<uint64_t>(team.first) * comm.slotBytes;
        if (step.gives(team.self, team.self)) {
          const MutableSpan own = step.send.chunk(team.self, done, capacity, call.elementBytes);
          reduceThrough<T, kWays>(share, {nullptr, 0, own.base, slots, stride, team.self, team.size},
                                  step.recv.base + done, own.bytes, {call.op, call.nRanks, step.finishes}, prologue,
                                  epilogue);
        }
      }
    } else if (result == ncclSuccess) {
      for (int k = 1; k < team.size; ++k) {
        const int member = team.after(k);
        if (!step.gives(member, team.self)) continue;
        const MutableSpan out = step.recv.chunk(member, done, capacity, call.elementBytes);
        copyBytes(share, out.base, inbox + static_cast<uint64_t>(team.rank(member)) * comm.slotBytes, out.bytes,
                  call.elementBytes);
      }
    }
    result = session.endExchange(result);
    if (result != ncclSuccess) return result;
    done += capacity;
  } while (done < step.send.bytes);
  return ncclSuccess;
}

// What a member gives to itself. Before the exchanges: the others' parts do not overlap it.
template <class Coop>
NCCLFFM_DEVICE void copyToSelf(const ChannelSession<Coop> &session, const Step &step, const CallContext &call) {
  if (step.reduces || !step.gives(step.team.self, step.team.self)) return;
  const char *from = step.send.of(step.team.self);
  char *to = step.recv.of(step.team.self);
  if (from != to) {
    copyBytes({session.coop().rank(), session.coop().size()}, to, from, step.recv.lengthOf(step.team.self),
              call.elementBytes);
  }
}

template <class T, Ways kWays = Ways::kAll, class Coop>
NCCLFFM_DEVICE ncclResult_t runStep(ChannelSession<Coop> &session, uint32_t protocol, const Step &step,
                                    const CallContext &call) {
  copyToSelf(session, step, call);
  if (protocol == ncclFfmProtocolLL) return runStepOfLines<LL, T>(session, step, call, Identity(), Identity());
  if constexpr (kWays == Ways::kAll) {
    if (protocol == ncclFfmProtocolLL128) return runStepOfLines<LL128, T>(session, step, call, Identity(), Identity());
  }
  return runStepOfSimple<T, kWays>(session, step, call, Identity(), Identity());
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_EXCHANGE_H_

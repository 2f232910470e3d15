// The one-shot LL all-reduce under collectives.h and fused.h: every rank sends all it has to every other, then each
// sums up.
#ifndef NCCLFFM_IMPL_ALL_REDUCE_H_
#define NCCLFFM_IMPL_ALL_REDUCE_H_

#include "../reduce.h"

namespace ncclffm {

struct Identity {
  template <class T>
  NCCLFFM_DEVICE T operator()(T x) const {
    return x;
  }
};

// What invariants 8 to 10 ask of the buffers of a collective that has equally long ones.
template <class T>
NCCLFFM_DEVICE bool areValid(const T *sendbuff, const T *recvbuff, size_t count) {
  if (count == 0) return true;
  if (sendbuff == nullptr || recvbuff == nullptr || count > ~size_t{0} / sizeof(T)) return false;
  uintptr_t send = reinterpret_cast<uintptr_t>(sendbuff), recv = reinterpret_cast<uintptr_t>(recvbuff);
  if (send % alignof(T) != 0 || recv % alignof(T) != 0) return false;
  size_t distance = send < recv ? recv - send : send - recv;
  return distance == 0 || distance >= count * sizeof(T);
}

// Peers polled together: their loads are in flight at the same time.
constexpr int kPeersAtOnce = 4;

// One line of the result: own contribution and those of all peers, in rank order.
template <class T, class Op, class Coop>
NCCLFFM_DEVICE ncclResult_t reduceLine(const ChannelSession<Coop> &session, const LLSlots &slots, uint32_t index,
                                       const typename ElementType<T>::Accumulator (&own)[ElementType<T>::kPerLine],
                                       typename ElementType<T>::Accumulator (&sum)[ElementType<T>::kPerLine]) {
  const DevComm &comm = session.comm();
  const uint32_t epoch = session.site().epoch;
  Op op;
  for (int base = 0; base < comm.nRanks; base += kPeersAtOnce) {
    LLLine line[kPeersAtOnce] = {};  // epoch 0: not complete
    ncclResult_t result = waitFor(comm, session.site(), [&] {
      NCCLFFM_UNROLL
      for (int k = 0; k < kPeersAtOnce; ++k) {
        int peer = base + k;
        if (peer < comm.nRanks && peer != comm.rank && !isComplete(line[k], epoch)) line[k] = slots.poll(peer, index);
      }
      int missing = kNobody;
      NCCLFFM_UNROLL
      for (int k = kPeersAtOnce - 1; k >= 0; --k) {
        int peer = base + k;
        if (peer < comm.nRanks && peer != comm.rank && !isComplete(line[k], epoch)) missing = peer;
      }
      return missing;
    });
    if (result != ncclSuccess) return result;
    NCCLFFM_UNROLL
    for (int k = 0; k < kPeersAtOnce; ++k) {
      int rank = base + k;
      if (rank >= comm.nRanks) break;
      typename ElementType<T>::Accumulator x[ElementType<T>::kPerLine];
      ElementType<T>::fromPayload(unpackLine(line[k]), x);
      NCCLFFM_UNROLL
      for (int e = 0; e < ElementType<T>::kPerLine; ++e) {
        auto contribution = rank == comm.rank ? own[e] : x[e];
        sum[e] = rank == 0 ? contribution : op(sum[e], contribution);
      }
    }
  }
  return ncclSuccess;
}

// recvbuff = epilogue(sum over the ranks of prologue(sendbuff)), in exchanges of as many elements as a slot has room
// for. The prologue is evaluated twice for an element, once to send it and once to sum it, which is cheaper than to
// store it: it must give the same value both times.
template <class T, class Op, class Coop, class Prologue, class Epilogue>
NCCLFFM_DEVICE ncclResult_t allReduceOneShotLL(ChannelSession<Coop> &session, const T *sendbuff, T *recvbuff,
                                               size_t count, Prologue prologue, Epilogue epilogue) {
  constexpr int kPerLine = ElementType<T>::kPerLine;
  if (session.result() != ncclSuccess) return session.result();
  if (!areValid(sendbuff, recvbuff, count)) return ncclInvalidArgument;

  const DevComm &comm = session.comm();
  const uint32_t threadRank = session.coop().rank(), groupSize = session.coop().size();
  const bool wholeSend = holdsWholeLines(sendbuff), wholeRecv = holdsWholeLines(recvbuff);
  const uint32_t perExchange = comm.linesPerSlot * kPerLine;  // linesPerSlot is bounded, so 32 bits do

  for (size_t done = 0; done < count; done += perExchange) {
    const T *in = sendbuff + done;
    T *out = recvbuff + done;
    const uint32_t n = static_cast<uint32_t>(count - done < perExchange ? count - done : perExchange);
    const uint32_t lines = (n + kPerLine - 1) / kPerLine;

    session.beginExchange();
    const uint32_t epoch = session.site().epoch;
    const LLSlots slots(comm, session.site());

    for (uint32_t i = threadRank; i < lines; i += groupSize) {
      typename ElementType<T>::Accumulator own[kPerLine];
      loadElements(in, i * kPerLine, n, wholeSend, prologue, own);
      const LLLine line = packLine(ElementType<T>::toPayload(own), epoch);
      // Starting at the next rank spreads the load over the links.
      for (int k = 1, peer = comm.rank + 1; k < comm.nRanks; ++k, ++peer) {
        if (peer == comm.nRanks) peer = 0;
        slots.put(peer, i, line);
      }
    }

    ncclResult_t result = ncclSuccess;
    for (uint32_t i = threadRank; i < lines && result == ncclSuccess; i += groupSize) {
      typename ElementType<T>::Accumulator own[kPerLine], sum[kPerLine] = {};
      loadElements(in, i * kPerLine, n, wholeSend, prologue, own);
      result = reduceLine<T, Op>(session, slots, i, own, sum);
      if (result == ncclSuccess) storeElements(out, i * kPerLine, n, wholeRecv, epilogue, sum);
    }

    if (holds(Rule::kClearOnWrap) && isLastOfItsHalf(epoch)) slots.clear(threadRank, groupSize);
    result = session.endExchange(result);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_ALL_REDUCE_H_

// Bodies of collectives.h.
#ifndef NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_
#define NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_

namespace ncclffm {

template <class T>
struct TypeTag {
  using Type = T;
};

// Calls f with the element type that an ncclDataType_t stands for.
template <class F>
NCCLFFM_DEVICE ncclResult_t withTypeOf(int datatype, F f) {
  switch (datatype) {
    case ncclInt8:
      return f(TypeTag<int8_t>());
    case ncclUint8:
      return f(TypeTag<uint8_t>());
    case ncclInt32:
      return f(TypeTag<int32_t>());
    case ncclUint32:
      return f(TypeTag<uint32_t>());
    case ncclInt64:
      return f(TypeTag<int64_t>());
    case ncclUint64:
      return f(TypeTag<uint64_t>());
    case ncclFloat16:
      return f(TypeTag<Float16>());
    case ncclFloat32:
      return f(TypeTag<float>());
    case ncclFloat64:
      return f(TypeTag<double>());
    default:
      return f(TypeTag<Bfloat16>());
  }
}

// With the element type of a call that reduces, or Unreduced.
template <class F>
NCCLFFM_DEVICE ncclResult_t withElementType(const Call &call, F f) {
  return reduces(call.function) ? withTypeOf(call.datatype, f) : f(TypeTag<Unreduced>());
}

// A call in a kernel of somebody else's is a function of its own, which takes copies: so that kernels stay small, and
// the session may stay in registers.
template <class T, Ways kWays = Ways::kAll, class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t runShareApart(ChannelSession<Coop> &session, const Call &call,
                                               const BlockShare &share) {
  return runShare<T, kWays>(session, call, share);
}

// Not a generic lambda: NVRTC takes the body of one for a function of the host.
template <class Coop>
struct RunShare {
  ChannelSession<Coop> &session;
  const Call &call;
  const BlockShare &share;

  template <class T>
  NCCLFFM_DEVICE ncclResult_t operator()(TypeTag<T>) const {
    ChannelSession<Coop> lent = session.lend();
    const ncclResult_t result = runShareApart<T>(lent, call, share);
    session.takeBack(lent);
    return result;
  }
};

template <class Coop>
NCCLFFM_DEVICE ncclResult_t runShareOfAnyType(ChannelSession<Coop> &session, const Call &call,
                                              const BlockShare &share) {
  return withElementType(call, RunShare<Coop>{session, call, share});
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevCallLsa(ChannelSession<Coop> &session, Call call) {
  if (session.result() != ncclSuccess) return session.result();
  chooseFor(session.comm(), call, session.coop().size(), 1);
  if (isPair(call.function) || problemOf(session.comm(), call, session.coop().size()) != Problem::kNone) {
    return ncclInvalidArgument;
  }
  return runShareOfAnyType(session, call, {0, call.count});
}

// A group that takes the channel for this call alone, on a share of the call. The call leaves nothing open.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t callOnChannel(Coop coop, const DevComm &comm, const Call &call, int channel,
                                          const BlockShare &share) {
  if (isPair(call.function)) return runPairShare(coop, comm, call, channel, share);
  ChannelSession<Coop> session(coop, comm, channel, static_cast<ncclFfmFunction>(call.function));
  if (session.result() != ncclSuccess) return session.result();
  return runShareOfAnyType(session, call, share);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t callBy(Coop coop, const DevComm &comm, Call &call, int channel) {
  if (!isValid(comm) || channel < 0 || channel >= comm.nChannels) return ncclInvalidArgument;
  chooseFor(comm, call, coop.size(), 1);
  if (problemOf(comm, call, coop.size()) != Problem::kNone) return ncclInvalidArgument;
  return callOnChannel(coop, comm, call, channel, {0, call.count});
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t callBy(const Grid<Coop> &grid, const DevComm &comm, Call &call, int channel) {
  if (!isValid(comm)) return ncclInvalidArgument;
  chooseFor(comm, call, grid.block.size(), grid.nBlocks);
  if (problemOf(comm, call, grid.block.size()) != Problem::kNone) return ncclInvalidArgument;
  if (channel < 0 || channel >= comm.nChannels || grid.nBlocks > comm.nChannels - channel) return ncclInvalidArgument;
  ncclResult_t result = syncGrid(grid, comm, channel);
  if (result != ncclSuccess) return result;
  const BlockShare share = shareOf(call.count, elementBytesOf(call.datatype), grid.index, grid.nBlocks);
  result = callOnChannel(grid.block, comm, call, channel + grid.index, share);
  const ncclResult_t ofGrid = syncGrid(grid, comm, channel);
  return result != ncclSuccess ? result : ofGrid;
}

// The body of a kernel that runs a checked call with nothing left open: block number `block` of nBlocks works on its
// share, on the channel of its own number. T as for runShare.
template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t callBlock(Coop coop, const DevComm &comm, const Call &call, int block, int nBlocks) {
  const BlockShare share = shareOf(call.count, elementBytesOf(call.datatype), block, nBlocks);
  if constexpr (!kReduces<T>) {
    if (isPair(call.function)) return runPairShare(coop, comm, call, block, share);
  }
  ChannelSession<Coop> session(coop, comm, block, static_cast<ncclFfmFunction>(call.function));
  if (session.result() != ncclSuccess) return session.result();
  return runShare<T>(session, call, share);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevCallLsa(Coop coop, const DevComm &comm, Call call, int channel) {
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE Call makeCall(ncclFfmFunction function, const void *sendbuff, void *recvbuff, size_t count, int datatype,
                             int op, int root, int source) {
  Call call = {};
  call.function = function;
  call.datatype = datatype;
  call.op = op;
  call.root = root;
  call.source = source;
  call.count = count;
  call.sendbuff = sendbuff;
  call.recvbuff = recvbuff;
  return call;
}

// An exchange by LL between two ranks, with nothing to compute before the first store: at their latencies, every
// instruction counts. What runStepOfLines<LL> does for whole words.
template <class T, class Coop, class Tell>
NCCLFFM_DEVICE ncclResult_t allReduceOfTwo(ChannelSession<Coop> &session, const char *in, char *out, uint32_t words,
                                           int op, uint32_t hash, Tell tell) {
  const DevComm &comm = session.comm();
  const int other = 1 - comm.rank;
  const uint32_t first = session.coop().rank(), groupSize = session.coop().size();
  session.beginExchange(hash);
  const uint32_t flag = flagOf(session.site());
  const SmallSlots &slots = session.smallSlots();
  const uint64_t half = session.site().epoch % 2 == 0 ? 0 : slots.secondHalf;
  char *outSlot = reinterpret_cast<char *>(slots.out + half);
  const char *inSlot = slots.in + half;
  uint64_t firstWord = 0;
  for (uint32_t i = first; i < words; i += groupSize) {
    const uint64_t word[LL::kWords] = {loadAs<uint64_t>(in + i * 8)};
    if (i == first) firstWord = word[0];
    LL::put(outSlot, i, word, flag);
  }
  tell(session.site().epoch);
  if (first == 0) {
    storeRelaxedSys(reinterpret_cast<Letter *>(slots.begun) + session.site().epoch % 2, makeLetter(session.site()));
  }
  auto letterOf = [&](int peer) { return session.begun(peer); };
  ncclResult_t result = ncclSuccess;
  for (uint32_t i = first; i < words && result == ncclSuccess; i += groupSize) {
    const uint64_t own = i == first ? firstWord : loadAs<uint64_t>(in + i * 8);
    uint64_t theirs[LL::kWords] = {};
    result = awaitUnit<LL>(comm, session.site(), letterOf, other, inSlot, i, theirs);
    WordReducer<T> sum;
    sum.start(comm.rank == 0 ? own : theirs[0]);
    sum.add(comm.rank == 0 ? theirs[0] : own, op);
    if (result == ncclSuccess) storeAs(out + i * 8, sum.finish(op, 2));
  }
  return session.endExchange(result);
}

constexpr int kFewRanks = 8;

// The same of 3 to kFewRanks ranks, with the lines of all peers on their way at once.
template <class T, class Coop, class Tell>
NCCLFFM_DEVICE ncclResult_t allReduceOfFew(ChannelSession<Coop> &session, const char *in, char *out, uint32_t words,
                                           int op, uint32_t hash, Tell tell) {
  const DevComm &comm = session.comm();
  const int n = comm.nRanks, self = comm.rank;
  const uint32_t first = session.coop().rank(), groupSize = session.coop().size();
  session.beginExchange(hash);
  const uint32_t flag = flagOf(session.site());
  const SmallSlots &slots = session.smallSlots();
  const uint64_t half = session.site().epoch % 2 == 0 ? 0 : slots.secondHalf;
  char *outSlot[kFewRanks - 1] = {};
  NCCLFFM_UNROLL
  for (int k = 0; k < kFewRanks - 1; ++k) {
    const int peer = self + 1 + k < n ? self + 1 + k : self + 1 + k - n;
    if (k + 1 < n) outSlot[k] = loadPeer(comm.peers, peer) + slots.out + half;
  }
  uint64_t firstWord = 0;
  for (uint32_t i = first; i < words; i += groupSize) {
    const uint64_t word[LL::kWords] = {loadAs<uint64_t>(in + i * 8)};
    if (i == first) firstWord = word[0];
    NCCLFFM_UNROLL
    for (int k = 0; k < kFewRanks - 1; ++k) {
      if (k + 1 < n) LL::put(outSlot[k], i, word, flag);
    }
  }
  tell(session.site().epoch);
  for (int peer = static_cast<int>(first); peer < n; peer += static_cast<int>(groupSize)) {
    if (peer == self) continue;
    Letter *begun = reinterpret_cast<Letter *>(loadPeer(comm.peers, peer) + slots.begun);
    storeRelaxedSys(begun + session.site().epoch % 2, makeLetter(session.site()));
  }
  const char *inSlot = slots.in + half;
  auto letterOf = [&](int peer) { return session.begun(peer); };
  ncclResult_t result = ncclSuccess;
  for (uint32_t i = first; i < words && result == ncclSuccess; i += groupSize) {
    const uint64_t own = i == first ? firstWord : loadAs<uint64_t>(in + i * 8);
    LL::Line line[kFewRanks] = {};
    auto isMissing = [&](int k) { return k < n && k != self && !LL::isComplete(line[k], i, flag); };
    result = waitFor(Alone(), comm, session.site(), letterOf, [&] {
      NCCLFFM_UNROLL
      for (int k = 0; k < kFewRanks; ++k) {
        if (isMissing(k)) line[k] = LL::poll(inSlot + static_cast<uint64_t>(k) * comm.slotBytes, i);
      }
      int missing = kNobody;
      NCCLFFM_UNROLL
      for (int k = kFewRanks - 1; k >= 0; --k) {
        if (isMissing(k)) missing = k;
      }
      return missing;
    });
    WordReducer<T> sum;
    NCCLFFM_UNROLL
    for (int k = 0; k < kFewRanks; ++k) {
      uint64_t word[LL::kWords];
      LL::unpack(line[k], word);
      if (k == self) word[0] = own;
      if (k == 0) {
        sum.start(word[0]);
      } else if (k < n) {
        sum.add(word[0], op);
      }
    }
    if (result == ncclSuccess) storeAs(out + i * 8, sum.finish(op, n));
  }
  return session.endExchange(result);
}

// What is small, by the shortest way: an exchange by LL. It is what ncclDevCallLsa would do. tell: as of
// runStepOfLines.
template <class T, class Coop, class Tell = NothingToTell>
NCCLFFM_DEVICE ncclResult_t smallAllReduce(ChannelSession<Coop> &session, const Call &call, Tell tell = Tell()) {
  const DevComm &comm = session.comm();
  const uint64_t bytes = call.count * sizeof(T);
  const uint32_t hash = hashOf(call, call.count);
  session.setFunction(ncclFfmFunctionAllReduce);
  const char *in = static_cast<const char *>(call.sendbuff);
  char *out = static_cast<char *>(call.recvbuff);
  const uint64_t misaligned = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) | bytes;
  if (misaligned % 8 == 0 && comm.nRanks > 1 && comm.nRanks <= kFewRanks) {
    const uint32_t words = static_cast<uint32_t>(bytes / 8);
    return comm.nRanks == 2 ? allReduceOfTwo<T>(session, in, out, words, call.op, hash, tell)
                            : allReduceOfFew<T>(session, in, out, words, call.op, hash, tell);
  }
  return runStepOfLines<LL, T>(session, stepOf(comm, call, buffersOf(call, {0, call.count}, sizeof(T)), 0),
                               {call.op, comm.nRanks, sizeof(T), hash}, Identity(), Identity(), tell);
}

template <class Coop>
struct RunSmallAllReduce {
  ChannelSession<Coop> &session;
  const Call &call;

  template <class T>
  NCCLFFM_DEVICE ncclResult_t operator()(TypeTag<T>) const {
    return smallAllReduce<T>(session, call);
  }
};

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op) {
  Call call = makeCall(ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, datatype, op, 0, 0);
  const uint32_t elementBytes = elementBytesOf(datatype);
  const bool isSmall = count - 1 < session.smallBytes() && count * elementBytes - 1 < session.smallBytes();
  if (session.result() == ncclSuccess && isSmall && isReduction(op) &&
      problemOfBuffers(session.comm(), call, elementBytes) == Problem::kNone) {
    call.protocol = ncclFfmProtocolLL;
    call.algorithm = ncclFfmAlgorithmOneShot;
    return withTypeOf(call.datatype, RunSmallAllReduce<Coop>{session, call});
  }
  return ncclDevCallLsa(session, call);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int op, int channel) {
  Call call = makeCall(ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, datatype, op, 0, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int op, int channel) {
  return ncclDevAllReduce(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, op, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op) {
  return ncclDevCallLsa(session,
                        makeCall(ncclFfmFunctionReduceScatter, sendbuff, recvbuff, recvcount, datatype, op, 0, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op, int channel) {
  Call call = makeCall(ncclFfmFunctionReduceScatter, sendbuff, recvbuff, recvcount, datatype, op, 0, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevReduceScatter(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                 size_t recvcount, int datatype, int op, int channel) {
  return ncclDevReduceScatter(CoopBlock(), comm, sendbuff, recvbuff, recvcount, datatype, op, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype) {
  return ncclDevCallLsa(session,
                        makeCall(ncclFfmFunctionAllGather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype, int channel) {
  Call call = makeCall(ncclFfmFunctionAllGather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevAllGather(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t sendcount, int datatype, int channel) {
  return ncclDevAllGather(CoopBlock(), comm, sendbuff, recvbuff, sendcount, datatype, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int root) {
  return ncclDevCallLsa(session,
                        makeCall(ncclFfmFunctionBroadcast, sendbuff, recvbuff, count, datatype, ncclSum, root, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                             size_t count, int datatype, int root, int channel) {
  Call call = makeCall(ncclFfmFunctionBroadcast, sendbuff, recvbuff, count, datatype, ncclSum, root, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevBroadcast(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                             int datatype, int root, int channel) {
  return ncclDevBroadcast(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, root, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduce(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                          size_t count, int datatype, int op, int root) {
  return ncclDevCallLsa(session, makeCall(ncclFfmFunctionReduce, sendbuff, recvbuff, count, datatype, op, root, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevReduce(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                          size_t count, int datatype, int op, int root, int channel) {
  Call call = makeCall(ncclFfmFunctionReduce, sendbuff, recvbuff, count, datatype, op, root, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevReduce(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                          int datatype, int op, int root, int channel) {
  return ncclDevReduce(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, op, root, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(ChannelSession<Coop> &session, const void *sendbuff, void *recvbuff,
                                            size_t count, int datatype) {
  return ncclDevCallLsa(session, makeCall(ncclFfmFunctionAllToAll, sendbuff, recvbuff, count, datatype, ncclSum, 0, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(Coop coop, const DevComm &comm, const void *sendbuff, void *recvbuff,
                                            size_t count, int datatype, int channel) {
  Call call = makeCall(ncclFfmFunctionAllToAll, sendbuff, recvbuff, count, datatype, ncclSum, 0, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevAllToAll(const DevComm &comm, const void *sendbuff, void *recvbuff, size_t count,
                                            int datatype, int channel) {
  return ncclDevAllToAll(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(ChannelSession<Coop> &session) {
  return ncclDevCallLsa(session, makeCall(ncclFfmFunctionBarrier, nullptr, nullptr, 0, ncclInt8, ncclSum, 0, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(Coop coop, const DevComm &comm, int channel) {
  Call call = makeCall(ncclFfmFunctionBarrier, nullptr, nullptr, 0, ncclInt8, ncclSum, 0, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevBarrier(const DevComm &comm, int channel) {
  return ncclDevBarrier(CoopBlock(), comm, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(ChannelSession<Coop> &session, const void *sendbuff,
                                                         void *recvbuff, size_t count, int datatype, int op,
                                                         int ranksPerGroup) {
  return ncclDevCallLsa(session, makeCall(ncclFfmFunctionHierarchicalAllReduce, sendbuff, recvbuff, count, datatype, op,
                                          ranksPerGroup, 0));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(Coop coop, const DevComm &comm, const void *sendbuff,
                                                         void *recvbuff, size_t count, int datatype, int op,
                                                         int ranksPerGroup, int channel) {
  Call call = makeCall(ncclFfmFunctionHierarchicalAllReduce, sendbuff, recvbuff, count, datatype, op, ranksPerGroup, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevHierarchicalAllReduce(const DevComm &comm, const void *sendbuff, void *recvbuff,
                                                         size_t count, int datatype, int op, int ranksPerGroup,
                                                         int channel) {
  return ncclDevHierarchicalAllReduce(CoopBlock(), comm, sendbuff, recvbuff, count, datatype, op, ranksPerGroup,
                                      channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevSend(Coop coop, const DevComm &comm, const void *buff, size_t count, int datatype,
                                        int peer, int channel) {
  Call call = makeCall(ncclFfmFunctionSend, buff, nullptr, count, datatype, ncclSum, peer, 0);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevSend(const DevComm &comm, const void *buff, size_t count, int datatype, int peer,
                                        int channel) {
  return ncclDevSend(CoopBlock(), comm, buff, count, datatype, peer, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevRecv(Coop coop, const DevComm &comm, void *buff, size_t count, int datatype,
                                        int peer, int channel) {
  Call call = makeCall(ncclFfmFunctionRecv, nullptr, buff, count, datatype, ncclSum, 0, peer);
  return callBy(coop, comm, call, channel);
}

NCCLFFM_DEVICE ncclResult_t ncclDevRecv(const DevComm &comm, void *buff, size_t count, int datatype, int peer,
                                        int channel) {
  return ncclDevRecv(CoopBlock(), comm, buff, count, datatype, peer, channel);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclDevSendRecv(Coop coop, const DevComm &comm, const void *sendbuff, int to,
                                            void *recvbuff, int from, size_t count, int datatype, int channel) {
  Call call = makeCall(ncclFfmFunctionSendRecv, sendbuff, recvbuff, count, datatype, ncclSum, to, from);
  return callBy(coop, comm, call, channel);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_COLLECTIVES_FUNCS_H_

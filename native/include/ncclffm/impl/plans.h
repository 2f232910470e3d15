// Every collective as steps, and the checks before the first.
#ifndef NCCLFFM_IMPL_PLANS_H_
#define NCCLFFM_IMPL_PLANS_H_

#include "choose.h"
#include "pairs.h"
#include "zero_copy.h"

namespace ncclffm {

// What is wrong with a call, in the order in which it is looked for.
enum class Problem {
  kNone,
  kFunction,
  kType,
  kOp,
  kRoot,       // of Broadcast and Reduce; or the ranks of a group, which divide the number of ranks
  kPeer,       // of Send and Recv
  kProtocol,   // there is none of this number, or this path or group does not carry it
  kAlgorithm,  // there is none of this number, or the function does not know it
  kSize,       // bytes that do not fit an address
  kBuffer,     // null, or misaligned
  kWindow,     // only one buffer in a window, or not all of it in the window
  kOverlap,
};

NCCLFFM_DEVICE bool reduces(uint32_t function) {
  return function == ncclFfmFunctionAllReduce || function == ncclFfmFunctionReduceScatter ||
         function == ncclFfmFunctionReduce || function == ncclFfmFunctionHierarchicalAllReduce;
}

// The lengths of a call's buffers on this rank, in parts of count elements.
struct PartCounts {
  uint64_t send;
  uint64_t recv;
};

NCCLFFM_DEVICE PartCounts partCounts(const DevComm &comm, const Call &call) {
  const uint64_t n = static_cast<uint64_t>(comm.nRanks);
  const bool isRoot = call.root == comm.rank;
  switch (call.function) {
    case ncclFfmFunctionReduceScatter:
      return {n, 1};
    case ncclFfmFunctionAllGather:
      return {1, n};
    case ncclFfmFunctionAllToAll:
      return {n, n};
    case ncclFfmFunctionBroadcast:
      return {isRoot ? 1u : 0u, 1};
    case ncclFfmFunctionReduce:
      return {1, isRoot ? 1u : 0u};
    case ncclFfmFunctionSend:
      return {1, 0};
    case ncclFfmFunctionRecv:
      return {0, 1};
    case ncclFfmFunctionBarrier:
      return {0, 0};
    default:
      return {1, 1};
  }
}

// Where a buffer in place begins: recv - send, in parts.
NCCLFFM_DEVICE bool isInPlace(const DevComm &comm, const Call &call, uint64_t partBytes, uintptr_t send,
                              uintptr_t recv) {
  const uint64_t own = static_cast<uint64_t>(comm.rank) * partBytes;
  switch (call.function) {
    case ncclFfmFunctionAllReduce:
    case ncclFfmFunctionHierarchicalAllReduce:
    case ncclFfmFunctionBroadcast:
    case ncclFfmFunctionReduce:
      return send == recv;
    case ncclFfmFunctionReduceScatter:
      return recv == send + own;
    case ncclFfmFunctionAllGather:
      return send == recv + own;
    default:
      return false;
  }
}

NCCLFFM_DEVICE bool fits(const LsaBuffer &buffer, uint64_t bytes) {
  return bytes <= buffer.bytes && buffer.offset <= buffer.bytes - bytes;
}

// Bounds what is multiplied by the size of an element and the number of ranks: far beyond any memory, far below 64
// bits.
constexpr uint64_t kMaxCount = uint64_t{1} << 40;

NCCLFFM_DEVICE Problem problemOfBuffers(const DevComm &comm, const Call &call, uint32_t elementBytes) {
  if (call.count > kMaxCount) return Problem::kSize;
  const uint64_t partBytes = call.count * elementBytes;
  const PartCounts parts = partCounts(comm, call);
  const uint64_t sendBytes = parts.send * partBytes, recvBytes = parts.recv * partBytes;
  uintptr_t send = reinterpret_cast<uintptr_t>(call.sendbuff), recv = reinterpret_cast<uintptr_t>(call.recvbuff);
  const bool zeroCopy = isZeroCopy(call);
  if (zeroCopy) {
    // Every rank's buffers are in its windows, whether it is the root or not.
    if (!fits(call.send, parts.send == 0 ? partBytes : sendBytes) ||
        !fits(call.recv, parts.recv == 0 ? partBytes : recvBytes)) {
      return Problem::kWindow;
    }
    send = call.send.offset;
    recv = call.recv.offset;
  } else if (call.send.peers != nullptr || call.recv.peers != nullptr) {
    return Problem::kWindow;
  } else if ((parts.send != 0 && send == 0) || (parts.recv != 0 && recv == 0)) {
    return Problem::kBuffer;
  }
  // Sizes of elements are powers of two, and a division takes longer than a message.
  const uintptr_t mask = elementBytes - 1;
  if ((parts.send != 0 && (send & mask) != 0) || (parts.recv != 0 && (recv & mask) != 0)) return Problem::kBuffer;
  const bool sameSpace = !zeroCopy || call.send.peers == call.recv.peers;
  const bool overlap = sendBytes != 0 && recvBytes != 0 && send < recv + recvBytes && recv < send + sendBytes;
  if (holds(Rule::kCheckOverlap) && sameSpace && overlap && !isInPlace(comm, call, partBytes, send, recv)) {
    return Problem::kOverlap;
  }
  return Problem::kNone;
}

NCCLFFM_DEVICE bool isPair(uint32_t function) {
  return function >= ncclFfmFunctionSend && function <= ncclFfmFunctionSendRecv;
}

// Of a call that leaves nothing open. The communicator is valid.
NCCLFFM_DEVICE Problem problemOf(const DevComm &comm, const Call &call, uint32_t groupSize) {
  if (!hasAlgorithm(call.function, ncclFfmAlgorithmOneShot, false) &&
      !hasAlgorithm(call.function, ncclFfmAlgorithmTwoShot, false)) {
    return Problem::kFunction;
  }
  if (!allowsProtocol(call.protocol, comm.path, groupSize)) return Problem::kProtocol;
  if (isZeroCopy(call) && call.protocol != ncclFfmProtocolSimple) return Problem::kProtocol;
  if (!hasAlgorithm(call.function, call.algorithm, isZeroCopy(call))) return Problem::kAlgorithm;
  if (call.function == ncclFfmFunctionBarrier) return Problem::kNone;
  const uint32_t elementBytes = elementBytesOf(call.datatype);
  if (elementBytes == 0) return Problem::kType;
  if (reduces(call.function) && !isReduction(call.op)) return Problem::kOp;
  if (call.function == ncclFfmFunctionBroadcast || call.function == ncclFfmFunctionReduce) {
    if (call.root < 0 || call.root >= comm.nRanks) return Problem::kRoot;
  }
  if (call.function == ncclFfmFunctionHierarchicalAllReduce && (call.root < 1 || comm.nRanks % call.root != 0)) {
    return Problem::kRoot;
  }
  auto isPeer = [&](int rank) { return rank >= 0 && rank < comm.nRanks && rank != comm.rank; };
  if (isPair(call.function)) {
    if (call.function != ncclFfmFunctionRecv && !isPeer(call.root)) return Problem::kPeer;
    if (call.function != ncclFfmFunctionSend && !isPeer(call.source)) return Problem::kPeer;
  }
  return call.count == 0 ? Problem::kNone : problemOfBuffers(comm, call, elementBytes);
}

// Fills in what the call, then the communicator leaves open, for so many groups of this size.
NCCLFFM_DEVICE void chooseFor(const DevComm &comm, Call &call, uint32_t groupSize, int nGroups) {
  uint32_t protocol = call.protocol, algorithm = call.algorithm;
  const bool zeroCopy = isZeroCopy(call);
  if (protocol == ncclFfmProtocolAuto && zeroCopy) protocol = ncclFfmProtocolSimple;
  if (protocol == ncclFfmProtocolAuto && allowsProtocol(comm.protocol, comm.path, groupSize)) protocol = comm.protocol;
  if (algorithm == ncclFfmAlgorithmAuto && hasAlgorithm(call.function, comm.algorithm, zeroCopy)) {
    algorithm = comm.algorithm;
  }
  const Choice choice = choose(call.function, protocol, algorithm, comm.nRanks,
                               call.count * elementBytesOf(call.datatype), nGroups, comm.path, zeroCopy);
  call.protocol = choice.protocol;
  call.algorithm = choice.algorithm;
}

// The offsets of a zero-copy call that must be equal on all ranks: peers store at their own, or load from it.
NCCLFFM_DEVICE uint64_t sharedOffsets(const Call &call) {
  const bool scatters = call.function == ncclFfmFunctionReduceScatter;
  return (reduces(call.function) ? call.send.offset * 3 : 0) + (scatters ? 0 : call.recv.offset);
}

// What must be equal on all ranks, in 31 bits, of which a flag carries the low 15: they differ where only counts do,
// and by less than 32765, by multiples of 32768, or by a power of two.
NCCLFFM_DEVICE uint32_t hashOf(const Call &call, uint64_t shareCount) {
  const uint64_t which = static_cast<uint64_t>(call.function) | static_cast<uint64_t>(call.datatype) << 4 |
                         static_cast<uint64_t>(call.op) << 8 | static_cast<uint64_t>(call.protocol) << 12 |
                         static_cast<uint64_t>(call.algorithm) << 14 | static_cast<uint64_t>(isZeroCopy(call)) << 16 |
                         static_cast<uint64_t>(isPair(call.function) ? 0 : call.root) << 32;
  const uint64_t mixed = (which + (isZeroCopy(call) ? sharedOffsets(call) : 0)) * 0x9e3779b97f4a7c15u;
  const uint32_t hash =
      static_cast<uint32_t>(mixed >> 40) +
      static_cast<uint32_t>(shareCount + 3 * (shareCount >> 15) + 5 * (shareCount >> 30));  // no count has 2^45
  return hash | 0x80000000u;  // never 0, which is what memory that was never written has
}

// Elements [first, first + count) of every part of a call: what one group works on.
struct BlockShare {
  uint64_t first;
  uint64_t count;
};

constexpr uint64_t kShareBytes = 128;  // shares and shards are whole cache lines, so that aligned buffers stay aligned

// Bytes of each of n equal shares, but for the last ones. A division of 64 bits takes longer than a message.
NCCLFFM_DEVICE uint64_t shardBytes(uint64_t bytes, int n) {
  const uint64_t lines = (bytes + kShareBytes - 1) / kShareBytes + static_cast<uint64_t>(n) - 1;
  const uint32_t m = static_cast<uint32_t>(n);
  return (lines >> 32 == 0 ? static_cast<uint32_t>(lines) / m : lines / m) * kShareBytes;
}

// The share of a block of a launch.
NCCLFFM_DEVICE BlockShare shareOf(uint64_t count, uint32_t elementBytes, int block, int nBlocks) {
  if (nBlocks == 1) return {0, count};
  const uint64_t bytes = count * elementBytes, share = shardBytes(bytes, nBlocks);
  const uint64_t first = share * static_cast<uint64_t>(block);
  if (first >= bytes) return {0, 0};
  const int shift = elementBytes == 8 ? 3 : elementBytes == 4 ? 2 : elementBytes == 2 ? 1 : 0;
  return {first >> shift, (bytes - first < share ? bytes - first : share) >> shift};
}

constexpr uint64_t kNoEnd = ~uint64_t{0};

// The buffers of a group's share.
struct ShareBuffers {
  char *in;
  char *out;
  uint64_t bytes;   // of the share, in every part
  uint64_t stride;  // from part to part
};

NCCLFFM_DEVICE int stepsOf(const Call &call) {
  if (call.function == ncclFfmFunctionHierarchicalAllReduce) return 4;
  return call.algorithm == ncclFfmAlgorithmTwoShot ? 2 : 1;
}

// Every member has a shard of `out` complete, the others get it.
NCCLFFM_DEVICE Step gatherShards(const Team &team, char *out, uint64_t shard, uint64_t total) {
  const Parts shards = {out, shard, shard, total};
  const Parts own = {shards.of(team.self), 0, shard, shards.lengthOf(team.self)};
  return {team, own, kEverybody, kEverybody, shards, false, false};
}

// Every member gets a shard of `in`, summed, in its place of `out`.
NCCLFFM_DEVICE Step reduceShards(const Team &team, char *in, char *out, uint64_t shard, uint64_t total, bool finishes) {
  const Parts shards = {in, shard, shard, total};
  const Parts own = {out + static_cast<uint64_t>(team.self) * shard, 0, shard, total};
  return {team, shards, kEverybody, kEverybody, own, true, finishes};
}

NCCLFFM_DEVICE Step stepOf(const DevComm &comm, const Call &call, const ShareBuffers &b, int i) {
  const Team all = {0, 1, comm.nRanks, comm.rank};
  const Parts whole = {b.in, 0, b.bytes, b.bytes}, result = {b.out, 0, b.bytes, b.bytes};
  const Parts inParts = {b.in, b.stride, b.bytes, kNoEnd}, outParts = {b.out, b.stride, b.bytes, kNoEnd};
  switch (call.function) {
    case ncclFfmFunctionAllReduce: {
      if (call.algorithm == ncclFfmAlgorithmOneShot) return {all, whole, kEverybody, kEverybody, result, true, true};
      const uint64_t shard = shardBytes(b.bytes, comm.nRanks);
      return i == 0 ? reduceShards(all, b.in, b.out, shard, b.bytes, true) : gatherShards(all, b.out, shard, b.bytes);
    }
    case ncclFfmFunctionReduceScatter:
      return {all, inParts, kEverybody, kEverybody, result, true, true};
    case ncclFfmFunctionAllGather:
      return {all, whole, kEverybody, kEverybody, outParts, false, false};
    case ncclFfmFunctionAllToAll:
      return {all, inParts, kEverybody, kEverybody, outParts, false, false};
    case ncclFfmFunctionReduce:
      return {all, whole, call.root, kEverybody, result, true, true};
    case ncclFfmFunctionBroadcast: {
      if (call.algorithm == ncclFfmAlgorithmOneShot) return {all, whole, kEverybody, call.root, result, false, false};
      const uint64_t shard = shardBytes(b.bytes, comm.nRanks);
      if (i == 1) return gatherShards(all, b.out, shard, b.bytes);
      const Parts shards = {b.in, shard, shard, b.bytes}, places = {b.out, shard, shard, b.bytes};
      const Parts own = {places.of(comm.rank), 0, shard, places.lengthOf(comm.rank)};
      return {all, shards, kEverybody, call.root, own, false, false};
    }
    default: {  // hierarchical all-reduce: reduced in the group, then across groups, and handed back the same way
      const int groupSize = call.root, member = comm.rank % groupSize, group = comm.rank / groupSize;
      const Team inGroup = {group * groupSize, 1, groupSize, member};
      const Team across = {member, groupSize, comm.nRanks / groupSize, group};
      const uint64_t ofGroup = shardBytes(b.bytes, groupSize), ofRank = shardBytes(ofGroup, across.size);
      const Parts places = {b.out, ofGroup, ofGroup, b.bytes};
      char *mine = places.of(member);
      const uint64_t length = places.lengthOf(member);
      if (i == 0) return reduceShards(inGroup, b.in, b.out, ofGroup, b.bytes, false);
      if (i == 1) return reduceShards(across, mine, mine, ofRank, length, true);
      if (i == 2) return gatherShards(across, mine, ofRank, length);
      return gatherShards(inGroup, b.out, ofGroup, b.bytes);
    }
  }
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t runRing(ChannelSession<Coop> &session, const Call &call, const ShareBuffers &b,
                                    const CallContext &context) {
  const DevComm &comm = session.comm();
  const int n = comm.nRanks, channel = session.site().channel;
  const ncclFfmFunction function = static_cast<ncclFfmFunction>(call.function);
  // All ranks hear from all, once, so that whoever calls something else or does not come is named by everybody.
  session.beginExchange(context.hash);
  session.tellBegun();
  const ncclResult_t begun = session.endExchange(session.awaitReady());
  if (begun != ncclSuccess) return begun;
  PairSession<Coop> next(session.coop(), comm, channel, (comm.rank + 1) % n, Direction::kSend, function);
  if (next.result() != ncclSuccess) return session.endCall(next.result());
  PairSession<Coop> previous(session.coop(), comm, channel, (comm.rank + n - 1) % n, Direction::kRecv, function);
  if (previous.result() != ncclSuccess) return session.endCall(previous.result());
  if constexpr (kReduces<T>) {
    const uint64_t shard = shardBytes(b.bytes, n);
    const Parts in = {b.in, shard, shard, b.bytes}, out = {b.out, shard, shard, b.bytes};
    return session.endCall(ringPhases<T>(next, previous, call.protocol, in, out, context));
  } else {
    const Parts out = {b.out, b.stride, b.bytes, kNoEnd};
    char *own = out.of(comm.rank);
    if (own != b.in) {
      copyBytes({session.coop().rank(), session.coop().size()}, own, b.in, b.bytes, context.elementBytes);
    }
    session.coop().sync();
    return session.endCall(ringPhases<T>(next, previous, call.protocol, out, out, context));
  }
}

template <class T, class Coop>
NCCLFFM_DEVICE ncclResult_t runZeroCopy(ChannelSession<Coop> &session, const Call &call, const BlockShare &share,
                                        const CallContext &context) {
  const DevComm &comm = session.comm();
  const int n = comm.nRanks;
  const uint64_t first = share.first * context.elementBytes, bytes = share.count * context.elementBytes;
  const uint64_t stride = call.count * context.elementBytes, rank = static_cast<uint64_t>(comm.rank);
  const Everywhere in = Everywhere{call.send.peers, call.send.offset}.plus(first);
  const Everywhere out = Everywhere{call.recv.peers, call.recv.offset}.plus(first);
  const ncclResult_t result = barrier(session, context.hash);
  if (result != ncclSuccess) return result;
  if constexpr (kReduces<T>) {
    // Of a reduce-scatter each rank has its part, of the others a shard.
    const bool isScatter = call.function == ncclFfmFunctionReduceScatter;
    const Parts shards = {nullptr, shardBytes(bytes, n), shardBytes(bytes, n), bytes};
    const uint64_t start = rank * (isScatter ? stride : shards.stride);
    const int onlyTo = isScatter ? comm.rank : call.function == ncclFfmFunctionReduce ? call.root : kEverybody;
    reduceEverywhere<T>(session, in.plus(start), isScatter ? out : out.plus(start), onlyTo,
                        isScatter ? bytes : shards.lengthOf(comm.rank), context);
  } else {
    for (int k = 0; k < n; ++k) {
      const int to = comm.rank + k < n ? comm.rank + k : comm.rank + k - n;
      if (call.function == ncclFfmFunctionBroadcast) {
        if (comm.rank == call.root) storeTo(session, in.at(comm.rank), out, to, bytes, context.elementBytes);
      } else {
        const Everywhere from =
            call.function == ncclFfmFunctionAllToAll ? in.plus(static_cast<uint64_t>(to) * stride) : in;
        storeTo(session, from.at(comm.rank), out.plus(rank * stride), to, bytes, context.elementBytes);
      }
    }
  }
  return barrier(session, context.hash);
}

// A barrier looks at no argument.
NCCLFFM_DEVICE Call makeBarrier() {
  Call call = {};
  call.function = ncclFfmFunctionBarrier;
  return call;
}

NCCLFFM_DEVICE ShareBuffers buffersOf(const Call &call, const BlockShare &share, uint32_t elementBytes) {
  const uint64_t first = share.first * elementBytes;
  return {const_cast<char *>(static_cast<const char *>(call.sendbuff)) + first,
          static_cast<char *>(call.recvbuff) + first, share.count * elementBytes, call.count * elementBytes};
}

// A checked collective with nothing left open, on a group's share of it. T is the element type of a call that reduces.
template <class T, Ways kWays = Ways::kAll, class Coop>
NCCLFFM_DEVICE ncclResult_t runShare(ChannelSession<Coop> &session, const Call &call, const BlockShare &share) {
  const DevComm &comm = session.comm();
  session.setFunction(static_cast<ncclFfmFunction>(call.function));
  if constexpr (!kReduces<T>) {
    if (call.function == ncclFfmFunctionBarrier) return barrier(session, hashOf(makeBarrier(), 0));
  }
  if (share.count == 0) return ncclSuccess;
  const CallContext context = {call.op, comm.nRanks, elementBytesOf(call.datatype), hashOf(call, share.count)};
  const ShareBuffers buffers = buffersOf(call, share, context.elementBytes);
  if constexpr (kWays == Ways::kAll) {
    if (isZeroCopy(call)) return runZeroCopy<T>(session, call, share, context);
    if (call.algorithm == ncclFfmAlgorithmRing && comm.nRanks > 1) return runRing<T>(session, call, buffers, context);
  }
  // What is all about latency has code of its own, in which the step is known.
  if constexpr (kReduces<T>) {
    if (call.function == ncclFfmFunctionAllReduce && call.algorithm == ncclFfmAlgorithmOneShot &&
        call.protocol == ncclFfmProtocolLL) {
      return runStepOfLines<LL, T>(session, stepOf(comm, call, buffers, 0), context, Identity(), Identity());
    }
  }
  NCCLFFM_NO_UNROLL
  for (int i = 0; i < stepsOf(call); ++i) {
    const ncclResult_t result = runStep<T, kWays>(session, call.protocol, stepOf(comm, call, buffers, i), context);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

// A checked send, receive or both with nothing left open, on a group's share of it.
template <class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t runPairShare(Coop coop, const DevComm &comm, const Call &call, int channel,
                                              const BlockShare &share, uint32_t taskHash = 0) {
  if (share.count == 0) return ncclSuccess;
  const uint32_t elementBytes = elementBytesOf(call.datatype);
  const uint64_t first = share.first * elementBytes, bytes = share.count * elementBytes;
  const ncclFfmFunction function = static_cast<ncclFfmFunction>(call.function);
  Call neutral = call;  // the two ends of a pair have the same hash
  neutral.function = ncclFfmFunctionSendRecv;
  neutral.op = ncclSum;
  const uint32_t hash = hashOf(neutral, share.count) ^ taskHash;
  const ConstSpan out = {static_cast<const char *>(call.sendbuff) + first, bytes, elementBytes};
  const Arrival in = {{static_cast<char *>(call.recvbuff) + first, bytes, elementBytes}, nullptr, {}};
  const int to = call.function == ncclFfmFunctionRecv ? kNobody : call.root;
  const int from = call.function == ncclFfmFunctionSend ? kNobody : call.source;
  PairSession<Coop> next(coop, comm, channel, to, Direction::kSend, function);
  if (next.result() != ncclSuccess) return next.result();
  PairSession<Coop> previous(coop, comm, channel, from, Direction::kRecv, function);
  if (previous.result() != ncclSuccess) return previous.result();
  return sendRecv<Unreduced>(next, previous, call.protocol, out, in, bytes, hash);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PLANS_H_

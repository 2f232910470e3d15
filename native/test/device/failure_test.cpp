// What happens when something goes wrong: a rank that does not come, or stops half-way, or calls something else; an
// abort; a channel that is busy; bad arguments. Every live rank gets a code and a status record within the deadline.
// With --break RULE it passes only if the checks notice that the rule is broken.
#include "harness.h"

#include <functional>

namespace ncclffm::test {
namespace {

constexpr int kChannels = 3;
constexpr uint32_t kSlotBytes = 512;
constexpr uint64_t kTimeoutNs = 300 * kMs;  // where a timeout is what must come
// ... and ranks must be in step before: none stands still for so long on a busy machine.
constexpr uint64_t kPatientNs = 1500 * kMs;

Call floatCall(uint32_t function, std::vector<float> &in, std::vector<float> &out, uint64_t count) {
  Call call = {};
  call.function = function;
  call.datatype = ncclFloat32;
  call.op = ncclSum;
  call.count = count;
  call.sendbuff = in.data();
  call.recvbuff = out.data();
  return call;
}

ncclResult_t allReduce(const DevComm &comm, std::vector<float> &buffer, int channel) {
  return ncclDevAllReduce(comm, buffer.data(), buffer.data(), buffer.size(), ncclFloat32, ncclSum, channel);
}

void checkStatus(World &world, int rank, const Status &expected) {
  Status s = world.status(rank);
  check(s.ready == 1 && s.code == expected.code && s.function == expected.function && s.rank == rank &&
            s.peer == expected.peer && s.channel == expected.channel && s.epoch == expected.epoch,
        "status of rank %d: ready %u, code %u, function %u, rank %d, peer %d, channel %d, epoch %u; expected code %u, "
        "function %u, peer %d, channel %d, epoch %u",
        rank, s.ready, s.code, s.function, s.rank, s.peer, s.channel, s.epoch, expected.code, expected.function,
        expected.peer, expected.channel, expected.epoch);
}

Status statusOf(ncclResult_t code, uint32_t function, int peer, int channel, uint32_t epoch) {
  return {static_cast<uint32_t>(code), function, 0, peer, channel, epoch, 0, 0, 1, {}, {}};
}

void checkWaited(World &world, int rank, uint64_t timeoutNs) {
  const uint64_t waited = world.status(rank).waitedNs;
  check(waited >= timeoutNs && waited < 30 * kTimeoutNs, "rank %d waited %llu ns", rank,
        static_cast<unsigned long long>(waited));
}

// A new communicator of the same ranks is not troubled by what happened to another.
void checkThatANewOneWorks(int nRanks) {
  World world(nRanks, kChannels, kSlotBytes, 60000 * kMs);
  inThreads(nRanks, [&](int rank) {
    std::vector<float> buffer(301, static_cast<float>(rank));
    const ncclResult_t result = allReduce(world.comm(rank), buffer, 1);
    check(result == ncclSuccess && buffer[300] == static_cast<float>(nRanks * (nRanks - 1) / 2),
          "a new communicator: result %d", result);
  });
}

void rankThatNeverArrivesIsNamedOnEveryLiveRank(int nRanks, int absent, uint32_t function, uint32_t protocol,
                                                uint32_t algorithm) {
  constexpr int kChannel = 1, kGoodCalls = 5;
  // The good calls have a deadline of their own, which a busy machine keeps.
  World world(nRanks, kChannels, kSlotBytes, 60000 * kMs);
  inThreads(nRanks, [&](int rank) {
    for (int i = 0; i < kGoodCalls; ++i) {
      const ncclResult_t result = ncclDevBarrier(world.comm(rank), kChannel);
      check(result == ncclSuccess, "a good call: result %d", result);
    }
  });
  std::atomic<int> begun{0};
  inThreads(nRanks, [&](int rank) {
    if (rank == absent) return;
    DevComm comm = world.comm(rank);
    comm.timeoutNs = kPatientNs;
    std::vector<float> in(900, 1.0f), out(900 * nRanks);
    Call call = floatCall(function, in, out, 900 / nRanks);
    call.root = function == ncclFfmFunctionHierarchicalAllReduce ? nRanks : (absent + 1) % nRanks;
    call.protocol = protocol;
    call.algorithm = algorithm;
    ++begun;
    while (begun.load() != nRanks - 1) std::this_thread::yield();  // so that they time out together
    const ncclResult_t result = ncclDevCallLsa(CoopThread(), comm, call, kChannel);
    check(result == ncclTimeout, "function %u, protocol %u, algorithm %u, rank %d: result %d, not ncclTimeout",
          function, protocol, algorithm, rank, result);
  });
  for (int rank = 0; rank < nRanks; ++rank) {
    if (rank == absent) continue;
    checkWaited(world, rank, kPatientNs);
    checkStatus(world, rank, statusOf(ncclTimeout, function, absent, kChannel, kGoodCalls + 1));
  }

  // The communicator has failed for good, on every channel, and does not even send; without a deadline, too.
  const int live = absent == 0 ? 1 : 0;
  DevComm comm = world.comm(live);
  comm.timeoutNs = 0;
  std::vector<float> buffer(7, 3.0f);
  for (int channel = 0; channel < kChannels; ++channel) {
    const uint64_t state = world.state(live, channel);
    const ncclResult_t result = allReduce(comm, buffer, channel);
    check(result == ncclTimeout && world.state(live, channel) == state && buffer[0] == 3.0f,
          "a call after the failure: result %d", result);
    check(ncclDevSend(comm, buffer.data(), 7, ncclFloat32, absent, channel) == ncclTimeout, "a send after the failure");
  }
}

void ranksThatNeverArriveAreNamed() {
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
    for (uint32_t algorithm : {ncclFfmAlgorithmOneShot, ncclFfmAlgorithmTwoShot, ncclFfmAlgorithmRing}) {
      rankThatNeverArrivesIsNamedOnEveryLiveRank(3, 2, ncclFfmFunctionAllReduce, protocol, algorithm);
    }
    for (uint32_t function : {ncclFfmFunctionReduceScatter, ncclFfmFunctionAllGather, ncclFfmFunctionBroadcast,
                              ncclFfmFunctionReduce, ncclFfmFunctionAllToAll, ncclFfmFunctionBarrier}) {
      rankThatNeverArrivesIsNamedOnEveryLiveRank(4, 1, function, protocol, ncclFfmAlgorithmOneShot);
    }
    rankThatNeverArrivesIsNamedOnEveryLiveRank(2, 0, ncclFfmFunctionHierarchicalAllReduce, protocol,
                                               ncclFfmAlgorithmTwoShot);
  }
  rankThatNeverArrivesIsNamedOnEveryLiveRank(6, 0, ncclFfmFunctionAllReduce, ncclFfmProtocolLL,
                                             ncclFfmAlgorithmOneShot);
  checkThatANewOneWorks(4);
}

// One rank calls something else than the others: nobody takes what is there for its own, all learn who did.
void ranksThatDisagreeAreToldSo() {
  struct Difference {
    const char *what;
    std::function<void(Call &)> change;
  };
  const Difference differences[] = {
      {"count", [](Call &c) { ++c.count; }},
      {"a much larger count", [](Call &c) { c.count = 800; }},
      {"function", [](Call &c) { c.function = ncclFfmFunctionReduce; }},
      {"barrier", [](Call &c) { c.function = ncclFfmFunctionBarrier; }},
      {"op", [](Call &c) { c.op = ncclMax; }},
      {"type", [](Call &c) { c.datatype = ncclInt32; }},
      {"protocol LL", [](Call &c) { c.protocol = ncclFfmProtocolLL; }},
      {"protocol LL128", [](Call &c) { c.protocol = ncclFfmProtocolLL128; }},
      {"protocol Simple", [](Call &c) { c.protocol = ncclFfmProtocolSimple; }},
      {"algorithm", [](Call &c) { c.algorithm = ncclFfmAlgorithmTwoShot; }},
      {"algorithm, the ring", [](Call &c) { c.algorithm = ncclFfmAlgorithmRing; }},
      {"root", [](Call &c) { c.function = ncclFfmFunctionBroadcast, c.root = 1; }},
      {"root of reduce", [](Call &c) { c.function = ncclFfmFunctionReduce, c.root = 1; }},
  };
  constexpr int kChannel = 2, kRanks = 3, kOdd = 2;
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
    for (const Difference &difference : differences) {
      World world(kRanks, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
      auto callFor = [&](int rank, std::vector<float> &in, std::vector<float> &out) {
        Call call = floatCall(ncclFfmFunctionAllReduce, in, out, 70);
        call.protocol = protocol;
        call.algorithm = ncclFfmAlgorithmOneShot;
        if (strncmp(difference.what, "root", 4) == 0) difference.change(call), call.root = 0;
        if (rank == kOdd) difference.change(call);
        return call;
      };
      std::vector<float> none;
      const Call odd = callFor(kOdd, none, none), usual = callFor(0, none, none);
      if (odd.protocol == protocol && strncmp(difference.what, "protocol", 8) == 0) continue;
      inThreads(kRanks, [&](int rank) {
        std::vector<float> in(900, 1.0f), out(900);
        const Call call = callFor(rank, in, out);
        const ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(rank), call, kChannel);
        check(result == ncclInvalidUsage,
              "protocol %u, another %s on rank %d, rank %d: result %d, not ncclInvalidUsage", protocol, difference.what,
              kOdd, rank, result);
      });
      for (int rank = 0; rank < kRanks; ++rank) {
        const Status s = world.status(rank);
        const bool named = rank == kOdd ? s.peer == 0 || s.peer == 1 : s.peer == kOdd;
        check(s.code == ncclInvalidUsage && s.function == (rank == kOdd ? odd : usual).function && s.rank == rank &&
                  named && s.channel == kChannel && s.epoch == 1,
              "protocol %u, another %s on rank %d, status of rank %d: code %u, function %u, peer %d, channel %d, epoch "
              "%u",
              protocol, difference.what, kOdd, rank, s.code, s.function, s.peer, s.channel, s.epoch);
      }
    }
  }
  checkThatANewOneWorks(kRanks);
}

void ranksOnDifferentChannelsTimeOut() {
  World world(2, kChannels, kSlotBytes, kTimeoutNs);
  inThreads(2, [&](int rank) {
    std::vector<float> buffer(9, 1.0f);
    const ncclResult_t result = allReduce(world.comm(rank), buffer, rank);
    check(result == ncclTimeout, "rank %d: result %d, not ncclTimeout", rank, result);
  });
  for (int rank = 0; rank < 2; ++rank) {
    checkStatus(world, rank, statusOf(ncclTimeout, ncclFfmFunctionAllReduce, 1 - rank, rank, 1));
  }
}

// Counts whose low 15 bits are the same, on few threads that poll fast: the flags must differ.
void countsThatDifferByMuchAreToldApart() {
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128}) {
    for (uint32_t algorithm : {ncclFfmAlgorithmOneShot, ncclFfmAlgorithmTwoShot, ncclFfmAlgorithmRing}) {
      for (uint64_t other : {uint64_t{2 * 32768}, uint64_t{4 * 32768}, uint64_t{3 * 32768}}) {
        World world(2, kChannels, 1 << 20, expectFailure ? kTimeoutNs : 20000 * kMs);
        inThreads(2, [&](int rank) {
          const uint64_t count = rank == 0 ? 32768 : other;
          std::vector<float> in(count, 1.0f), out(count);
          Call call = floatCall(ncclFfmFunctionAllReduce, in, out, count);
          call.protocol = protocol;
          call.algorithm = algorithm;
          ncclResult_t result = ncclSuccess;
          for (int i = 0; i < 4 && result == ncclSuccess; ++i) {
            result = ncclDevCallLsa(CoopThread(), world.comm(rank), call, 0);
          }
          check(result == ncclInvalidUsage, "protocol %u, algorithm %u, 32768 and %llu elements: result %d", protocol,
                algorithm, static_cast<unsigned long long>(other), result);
        });
      }
    }
  }
}

// The window of every rank's buffers is the same, but one rank's call has its result elsewhere in it.
void offsetsOfZeroCopyThatDifferAreToldApart() {
  constexpr int kRanks = 2;
  World world(kRanks, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
  std::vector<float> windows[kRanks];
  void *peers[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    windows[rank].assign(300, 1.0f);
    peers[rank] = windows[rank].data();
  }
  inThreads(kRanks, [&](int rank) {
    Call call = makeCall(ncclFfmFunctionAllReduce, nullptr, nullptr, 100, ncclFloat32, ncclSum, 0, 0);
    call.send = {peers, 1200, 0};
    call.recv = {peers, 1200, rank == 0 ? 400u : 800u};
    const ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(rank), call, 0);
    check(result == ncclInvalidUsage, "rank %d: result %d, not ncclInvalidUsage", rank, result);
  });
  for (const auto &window : windows) check(window[100] == 1.0f && window[200] == 1.0f, "a refused call wrote");
}

// Small all-reduces on a session, by the short way of so many ranks: one rank's has two elements more.
void shortWayTellsRanksThatDisagree(int nRanks) {
  constexpr int kOdd = 1, kChannel = 2;
  World world(nRanks, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
  inThreads(nRanks, [&](int rank) {
    std::vector<double> buffer(20, 1.0);
    ChannelSession<CoopThread> session(CoopThread(), world.comm(rank), kChannel, ncclFfmFunctionAllReduce);
    auto allReduceOf = [&](size_t count) {
      return ncclDevAllReduce(session, buffer.data(), buffer.data(), count, ncclFloat64, ncclSum);
    };
    const ncclResult_t good = allReduceOf(20);
    check(good == ncclSuccess && buffer[19] == nRanks, "%d ranks, a small all-reduce: %d", nRanks, good);
    const ncclResult_t result = allReduceOf(rank == kOdd ? 12 : 10);
    check(result == ncclInvalidUsage, "%d ranks, rank %d of other counts: result %d, not ncclInvalidUsage", nRanks,
          rank, result);
  });
  for (int rank = 0; rank < nRanks; ++rank) {
    const Status s = world.status(rank);
    check(s.code == ncclInvalidUsage && (rank == kOdd ? s.peer != kOdd : s.peer == kOdd) && s.epoch == 2,
          "%d ranks, rank %d of other counts: status code %u, peer %d, epoch %u", nRanks, rank, s.code, s.peer,
          s.epoch);
  }
}

// A session whose ring did not come to pass knows that its communicator has failed.
void sessionFailsWithItsRing() {
  World world(2, kChannels, kSlotBytes, kTimeoutNs);
  __atomic_store_n(&world.comm(0).pairs[1].send, kBusyBit, __ATOMIC_RELAXED);
  inThreads(2, [&](int rank) {
    const DevComm &comm = world.comm(rank);
    ChannelSession<CoopThread> session(CoopThread(), comm, 0, ncclFfmFunctionAllReduce);
    std::vector<float> in(9, 1.0f), out(9);
    Call call = floatCall(ncclFfmFunctionAllReduce, in, out, 9);
    call.protocol = ncclFfmProtocolLL;
    call.algorithm = ncclFfmAlgorithmRing;
    const ncclResult_t expected = rank == 0 ? ncclInvalidUsage : ncclTimeout;
    const ncclResult_t first = ncclDevCallLsa(session, call), ofSession = session.result();
    const ncclResult_t second = ncclDevCallLsa(session, call);
    check(first == expected && ofSession == expected && second == expected, "rank %d: results %d, %d, %d", rank, first,
          ofSession, second);
  });
}

// A rank stops after it began an exchange, and after the first step of two.
void rankThatDiesInTheMiddleIsNamed() {
  constexpr int kRanks = 3, kDying = 1, kChannel = 0;
  constexpr uint64_t kCount = 90;  // everybody has a shard, and so waits for everybody in the first step
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
    for (int stepsDone : {0, 1}) {
      World world(kRanks, kChannels, kSlotBytes, kPatientNs);
      std::atomic<int> begun{0};
      inThreads(kRanks, [&](int rank) {
        ++begun;
        while (begun.load() != kRanks) std::this_thread::yield();
        std::vector<float> in(kCount, 1.0f), out(kCount);
        Call call = floatCall(ncclFfmFunctionAllReduce, in, out, kCount);
        call.protocol = protocol;
        call.algorithm = ncclFfmAlgorithmTwoShot;
        if (rank != kDying) {
          const ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(rank), call, kChannel);
          check(result == ncclTimeout, "rank %d: result %d, not ncclTimeout", rank, result);
          return;
        }
        const DevComm &comm = world.comm(rank);
        ChannelSession<CoopThread> session(CoopThread(), comm, kChannel, ncclFfmFunctionAllReduce);
        const CallContext context = {call.op, kRanks, sizeof(float), hashOf(call, call.count)};
        const ShareBuffers buffers = buffersOf(call, {0, call.count}, sizeof(float));
        for (int i = 0; i < stepsDone; ++i) runStep<float>(session, protocol, stepOf(comm, call, buffers, i), context);
        session.beginExchange(context.hash);
        if (protocol != ncclFfmProtocolSimple) session.tellBegun();
      });
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == kDying) continue;
        checkStatus(world, rank, statusOf(ncclTimeout, ncclFfmFunctionAllReduce, kDying, kChannel, stepsDone + 1));
      }
    }
  }
  checkThatANewOneWorks(kRanks);
}

void abortEndsAWaitThatHasNoDeadline() {
  const struct {
    uint32_t function, statusFunction;
    uint64_t count;
    uint32_t epoch;
  } rows[] = {{ncclFfmFunctionAllReduce, ncclFfmFunctionAllReduce, 3, 1},
              {ncclFfmFunctionBarrier, ncclFfmFunctionBarrier, 0, 1},
              {ncclFfmFunctionSend, ncclFfmFunctionSend, 3 * kSlotBytes, 3},
              {ncclFfmFunctionSendRecv, ncclFfmFunctionSendRecv, 3, 1}};
  for (const auto &row : rows) {
    World world(2, kChannels, kSlotBytes, 0);
    std::thread waiting([&] {
      std::vector<float> in(3 * kSlotBytes, 1.0f), out(3 * kSlotBytes);
      Call call = floatCall(row.function, in, out, row.count);
      call.root = call.source = row.function >= ncclFfmFunctionSend ? 1 : 0;
      call.protocol = ncclFfmProtocolLL;
      const ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(0), call, 2);
      check(result == ncclRemoteError, "function %u, aborted: result %d", row.function, result);
    });
    while (world.isUntouched(1)) std::this_thread::yield();  // it has sent, so it waits or is about to
    world.abort(0);
    waiting.join();
    checkStatus(world, 0, statusOf(ncclRemoteError, row.statusFunction, 1, 2, row.epoch));
  }
}

void gridWithoutAllOfItsBlocksTimesOut() {
  World world(2, kChannels, kSlotBytes, kTimeoutNs);
  std::vector<float> buffer(100, 1.0f);
  const Grid<CoopThread> grid = {CoopThread(), 1, 2};
  const ncclResult_t result =
      ncclDevAllReduce(grid, world.comm(1), buffer.data(), buffer.data(), 100, ncclFloat32, ncclSum, 0);
  check(result == ncclTimeout && world.isUntouched(0), "result %d, not ncclTimeout", result);
  checkStatus(world, 1, statusOf(ncclTimeout, ncclFfmFunctionGridSync, 1, 1, 0));
}

// One block of a grid is through and waits for the other, which waits for a peer in vain: the status names the peer.
void peerThatDoesNotComeToABlockOfAGridIsNamed() {
  constexpr uint64_t kCount = 2 * kShareBytes / sizeof(float);  // a share for each block
  World world(2, kChannels, kSlotBytes, 20000 * kMs);
  std::vector<float> buffers[2] = {std::vector<float>(kCount, 1.0f), std::vector<float>(kCount, 2.0f)};
  std::atomic<bool> firstIsThrough{false};
  std::thread first([&] {
    const Grid<CoopThread> grid = {CoopThread(), 0, 2};
    const ncclResult_t result =
        ncclDevAllReduce(grid, world.comm(0), buffers[0].data(), buffers[0].data(), kCount, ncclFloat32, ncclSum, 1);
    check(result == ncclTimeout, "the first block: result %d, not ncclTimeout", result);
  });
  // The body of the same call, but its exchange waits for the first block's, and not for long for the peer.
  std::thread second([&] {
    const Grid<CoopThread> grid = {CoopThread(), 1, 2};
    Call call = floatCall(ncclFfmFunctionAllReduce, buffers[0], buffers[0], kCount);
    chooseFor(world.comm(0), call, 1, 2);
    ncclResult_t result = syncGrid(grid, world.comm(0), 1);
    check(result == ncclSuccess, "the second block arrives: result %d", result);
    while (!firstIsThrough) std::this_thread::yield();
    DevComm comm = world.comm(0);
    comm.timeoutNs = kTimeoutNs;
    result = callOnChannel(CoopThread(), comm, call, 2, shareOf(kCount, sizeof(float), 1, 2));
    check(result == ncclTimeout, "the second block: result %d, not ncclTimeout", result);
    result = syncGrid(grid, world.comm(0), 1);
    check(result == ncclTimeout, "the second block leaves: result %d, not ncclTimeout", result);
  });
  Call call = floatCall(ncclFfmFunctionAllReduce, buffers[1], buffers[1], kCount);
  chooseFor(world.comm(1), call, 1, 2);
  const BlockShare share = shareOf(kCount, sizeof(float), 0, 2);
  const ncclResult_t result = callOnChannel(CoopThread(), world.comm(1), call, 1, share);
  check(result == ncclSuccess, "the peer's first block: result %d", result);
  firstIsThrough = true;
  first.join();
  second.join();
  checkStatus(world, 0, statusOf(ncclTimeout, ncclFfmFunctionAllReduce, 1, 2, 1));
}

// Of one communicator, on channels of their own.
void twoGridsAtATime() {
  constexpr int kTimes = 200, kGrids = 2;
  World world(2, 2 * kGrids, kSlotBytes, 60000 * kMs);
  std::vector<float> buffers[2][kGrids];
  for (int rank = 0; rank < 2; ++rank) {
    for (auto &buffer : buffers[rank]) buffer.assign(300, static_cast<float>(rank));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < 2 * kGrids * 2; ++i) {
    threads.emplace_back([&, rank = i % 2, grid = i / 2 % kGrids, block = i / 4] {
      std::vector<float> &buffer = buffers[rank][grid];
      for (int k = 0; k < kTimes; ++k) {
        const ncclResult_t result =
            ncclDevAllReduce(Grid<CoopThread>{CoopThread(), block, 2}, world.comm(rank), buffer.data(), buffer.data(),
                             buffer.size(), ncclFloat32, ncclMax, 2 * grid);
        check(result == ncclSuccess, "rank %d, grid %d, block %d: result %d", rank, grid, block, result);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (const auto &ofRank : buffers) {
    for (const auto &buffer : ofRank) check(buffer[0] == 1 && buffer[299] == 1, "%g, %g", buffer[0], buffer[299]);
  }
}

void secondCollectiveOnABusyChannelIsRefused() {
  constexpr int kChannel = 1;
  World world(2, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
  std::vector<float> first(5, 1.0f), second(5, 2.0f);
  std::thread running([&] {
    ncclResult_t result = allReduce(world.comm(0), first, kChannel);
    check(result == ncclInvalidUsage, "the collective in flight: result %d", result);
  });
  while (world.isUntouched(1)) std::this_thread::yield();
  ncclResult_t result = allReduce(world.comm(0), second, kChannel);
  check(result == ncclInvalidUsage, "a second collective on a busy channel: result %d", result);
  running.join();
  checkStatus(world, 0, statusOf(ncclInvalidUsage, ncclFfmFunctionAllReduce, kNobody, kChannel, 0));
  check(second[0] == 2.0f && first[0] == 1.0f, "a refused collective wrote its buffer");
}

void whoIsRefusedLeavesTheBusyBitAndSendsNothing() {
  World world(2, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
  const uint64_t held = kBusyBit | 41;
  __atomic_store_n(&world.comm(0).channels[0].state, held, __ATOMIC_RELAXED);
  std::vector<float> buffer(5, 1.0f);
  ncclResult_t result = allReduce(world.comm(0), buffer, 0);
  check(result == ncclInvalidUsage && world.state(0, 0) == held && world.isUntouched(1), "result %d, state %llx",
        result, static_cast<unsigned long long>(world.state(0, 0)));
  checkStatus(world, 0, statusOf(ncclInvalidUsage, ncclFfmFunctionAllReduce, kNobody, 0, 41));
}

void secondSendToAPeerOnAChannelIsRefused() {
  for (Direction direction : {Direction::kSend, Direction::kRecv}) {
    World world(3, kChannels, kSlotBytes, expectFailure ? kTimeoutNs : 20000 * kMs);
    const DevComm &comm = world.comm(0);
    std::vector<float> buffer(5, 1.0f);
    PairSession<CoopThread> held(CoopThread(), comm, 1, 2, direction, ncclFfmFunctionSendRecv);
    check(held.result() == ncclSuccess, "a session: %d", held.result());
    if (direction == Direction::kSend) {  // other peers and channels are not concerned
      check(ncclDevSend(comm, buffer.data(), 5, ncclFloat32, 1, 1) == ncclSuccess, "a send to another peer");
      check(ncclDevSend(comm, buffer.data(), 5, ncclFloat32, 2, 0) == ncclSuccess, "a send on another channel");
    }
    const bool sends = direction == Direction::kSend;
    const ncclResult_t result = sends ? ncclDevSend(comm, buffer.data(), 5, ncclFloat32, 2, 1)
                                      : ncclDevRecv(comm, buffer.data(), 5, ncclFloat32, 2, 1);
    check(result == ncclInvalidUsage, "a second one: result %d", result);
    checkStatus(world, 0, statusOf(ncclInvalidUsage, sends ? ncclFfmFunctionSend : ncclFfmFunctionRecv, kNobody, 1, 0));
  }
}

void sendsAndReceivesWithoutTheirOtherEndTimeOut() {
  constexpr int kChannel = 2;
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
    const uint64_t slot = payloadBytesOf(protocol, kSlotBytes) / sizeof(float);
    std::vector<float> in(3 * slot, 1.0f), out(3 * slot, 7.0f);
    World world(2, kChannels, kSlotBytes, kTimeoutNs);
    Call call = floatCall(ncclFfmFunctionSend, in, out, 2 * slot);
    call.root = 1;
    call.protocol = protocol;
    ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(0), call, kChannel);
    check(result == ncclSuccess, "protocol %u: a send that fits two slots: result %d", protocol, result);
    call.count = 1;
    result = ncclDevCallLsa(CoopThread(), world.comm(0), call, kChannel);
    check(result == ncclTimeout, "protocol %u: a send beyond two slots: result %d", protocol, result);
    checkStatus(world, 0, statusOf(ncclTimeout, ncclFfmFunctionSend, 1, kChannel, 3));
    checkWaited(world, 0, kTimeoutNs);

    World other(2, kChannels, kSlotBytes, kTimeoutNs);
    call.function = ncclFfmFunctionRecv;
    call.source = 0;
    result = ncclDevCallLsa(CoopThread(), other.comm(1), call, kChannel);
    check(result == ncclTimeout && out[0] == 7.0f, "protocol %u: a receive without a send: result %d", protocol,
          result);
    checkStatus(other, 1, statusOf(ncclTimeout, ncclFfmFunctionRecv, 0, kChannel, 1));

    // What was sent is there for whom it was sent to, and for nobody who asks for something else.
    World third(2, kChannels, kSlotBytes, kTimeoutNs);
    call.function = ncclFfmFunctionSend;
    call.root = 1;
    call.count = 10;
    check(ncclDevCallLsa(CoopThread(), third.comm(0), call, kChannel) == ncclSuccess, "a send of 10 elements");
    call.function = ncclFfmFunctionRecv;
    call.count = 11;
    result = ncclDevCallLsa(CoopThread(), third.comm(1), call, kChannel);
    check(result == ncclInvalidUsage && out[0] == 7.0f, "protocol %u: a receive of another count: result %d", protocol,
          result);
    checkStatus(third, 1, statusOf(ncclInvalidUsage, ncclFfmFunctionRecv, 0, kChannel, 1));
  }
}

// Everything that a call can get wrong, by a thread, on a session and by a grid.
void badArgumentsReturnACodeAndTouchNothing() {
  constexpr int kRanks = 4, kRank = 1;
  constexpr uint64_t kCount = 8;
  World world(kRanks, kChannels, kSlotBytes, 3000 * kMs);
  std::vector<double> memory(256, 1.0);
  float *const p = reinterpret_cast<float *>(memory.data());
  char *const bytes = reinterpret_cast<char *>(p);
  std::vector<void *> windows(kRanks, p), otherWindows(kRanks, p);

  auto good = [&](uint32_t function) {
    Call call = {};
    call.function = function;
    call.datatype = ncclFloat32;
    call.op = ncclSum;
    call.count = kCount;
    call.sendbuff = p;
    call.recvbuff = p + 256;
    call.root = function == ncclFfmFunctionHierarchicalAllReduce ? 2 : 0;
    return call;
  };
  int looked = 0;
  auto untouched = [&](const char *what) {
    bool same = true;
    for (double x : memory) same &= x == 1.0;
    for (int r = 0; r < kRanks; ++r) same &= world.isUntouched(r) && world.state(r, 0) == 0 && world.state(r, 1) == 0;
    check(same && world.status(kRank).code == 0 && world.comm(kRank).channels[0].gridSync == 0, "%s changed memory",
          what);
  };
  auto expectBad = [&](const char *what, const DevComm &comm, const Call &call, int channel) {
    auto look = [&](const char *who, ncclResult_t result) {
      check(result == ncclInvalidArgument, "%s, function %u, by %s: result %d, not ncclInvalidArgument", what,
            call.function, who, result);
      ++looked;
    };
    look("a thread", ncclDevCallLsa(CoopThread(), comm, call, channel));
    look("a grid", ncclDevCallLsa(Grid<CoopThread>{CoopThread(), 0, 2}, comm, call, channel));
    {
      ChannelSession<CoopThread> session(CoopThread(), comm, channel, ncclFfmFunctionNone);
      look("a session", ncclDevCallLsa(session, call));
    }
    untouched(what);
  };
  auto bad = [&](const char *what, uint32_t function, auto change) {
    Call call = good(function);
    change(call);
    expectBad(what, world.comm(kRank), call, 0);
  };
  auto badComm = [&](const char *what, auto change) {
    DevComm comm = world.comm(kRank);
    change(comm);
    expectBad(what, comm, good(ncclFfmFunctionAllReduce), 0);
    check(ncclDevAllReduce(comm, p, p, 8, ncclFloat32, ncclSum, 0) == ncclInvalidArgument &&
              ncclDevBarrier(comm, 0) == ncclInvalidArgument &&
              ncclDevSend(comm, p, 8, ncclFloat32, 0, 0) == ncclInvalidArgument &&
              syncGrid(Grid<CoopThread>{CoopThread(), 0, 1}, comm) == ncclInvalidArgument,
          "%s: not ncclInvalidArgument", what);
    untouched(what);
  };

  badComm("magic", [](DevComm &c) { c.magic = 0; });
  badComm("version", [](DevComm &c) { c.version++; });
  badComm("rank too large", [](DevComm &c) { c.rank = kRanks; });
  badComm("rank negative", [](DevComm &c) { c.rank = -1; });
  badComm("no ranks", [](DevComm &c) { c.nRanks = 0; });
  badComm("no channels", [](DevComm &c) { c.nChannels = 0; });
  badComm("no slot", [](DevComm &c) { c.slotBytes = 0; });
  badComm("an odd slot", [](DevComm &c) { c.slotBytes = NCCLFFM_SLOT_UNIT + 16; });
  badComm("too large a slot", [](DevComm &c) { c.slotBytes = NCCLFFM_MAX_SLOT_BYTES + NCCLFFM_SLOT_UNIT; });
  badComm("null channels", [](DevComm &c) { c.channels = nullptr; });
  badComm("null pairs", [](DevComm &c) { c.pairs = nullptr; });
  badComm("null peers", [](DevComm &c) { c.peers = nullptr; });
  badComm("null status", [](DevComm &c) { c.status = nullptr; });

  const Call allReduceCall = good(ncclFfmFunctionAllReduce);
  for (int channel : {-1, kChannels, INT32_MIN, INT32_MAX}) {
    expectBad("channel", world.comm(kRank), allReduceCall, channel);
    check(ncclDevSend(world.comm(kRank), p, 8, ncclFloat32, 0, channel) == ncclInvalidArgument, "a send on channel %d",
          channel);
  }
  for (const Grid<CoopThread> &grid : {Grid<CoopThread>{CoopThread(), 0, kChannels + 1},
                                       {CoopThread(), 2, 2},
                                       {CoopThread(), -1, 2},
                                       {CoopThread(), 0, 0},
                                       {CoopThread(), 0, -1}}) {
    check(ncclDevCallLsa(grid, world.comm(kRank), allReduceCall, 0) == ncclInvalidArgument, "block %d of %d",
          grid.index, grid.nBlocks);
  }
  check(ncclDevCallLsa(Grid<CoopThread>{CoopThread(), 0, 2}, world.comm(kRank), allReduceCall, kChannels - 1) ==
            ncclInvalidArgument,
        "a grid beyond the last channel");
  untouched("a bad grid");

  for (uint32_t function : {0u, 12u, 13u, 99u, ~0u}) bad("function", function, [](Call &) {});
  for (uint32_t f = ncclFfmFunctionAllReduce; f <= ncclFfmFunctionSendRecv; ++f) {
    bad("protocol", f, [](Call &c) { c.protocol = 4; });
    bad("algorithm", f, [](Call &c) { c.algorithm = 4; });
    if (f != ncclFfmFunctionAllReduce && f != ncclFfmFunctionAllGather) {
      bad("ring", f, [](Call &c) { c.algorithm = ncclFfmAlgorithmRing; });
    }
    if (f == ncclFfmFunctionBarrier) continue;
    bad("type", f, [](Call &c) { c.datatype = 10; });
    bad("type", f, [](Call &c) { c.datatype = -1; });
    bad("type, nothing to do", f, [](Call &c) { c.datatype = 10, c.count = 0; });
    bad("size", f, [](Call &c) { c.count = SIZE_MAX; });
    bad("size", f, [](Call &c) { c.count = SIZE_MAX / 2 / sizeof(float) / kRanks + 1; });
    bad("only one window", f, [&](Call &c) { c.recv = {windows.data(), 1024, 0}; });
    if (reduces(f)) {
      bad("op", f, [](Call &c) { c.op = 5; });
      bad("op", f, [](Call &c) { c.op = -1; });
    }
    const bool isPairCall = f >= ncclFfmFunctionSend;
    if (f != ncclFfmFunctionRecv && f != ncclFfmFunctionBroadcast) {
      bad("null sendbuff", f, [](Call &c) { c.sendbuff = nullptr; });
      bad("misaligned sendbuff", f, [&](Call &c) { c.sendbuff = bytes + 2; });
    }
    if (f != ncclFfmFunctionSend && f != ncclFfmFunctionReduce) {
      bad("null recvbuff", f, [](Call &c) { c.recvbuff = nullptr; });
      bad("misaligned recvbuff", f, [&](Call &c) { c.recvbuff = bytes + 1025; });
    }
    if (isPairCall) {
      for (int peer : {-1, kRank, kRanks}) bad("peer", f, [&](Call &c) { c.root = c.source = peer; });
      continue;
    }
    // Whatever is a root here has both buffers.
    auto asRoot = [&](auto change) {
      return [&, change](Call &c) {
        if (f == ncclFfmFunctionBroadcast || f == ncclFfmFunctionReduce) c.root = kRank;
        change(c);
      };
    };
    bad("recvbuff an element after sendbuff", f, asRoot([&](Call &c) { c.recvbuff = p + 1; }));
    bad("sendbuff an element after recvbuff", f, asRoot([&](Call &c) { c.sendbuff = p + 1, c.recvbuff = p; }));
    bad("the last element", f, asRoot([&](Call &c) { c.sendbuff = p + kCount - 1, c.recvbuff = p; }));
    if (f == ncclFfmFunctionReduceScatter || f == ncclFfmFunctionAllGather || f == ncclFfmFunctionAllToAll) {
      bad("equal buffers of unequal parts", f, [&](Call &c) { c.recvbuff = p; });
    }
    if (f == ncclFfmFunctionHierarchicalAllReduce) {
      for (int group : {0, -1, 3, 8}) bad("group", f, [&](Call &c) { c.root = group; });
      continue;
    }
    if (f == ncclFfmFunctionBroadcast || f == ncclFfmFunctionReduce) {
      for (int root : {-1, kRanks}) bad("root", f, [&](Call &c) { c.root = root; });
    }
    auto inWindows = [&](Call &c, uint64_t windowBytes, uint64_t sendOffset, uint64_t recvOffset) {
      c.send = {windows.data(), windowBytes, sendOffset};
      c.recv = {windows.data(), windowBytes, recvOffset};
    };
    bad("the end of a window", f, asRoot([&](Call &c) { inWindows(c, 1024, 1024 - 28, 0); }));
    bad("the end of a window", f, asRoot([&](Call &c) { inWindows(c, 1024, 0, 1024 - 28); }));
    bad("an offset that wraps", f, asRoot([&](Call &c) { inWindows(c, 1024, 0, UINT64_MAX - 3); }));
    bad("a misaligned offset", f, asRoot([&](Call &c) { inWindows(c, 1024, 2, 512); }));
    bad("overlap in windows", f, asRoot([&](Call &c) { inWindows(c, 1024, 0, 4); }));
    for (uint32_t protocol : {1u, 2u, 4u, 99u}) {
      bad("a protocol of slots in windows", f, [&](Call &c) {
        inWindows(c, 1024, 0, 512);
        c.protocol = protocol;
      });
    }
    bad("zero-copy ring", f, asRoot([&](Call &c) { inWindows(c, 1024, 0, 512), c.algorithm = ncclFfmAlgorithmRing; }));
  }
  DevComm pcie = world.comm(kRank);
  pcie.path = ncclFfmPathPcie;
  Call ll128 = allReduceCall;
  ll128.protocol = ncclFfmProtocolLL128;
  expectBad("LL128 over PCIe", pcie, ll128, 0);
  for (uint32_t f = ncclFfmFunctionSend; f <= ncclFfmFunctionSendRecv; ++f) {
    Call call = good(f);
    call.source = 0;
    ChannelSession<CoopThread> session(CoopThread(), world.comm(kRank), 0, ncclFfmFunctionNone);
    check(ncclDevCallLsa(session, call) == ncclInvalidArgument, "function %u on a session", f);
  }
  untouched("a send on a session");
  check(looked > 500, "only %d calls were looked at", looked);

  for (uint32_t f = ncclFfmFunctionAllReduce; f <= ncclFfmFunctionSendRecv; ++f) {
    if (f == ncclFfmFunctionBarrier) continue;
    Call call = good(f);
    call.source = 0;
    call.count = 0;
    call.sendbuff = call.recvbuff = nullptr;
    const ncclResult_t result = ncclDevCallLsa(CoopThread(), world.comm(kRank), call, 0);
    check(result == ncclSuccess, "function %u of no elements needs no buffers: result %d", f, result);
  }
  untouched("nothing to do");
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
#ifdef NCCLFFM_RULES_AT_RUN_TIME
  if (argc == 3 && strcmp(argv[1], "--break") == 0) breakRule(argv[2]);
#else
  (void)argc, (void)argv;
#endif
  badArgumentsReturnACodeAndTouchNothing();
  secondCollectiveOnABusyChannelIsRefused();
  whoIsRefusedLeavesTheBusyBitAndSendsNothing();
  secondSendToAPeerOnAChannelIsRefused();
  if (expectFailure && failures.load() != 0) return report("failure_test");
  ranksThatDisagreeAreToldSo();
  countsThatDifferByMuchAreToldApart();
  offsetsOfZeroCopyThatDifferAreToldApart();
  if (expectFailure) return report("failure_test");
  ranksOnDifferentChannelsTimeOut();
  sendsAndReceivesWithoutTheirOtherEndTimeOut();
  abortEndsAWaitThatHasNoDeadline();
  gridWithoutAllOfItsBlocksTimesOut();
  peerThatDoesNotComeToABlockOfAGridIsNamed();
  twoGridsAtATime();
  rankThatDiesInTheMiddleIsNamed();
  for (int nRanks : {2, 3, 5, 8}) shortWayTellsRanksThatDisagree(nRanks);
  sessionFailsWithItsRing();
  ranksThatNeverArriveAreNamed();
  return report("failure_test");
}

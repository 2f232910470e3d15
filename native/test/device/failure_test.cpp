// What happens when something goes wrong: a rank that does not come, an abort, a second collective on a busy channel,
// bad arguments. Built a second time with the rule of busy channels broken (then --expect-failure: its check must
// notice).
#include "harness.h"

namespace ncclffm::test {
namespace {

constexpr int kChannels = 3;
constexpr uint32_t kLines = 4;

ncclResult_t allReduce(const DevComm &comm, std::vector<float> &buffer, int channel) {
  return ncclDevAllReduce(comm, buffer.data(), buffer.data(), buffer.size(), ncclFloat32, ncclSum, channel);
}

void checkStatus(World &world, int rank, const Status &expected) {
  Status s = world.status(rank);
  check(s.ready == 1 && s.code == expected.code && s.function == expected.function && s.rank == expected.rank &&
            s.peer == expected.peer && s.channel == expected.channel && s.epoch == expected.epoch,
        "status of rank %d: ready %u, code %u, function %u, rank %d, peer %d, channel %d, epoch %u; expected code %u, "
        "function %u, peer %d, channel %d, epoch %u",
        rank, s.ready, s.code, s.function, s.rank, s.peer, s.channel, s.epoch, expected.code, expected.function,
        expected.peer, expected.channel, expected.epoch);
}

void rankThatNeverArrivesIsNamedOnEveryLiveRank(int nRanks, int absent) {
  constexpr uint64_t kTimeoutNs = 300 * kMs;
  constexpr int kChannel = 1, kGoodCalls = 5;
  // The good calls have a deadline of their own, which a busy machine keeps.
  World world(nRanks, kChannels, kLines, 60000 * kMs);
  inThreads(nRanks, [&](int rank) {
    std::vector<float> buffer(7, 1.0f);
    for (int i = 0; i < kGoodCalls; ++i) {
      check(allReduce(world.comm(rank), buffer, kChannel) == ncclSuccess, "a good call failed");
    }
  });
  inThreads(nRanks, [&](int rank) {
    if (rank == absent) return;
    DevComm comm = world.comm(rank);
    comm.timeoutNs = kTimeoutNs;
    std::vector<float> buffer(7, 1.0f);
    ncclResult_t result;
    {
      ChannelSession<CoopThread> session(CoopThread(), comm, kChannel, ncclFfmFunctionFusedScaleAllReduceSqrt);
      result = fusedAllReduce(session, buffer.data(), buffer.data(), buffer.size(), ScaleAdd{2, 1}, SqrtAbs());
      check(session.result() == result, "the session of a failed call says %d", session.result());
    }
    check(result == ncclTimeout, "rank %d: result %d, not ncclTimeout", rank, result);
  });
  for (int rank = 0; rank < nRanks; ++rank) {
    if (rank == absent) continue;
    checkStatus(world, rank,
                {ncclTimeout, ncclFfmFunctionFusedScaleAllReduceSqrt, rank, absent, kChannel, kGoodCalls + 1, 0, 0, 1});
    uint64_t waited = world.status(rank).waitedNs;
    check(waited >= kTimeoutNs && waited < 20 * kTimeoutNs, "rank %d waited %llu ns", rank,
          static_cast<unsigned long long>(waited));
  }

  // The communicator has failed for good, on every channel, and does not even send; without a deadline, too.
  int live = absent == 0 ? 1 : 0;
  DevComm comm = world.comm(live);
  comm.timeoutNs = 0;
  std::vector<float> buffer(7, 3.0f);
  for (int channel = 0; channel < kChannels; ++channel) {
    uint64_t state = world.state(live, channel);
    ncclResult_t result = allReduce(comm, buffer, channel);
    check(result == ncclTimeout && world.state(live, channel) == state && buffer[0] == 3.0f,
          "a call after the failure: result %d", result);
  }
}

void abortEndsAWaitThatHasNoDeadline() {
  World world(2, kChannels, kLines, 0);
  std::thread waiting([&] {
    std::vector<float> buffer(3, 1.0f);
    ncclResult_t result = allReduce(world.comm(0), buffer, 2);
    check(result == ncclRemoteError, "an aborted call: result %d", result);
  });
  while (world.isUntouched(1)) std::this_thread::yield();  // it has sent, so it waits or is about to
  world.abort(0);
  waiting.join();
  checkStatus(world, 0, {ncclRemoteError, ncclFfmFunctionAllReduce, 0, 1, 2, 1, 0, 0, 1});
}

void secondCollectiveOnABusyChannelIsRefused() {
  constexpr int kChannel = 1;
  World world(2, kChannels, kLines, 3000 * kMs);
  std::vector<float> first(5, 1.0f), second(5, 2.0f);
  std::thread running([&] {
    ncclResult_t result = allReduce(world.comm(0), first, kChannel);
    check(result == ncclInvalidUsage, "the collective in flight: result %d", result);
  });
  while (world.isUntouched(1)) std::this_thread::yield();
  ncclResult_t result = allReduce(world.comm(0), second, kChannel);
  check(result == ncclInvalidUsage, "a second collective on a busy channel: result %d", result);
  running.join();
  checkStatus(world, 0, {ncclInvalidUsage, ncclFfmFunctionAllReduce, 0, kNobody, kChannel, 0, 0, 0, 1});
  check(second[0] == 2.0f && first[0] == 1.0f, "a refused collective wrote its buffer");
}

void whoIsRefusedLeavesTheBusyBitAndSendsNothing() {
  World world(2, kChannels, kLines, 3000 * kMs);
  const uint64_t held = kBusyBit | 41;
  __atomic_store_n(&world.comm(0).channels[0].state, held, __ATOMIC_RELAXED);
  std::vector<float> buffer(5, 1.0f);
  ncclResult_t result = allReduce(world.comm(0), buffer, 0);
  check(result == ncclInvalidUsage && world.state(0, 0) == held && world.isUntouched(1), "result %d, state %llx",
        result, static_cast<unsigned long long>(world.state(0, 0)));
  checkStatus(world, 0, {ncclInvalidUsage, ncclFfmFunctionAllReduce, 0, kNobody, 0, 41, 0, 0, 1});
}

void badArgumentsReturnACodeAndTouchNothing() {
  World world(2, kChannels, kLines, 3000 * kMs);
  const DevComm good = world.comm(0);
  std::vector<float> buffer(64, 1.0f);
  float *const p = buffer.data();
  char *const bytes = reinterpret_cast<char *>(p);

  struct {
    const char *what;
    DevComm comm;
    const void *send;
    void *recv;
    size_t count;
    int datatype, op, channel;
  } cases[] = {
      {"magic", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"version", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"rank too large", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"rank negative", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"no ranks", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"no lines", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"too many lines", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"null channels", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"null peers", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"null status", good, p, p, 8, ncclFloat32, ncclSum, 0},
      {"channel negative", good, p, p, 8, ncclFloat32, ncclSum, -1},
      {"channel too large", good, p, p, 8, ncclFloat32, ncclSum, kChannels},
      {"datatype", good, p, p, 8, 8, ncclSum, 0},
      {"op", good, p, p, 8, ncclFloat32, 1, 0},
      {"null sendbuff", good, nullptr, p, 8, ncclFloat32, ncclSum, 0},
      {"null recvbuff", good, p, nullptr, 8, ncclFloat32, ncclSum, 0},
      {"misaligned sendbuff", good, bytes + 2, p + 32, 8, ncclFloat32, ncclSum, 0},
      {"misaligned recvbuff", good, p, bytes + 129, 8, ncclFloat32, ncclSum, 0},
      {"recvbuff inside sendbuff", good, p, p + 1, 8, ncclFloat32, ncclSum, 0},
      {"sendbuff inside recvbuff", good, p + 7, p, 8, ncclFloat32, ncclSum, 0},
      {"count beyond memory", good, p, p, SIZE_MAX / 2, ncclFloat32, ncclSum, 0},
  };
  cases[0].comm.magic = 0;
  cases[1].comm.version++;
  cases[2].comm.rank = 2;
  cases[3].comm.rank = -1;
  cases[4].comm.nRanks = 0;
  cases[5].comm.linesPerSlot = 0;
  cases[6].comm.linesPerSlot = NCCLFFM_MAX_LINES_PER_SLOT + 1;
  cases[7].comm.channels = nullptr;
  cases[8].comm.peers = nullptr;
  cases[9].comm.status = nullptr;
  for (const auto &c : cases) {
    ncclResult_t result = ncclDevAllReduce(c.comm, c.send, c.recv, c.count, c.datatype, c.op, c.channel);
    check(result == ncclInvalidArgument, "%s: result %d, not ncclInvalidArgument", c.what, result);
  }
  bool unchanged = true;
  for (float x : buffer) unchanged &= x == 1.0f;
  check(unchanged && world.isUntouched(1) && world.state(0, 0) == 0 && world.status(0).code == 0,
        "a bad argument changed memory");
  check(ncclDevAllReduce(good, nullptr, nullptr, 0, ncclFloat32, ncclSum, 0) == ncclSuccess,
        "nothing to do needs no buffers");
  check(ncclDevAllReduce(good, p, p + 8, 0, ncclFloat32, ncclSum, 0) == ncclSuccess && world.isUntouched(1),
        "nothing to do sends nothing");
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
  if (argc > 1 && std::strcmp(argv[1], "--expect-failure") == 0) {
    secondCollectiveOnABusyChannelIsRefused();
    fprintf(stderr, "a broken rule was noticed %d times\n", failures.load());
    return failures.load() > 0 ? 0 : 1;
  }
  rankThatNeverArrivesIsNamedOnEveryLiveRank(2, 1);
  rankThatNeverArrivesIsNamedOnEveryLiveRank(4, 2);
  rankThatNeverArrivesIsNamedOnEveryLiveRank(6, 0);
  abortEndsAWaitThatHasNoDeadline();
  secondCollectiveOnABusyChannelIsRefused();
  whoIsRefusedLeavesTheBusyBitAndSendsNothing();
  badArgumentsReturnACodeAndTouchNothing();
  return report("failure_test");
}

// Ranks as processes: this program starts itself again as each rank, and hands the unique id over by a pipe.
#include <cstring>

#include "process_rank.h"
#include "rank_process.h"
#include "resources.h"

using namespace test;

namespace {

// ---- The rank's side ----

void allReduceAndCheck(const Rank &rank, size_t count) {
  auto *data = deviceArray<float>(count);
  std::vector<float> host(count);
  for (size_t i = 0; i < count; ++i) {
    host[i] = static_cast<float>(static_cast<size_t>(rank.rank) * 10 + i % 100);
  }
  toDevice(data, host);
  NCCL_OK(ncclAllReduce(data, data, count, ncclFloat32, ncclSum, rank.comm, rank.stream));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  const std::vector<float> got = toHost(data, count);
  const int n = rank.nRanks;
  for (size_t i = 0; i < count; ++i) {
    CHECK_EQ(got[i], static_cast<float>(10 * n * (n - 1) / 2 + n * static_cast<int>(i % 100)));
  }
  CUDA_OK(cudaFree(data));
}

void collectivesScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  for (size_t count : {1u, 1000u, 300000u}) {
    allReduceAndCheck(rank, count);
  }
  auto *data = deviceArray<int>(static_cast<size_t>(2 * n));
  toDevice(data, std::vector<int>(static_cast<size_t>(2 * n), number));
  const int next = (number + 1) % n;
  const int previous = (number + n - 1) % n;
  for (int round = 0; round < 200; ++round) {
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclSend(data, 1, ncclInt32, next, rank.comm, rank.stream));
    NCCL_OK(ncclRecv(data + 1, 1, ncclInt32, previous, rank.comm, rank.stream));
    NCCL_OK(ncclGroupEnd());
    NCCL_OK(ncclAllGather(data, data + n, 1, ncclInt32, rank.comm, rank.stream));
  }
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  const std::vector<int> got = toHost(data, static_cast<size_t>(2 * n));
  CHECK_EQ(got[1], previous);
  for (int i = 0; i < n; ++i) {
    CHECK_EQ(got[static_cast<size_t>(n + i)], i);
  }
  leave(rank);
}

void windowScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  void *memory = nullptr;
  NCCL_OK(ncclMemAlloc(&memory, 8192));
  ncclWindow_t window = nullptr;
  NCCL_OK(ncclCommWindowRegister(rank.comm, memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC));
  auto *token = deviceArray<int>(1);
  for (int peer = 0; peer < n; ++peer) {
    void *pointer = nullptr;
    NCCL_OK(ncclGetLsaDevicePointer(window, 4u * static_cast<size_t>(number), peer, &pointer));
    cudaPointerAttributes attributes;
    CUDA_OK(cudaPointerGetAttributes(&attributes, pointer));
    CHECK_EQ(attributes.type, cudaMemoryTypeDevice);
    const int value = 1000 * number + peer;
    CUDA_OK(cudaMemcpyAsync(pointer, &value, sizeof(value), cudaMemcpyHostToDevice, rank.stream));
  }
  NCCL_OK(ncclAllReduce(token, token, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  for (int peer = 0; peer < n; ++peer) {
    CHECK_EQ(static_cast<int *>(memory)[peer], 1000 * peer + number);
  }
  NCCL_OK(ncclCommWindowDeregister(rank.comm, window));
  leave(rank);
}

/// allReduceAndCheck() on another communicator of the same ranks or some of them.
void sumAndCheck(ncclComm_t comm, cudaStream_t stream, int number, int want) {
  auto *data = deviceArray<int>(1);
  toDevice(data, {number});
  NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(toHost(data, 1)[0], want);
  CUDA_OK(cudaFree(data));
}

void splitScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  ncclComm_t child = nullptr;
  NCCL_OK(ncclCommSplit(rank.comm, number % 2, -number, &child, nullptr));
  int childRank = -1;
  NCCL_OK(ncclCommUserRank(child, &childRank));
  CHECK_EQ(childRank, (n - 1 - number) / 2);
  int want = 0;
  for (int other = number % 2; other < n; other += 2) {
    want += 1 << other;
  }
  sumAndCheck(child, rank.stream, 1 << number, want);
  NCCL_OK(ncclCommDestroy(child));
  float factor = static_cast<float>(number + 1);
  ncclRedOp_t op = ncclSum;
  NCCL_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, rank.comm));
  auto *data = deviceArray<float>(1);
  toDevice(data, {2.0f});
  NCCL_OK(ncclAllReduce(data, data, 1, ncclFloat32, op, rank.comm, rank.stream));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  CHECK_EQ(toHost(data, 1)[0], static_cast<float>(n * (n + 1)));
  leave(rank);
}

void signalScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  constexpr size_t kCount = 10000;
  void *memory = nullptr;
  NCCL_OK(ncclMemAlloc(&memory, 2 * kCount * sizeof(int)));
  auto *data = static_cast<int *>(memory);
  ncclWindow_t window = nullptr;
  NCCL_OK(ncclCommWindowRegister(rank.comm, memory, 2 * kCount * sizeof(int), &window, NCCL_WIN_COLL_SYMMETRIC));
  const int next = (number + 1) % n;
  const int previous = (number + n - 1) % n;
  for (int round = 0; round < 20; ++round) {
    toDevice(data, std::vector<int>(kCount, round * n + number));
    NCCL_OK(
        ncclPutSignal(data, kCount, ncclInt32, next, window, kCount * sizeof(int), 0, 0, 0, rank.comm, rank.stream));
    ncclWaitSignalDesc_t wait = {1, previous, 0, 0};
    NCCL_OK(ncclWaitSignal(1, &wait, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK(toHost(data + kCount, kCount) == std::vector<int>(kCount, round * n + previous));
    sumAndCheck(rank.comm, rank.stream, 1, n);  // nobody overwrites what is still being checked
  }
  NCCL_OK(ncclCommWindowDeregister(rank.comm, window));
  leave(rank);
}

/// The last rank is not among those who start; rank 0 hands its id to the parent.
void growScenario(int number, int n) {
  const ncclUniqueId id = idFromParent();
  ncclComm_t grown = nullptr;
  if (number == n - 1) {
    CUDA_OK(cudaSetDevice(number));
    NCCL_OK(ncclCommGrow(nullptr, n, &id, number, &grown, nullptr));
  } else {
    const Rank rank = join(id, number, n - 1);
    ncclUniqueId growId;
    if (number == 0) {
      NCCL_OK(ncclCommGetUniqueId(rank.comm, &growId));
      writeAll(1, &growId, sizeof(growId));
    }
    NCCL_OK(ncclCommGrow(rank.comm, n, number == 0 ? &growId : nullptr, -1, &grown, nullptr));
    leave(rank);
  }
  const cudaStream_t stream = newStream();
  sumAndCheck(grown, stream, 1 << number, (1 << n) - 1);
  NCCL_OK(ncclCommDestroy(grown));
}

/// The last rank is killed while the others wait for it; they go on without it.
void shrinkAfterKillScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  if (number == n - 1) {
    mark();
    awaitPermission();  // never given
  }
  auto *data = deviceArray<int>(1000);
  NCCL_OK(ncclAllReduce(data, data, 1000, ncclInt32, ncclSum, rank.comm, rank.stream));
  mark();
  CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
  ncclComm_t child = nullptr;
  int excluded[] = {n - 1};
  CHECK_EQ(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, NCCL_SHRINK_DEFAULT), ncclRemoteError);
  NCCL_OK(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, NCCL_SHRINK_ABORT));
  NCCL_OK(ncclCommAbort(rank.comm));
  sumAndCheck(child, rank.stream, 1 << number, (1 << (n - 1)) - 1);
  NCCL_OK(ncclCommDestroy(child));
}

/// The last rank never comes to the second collective; it is killed while the others wait.
void killedWhileOthersWaitScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  allReduceAndCheck(rank, 1000);
  auto *data = deviceArray<int>(1000);
  if (number == n - 1) {
    mark();
    awaitPermission();  // never given
  }
  NCCL_OK(ncclAllReduce(data, data, 1000, ncclInt32, ncclSum, rank.comm, rank.stream));
  mark();
  CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
  ncclResult_t error = ncclSuccess;
  NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
  CHECK_EQ(error, ncclRemoteError);
  CHECK_CONTAINS(ncclGetLastError(rank.comm), "rank " + std::to_string(n - 1) + " (process ");
  CHECK_CONTAINS(ncclGetLastError(rank.comm), "has ended");
  NCCL_OK(ncclCommAbort(rank.comm));
  CUDA_OK(cudaStreamDestroy(rank.stream));
}

/// One rank is killed somewhere inside a long run of large collectives.
void killedInTheMiddleScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  constexpr size_t kCount = kSanitized ? 1 << 16 : 1 << 20;
  auto *data = deviceArray<float>(kCount);
  mark();
  cudaError_t error = cudaSuccess;
  while (error == cudaSuccess) {
    const ncclResult_t result = ncclAllReduce(data, data, kCount, ncclFloat32, ncclMax, rank.comm, rank.stream);
    if (result != ncclSuccess) {
      CHECK_EQ(result, ncclRemoteError);
    }
    error = cudaStreamSynchronize(rank.stream);
  }
  CHECK_EQ(error, cudaErrorLaunchFailure);
  ncclResult_t state = ncclSuccess;
  NCCL_OK(ncclCommGetAsyncError(rank.comm, &state));
  CHECK_EQ(state, ncclRemoteError);
  NCCL_OK(ncclCommDestroy(rank.comm));
}

/// Killed while idle: GetAsyncError alone must tell.
void killedWhileIdleScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  mark();
  ncclResult_t error = ncclSuccess;
  while (error == ncclSuccess) {
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    poll(nullptr, 0, 1);
  }
  CHECK_EQ(error, ncclRemoteError);
  NCCL_OK(ncclCommAbort(rank.comm));
}

/// Rank 0 makes the id, hands it to the test, and all go through it; after the init its process is not special.
void rankZeroMakesTheIdScenario(int number, int n) {
  ncclUniqueId id;
  if (number == 0) {
    NCCL_OK(ncclGetUniqueId(&id));
    writeAll(1, &id, sizeof(id));
  } else {
    id = idFromParent();
  }
  const Rank rank = join(id, number, n);
  allReduceAndCheck(rank, 10000);
  leave(rank);
}

/// Only makes an id and ends when it is told to.
void makeIdScenario() {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  writeAll(1, &id, sizeof(id));
  awaitPermission();
}

void creatorEndsScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  mark();
  awaitPermission();
  allReduceAndCheck(rank, 1000);
  leave(rank);
}

/// Waits for a rank that never comes, until a waiting one is killed.
void killedDuringInitScenario(int number, int n) {
  const ncclUniqueId id = idFromParent();
  ncclComm_t comm = nullptr;
  CHECK_EQ(ncclCommInitRank(&comm, n + 1, id, number), ncclRemoteError);
  CHECK_CONTAINS(ncclGetLastError(nullptr), "ended while it waited");
}

/// Returns from main with an open communicator, an open stream and work that never ends.
void exitWithEverythingOpenScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  auto *data = deviceArray<int>(1);
  static auto *never = new Gate;  // not destroyed: the stream's worker waits at it until the process is gone
  CUDA_OK(cudaLaunchHostFunc(rank.stream, Gate::waitAt, never));
  NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
}

void checkSurvivors(const char *scenario, int n, int victim, bool survivorsMark) {
  const std::set<std::string> before = listing("/dev/shm");
  const RankProcesses ranks = start(scenario, n);
  giveIdTo(ranks);
  for (int rank = 0; rank < n; ++rank) {
    if (rank == victim || survivorsMark) {
      ranks[static_cast<size_t>(rank)]->awaitMark();
    }
  }
  const auto killed = Clock::now();
  ranks[static_cast<size_t>(victim)]->killNow();
  CHECK_EQ(ranks[static_cast<size_t>(victim)]->end(), -SIGKILL);
  for (int rank = 0; rank < n; ++rank) {
    if (rank != victim) {
      CHECK_EQ_IN(ranks[static_cast<size_t>(rank)]->end(), 0, "rank " + std::to_string(rank));
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - killed).count();
  std::printf("survivors ended %.3f s after the kill\n", seconds);
  CHECK(seconds < 5);
  CHECK(listing("/dev/shm") == before);
}

/// How many descriptors of this process refer to files with the text in their name.
int descriptorsOf(const std::string &text) {
  int count = 0;
  for (const std::string &name : listing("/proc/self/fd")) {
    char target[256] = "";
    if (readlink(("/proc/self/fd/" + name).c_str(), target, sizeof(target) - 1) > 0) {
      count += std::string(target).find(text) != std::string::npos ? 1 : 0;
    }
  }
  return count;
}

void checkAllEnd(const char *scenario, int n) {
  const std::set<std::string> before = listing("/dev/shm");
  const RankProcesses ranks = start(scenario, n);
  giveIdTo(ranks);
  for (const auto &rank : ranks) {
    CHECK_EQ(rank->end(), 0);
  }
  CHECK(listing("/dev/shm") == before);
}

}  // namespace

namespace test {

int runAsRank(int argc, char **argv) {
  CHECK_EQ(argc, 3);
  const std::string scenario = argv[0];
  const int number = std::atoi(argv[1]);
  const int n = std::atoi(argv[2]);
  if (scenario == "collectives") {
    collectivesScenario(number, n);
  } else if (scenario == "window") {
    windowScenario(number, n);
  } else if (scenario == "split") {
    splitScenario(number, n);
  } else if (scenario == "signal") {
    signalScenario(number, n);
  } else if (scenario == "grow") {
    growScenario(number, n);
  } else if (scenario == "shrinkAfterKill") {
    shrinkAfterKillScenario(number, n);
  } else if (scenario == "killedWhileOthersWait") {
    killedWhileOthersWaitScenario(number, n);
  } else if (scenario == "killedInTheMiddle") {
    killedInTheMiddleScenario(number, n);
  } else if (scenario == "killedWhileIdle") {
    killedWhileIdleScenario(number, n);
  } else if (scenario == "rankZeroMakesTheId") {
    rankZeroMakesTheIdScenario(number, n);
  } else if (scenario == "makeId") {
    makeIdScenario();
  } else if (scenario == "creatorEnds") {
    creatorEndsScenario(number, n);
  } else if (scenario == "killedDuringInit") {
    killedDuringInitScenario(number, n);
  } else if (scenario == "exitWithEverythingOpen") {
    exitWithEverythingOpenScenario(number, n);
  } else if (!runIpcScenario(scenario, number, n)) {
    std::fprintf(stderr, "unknown scenario %s\n", scenario.c_str());
    return 2;
  }
  return 0;
}

}  // namespace test

TEST(processesDoCollectivesAndMessages) {
  for (int n : {2, 4}) {
    checkAllEnd("collectives", n);
  }
}

TEST(processesShareWindows) {
  checkAllEnd("window", 4);
}

TEST(processesSplit) {
  checkAllEnd("split", 4);
}

TEST(processesSignalEachOther) {
  checkAllEnd("signal", 3);
}

TEST(processesGrow) {
  const RankProcesses ranks = start("grow", 3);
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ranks[0]->give(id);
  ranks[1]->give(id);
  ranks[2]->give(ranks[0]->takeId());
  for (const auto &rank : ranks) {
    CHECK_EQ(rank->end(), 0);
  }
}

TEST(processesGoOnWithoutAKilledRank) {
  checkSurvivors("shrinkAfterKill", 4, 3, true);
}

TEST(processesJoinWithAnIdOfRankZero) {
  const RankProcesses ranks = start("rankZeroMakesTheId", 3);
  const ncclUniqueId id = ranks[0]->takeId();
  ranks[1]->give(id);
  ranks[2]->give(id);
  for (const auto &rank : ranks) {
    CHECK_EQ(rank->end(), 0);
  }
}

TEST(creatorOfTheIdMayEndAfterTheInit) {
  RankProcess creator("makeId", 0, 0);
  const ncclUniqueId id = creator.takeId();
  const RankProcesses ranks = start("creatorEnds", 2);
  for (const auto &rank : ranks) {
    rank->give(id);
  }
  for (const auto &rank : ranks) {
    rank->awaitMark();
  }
  creator.goOn();
  CHECK_EQ(creator.end(), 0);
  for (const auto &rank : ranks) {
    rank->goOn();
  }
  for (const auto &rank : ranks) {
    CHECK_EQ(rank->end(), 0);
  }
}

TEST(killedRankFreesThoseWhoWaitForIt) {
  checkSurvivors("killedWhileOthersWait", 4, 3, true);
}

TEST(killedRankInTheMiddleOfCollectivesIsNoticed) {
  for (int victim : {0, 1, 2}) {
    checkSurvivors("killedInTheMiddle", 3, victim, true);
  }
}

TEST(killedRankIsReportedByGetAsyncError) {
  checkSurvivors("killedWhileIdle", 2, 0, true);
}

TEST(killedRankDuringInitFreesTheOthers) {
  const RankProcesses ranks = start("killedDuringInit", 3);
  giveIdTo(ranks);
  // The root is in this process: a rank has joined when the root holds the descriptor of its heap.
  const auto deadline = Clock::now() + std::chrono::milliseconds(kLongMs);
  while (descriptorsOf("memfd:ncclffm-heap") < 3) {
    CHECK(Clock::now() < deadline);
    std::this_thread::yield();
  }
  ranks[1]->killNow();
  CHECK_EQ(ranks[1]->end(), -SIGKILL);
  CHECK_EQ(ranks[0]->end(), 0);
  CHECK_EQ(ranks[2]->end(), 0);
}

TEST(processEndsPromptlyWithEverythingOpen) {
  const auto begin = Clock::now();
  checkAllEnd("exitWithEverythingOpen", 2);
  CHECK(std::chrono::duration<double>(Clock::now() - begin).count() < 10);
}

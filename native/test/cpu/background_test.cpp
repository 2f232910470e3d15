// Non-blocking communicators: calls that go on in the background, late results, and what is refused meanwhile.
#include <chrono>
#include <cstring>

#include "fault.h"
#include "world.h"

using namespace test;
using Clock = std::chrono::steady_clock;

namespace {

ncclConfig_t nonBlocking() {
  ncclConfig_t config = {};
  config.size = offsetof(ncclConfig_t, cgaClusterSize);  // the struct of NCCL 2.14 had no other fields
  config.magic = NCCL_API_MAGIC;
  config.version = 21400;
  config.blocking = 0;
  return config;
}

ncclResult_t stateOf(ncclComm_t comm) {
  ncclResult_t state = ncclInternalError;
  NCCL_OK(ncclCommGetAsyncError(comm, &state));
  return state;
}

ncclResult_t settle(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while ((state = stateOf(comm)) == ncclInProgress) {
    std::this_thread::yield();
  }
  return state;
}

/// As onRanks(), with non-blocking communicators.
void onNonBlockingRanks(int n, const std::function<void(Rank &)> &body) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  onThreads(n, [&](int number) {
    Rank rank;
    rank.rank = number;
    rank.nRanks = n;
    CUDA_OK(cudaSetDevice(number));
    ncclConfig_t config = nonBlocking();
    CHECK_EQ(ncclCommInitRankConfig(&rank.comm, n, id, number, &config), ncclInProgress);
    CHECK(rank.comm != nullptr);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    rank.stream = newStream();
    body(rank);
    if (rank.comm != nullptr) {
      CHECK_EQ(ncclCommFinalize(rank.comm), ncclInProgress);
      CHECK_EQ(settle(rank.comm), ncclSuccess);
      NCCL_OK(ncclCommDestroy(rank.comm));
    }
    CUDA_OK(cudaStreamDestroy(rank.stream));
  });
}

int sum(ncclComm_t comm, cudaStream_t stream) {
  auto *data = deviceArray<int>(1);
  toDevice(data, {1});
  const ncclResult_t result = ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream);
  CHECK(result == ncclInProgress || result == ncclSuccess);
  CHECK_EQ(settle(comm), ncclSuccess);
  CUDA_OK(cudaStreamSynchronize(stream));
  const int got = toHost(data, 1)[0];
  CUDA_OK(cudaFree(data));
  return got;
}

}  // namespace

TEST(nonBlockingCreationIsInProgressUntilAllRanksHaveCome) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comms[2] = {};
  ncclConfig_t config = nonBlocking();
  CHECK_EQ(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config), ncclInProgress);
  CHECK_EQ(stateOf(comms[0]), ncclInProgress);
  int count = 0;
  CHECK_EQ(ncclCommCount(comms[0], &count), ncclInvalidArgument);
  CHECK_CONTAINS(ncclGetLastError(nullptr), "still in progress");
  auto *data = deviceArray<int>(1);
  CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comms[0], nullptr), ncclInvalidArgument);
  CHECK_EQ(ncclCommDestroy(comms[0]), ncclInvalidArgument);
  CHECK_EQ(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config), ncclInProgress);
  for (ncclComm_t comm : comms) {
    CHECK_EQ(settle(comm), ncclSuccess);
    NCCL_OK(ncclCommCount(comm, &count));
    CHECK_EQ(count, 2);
  }
  for (ncclComm_t comm : comms) {
    NCCL_OK(ncclCommDestroy(comm));
  }
  CUDA_OK(cudaFree(data));
}

TEST(creationThatWaitsIsEndedByAbort) {
  const auto start = Clock::now();
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  ncclConfig_t config = nonBlocking();
  CHECK_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
  NCCL_OK(ncclCommAbort(comm));
  ncclResult_t state = ncclSuccess;
  CHECK_EQ(ncclCommGetAsyncError(comm, &state), ncclInvalidArgument);
  CHECK(Clock::now() - start < std::chrono::seconds(5));
}

TEST(creationThatFailsInTheBackgroundSaysWhyUntilItIsAborted) {
  setenv("NCCLFFM_CPU_TIMEOUT_MS", "200", 1);
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  ncclConfig_t config = nonBlocking();
  CHECK_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
  CHECK_EQ(settle(comm), ncclSystemError);
  CHECK_CONTAINS(ncclGetLastError(comm), "rank 1 of 2 did not come within 200 ms");
  int count = 0;
  CHECK_EQ(ncclCommCount(comm, &count), ncclSystemError);
  NCCL_OK(ncclCommAbort(comm));
}

TEST(everyCallOfANonBlockingRankCanGoOnInTheBackground) {
  onNonBlockingRanks(3, [](Rank &rank) {
    CHECK_EQ(sum(rank.comm, rank.stream), 3);
    void *memory = nullptr;
    NCCL_OK(ncclMemAlloc(&memory, 4096));
    ncclWindow_t window = nullptr;
    CHECK_EQ(ncclCommWindowRegister(rank.comm, memory, 4096, &window, 0), ncclSuccess);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK(window != nullptr);
    ncclComm_t child = nullptr;
    CHECK_EQ(ncclCommSplit(rank.comm, rank.rank / 2, 0, &child, nullptr), ncclSuccess);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK_EQ(sum(child, rank.stream), rank.rank < 2 ? 2 : 1);
    int count = 0;
    NCCL_OK(ncclCommCount(child, &count));
    CHECK_EQ(ncclCommFinalize(child), ncclInProgress);  // the child has inherited its parent's configuration
    CHECK_EQ(settle(child), ncclSuccess);
    NCCL_OK(ncclCommDestroy(child));
    child = nullptr;
    if (rank.rank != 1) {
      int excluded[] = {1};
      CHECK_EQ(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, 0), ncclSuccess);
      CHECK_EQ(settle(rank.comm), ncclSuccess);
      CHECK_EQ(sum(child, rank.stream), 2);
      NCCL_OK(ncclCommDestroy(child));
    }
    CHECK_EQ(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM), ncclInProgress);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK_EQ(ncclCommResume(rank.comm), ncclInProgress);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK_EQ(sum(rank.comm, rank.stream), 3);
    NCCL_OK(ncclCommWindowDeregister(rank.comm, window));
    NCCL_OK(ncclMemFree(memory));
  });
}

TEST(nonBlockingGrowthIsInProgressOnTheNewCommunicator) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclUniqueId growId;
  ncclConfig_t config = nonBlocking();
  ncclComm_t old = nullptr;
  CHECK_EQ(ncclCommInitRankConfig(&old, 1, id, 0, &config), ncclInProgress);
  CHECK_EQ(settle(old), ncclSuccess);
  NCCL_OK(ncclCommGetUniqueId(old, &growId));
  ncclComm_t grown[2] = {};
  CHECK_EQ(ncclCommGrow(old, 2, &growId, -1, &grown[0], nullptr), ncclSuccess);
  CHECK(grown[0] != nullptr);
  CHECK_EQ(stateOf(grown[0]), ncclInProgress);
  CHECK_EQ(stateOf(old), ncclSuccess);
  CHECK_EQ(ncclCommGrow(nullptr, 2, &growId, 1, &grown[1], &config), ncclSuccess);
  for (ncclComm_t comm : grown) {
    CHECK_EQ(settle(comm), ncclSuccess);
    int count = 0;
    NCCL_OK(ncclCommCount(comm, &count));
    CHECK_EQ(count, 2);
  }
  for (ncclComm_t comm : {grown[0], grown[1], old}) {
    NCCL_OK(ncclCommDestroy(comm));
  }
}

TEST(nonBlockingGroupIsOneCallInTheBackground) {
  onNonBlockingRanks(2, [](Rank &rank) {
    void *memory = nullptr;
    NCCL_OK(ncclMemAlloc(&memory, 8192));
    ncclWindow_t windows[2] = {};
    auto *data = static_cast<int *>(memory);
    toDevice(data, {5});
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    NCCL_OK(ncclCommWindowRegister(rank.comm, memory, 4096, &windows[0], 0));
    NCCL_OK(ncclCommWindowRegister(rank.comm, data + 1024, 4096, &windows[1], 0));
    CHECK_EQ(ncclGroupEnd(), ncclInProgress);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK(windows[0] != nullptr && windows[1] != nullptr);
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(data, 1)[0], 10);
    // Blocking and non-blocking communicators do not go together.
    ncclUniqueId id;
    NCCL_OK(ncclGetUniqueId(&id));
    ncclComm_t blocking = nullptr;
    NCCL_OK(ncclCommInitRank(&blocking, 1, id, 0));
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, blocking, rank.stream));
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CHECK_EQ(ncclGroupEnd(), ncclInvalidArgument);
    NCCL_OK(ncclCommDestroy(blocking));
    CHECK_EQ(sum(rank.comm, rank.stream), 2);
    NCCL_OK(ncclMemFree(memory));
  });
}

TEST(resultsAreWrittenAsLateAsARuleSays) {
  NCCL_OK(ncclFfmCpuSetFaults("ncclCommSplit:late_ms=100;ncclCommWindowRegister:late_ms=100"));
  onNonBlockingRanks(2, [](Rank &rank) {
    void *memory = nullptr;
    NCCL_OK(ncclMemAlloc(&memory, 4096));
    ncclWindow_t window = nullptr;
    const auto start = Clock::now();
    CHECK_EQ(ncclCommWindowRegister(rank.comm, memory, 4096, &window, 0), ncclSuccess);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK(window != nullptr);
    CHECK(Clock::now() - start >= std::chrono::milliseconds(100));
    ncclComm_t child = nullptr;
    CHECK_EQ(ncclCommSplit(rank.comm, 0, 0, &child, nullptr), ncclSuccess);
    CHECK_EQ(settle(rank.comm), ncclSuccess);
    CHECK_EQ(sum(child, rank.stream), 2);
    CHECK(Clock::now() - start >= std::chrono::milliseconds(200));
    NCCL_OK(ncclCommDestroy(child));
    NCCL_OK(ncclMemFree(memory));
  });
}

TEST(abortEndsASplitInTheBackground) {
  const auto start = Clock::now();
  std::atomic<int> ready{0};
  onNonBlockingRanks(2, [&](Rank &rank) {
    awaitCount(&ready, 2);
    if (rank.rank == 1) {
      while (stateOf(rank.comm) == ncclSuccess) {  // never comes to the split
        std::this_thread::yield();
      }
    } else {
      ncclComm_t child = nullptr;
      CHECK_EQ(ncclCommSplit(rank.comm, 0, 0, &child, nullptr), ncclSuccess);
      CHECK_EQ(stateOf(rank.comm), ncclInProgress);
      NCCL_OK(ncclCommAbort(rank.comm));
      CHECK_EQ(child, nullptr);
      rank.comm = nullptr;
      return;
    }
    NCCL_OK(ncclCommAbort(rank.comm));
    rank.comm = nullptr;
  });
  CHECK(Clock::now() - start < std::chrono::seconds(10));
}

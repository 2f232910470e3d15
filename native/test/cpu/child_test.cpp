// Communicators made from communicators: split, shrink and grow; and revoked and suspended ones.
#include <cstring>

#include "resources.h"
#include "world.h"

using namespace test;

namespace {

ncclConfig_t noConfig() {
  ncclConfig_t config = {};
  config.size = sizeof(config);
  config.magic = NCCL_API_MAGIC;
  config.version = 23007;
  config.blocking = NCCL_CONFIG_UNDEF_INT;
  return config;
}

int rankOf(ncclComm_t comm) {
  int value = -1;
  NCCL_OK(ncclCommUserRank(comm, &value));
  return value;
}

int sizeOf(ncclComm_t comm) {
  int value = -1;
  NCCL_OK(ncclCommCount(comm, &value));
  return value;
}

/// The sum of a number over the ranks of a communicator.
int sum(ncclComm_t comm, cudaStream_t stream, int number) {
  auto *data = deviceArray<int>(1);
  toDevice(data, {number});
  NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  const int result = toHost(data, 1)[0];
  CUDA_OK(cudaFree(data));
  return result;
}

void waitForError(ncclComm_t comm) {
  ncclResult_t error = ncclSuccess;
  while (error == ncclSuccess) {
    NCCL_OK(ncclCommGetAsyncError(comm, &error));
    std::this_thread::yield();
  }
}

}  // namespace

TEST(splitGroupsByColorAndOrdersByKeyThenRank) {
  onRanks(6, [](Rank &rank) {
    // Colors 0 1 0 1 0 1; keys reverse the order in color 0 and are all equal in color 1.
    const int color = rank.rank % 2;
    ncclComm_t child = nullptr;
    NCCL_OK(ncclCommSplit(rank.comm, color, color == 0 ? -rank.rank : 7, &child, nullptr));
    CHECK_EQ(sizeOf(child), 3);
    CHECK_EQ(rankOf(child), color == 0 ? 2 - rank.rank / 2 : rank.rank / 2);
    int device = -1;
    NCCL_OK(ncclCommCuDevice(child, &device));
    CHECK_EQ(device, rank.rank);
    CHECK_EQ(sum(child, rank.stream, 1 << rank.rank), color == 0 ? 1 + 4 + 16 : 2 + 8 + 32);
    CHECK_EQ(sum(rank.comm, rank.stream, 1), 6);  // the parent goes on
    ncclComm_t grandchild = nullptr;
    NCCL_OK(ncclCommSplit(child, rankOf(child) == 0 ? 0 : 1, 0, &grandchild, nullptr));
    CHECK_EQ(sizeOf(grandchild), rankOf(child) == 0 ? 1 : 2);
    NCCL_OK(ncclCommDestroy(grandchild));
    NCCL_OK(ncclCommDestroy(child));
  });
}

TEST(splitWithoutColorGivesNull) {
  onRanks(3, [](Rank &rank) {
    auto child = reinterpret_cast<ncclComm_t>(1);
    NCCL_OK(ncclCommSplit(rank.comm, rank.rank == 1 ? NCCL_SPLIT_NOCOLOR : 5, 0, &child, nullptr));
    if (rank.rank == 1) {
      CHECK_EQ(child, nullptr);
      return;
    }
    CHECK_EQ(sum(child, rank.stream, 1 + rank.rank), 4);
    NCCL_OK(ncclCommDestroy(child));
  });
}

TEST(childOutlivesItsParent) {
  onRanks(3, [](Rank &rank) {
    ncclComm_t child = nullptr;
    NCCL_OK(ncclCommSplit(rank.comm, 0, 0, &child, nullptr));
    NCCL_OK(ncclCommDestroy(rank.comm));
    rank.comm = nullptr;
    CHECK_EQ(sum(child, rank.stream, 1), 3);
    NCCL_OK(ncclCommDestroy(child));
  });
}

TEST(splitsInAGroupAreWrittenAtItsEnd) {
  constexpr int kRanks = 4;
  ncclComm_t comms[kRanks] = {};
  NCCL_OK(ncclCommInitAll(comms, kRanks, nullptr));
  ncclComm_t first[kRanks] = {};
  ncclComm_t second[kRanks] = {};
  NCCL_OK(ncclGroupStart());
  for (int rank = 0; rank < kRanks; ++rank) {
    NCCL_OK(ncclCommSplit(comms[rank], rank / 2, 0, &first[rank], nullptr));
    NCCL_OK(ncclCommSplit(comms[rank], rank == 3 ? NCCL_SPLIT_NOCOLOR : 1, -rank, &second[rank], nullptr));
    CHECK(first[rank] == nullptr && second[rank] == nullptr);
  }
  NCCL_OK(ncclGroupEnd());
  for (int rank = 0; rank < kRanks; ++rank) {
    CHECK_EQ(sizeOf(first[rank]), 2);
    CHECK_EQ(rankOf(first[rank]), rank % 2);
    CHECK_EQ(second[rank] == nullptr, rank == 3);
    if (rank < 3) {
      CHECK_EQ(rankOf(second[rank]), 2 - rank);
      NCCL_OK(ncclCommDestroy(second[rank]));
    }
    NCCL_OK(ncclCommDestroy(first[rank]));
    NCCL_OK(ncclCommDestroy(comms[rank]));
  }
}

TEST(wrongChildrenAreRefused) {
  onRanks(2, [](Rank &rank) {
    ncclComm_t child = nullptr;
    int excluded[] = {0, 0};
    ncclConfig_t config = noConfig();
    config.blocking = 3;
    CHECK_EQ(ncclCommSplit(rank.comm, -2, 0, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommSplit(rank.comm, 0, 0, nullptr, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommSplit(nullptr, 0, 0, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommSplit(rank.comm, 0, 0, &child, &config), ncclInvalidArgument);
    CHECK_EQ(ncclCommShrink(rank.comm, nullptr, 1, &child, nullptr, 0), ncclInvalidArgument);
    CHECK_EQ(ncclCommShrink(rank.comm, excluded, 0, &child, nullptr, 0), ncclInvalidArgument);
    CHECK_EQ(ncclCommShrink(rank.comm, excluded, 2, &child, nullptr, 0), ncclInvalidArgument);
    excluded[0] = rank.rank;
    CHECK_EQ(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, 0), ncclInvalidArgument);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "is excluded itself");
    excluded[0] = 2;
    CHECK_EQ(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, 0), ncclInvalidArgument);
    excluded[0] = 1 - rank.rank;
    CHECK_EQ(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, 2), ncclInvalidArgument);
    ncclUniqueId id = {};
    CHECK_EQ(ncclCommGrow(rank.comm, 2, nullptr, -1, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommGrow(rank.comm, 3, nullptr, 0, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommGrow(nullptr, 3, nullptr, 2, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommGrow(nullptr, 3, &id, 3, &child, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommGrow(rank.comm, 3, nullptr, -1, nullptr, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommRevoke(rank.comm, 1), ncclInvalidArgument);
    CHECK_EQ(ncclCommResume(rank.comm), ncclInvalidUsage);
    CHECK_EQ(child, nullptr);
    CHECK_EQ(sum(rank.comm, rank.stream, 1), 2);
  });
}

TEST(ranksThatCallDifferentFunctionsTogetherAreTold) {
  onRanks(2, [](Rank &rank) {
    ncclComm_t child = nullptr;
    const ncclResult_t result =
        rank.rank == 0 ? ncclCommSplit(rank.comm, 0, 0, &child, nullptr) : ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM);
    CHECK_EQ(result, ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "rank 0 called ncclCommSplit, rank 1 called ncclCommSuspend");
  });
}

TEST(shrinkKeepsTheOrderOfWhoRemains) {
  onRanks(5, [](Rank &rank) {
    int excluded[] = {3, 0};
    if (rank.rank == 0 || rank.rank == 3) {
      waitForError(rank.comm);  // the others destroy theirs when they are done; nobody asks these two
      return;
    }
    ncclComm_t child = nullptr;
    NCCL_OK(ncclCommShrink(rank.comm, excluded, 2, &child, nullptr, NCCL_SHRINK_DEFAULT));
    CHECK_EQ(sizeOf(child), 3);
    CHECK_EQ(rankOf(child), rank.rank == 4 ? 2 : rank.rank - 1);
    CHECK_EQ(sum(child, rank.stream, 1 << rank.rank), 2 + 4 + 16);
    int more[] = {0, 1};  // and again, from the child, to a world of one
    ncclComm_t last = nullptr;
    if (rankOf(child) == 2) {
      NCCL_OK(ncclCommShrink(child, more, 2, &last, nullptr, NCCL_SHRINK_DEFAULT));
      CHECK_EQ(sum(last, rank.stream, 9), 9);
      NCCL_OK(ncclCommDestroy(last));
    }
    NCCL_OK(ncclCommDestroy(child));
    NCCL_OK(ncclCommAbort(rank.comm));
    rank.comm = nullptr;
  });
}

TEST(shrinkThatAbortsEndsAHangingCollective) {
  std::atomic<int> enqueued{0};
  onRanks(3, [&](Rank &rank) {
    if (rank.rank == 1) {
      waitForError(rank.comm);  // never comes to the collective
      return;
    }
    auto *data = deviceArray<int>(1);
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    awaitCount(&enqueued, 2);
    int excluded[] = {1};
    ncclComm_t child = nullptr;
    NCCL_OK(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, NCCL_SHRINK_ABORT));
    CHECK_EQ(sum(child, rank.stream, 1 + rank.rank), 4);  // the stream can be used again
    NCCL_OK(ncclCommAbort(rank.comm));
    rank.comm = nullptr;
    NCCL_OK(ncclCommDestroy(child));
  });
}

TEST(growAddsRanksAndKeepsTheOldNumbers) {
  constexpr int kOld = 2;
  constexpr int kNew = 5;
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclUniqueId growId = {};
  Gate made;
  onThreads(kNew, [&](int number) {
    CUDA_OK(cudaSetDevice(number));
    const cudaStream_t stream = newStream();
    ncclComm_t comm = nullptr;
    ncclComm_t grown = nullptr;
    if (number < kOld) {
      NCCL_OK(ncclCommInitRank(&comm, kOld, id, number));
      if (number == 1) {
        NCCL_OK(ncclCommGetUniqueId(comm, &growId));
        ncclUniqueId second;
        CHECK_EQ(ncclCommGetUniqueId(comm, &second), ncclInvalidUsage);
        made.open();
      }
      NCCL_OK(ncclCommGrow(comm, kNew, number == 1 ? &growId : nullptr, -1, &grown, nullptr));
    } else {
      made.wait();
      NCCL_OK(ncclCommGrow(nullptr, kNew, &growId, number, &grown, nullptr));
    }
    CHECK_EQ(sizeOf(grown), kNew);
    CHECK_EQ(rankOf(grown), number);
    CHECK_EQ(sum(grown, stream, 1 << number), 31);
    if (comm != nullptr) {
      CHECK_EQ(sum(comm, stream, 1), kOld);
      if (number == 0) {  // the first id has been used, so another can be made
        ncclUniqueId next;
        NCCL_OK(ncclCommGetUniqueId(comm, &next));
      }
      NCCL_OK(ncclCommDestroy(comm));
    }
    NCCL_OK(ncclCommDestroy(grown));
    CUDA_OK(cudaStreamDestroy(stream));
  });
}

TEST(revokedCommunicatorEndsWhatRunsAndCanStillBeSplitAndShrunk) {
  std::atomic<int> enqueued{0};
  onRanks(3, [&](Rank &rank) {
    auto *data = deviceArray<int>(1);
    if (rank.rank != 2) {  // hangs: rank 2 never comes
      NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    awaitCount(&enqueued, 3);
    if (rank.rank == 0) {
      NCCL_OK(ncclCommRevoke(rank.comm, NCCL_REVOKE_DEFAULT));
    } else {
      waitForError(rank.comm);
      NCCL_OK(ncclCommRevoke(rank.comm, NCCL_REVOKE_DEFAULT));
    }
    ncclResult_t error = ncclInternalError;
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    CHECK_EQ(error, ncclSuccess);
    CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream), ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "has been revoked");
    CHECK_EQ(ncclCommRevoke(rank.comm, NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
    CHECK_EQ(ncclCommFinalize(rank.comm), ncclInvalidArgument);
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    ncclComm_t child = nullptr;
    NCCL_OK(ncclCommSplit(rank.comm, 0, -rank.rank, &child, nullptr));
    CHECK_EQ(rankOf(child), 2 - rank.rank);
    CHECK_EQ(sum(child, rank.stream, 1), 3);
    NCCL_OK(ncclCommDestroy(child));
    child = nullptr;
    if (rank.rank != 2) {
      int excluded[] = {2};
      NCCL_OK(ncclCommShrink(rank.comm, excluded, 1, &child, nullptr, NCCL_SHRINK_DEFAULT));
      CHECK_EQ(sum(child, rank.stream, 1), 2);
      NCCL_OK(ncclCommDestroy(child));
    }
    CUDA_OK(cudaFree(data));
  });
}

TEST(suspendedCommunicatorRefusesWorkUntilItIsResumed) {
  onRanks(2, [](Rank &rank) {
    uint64_t value = 7;
    NCCL_OK(ncclCommMemStats(rank.comm, ncclStatGpuMemSuspended, &value));
    CHECK_EQ(value, 0u);
    NCCL_OK(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM));
    NCCL_OK(ncclCommMemStats(rank.comm, ncclStatGpuMemSuspended, &value));
    CHECK_EQ(value, 1u);
    auto *data = deviceArray<int>(1);
    CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream), ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "ncclCommResume");
    CHECK_EQ(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM), ncclInvalidUsage);
    NCCL_OK(ncclCommResume(rank.comm));
    CHECK_EQ(sum(rank.comm, rank.stream, 1), 2);
    uint64_t total = 0;
    uint64_t persistent = 0;
    uint64_t suspendable = 1;
    NCCL_OK(ncclCommMemStats(rank.comm, ncclStatGpuMemTotal, &total));
    NCCL_OK(ncclCommMemStats(rank.comm, ncclStatGpuMemPersist, &persistent));
    NCCL_OK(ncclCommMemStats(rank.comm, ncclStatGpuMemSuspend, &suspendable));
    CHECK(total > 0);
    CHECK_EQ(total, persistent + suspendable);
    CHECK_EQ(ncclCommMemStats(rank.comm, static_cast<ncclCommMemStat_t>(4), &value), ncclInvalidArgument);
    CHECK_EQ(ncclCommMemStats(rank.comm, ncclStatGpuMemTotal, nullptr), ncclInvalidArgument);
  });
}

TEST(scalableInitTakesSeveralIdsAndUsesAllUp) {
  constexpr int kRanks = 3;
  ncclUniqueId ids[kRanks];
  for (ncclUniqueId &id : ids) {
    NCCL_OK(ncclGetUniqueId(&id));
  }
  onThreads(kRanks, [&](int number) {
    CUDA_OK(cudaSetDevice(number));
    ncclComm_t comm = nullptr;
    CHECK_EQ(ncclCommInitRankScalable(&comm, kRanks, number, 0, ids, nullptr), ncclInvalidArgument);
    CHECK_EQ(ncclCommInitRankScalable(&comm, kRanks, number, kRanks + 1, ids, nullptr), ncclInvalidArgument);
    NCCL_OK(ncclCommInitRankScalable(&comm, kRanks, number, kRanks, ids, nullptr));
    const cudaStream_t stream = newStream();
    CHECK_EQ(sum(comm, stream, 1), kRanks);
    NCCL_OK(ncclCommDestroy(comm));
    CUDA_OK(cudaStreamDestroy(stream));
  });
  for (const ncclUniqueId &id : ids) {
    ncclComm_t comm = nullptr;
    CHECK_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidUsage);
  }
}

TEST(commNameThatWasFreedTooEarlyIsNoticed) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  char name[] = "the name";
  ncclConfig_t config = noConfig();
  config.commName = name;
  ncclComm_t comm = nullptr;
  NCCL_OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
  ncclComm_t child = nullptr;
  NCCL_OK(ncclCommSplit(comm, 0, 0, &child, nullptr));  // inherits the pointer
  NCCL_OK(ncclCommDestroy(comm));
  std::memset(name, 'x', sizeof(name) - 1);
  CHECK_EQ(ncclCommDestroy(child), ncclInternalError);
  CHECK_CONTAINS(ncclGetLastError(nullptr), "config.commName was \"the name\"");
}

TEST(fiftySplitsLeaveNothingBehind) {
  onRanks(2, [](Rank &rank) {
    const auto cycle = [&] {
      ncclComm_t child = nullptr;
      NCCL_OK(ncclCommSplit(rank.comm, 0, 0, &child, nullptr));
      CHECK_EQ(sum(child, rank.stream, 1), 2);
      NCCL_OK(ncclCommDestroy(child));
    };
    cycle();
    (void)sum(rank.comm, rank.stream, 1);
    const Resources before = Resources::now();
    for (int i = 0; i < 50; ++i) {
      cycle();
    }
    (void)sum(rank.comm, rank.stream, 1);
    before.expectAtMost(Resources{1, 0});  // the other rank's listing of descriptors is one
    (void)sum(rank.comm, rank.stream, 1);
  });
}

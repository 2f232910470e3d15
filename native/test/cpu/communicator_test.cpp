// Creating and ending communicators, wrong arguments, ranks that disagree, do not come, or give up.
#include <chrono>

#include "resources.h"
#include "world.h"

using namespace test;
using Clock = std::chrono::steady_clock;

namespace {

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void checkAllReduce(ncclComm_t *comms, int n) {
  std::vector<cudaStream_t> streams;
  std::vector<int *> data;
  NCCL_OK(ncclGroupStart());
  for (int i = 0; i < n; ++i) {
    int device = -1;
    NCCL_OK(ncclCommCuDevice(comms[i], &device));
    CUDA_OK(cudaSetDevice(device));
    streams.push_back(newStream());
    data.push_back(deviceArray<int>(1));
    toDevice(data.back(), {i + 1});
    NCCL_OK(ncclAllReduce(data.back(), data.back(), 1, ncclInt32, ncclSum, comms[i], streams.back()));
  }
  NCCL_OK(ncclGroupEnd());
  for (size_t i = 0; i < streams.size(); ++i) {
    CUDA_OK(cudaStreamSynchronize(streams[i]));
    CHECK_EQ(toHost(data[i], 1)[0], n * (n + 1) / 2);
    CUDA_OK(cudaStreamDestroy(streams[i]));
    CUDA_OK(cudaFree(data[i]));
  }
}

}  // namespace

TEST(communicatorKnowsItsPlace) {
  onRanks(3, [](Rank &rank) {
    int value = -1;
    NCCL_OK(ncclCommCount(rank.comm, &value));
    CHECK_EQ(value, 3);
    NCCL_OK(ncclCommUserRank(rank.comm, &value));
    CHECK_EQ(value, rank.rank);
    NCCL_OK(ncclCommCuDevice(rank.comm, &value));
    CHECK_EQ(value, rank.rank);
    ncclCommProperties_t properties = {};
    properties.size = sizeof(properties);
    properties.magic = NCCL_API_MAGIC;
    properties.version = 23007;
    NCCL_OK(ncclCommQueryProperties(rank.comm, &properties));
    CHECK_EQ(properties.rank, rank.rank);
    CHECK_EQ(properties.nRanks, 3);
    CHECK_EQ(properties.nLsaTeams, 1);
    CHECK(properties.deviceApiSupport && !properties.multimemSupport);
    const ncclTeam_t team = ncclTeamLsa(rank.comm);
    CHECK(team.nRanks == 3 && team.rank == rank.rank && team.stride == 1);
    ncclCommProperties_t older = {};
    older.size = 40;  // NCCL 2.29.2
    older.magic = NCCL_API_MAGIC;
    older.hostRmaSupport = true;
    NCCL_OK(ncclCommQueryProperties(rank.comm, &older));
    CHECK(older.nRanks == 3 && older.hostRmaSupport);  // nothing behind its end was written
    older.magic = 0;
    CHECK_EQ(ncclCommQueryProperties(rank.comm, &older), ncclInvalidArgument);
  });
}

TEST(oneThreadCreatesAllRanksInAGroup) {
  constexpr int kRanks = 4;
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comms[kRanks] = {};
  NCCL_OK(ncclGroupStart());
  for (int rank = 0; rank < kRanks; ++rank) {
    CUDA_OK(cudaSetDevice(rank));
    NCCL_OK(ncclCommInitRank(&comms[rank], kRanks, id, rank));
    CHECK_EQ(comms[rank], nullptr);  // written at the end of the group
  }
  NCCL_OK(ncclGroupEnd());
  checkAllReduce(comms, kRanks);
  for (ncclComm_t comm : comms) {
    NCCL_OK(ncclCommDestroy(comm));
  }
}

TEST(initAllTakesADeviceListEvenWithRepetitions) {
  ncclComm_t comms[3] = {};
  const int devices[] = {5, 5, 1};
  NCCL_OK(ncclCommInitAll(comms, 3, devices));
  int device = -1;
  NCCL_OK(ncclCommCuDevice(comms[2], &device));
  CHECK_EQ(device, 1);
  checkAllReduce(comms, 3);
  for (ncclComm_t comm : comms) {
    NCCL_OK(ncclCommFinalize(comm));
    NCCL_OK(ncclCommDestroy(comm));
  }
  NCCL_OK(ncclCommInitAll(comms, 3, nullptr));
  checkAllReduce(comms, 3);
  for (ncclComm_t comm : comms) {
    NCCL_OK(ncclCommDestroy(comm));
  }
  const int wrong[] = {0, 8};
  CHECK_EQ(ncclCommInitAll(comms, 2, wrong), ncclInvalidArgument);
}

TEST(severalCommunicatorsWorkSideBySide) {
  onRanks(4, [](Rank &rank) {
    ncclComm_t all[2] = {};
    static ncclUniqueId ids[2];
    if (rank.rank == 0) {
      NCCL_OK(ncclGetUniqueId(&ids[0]));
      NCCL_OK(ncclGetUniqueId(&ids[1]));
    }
    auto *data = deviceArray<int>(2);
    toDevice(data, {1, 1});
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));  // also tells that the ids are there
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclCommInitRank(&all[0], 4, ids[0], rank.rank));
    NCCL_OK(ncclCommInitRank(&all[1], 4, ids[1], 3 - rank.rank));
    NCCL_OK(ncclGroupEnd());
    const cudaStream_t other = newStream();
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, all[0], rank.stream));
    NCCL_OK(ncclAllReduce(data + 1, data + 1, 1, ncclInt32, ncclSum, all[1], other));
    NCCL_OK(ncclGroupEnd());
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CUDA_OK(cudaStreamSynchronize(other));
    CHECK(toHost(data, 2) == std::vector<int>({16, 4}));
    NCCL_OK(ncclCommDestroy(all[0]));
    NCCL_OK(ncclCommDestroy(all[1]));
    CUDA_OK(cudaStreamDestroy(other));
  });
}

TEST(wrongArgumentsAreRefusedWithTheReason) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(10);
    int value = 0;
    const ncclComm_t comm = rank.comm;
    const cudaStream_t stream = rank.stream;
    const auto refuses = [&](ncclResult_t got, const char *why) {
      CHECK_EQ_IN(got, ncclInvalidArgument, why);
      CHECK_CONTAINS(ncclGetLastError(comm), why);
    };
    refuses(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, nullptr, stream), "comm is NULL");
    refuses(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, reinterpret_cast<ncclComm_t>(&value), stream),
            "is not open");
    refuses(ncclAllReduce(data, data, 1, static_cast<ncclDataType_t>(12), ncclSum, comm, stream), "datatype 12");
    refuses(ncclAllReduce(data, data, 1, static_cast<ncclDataType_t>(-1), ncclSum, comm, stream), "datatype -1");
    refuses(ncclAllReduce(data, data, 1, ncclInt32, static_cast<ncclRedOp_t>(5), comm, stream), "op 5");
    refuses(ncclBroadcast(data, data, 1, ncclInt32, 2, comm, stream), "root 2");
    refuses(ncclBroadcast(data, data, 1, ncclInt32, -1, comm, stream), "root -1");
    refuses(ncclSend(data, 1, ncclInt32, 2, comm, stream), "peer 2");
    refuses(ncclAllReduce(data, data, static_cast<size_t>(-1), ncclInt32, ncclSum, comm, stream), "count");
    refuses(ncclAllReduce(data, data, 11, ncclInt32, ncclSum, comm, stream), "needs 44 bytes, but only 40");
    refuses(ncclAllGather(data, data, 6, ncclInt32, comm, stream), "recvbuff");
    refuses(ncclAllReduce(nullptr, data, 1, ncclInt32, ncclSum, comm, stream), "sendbuff is NULL");
    refuses(ncclAllReduce(&value, data, 1, ncclInt32, ncclSum, comm, stream), "is not device memory");
    refuses(ncclAllReduce(data, data + 1, 4, ncclInt32, ncclSum, comm, stream), "overlap");
    refuses(ncclAlltoAll(data, data, 2, ncclInt32, comm, stream), "overlap");
    refuses(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, reinterpret_cast<cudaStream_t>(&value)), "stream");
    CUDA_OK(cudaSetDevice(6));
    auto *elsewhere = deviceArray<int>(1);
    const cudaStream_t foreign = newStream();
    refuses(ncclAllReduce(elsewhere, data, 1, ncclInt32, ncclSum, comm, stream), "on device 6");
    refuses(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, foreign), "stream belongs to device 6");
    CHECK_EQ(ncclCommCount(nullptr, &value), ncclInvalidArgument);
    CHECK_EQ(ncclCommCount(comm, nullptr), ncclInvalidArgument);
    // The communicator is unharmed, and the NULL stream means its own device's whatever the current one is.
    toDevice(data, std::vector<int>(10, 1));
    NCCL_OK(ncclAllReduce(data, data, 10, ncclInt32, ncclSum, comm, nullptr));
    CUDA_OK(cudaSetDevice(rank.rank));
    CUDA_OK(cudaStreamSynchronize(nullptr));
    CHECK_EQ(toHost(data, 10)[9], 2);
    ncclResult_t error = ncclInternalError;
    NCCL_OK(ncclCommGetAsyncError(comm, &error));
    CHECK_EQ(error, ncclSuccess);
  });
  NCCL_OK(ncclCommDestroy(nullptr));
  NCCL_OK(ncclCommAbort(nullptr));
  NCCL_OK(ncclCommFinalize(nullptr));
}

TEST(wrongInitArgumentsAreRefusedWithTheReason) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  const auto refuses = [&](ncclResult_t got, const char *why) {
    CHECK_EQ_IN(got, ncclInvalidArgument, why);
    CHECK_CONTAINS(ncclGetLastError(nullptr), why);
    CHECK_EQ(comm, nullptr);
  };
  refuses(ncclGetUniqueId(nullptr), "NULL");
  refuses(ncclCommInitRank(nullptr, 1, id, 0), "comm is NULL");
  refuses(ncclCommInitRank(&comm, 0, id, 0), "nranks is 0");
  refuses(ncclCommInitRank(&comm, 65, id, 0), "nranks is 65");
  refuses(ncclCommInitRank(&comm, 2, id, 2), "rank 2");
  refuses(ncclCommInitRank(&comm, 2, id, -1), "rank -1");
  refuses(ncclCommInitRank(&comm, 1, ncclUniqueId(), 0), "unique id");
  ncclConfig_t config = {};
  refuses(ncclCommInitRankConfig(&comm, 1, id, 0, &config), "NCCL_CONFIG_INITIALIZER");
  config.size = sizeof(config);
  config.magic = NCCL_API_MAGIC;
  config.version = 23007;
  config.blocking = 2;
  refuses(ncclCommInitRankConfig(&comm, 1, id, 0, &config), "blocking");
  config.blocking = 1;
  NCCL_OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));  // the refused attempts did not use the id up
  NCCL_OK(ncclCommDestroy(comm));
  CHECK_EQ(ncclCommDestroy(comm), ncclInvalidArgument);
  comm = nullptr;
  CHECK_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclInvalidUsage);
  CHECK_CONTAINS(ncclGetLastError(nullptr), "already used");
}

// The root may still be closing its meeting point when the second comes.
TEST(idThatHasJustBeenUsedIsRefused) {
  for (int i = 0; i < 2000; ++i) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr, second = nullptr;
    NCCL_OK(ncclGetUniqueId(&id));
    NCCL_OK(ncclCommInitRank(&comm, 1, id, 0));
    CHECK_EQ(ncclCommInitRank(&second, 1, id, 0), ncclInvalidUsage);
    NCCL_OK(ncclCommDestroy(comm));
  }
}

TEST(ranksThatContradictEachOtherAreToldAtOnce) {
  for (bool sameRank : {true, false}) {
    ncclUniqueId id;
    NCCL_OK(ncclGetUniqueId(&id));
    const auto start = Clock::now();
    onThreads(2, [&](int number) {
      ncclComm_t comm = nullptr;
      const int nRanks = sameRank ? 3 : 3 + number;
      CHECK_EQ(ncclCommInitRank(&comm, nRanks, id, sameRank ? 1 : number), ncclInvalidUsage);
      CHECK_EQ(comm, nullptr);
      CHECK_CONTAINS(ncclGetLastError(nullptr), sameRank ? "rank 1 came twice" : "nranks");
    });
    CHECK(secondsSince(start) < 10);
  }
}

TEST(rankThatDoesNotComeIsNamed) {
  setenv("NCCLFFM_CPU_TIMEOUT_MS", "2000", 1);  // also of the init, which must go well
  onRanks(1, [](Rank &) {});  // starts what lives as long as the process
  const Resources before = Resources::now();
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  onThreads(2, [&](int number) {
    ncclComm_t comm = nullptr;
    CHECK_EQ(ncclCommInitRank(&comm, 4, id, number * 2), ncclSystemError);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "rank 1, 3 of 4 did not come within 2000 ms");
  });
  before.expectAtMost(Resources{0, 0});
}

TEST(rankThatDoesNotComeToACollectiveIsNamed) {
  setenv("NCCLFFM_CPU_TIMEOUT_MS", "2000", 1);  // also of the init, which must go well
  onRanks(3, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    if (rank.rank == 1) {
      // Comes to nothing, and stays until the others have failed.
      ncclResult_t error = ncclSuccess;
      while (error == ncclSuccess) {
        NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
        std::this_thread::yield();
      }
      CHECK_EQ(error, ncclRemoteError);
      return;
    }
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    ncclResult_t error = ncclSuccess;
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    CHECK_EQ(error, ncclRemoteError);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "ncclAllReduce: rank 1 did not come to it within 2000 ms");
    CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream), ncclRemoteError);
  });
}

TEST(rankThatHasLeftIsNotWaitedFor) {
  const auto start = Clock::now();
  onRanks(2, [](Rank &rank) {
    if (rank.rank == 1) {
      return;  // destroys its communicator
    }
    auto *data = deviceArray<int>(1);
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    ncclResult_t error = ncclSuccess;
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    CHECK_EQ(error, ncclRemoteError);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "rank 1 has destroyed its communicator");
  });
  CHECK(secondsSince(start) < 10);
}

TEST(ranksThatDisagreeAreBothTold) {
  onRanks(4, [](Rank &rank) {
    auto *data = deviceArray<int>(8);
    NCCL_OK(rank.rank == 2 ? ncclBroadcast(data, data, 4, ncclInt32, 1, rank.comm, rank.stream)
                           : ncclAllReduce(data, data, 4, ncclFloat32, ncclMax, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    ncclResult_t error = ncclSuccess;
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    CHECK_EQ(error, ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "rank 0 called ncclAllReduce(count 4, ncclFloat32, ncclMax)");
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "rank 2 called ncclBroadcast(count 4, ncclInt32, root 1)");
  });
}

TEST(everyKindOfDisagreementIsFound) {
  for (int kind = 0; kind < 4; ++kind) {
    onRanks(2, [kind](Rank &rank) {
      auto *data = deviceArray<int>(8);
      const bool odd = rank.rank == 1;
      NCCL_OK(ncclReduce(data, data, kind == 0 && odd ? 3 : 0, kind == 1 && odd ? ncclUint32 : ncclInt32,
                         kind == 2 && odd ? ncclMin : ncclMax, kind == 3 && odd ? 1 : 0, rank.comm, rank.stream));
      CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    });
  }
}

TEST(abortEndsAWaitingRankFromAnotherThread) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  const auto start = Clock::now();
  onThreads(2, [&](int number) {
    CUDA_OK(cudaSetDevice(number));
    ncclComm_t comm = nullptr;
    NCCL_OK(ncclCommInitRank(&comm, 2, id, number));
    if (number == 1) {
      ncclResult_t error = ncclSuccess;
      while (error == ncclSuccess) {  // never comes to the collective
        NCCL_OK(ncclCommGetAsyncError(comm, &error));
        std::this_thread::yield();
      }
      CHECK_EQ(error, ncclRemoteError);
      CHECK_CONTAINS(ncclGetLastError(comm), "rank 0 has aborted");
      NCCL_OK(ncclCommAbort(comm));
      return;
    }
    const cudaStream_t stream = newStream();
    auto *data = deviceArray<int>(1);
    Gate started;
    CUDA_OK(cudaLaunchHostFunc(stream, Gate::openIt, &started));
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream));
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, comm, stream));
    std::thread aborter([&] {
      started.wait();
      NCCL_OK(ncclCommAbort(comm));
    });
    const cudaError_t ended = cudaStreamSynchronize(stream);  // a failure until the abort is complete
    CHECK(ended == cudaErrorLaunchFailure || ended == cudaSuccess);
    aborter.join();
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    int count = 0;
    CHECK_EQ(ncclCommCount(comm, &count), ncclInvalidArgument);
    CUDA_OK(cudaStreamDestroy(stream));
    CUDA_OK(cudaFree(data));
  });
  CHECK(secondsSince(start) < 10);
}

TEST(abortWhileAStreamIsBlockedBeforeTheOperationReturns) {
  Gate gate;
  onRanks(1, [&](Rank &rank) {
    auto *data = deviceArray<int>(1);
    CUDA_OK(cudaLaunchHostFunc(rank.stream, Gate::waitAt, &gate));
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    NCCL_OK(ncclCommAbort(rank.comm));
    rank.comm = nullptr;
    gate.open();
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);  // a stream outlives an aborted communicator
  });
}

TEST(destroyWaitsForWhatIsEnqueued) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    toDevice(data, {rank.rank + 1});
    for (int i = 0; i < 100; ++i) {
      NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclMax, rank.comm, rank.stream));
    }
    NCCL_OK(ncclCommDestroy(rank.comm));
    rank.comm = nullptr;
    CUDA_OK(cudaStreamQuery(rank.stream));
    CHECK_EQ(toHost(data, 1)[0], 2);
  });
}

TEST(finalizedCommunicatorTakesNoMoreOperations) {
  onRanks(1, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    NCCL_OK(ncclCommFinalize(rank.comm));
    CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream), ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "finalized");
    CHECK_EQ(ncclCommFinalize(rank.comm), ncclInvalidArgument);
  });
}

TEST(twoHundredCommunicatorsLeaveNothingBehind) {
  const auto cycle = [] {
    onRanks(2, [](Rank &rank) {
      auto *data = deviceArray<int>(1);
      NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
      CUDA_OK(cudaFree(data));
    });
  };
  cycle();  // starts what lives as long as the process
  const Resources before = Resources::now();
  for (int i = 0; i < 200; ++i) {
    cycle();
  }
  before.expectAtMost(Resources{0, 0});
}

// Sends, receives and groups.
#include "world.h"

using namespace test;

namespace {

std::vector<int> numbers(size_t count, int seed) {
  std::vector<int> result(count);
  for (size_t i = 0; i < count; ++i) {
    result[i] = seed * 1000003 + static_cast<int>(i);
  }
  return result;
}

}  // namespace

TEST(ringOfSendsAndReceivesInGroups) {
  for (int n : {2, 4, 8}) {
    onRanks(n, [n](Rank &rank) {
      const int next = (rank.rank + 1) % n;
      const int previous = (rank.rank + n - 1) % n;
      for (size_t count : {size_t{0}, size_t{1}, size_t{1023}, size_t{100003}}) {
        auto *out = deviceArray<int>(count + 1);
        auto *in = deviceArray<int>(count + 1);
        toDevice(out, numbers(count, rank.rank));
        NCCL_OK(ncclGroupStart());
        NCCL_OK(ncclSend(out, count, ncclInt32, next, rank.comm, rank.stream));
        NCCL_OK(ncclRecv(in, count, ncclInt32, previous, rank.comm, rank.stream));
        NCCL_OK(ncclGroupEnd());
        CUDA_OK(cudaStreamSynchronize(rank.stream));
        CHECK(toHost(in, count) == numbers(count, previous));
        CUDA_OK(cudaFree(out));
        CUDA_OK(cudaFree(in));
      }
    });
  }
}

TEST(messagesOfOnePairKeepTheirOrder) {
  onRanks(2, [](Rank &rank) {
    constexpr int kMessages = 50;
    auto *data = deviceArray<int>(kMessages);
    if (rank.rank == 0) {
      toDevice(data, numbers(kMessages, 5));
    }
    // The sender groups in tens, the receiver in twenty-fives: groups need not correspond.
    const int group = rank.rank == 0 ? 10 : 25;
    for (int start = 0; start < kMessages; start += group) {
      NCCL_OK(ncclGroupStart());
      for (int i = start; i < start + group; ++i) {
        NCCL_OK(rank.rank == 0 ? ncclSend(data + i, 1, ncclInt32, 1, rank.comm, rank.stream)
                               : ncclRecv(data + i, 1, ncclInt32, 0, rank.comm, rank.stream));
      }
      NCCL_OK(ncclGroupEnd());
    }
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK(toHost(data, kMessages) == numbers(kMessages, 5));
  });
}

TEST(everyRankSendsToEveryRankItselfIncluded) {
  constexpr int kRanks = 4;
  constexpr size_t kCount = 1000;
  onRanks(kRanks, [](Rank &rank) {
    auto *out = deviceArray<int>(kCount * kRanks);
    auto *in = deviceArray<int>(kCount * kRanks);
    toDevice(out, numbers(kCount * kRanks, rank.rank));
    for (int round = 0; round < 20; ++round) {
      NCCL_OK(ncclGroupStart());
      for (int peer = 0; peer < kRanks; ++peer) {
        NCCL_OK(ncclSend(out + kCount * static_cast<size_t>(peer), kCount, ncclInt32, peer, rank.comm, rank.stream));
        NCCL_OK(ncclRecv(in + kCount * static_cast<size_t>(peer), kCount, ncclInt32, peer, rank.comm, rank.stream));
      }
      NCCL_OK(ncclGroupEnd());
    }
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    const std::vector<int> got = toHost(in, kCount * kRanks);
    for (int peer = 0; peer < kRanks; ++peer) {
      const std::vector<int> sent = numbers(kCount * kRanks, peer);
      for (size_t i = 0; i < kCount; ++i) {
        CHECK_EQ(got[kCount * static_cast<size_t>(peer) + i], sent[kCount * static_cast<size_t>(rank.rank) + i]);
      }
    }
  });
}

TEST(sendAndReceiveWithoutGroupMeet) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(10);
    toDevice(data, numbers(10, rank.rank));
    NCCL_OK(rank.rank == 0 ? ncclSend(data, 10, ncclInt32, 1, rank.comm, rank.stream)
                           : ncclRecv(data, 10, ncclInt32, 0, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK(toHost(data, 10) == numbers(10, 0));
  });
}

TEST(groupMixesCollectivesMessagesAndStreams) {
  onRanks(2, [](Rank &rank) {
    const cudaStream_t other = newStream();
    auto *sum = deviceArray<int>(1);
    auto *data = deviceArray<int>(2);
    toDevice(sum, {rank.rank + 1});
    toDevice(data, {rank.rank, -1});
    const int peer = 1 - rank.rank;
    NCCL_OK(ncclGroupStart());
    // The ranks call in a different order; messages and collectives of a group are independent.
    if (rank.rank == 0) {
      NCCL_OK(ncclAllReduce(sum, sum, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    NCCL_OK(ncclSend(data, 1, ncclInt32, peer, rank.comm, rank.stream));
    NCCL_OK(ncclRecv(data + 1, 1, ncclInt32, peer, rank.comm, other));
    if (rank.rank == 1) {
      NCCL_OK(ncclAllReduce(sum, sum, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    NCCL_OK(ncclGroupEnd());
    CUDA_OK(cudaStreamSynchronize(other));  // the receive was on this stream
    CHECK_EQ(toHost(data + 1, 1)[0], peer);
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(sum, 1)[0], 3);
    CUDA_OK(cudaStreamDestroy(other));
  });
}

TEST(operationsOfOneCommunicatorKeepTheirOrderAcrossStreams) {
  onRanks(4, [](Rank &rank) {
    const cudaStream_t streams[] = {rank.stream, newStream(), newStream()};
    auto *data = deviceArray<int>(1);
    toDevice(data, {1});
    for (int i = 0; i < 9; ++i) {
      NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, streams[i % 3]));
    }
    for (cudaStream_t stream : streams) {
      CUDA_OK(cudaStreamSynchronize(stream));
    }
    CHECK_EQ(toHost(data, 1)[0], 1 << 18);
  });
}

TEST(messagesOfDifferentSizeFailBothRanks) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(10);
    NCCL_OK(rank.rank == 0 ? ncclSend(data, 10, ncclInt32, 1, rank.comm, rank.stream)
                           : ncclRecv(data, 9, ncclInt32, 0, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    // Known without asking for the async error.
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "send and receive disagree");
    ncclResult_t error = ncclSuccess;
    NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
    CHECK_EQ(error, ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "ncclSend(count 10");
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "ncclRecv(count 9");
  });
}

TEST(messageToItselfNeedsItsCounterpart) {
  onRanks(1, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    CHECK_EQ(ncclSend(data, 1, ncclInt32, 0, rank.comm, rank.stream), ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "sends to itself");
  });
}

TEST(errorInAGroupIsReturnedByItsEndAndStartsNothing) {
  onRanks(1, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    toDevice(data, {7});
    auto *target = deviceArray<int>(1);
    toDevice(target, {0});
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, target, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CHECK_EQ(ncclAllReduce(data, target, 1, ncclInt32, static_cast<ncclRedOp_t>(99), rank.comm, rank.stream),
             ncclInvalidArgument);
    CHECK_EQ(ncclGroupEnd(), ncclInvalidArgument);
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(target, 1)[0], 0);
    NCCL_OK(ncclAllReduce(data, target, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(target, 1)[0], 7);
  });
  CHECK_EQ(ncclGroupEnd(), ncclInvalidUsage);
}

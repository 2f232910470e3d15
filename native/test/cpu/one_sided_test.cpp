// ncclPutSignal, ncclSignal, ncclWaitSignal and the other views of a window.
#include "world.h"

using namespace test;

namespace {

struct WindowMemory {
  int *memory = nullptr;
  ncclWindow_t window = nullptr;
  ncclComm_t comm = nullptr;

  WindowMemory(const Rank &rank, size_t bytes, int flags = NCCL_WIN_COLL_SYMMETRIC) : comm(rank.comm) {
    void *pointer = nullptr;
    NCCL_OK(ncclMemAlloc(&pointer, bytes));
    memory = static_cast<int *>(pointer);
    NCCL_OK(ncclCommWindowRegister(rank.comm, memory, bytes, &window, flags));
  }
  ~WindowMemory() {
    NCCL_OK(ncclCommWindowDeregister(comm, window));
    NCCL_OK(ncclMemFree(memory));
  }
};

void synchronizeRanks(const Rank &rank) {
  auto *token = deviceArray<int>(1);
  NCCL_OK(ncclAllReduce(token, token, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  CUDA_OK(cudaFree(token));
}

}  // namespace

TEST(putDataIsThereWhenTheWaitReturns) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 1000;
  onRanks(kRanks, [](Rank &rank) {
    // A part to send from, and one to receive in for every rank.
    WindowMemory window(rank, (kRanks + 1) * kCount * sizeof(int) + 4096);
    const int right = (rank.rank + 1) % kRanks;
    const int left = (rank.rank + kRanks - 1) % kRanks;
    for (int round = 0; round < 20; ++round) {
      toDevice(window.memory, std::vector<int>(kCount, 100 * round + rank.rank));
      const size_t offset = static_cast<size_t>(1 + rank.rank) * kCount * sizeof(int);
      NCCL_OK(ncclPutSignal(window.memory, kCount, ncclInt32, right, window.window, offset, 0, 0, 0, rank.comm,
                            rank.stream));
      ncclWaitSignalDesc_t wait = {1, left, 0, 0};
      NCCL_OK(ncclWaitSignal(1, &wait, rank.comm, rank.stream));
      wait = {};  // copied
      CUDA_OK(cudaStreamSynchronize(rank.stream));
      CHECK(toHost(window.memory + static_cast<size_t>(1 + left) * kCount, kCount) ==
            std::vector<int>(kCount, 100 * round + left));
      synchronizeRanks(rank);  // nobody overwrites what is still being checked
    }
  });
}

TEST(signalsAreCountedForEachPeer) {
  onRanks(3, [](Rank &rank) {
    if (rank.rank != 0) {
      for (int i = 0; i < 2 * rank.rank; ++i) {
        NCCL_OK(ncclSignal(0, 0, 0, 0, rank.comm, rank.stream));
      }
      NCCL_OK(ncclSignal(rank.rank, 0, 0, 0, rank.comm, rank.stream));  // to oneself
      ncclWaitSignalDesc_t own = {1, rank.rank, 0, 0};
      NCCL_OK(ncclWaitSignal(1, &own, rank.comm, rank.stream));
    } else {
      ncclWaitSignalDesc_t waits[] = {{3, 2, 0, 0}, {2, 1, 0, 0}};
      NCCL_OK(ncclWaitSignal(2, waits, rank.comm, rank.stream));
      CUDA_OK(cudaStreamSynchronize(rank.stream));
      NCCL_OK(ncclWaitSignal(1, &(waits[0] = {1, 2, 0, 0}), rank.comm, rank.stream));  // the fourth
    }
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    synchronizeRanks(rank);
  });
}

TEST(waitInAGroupDoesNotBlockThePutAfterIt) {
  onRanks(2, [](Rank &rank) {
    WindowMemory window(rank, 4096);
    const int peer = 1 - rank.rank;
    toDevice(window.memory, {7 + rank.rank});
    ncclWaitSignalDesc_t wait = {1, peer, 0, 0};
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclWaitSignal(1, &wait, rank.comm, rank.stream));
    NCCL_OK(ncclPutSignal(window.memory, 1, ncclInt32, peer, window.window, 64, 0, 0, 0, rank.comm, rank.stream));
    NCCL_OK(ncclGroupEnd());
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(window.memory + 16, 1)[0], 7 + peer);
    synchronizeRanks(rank);
  });
}

TEST(waitForASignalThatNeverComesNamesTheRank) {
  setenv("NCCLFFM_CPU_TIMEOUT_MS", "2000", 1);  // also of the init, which must go well
  onRanks(2, [](Rank &rank) {
    if (rank.rank == 1) {
      ncclResult_t error = ncclSuccess;
      while (error == ncclSuccess) {
        NCCL_OK(ncclCommGetAsyncError(rank.comm, &error));
        std::this_thread::yield();
      }
      return;
    }
    ncclWaitSignalDesc_t wait = {1, 1, 0, 0};
    NCCL_OK(ncclWaitSignal(1, &wait, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "ncclWaitSignal: rank 1 did not come to it within 2000 ms");
  });
}

TEST(wrongOneSidedCallsAreRefused) {
  onRanks(1, [](Rank &rank) {
    WindowMemory window(rank, 4096);
    WindowMemory plain(rank, 4096, NCCL_WIN_DEFAULT);
    const auto put = [&](int *from, size_t count, ncclWindow_t to, size_t offset, int signal) {
      return ncclPutSignal(from, count, ncclInt32, 0, to, offset, signal, 0, 0, rank.comm, rank.stream);
    };
    CHECK_EQ(put(window.memory, 1024, window.window, 4, 0), ncclInvalidArgument);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "leave the window of 4096 bytes of rank 0");
    CHECK_EQ(put(window.memory, 1, nullptr, 0, 0), ncclInvalidArgument);
    CHECK_EQ(put(window.memory, 1, window.window, 0, 1), ncclInvalidArgument);
    CHECK_EQ(put(plain.memory, 1, window.window, 0, 0), ncclInvalidArgument);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "NCCL_WIN_COLL_SYMMETRIC");
    NCCL_OK(put(window.memory, 1, plain.window, 4092, 0));
    CHECK_EQ(ncclSignal(1, 0, 0, 0, rank.comm, rank.stream), ncclInvalidArgument);
    CHECK_EQ(ncclSignal(0, 0, 1, 0, rank.comm, rank.stream), ncclInvalidArgument);
    ncclWaitSignalDesc_t wait = {0, 0, 0, 0};
    CHECK_EQ(ncclWaitSignal(1, &wait, rank.comm, rank.stream), ncclInvalidArgument);
    CHECK_EQ(ncclWaitSignal(0, &wait, rank.comm, rank.stream), ncclInvalidArgument);
    CHECK_EQ(ncclWaitSignal(1, nullptr, rank.comm, rank.stream), ncclInvalidArgument);
    wait = {1, 0, 0, 0};
    NCCL_OK(ncclWaitSignal(1, &wait, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
  });
}

TEST(windowHasAUserPointerPeersAndNoMulticast) {
  onRanks(2, [](Rank &rank) {
    WindowMemory window(rank, 4096);
    void *pointer = nullptr;
    NCCL_OK(ncclWinGetUserPtr(rank.comm, window.window, &pointer));
    CHECK_EQ(pointer, static_cast<void *>(window.memory));
    void *lsa = nullptr;
    NCCL_OK(ncclGetPeerDevicePointer(window.window, 8, 1 - rank.rank, &pointer));
    NCCL_OK(ncclGetLsaDevicePointer(window.window, 8, 1 - rank.rank, &lsa));
    CHECK_EQ(pointer, lsa);
    CHECK_EQ(ncclGetPeerDevicePointer(window.window, 8, 2, &pointer), ncclInvalidArgument);
    CHECK_EQ(ncclWinGetUserPtr(rank.comm, nullptr, &pointer), ncclInvalidArgument);
    NCCL_OK(ncclGetLsaMultimemDevicePointer(window.window, 0, &pointer));
    CHECK_EQ(pointer, nullptr);
    pointer = &window;
    NCCL_OK(ncclGetMultimemDevicePointer(window.window, 0, ncclMultimemHandle_t{window.memory}, &pointer));
    CHECK_EQ(pointer, nullptr);
    CHECK_EQ(ncclGetMultimemDevicePointer(window.window, 0, ncclMultimemHandle_t{nullptr}, &pointer),
             ncclInvalidArgument);
    ncclCommProperties_t properties = {};
    properties.size = sizeof(properties);
    properties.magic = NCCL_API_MAGIC;
    NCCL_OK(ncclCommQueryProperties(rank.comm, &properties));
    CHECK(properties.hostRmaSupport);
    synchronizeRanks(rank);
  });
}

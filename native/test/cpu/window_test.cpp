// Windows between threads.
#include "world.h"

using namespace test;

namespace {

int *windowMemory(size_t bytes) {
  void *pointer = nullptr;
  NCCL_OK(ncclMemAlloc(&pointer, bytes));
  return static_cast<int *>(pointer);
}

}  // namespace

TEST(windowReachesEveryPeersMemory) {
  constexpr int kRanks = 4;
  onRanks(kRanks, [](Rank &rank) {
    // Sizes differ between ranks, and so do offsets in the heap.
    const size_t bytes = 4096u * static_cast<size_t>(1 + rank.rank);
    int *memory = windowMemory(bytes);
    ncclWindow_t window = nullptr;
    NCCL_OK(ncclCommWindowRegister(rank.comm, memory, bytes, &window, NCCL_WIN_DEFAULT));
    CHECK(window != nullptr);
    // Everybody writes into everybody's memory; the collective after it orders the accesses.
    for (int peer = 0; peer < kRanks; ++peer) {
      void *pointer = nullptr;
      NCCL_OK(ncclGetLsaDevicePointer(window, 64u * static_cast<size_t>(rank.rank), peer, &pointer));
      *static_cast<int *>(pointer) = 100 * rank.rank + peer;
    }
    auto *token = deviceArray<int>(1);
    NCCL_OK(ncclAllReduce(token, token, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    for (int peer = 0; peer < kRanks; ++peer) {
      CHECK_EQ(memory[16 * peer], 100 * peer + rank.rank);
    }
    void *pointer = nullptr;
    NCCL_OK(ncclGetLsaDevicePointer(window, 0, rank.rank, &pointer));
    CHECK_EQ(pointer, static_cast<void *>(memory));
    const size_t last = 4096u * kRanks - 1;
    NCCL_OK(ncclGetLsaDevicePointer(window, last, kRanks - 1, &pointer));
    CHECK_EQ(ncclGetLsaDevicePointer(window, last, 0, &pointer), ncclInvalidArgument);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "outside the window of 4096 bytes of rank 0");
    CHECK_EQ(ncclGetLsaDevicePointer(window, 0, kRanks, &pointer), ncclInvalidArgument);
    CHECK_EQ(ncclGetLsaDevicePointer(window, 0, -1, &pointer), ncclInvalidArgument);
    NCCL_OK(ncclCommWindowDeregister(rank.comm, window));
    CHECK_EQ(ncclCommWindowDeregister(rank.comm, window), ncclInvalidArgument);
    CHECK_EQ(ncclGetLsaDevicePointer(window, 0, 0, &pointer), ncclInvalidArgument);
    NCCL_OK(ncclMemFree(memory));
    CUDA_OK(cudaFree(token));
  });
}

TEST(windowsOfOneThreadRegisterInAGroup) {
  constexpr int kRanks = 3;
  ncclComm_t comms[kRanks] = {};
  NCCL_OK(ncclCommInitAll(comms, kRanks, nullptr));
  ncclWindow_t windows[kRanks][2] = {};
  int *memory[kRanks] = {};
  NCCL_OK(ncclGroupStart());
  for (int rank = 0; rank < kRanks; ++rank) {
    CUDA_OK(cudaSetDevice(rank));
    memory[rank] = windowMemory(8192);
    for (size_t i = 0; i < 2; ++i) {
      NCCL_OK(ncclCommWindowRegister(comms[rank], memory[rank] + i * 1024, 4096, &windows[rank][i],
                                     NCCL_WIN_COLL_SYMMETRIC));
      CHECK_EQ(windows[rank][i], nullptr);
    }
  }
  NCCL_OK(ncclGroupEnd());
  for (int rank = 0; rank < kRanks; ++rank) {
    for (size_t i = 0; i < 2; ++i) {
      void *pointer = nullptr;
      NCCL_OK(ncclGetLsaDevicePointer(windows[0][i], 0, rank, &pointer));
      CHECK_EQ(pointer, static_cast<void *>(memory[rank] + i * 1024));
    }
  }
  for (ncclComm_t comm : comms) {
    NCCL_OK(ncclCommDestroy(comm));  // takes its windows along
  }
  void *pointer = nullptr;
  CHECK_EQ(ncclGetLsaDevicePointer(windows[1][0], 0, 0, &pointer), ncclInvalidArgument);
}

TEST(windowsAreIndependentOfPendingCollectives) {
  onRanks(2, [](Rank &rank) {
    int *memory = windowMemory(4096);
    ncclWindow_t window = nullptr;
    // One rank registers before, the other after it enqueues the collective.
    if (rank.rank == 0) {
      NCCL_OK(ncclAllReduce(memory, memory, 4, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    NCCL_OK(ncclCommWindowRegister(rank.comm, memory, 4096, &window, NCCL_WIN_DEFAULT));
    if (rank.rank == 1) {
      NCCL_OK(ncclAllReduce(memory, memory, 4, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    CUDA_OK(cudaStreamSynchronize(rank.stream));
  });
}

TEST(windowMemoryIsChecked) {
  onRanks(1, [](Rank &rank) {
    int *memory = windowMemory(8192);
    auto *plain = deviceArray<int>(4096);
    ncclWindow_t window = nullptr;
    const auto refuses = [&](ncclResult_t got, const char *why) {
      CHECK_EQ_IN(got, ncclInvalidArgument, why);
      CHECK_CONTAINS(ncclGetLastError(rank.comm), why);
    };
    refuses(ncclCommWindowRegister(rank.comm, memory + 1, 4096, &window, 0), "not aligned to 4096");
    refuses(ncclCommWindowRegister(rank.comm, memory, 8193, &window, 0), "needs 8193 bytes");
    refuses(ncclCommWindowRegister(rank.comm, plain, 4096, &window, 0), "not from ncclMemAlloc");
    refuses(ncclCommWindowRegister(rank.comm, memory, 4096, nullptr, 0), "win is NULL");
    refuses(ncclCommWindowRegister(rank.comm, memory, 4096, &window, 8), "winFlags 0x8");
    refuses(ncclCommWindowRegister(nullptr, memory, 4096, &window, 0), "comm is NULL");
    NCCL_OK(ncclMemFree(memory));
    CHECK_EQ(ncclMemFree(memory), ncclUnhandledCudaError);
  });
}

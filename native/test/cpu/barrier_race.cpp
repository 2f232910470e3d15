// Eight ranks, in-place all-reduces: the program in which ThreadSanitizer must find nothing, and must find the race
// when the barrier is weakened (NCCLFFM_TEST_WEAK_BARRIER).
#include "world.h"

using namespace test;

int main() {
  constexpr size_t kCount = 20000;
  onRanks(8, [](Rank &rank) {
    auto *data = deviceArray<int>(kCount);
    toDevice(data, std::vector<int>(kCount, 1));
    for (int i = 0; i < 3; ++i) {
      NCCL_OK(ncclAllReduce(data, data, kCount, ncclInt32, ncclSum, rank.comm, rank.stream));
    }
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK_EQ(toHost(data, kCount)[kCount - 1], 512);
  });
  std::puts("barrier_race finished");
  return 0;
}

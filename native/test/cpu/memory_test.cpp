// Device memory, pinned memory, copies, fills and what they refuse.
#include <cstring>
#include <set>

#include "world.h"

using namespace test;

TEST(mallocGivesAlignedDistinctMemoryOfTheCurrentDevice) {
  CUDA_OK(cudaSetDevice(3));
  std::set<void *> seen;
  for (size_t bytes : {1u, 511u, 512u, 513u, 100000u}) {
    void *pointer = nullptr;
    CUDA_OK(cudaMalloc(&pointer, bytes));
    CHECK_EQ(reinterpret_cast<uintptr_t>(pointer) % 512, 0u);
    CHECK(seen.insert(pointer).second);
    cudaPointerAttributes attributes;
    CUDA_OK(cudaPointerGetAttributes(&attributes, static_cast<char *>(pointer) + bytes - 1));
    CHECK_EQ(attributes.type, cudaMemoryTypeDevice);
    CHECK_EQ(attributes.device, 3);
  }
  for (void *pointer : seen) {
    CUDA_OK(cudaFree(pointer));
  }
}

TEST(freedMemoryIsFoundAgainAndItsNeighboursMerge) {
  size_t freeBefore = 0;
  size_t total = 0;
  CUDA_OK(cudaMemGetInfo(&freeBefore, &total));
  CHECK_EQ(freeBefore, total);
  std::vector<void *> pointers(100);
  for (void *&pointer : pointers) {
    CUDA_OK(cudaMalloc(&pointer, 5000));
  }
  size_t freeMeanwhile = 0;
  CUDA_OK(cudaMemGetInfo(&freeMeanwhile, &total));
  CHECK_EQ(freeBefore - freeMeanwhile, 100u * 5120u);
  for (size_t i = 0; i < pointers.size(); i += 2) {
    CUDA_OK(cudaFree(pointers[i]));
  }
  for (size_t i = 1; i < pointers.size(); i += 2) {
    CUDA_OK(cudaFree(pointers[i]));
  }
  void *whole = nullptr;
  CUDA_OK(cudaMalloc(&whole, total));  // possible only when every hole has merged
  CUDA_OK(cudaFree(whole));
  CHECK_EQ(cudaMalloc(&whole, total + 1), cudaErrorMemoryAllocation);
  CHECK_EQ(whole, nullptr);
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(freedPagesAreGivenBack) {
  constexpr size_t kBytes = 1 << 20;
  auto *first = deviceArray<char>(kBytes);
  CUDA_OK(cudaMemset(first, 0x5a, kBytes));
  CUDA_OK(cudaDeviceSynchronize());
  CHECK_EQ(toHost(first + kBytes - 1, 1)[0], 0x5a);
  CUDA_OK(cudaFree(first));
  auto *second = deviceArray<char>(kBytes);
  CHECK_EQ(static_cast<void *>(second), static_cast<void *>(first));
  CHECK_EQ(toHost(second + kBytes - 1, 1)[0], 0);  // a fresh page
  CUDA_OK(cudaFree(second));
}

TEST(freeRefusesWhatIsNoAllocation) {
  auto *pointer = deviceArray<char>(100);
  int local = 0;
  CUDA_OK(cudaFree(nullptr));
  CHECK_EQ(cudaFree(pointer + 1), cudaErrorInvalidValue);
  CHECK_EQ(cudaFree(&local), cudaErrorInvalidValue);
  CUDA_OK(cudaFree(pointer));
  CHECK_EQ(cudaFree(pointer), cudaErrorInvalidValue);
  CHECK_EQ(cudaFreeHost(&local), cudaErrorInvalidValue);
}

TEST(copiesGoInEveryDirection) {
  std::vector<int> numbers(1000);
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<int>(i * 7);
  }
  auto *a = deviceArray<int>(numbers.size());
  auto *b = deviceArray<int>(numbers.size());
  const size_t bytes = numbers.size() * sizeof(int);
  void *pinned = nullptr;
  CUDA_OK(cudaHostAlloc(&pinned, bytes, 0));
  CUDA_OK(cudaMemcpy(a, numbers.data(), bytes, cudaMemcpyHostToDevice));
  CUDA_OK(cudaMemcpy(b, a, bytes, cudaMemcpyDeviceToDevice));
  CUDA_OK(cudaMemcpy(pinned, b, bytes, cudaMemcpyDeviceToHost));
  CHECK_EQ(std::memcmp(pinned, numbers.data(), bytes), 0);
  std::vector<int> back(numbers.size());
  CUDA_OK(cudaMemcpy(back.data(), pinned, bytes, cudaMemcpyHostToHost));
  CHECK(back == numbers);
  CUDA_OK(cudaMemset(a, 0, bytes));
  CUDA_OK(cudaMemcpy(back.data(), a, bytes, cudaMemcpyDefault));
  CHECK(back == std::vector<int>(numbers.size()));
  CUDA_OK(cudaFreeHost(pinned));
  CUDA_OK(cudaFree(a));
  CUDA_OK(cudaFree(b));
}

TEST(copiesRefuseWrongDirectionsAndRanges) {
  auto *device = deviceArray<char>(100);
  char host[200] = {};
  CHECK_EQ(cudaMemcpy(device, host, 101, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, device + 1, 100, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, host + 100, 10, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, device, 10, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpy(host, device, 10, static_cast<cudaMemcpyKind>(9)), cudaErrorInvalidMemcpyDirection);
  CHECK_EQ(cudaMemcpy(nullptr, device, 10, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(device, 0, 101), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(host, 0, 10), cudaErrorInvalidValue);
  CUDA_OK(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDeviceToHost));
  CUDA_OK(cudaFree(device));
  CHECK_EQ(cudaMemcpy(host, device, 10, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
}

TEST(pinnedMemoryIsMappedAtItsOwnAddress) {
  CUDA_OK(cudaSetDevice(2));
  void *host = nullptr;
  void *device = nullptr;
  CUDA_OK(cudaHostAlloc(&host, 64, 2));
  CUDA_OK(cudaHostGetDevicePointer(&device, host, 0));
  CHECK_EQ(device, host);
  cudaPointerAttributes attributes;
  CUDA_OK(cudaPointerGetAttributes(&attributes, host));
  CHECK_EQ(attributes.type, cudaMemoryTypeHost);
  CHECK_EQ(attributes.device, 2);
  CUDA_OK(cudaFreeHost(host));
  CHECK_EQ(cudaHostGetDevicePointer(&device, host, 0), cudaErrorInvalidValue);
}

TEST(devicesAreCountedNamedAndChecked) {
  int count = 0;
  CUDA_OK(cudaGetDeviceCount(&count));
  CHECK_EQ(count, 8);
  CHECK_EQ(cudaSetDevice(8), cudaErrorInvalidDevice);
  CHECK_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  CUDA_OK(cudaSetDevice(7));
  int device = -1;
  CUDA_OK(cudaGetDevice(&device));
  CHECK_EQ(device, 7);
  onThreads(1, [](int) {
    int fresh = -1;
    CUDA_OK(cudaGetDevice(&fresh));
    CHECK_EQ(fresh, 0);  // the current device belongs to the thread
  });
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 5));
  CHECK_CONTAINS(properties.name, "emulated device 5");
  CHECK(properties.totalGlobalMem > 0);
  int value = 0;
  CUDA_OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK_EQ(value, 9);
  CHECK_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 8), cudaErrorInvalidDevice);
  int version = 0;
  CUDA_OK(cudaRuntimeGetVersion(&version));
  CHECK_EQ(version, 13000);
  NCCL_OK(ncclGetVersion(&version));
  CHECK_EQ(version, 23007);
  setenv("NCCLFFM_CPU_NCCL_VERSION", "22705", 1);
  NCCL_OK(ncclGetVersion(&version));
  CHECK_EQ(version, 22705);
}

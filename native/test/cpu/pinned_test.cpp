// Host memory that is registered, beside memory that cudaHostAlloc gave.
#include <sys/mman.h>

#include <cstring>

#include "resources.h"
#include "world.h"

using namespace test;

namespace {

constexpr unsigned int kFlags = cudaHostRegisterMapped | cudaHostRegisterPortable;

cudaMemoryType typeOf(const void *pointer, int *device = nullptr) {
  cudaPointerAttributes attributes;
  CUDA_OK(cudaPointerGetAttributes(&attributes, pointer));
  if (device != nullptr) {
    *device = attributes.device;
  }
  return attributes.type;
}

}  // namespace

TEST(registeredMemoryIsPinnedUntilItIsUnregistered) {
  CUDA_OK(cudaSetDevice(3));
  std::vector<char> memory(10001, 'a');
  CHECK_EQ(typeOf(memory.data()), cudaMemoryTypeUnregistered);
  void *device = nullptr;
  unsigned int flags = 0;
  CHECK_EQ(cudaHostGetDevicePointer(&device, memory.data(), 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostGetFlags(&flags, memory.data()), cudaErrorInvalidValue);
  CUDA_OK(cudaHostRegister(memory.data(), memory.size(), kFlags));
  int of = -1;
  CHECK_EQ(typeOf(memory.data() + memory.size() - 1, &of), cudaMemoryTypeHost);
  CHECK_EQ(of, 3);
  CHECK_EQ(typeOf(memory.data() + memory.size()), cudaMemoryTypeUnregistered);
  CUDA_OK(cudaHostGetDevicePointer(&device, memory.data() + 5, 0));
  CHECK_EQ(device, static_cast<void *>(memory.data() + 5));
  CHECK_EQ(cudaHostGetDevicePointer(&device, memory.data(), 1), cudaErrorInvalidValue);
  CUDA_OK(cudaHostGetFlags(&flags, memory.data()));
  CHECK_EQ(flags, kFlags);
  // The end of registered memory is an end, as that of an allocation.
  auto *there = deviceArray<char>(memory.size() + 1);
  CHECK_EQ(cudaMemcpy(there, memory.data(), memory.size() + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CUDA_OK(cudaMemcpy(there, memory.data(), memory.size(), cudaMemcpyHostToDevice));
  CHECK(toHost(there, memory.size()) == memory);
  CUDA_OK(cudaHostUnregister(memory.data()));
  CHECK_EQ(typeOf(memory.data()), cudaMemoryTypeUnregistered);
  CHECK_EQ(memory[17], 'a');  // still the caller's
  CUDA_OK(cudaFree(there));
}

TEST(copiesFromRegisteredMemoryAreAsynchronous) {
  std::vector<int> memory(1000, 7);
  CUDA_OK(cudaHostRegister(memory.data(), memory.size() * sizeof(int), kFlags));
  auto *there = deviceArray<int>(memory.size());
  const cudaStream_t stream = newStream();
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaMemcpyAsync(there, memory.data(), memory.size() * sizeof(int), cudaMemcpyHostToDevice, stream));
  std::fill(memory.begin(), memory.end(), 8);  // pageable memory would have been staged
  gate.open();
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(toHost(there, memory.size()) == memory);
  CUDA_OK(cudaHostUnregister(memory.data()));
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaFree(there));
}

TEST(unregisteringWaitsForWhatUsesTheMemory) {
  std::vector<char> memory(100, 'x');
  CUDA_OK(cudaHostRegister(memory.data(), memory.size(), kFlags));
  auto *there = deviceArray<char>(memory.size());
  const cudaStream_t stream = newStream();
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaMemcpyAsync(memory.data(), there, memory.size(), cudaMemcpyDeviceToHost, stream));
  CHECK(waitsForGate(&gate, [&] { CUDA_OK(cudaHostUnregister(memory.data())); }));
  CUDA_OK(cudaStreamQuery(stream));
  CHECK_EQ(memory[99], '\0');
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaFree(there));
}

TEST(registrationRefusesWhatOverlapsAndWhatIsNoHostMemory) {
  std::vector<char> memory(1000);
  char *start = memory.data();
  CUDA_OK(cudaHostRegister(start + 100, 100, 0));
  for (const auto &range : {std::pair(100, 100), {150, 10}, {0, 101}, {199, 1}, {199, 100}, {0, 1000}}) {
    CHECK_EQ_IN(cudaHostRegister(start + range.first, static_cast<size_t>(range.second), 0),
                cudaErrorHostMemoryAlreadyRegistered, std::to_string(range.first));
  }
  CUDA_OK(cudaHostRegister(start, 100, 0));
  CUDA_OK(cudaHostRegister(start + 200, 800, 0));
  CUDA_OK(cudaHostUnregister(start + 100));
  CHECK_EQ(cudaHostUnregister(start + 100), cudaErrorHostMemoryNotRegistered);
  CHECK_EQ(cudaHostUnregister(start + 201), cudaErrorHostMemoryNotRegistered);
  CHECK_EQ(cudaHostUnregister(nullptr), cudaErrorInvalidValue);
  CHECK_EQ(cudaFreeHost(start), cudaErrorInvalidValue);
  CUDA_OK(cudaHostUnregister(start));
  CUDA_OK(cudaHostUnregister(start + 200));

  CHECK_EQ(cudaHostRegister(nullptr, 100, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(start, 0, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(start, SIZE_MAX, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(start, 100, 0x10), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(start, 100, cudaHostRegisterReadOnly), cudaErrorNotSupported);
  CHECK_EQ(cudaHostRegister(start, 100, cudaHostRegisterIoMemory), cudaErrorNotSupported);
  auto *device = deviceArray<char>(100);
  CHECK_EQ(cudaHostRegister(device, 100, 0), cudaErrorInvalidValue);
  CUDA_OK(cudaFree(device));
  void *pinned = nullptr;
  CUDA_OK(cudaHostAlloc(&pinned, 100, cudaHostAllocPortable));
  CHECK_EQ(cudaHostRegister(pinned, 100, 0), cudaErrorHostMemoryAlreadyRegistered);
  CHECK_EQ(cudaHostUnregister(pinned), cudaErrorHostMemoryNotRegistered);
  unsigned int flags = 0;
  CUDA_OK(cudaHostGetFlags(&flags, pinned));
  CHECK_EQ(flags, cudaHostAllocPortable | cudaHostAllocMapped);
  CUDA_OK(cudaFreeHost(pinned));
  CHECK_EQ(cudaHostAlloc(&pinned, 100, 0x10), cudaErrorInvalidValue);

  const size_t page = 4096;
  void *pages = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(pages != MAP_FAILED);
  CHECK_EQ(munmap(static_cast<char *>(pages) + page, page), 0);
  CHECK_EQ(cudaHostRegister(pages, 2 * page, 0), cudaErrorInvalidValue);
  CUDA_OK(cudaHostRegister(pages, page, 0));
  CUDA_OK(cudaHostUnregister(pages));
  CHECK_EQ(munmap(pages, page), 0);
}

TEST(registrationsComeAndGoOnManyThreads) {
  std::vector<char> memory(4 * 1000);
  // Starts what then lives as long as the process: the heap, the default stream, a sanitizer's thread.
  (void)toHost(deviceArray<char>(1), 1);
  const Resources before = Resources::now();
  onThreads(4, [&](int thread) {
    char *own = memory.data() + 1000 * thread;
    for (int i = 0; i < 500; ++i) {
      CUDA_OK(cudaHostRegister(own, 1000, kFlags));
      CHECK_EQ(typeOf(own + 999), cudaMemoryTypeHost);
      CUDA_OK(cudaHostUnregister(own));
    }
  });
  before.expectAtMost({0, 0});
}

// The table of pinned blocks, and the exported cudaHost* functions.
#include "pinned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "abi.h"
#include "capture.h"
#include "device.h"
#include "error.h"
#include "memory.h"
#include "stream.h"

namespace ncclffm::cpu {

namespace {

struct PinnedTable {
  std::mutex mutex;
  std::map<uintptr_t, PinnedBlock> blocks;  // by address; they do not overlap
};

PinnedTable &pinned() {
  static auto *table = new PinnedTable;  // leaked, as every table of the backend
  return *table;
}

uint64_t pageBytes() {
  return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

/// Whether every page of the range is mapped in this process.
bool isMapped(uintptr_t start, uint64_t bytes) {
  const uintptr_t page = start / pageBytes() * pageBytes();
  // With MS_ASYNC the call only looks the pages up.
  return msync(reinterpret_cast<void *>(page), start - page + bytes, MS_ASYNC) == 0;
}

/// Takes the block with this start and origin out of the table when the device has done what uses it; false when there
/// is none.
bool remove(void *pointer, bool registered) {
  const std::optional<PinnedBlock> block = findPinned(pointer);
  if (!block || block->registered != registered || block->start != reinterpret_cast<uintptr_t>(pointer)) {
    return false;
  }
  (void)synchronizeDevice(block->device);  // a failed stream keeps its own error
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().blocks.erase(block->start) != 0;
}

}  // namespace

std::optional<PinnedBlock> findPinned(const void *pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  const auto next = pinned().blocks.upper_bound(address);
  if (next == pinned().blocks.begin()) {
    return std::nullopt;
  }
  const PinnedBlock &block = std::prev(next)->second;
  return address - block.start < block.bytes ? std::optional(block) : std::nullopt;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
  return guardCuda([&] {
    constexpr unsigned int kKnown = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if (pointer == nullptr || (flags & ~kKnown) != 0) {
      return cudaErrorInvalidValue;
    }
    *pointer = nullptr;
    if (bytes == 0) {
      return cudaSuccess;
    }
    const cudaError_t captures = checkUnsafeCall();
    if (captures != cudaSuccess) {
      return captures;
    }
    void *memory = nullptr;
    if (posix_memalign(&memory, pageBytes(), bytes) != 0) {
      return cudaErrorMemoryAllocation;
    }
    const auto start = reinterpret_cast<uintptr_t>(memory);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks[start] = {start, bytes, currentDevice(), flags, false};
    *pointer = memory;
    return cudaSuccess;
  });
}

// Waits for the device that was current at the allocation, as CUDA does, so that no copy still uses the memory.
cudaError_t cudaFreeHost(void *pointer) {
  return guardCuda([&] {
    if (pointer == nullptr) {
      return cudaSuccess;
    }
    if (onStreamWorker()) {
      return cudaErrorNotPermitted;
    }
    const cudaError_t captures = checkUnsafeCall();
    if (captures != cudaSuccess) {
      return captures;
    }
    if (!remove(pointer, false)) {
      return cudaErrorInvalidValue;
    }
    std::free(pointer);
    return cudaSuccess;
  });
}

// What the emulated devices lack (cudaHostRegisterReadOnly, cudaHostRegisterIoMemory) they say they do not support.
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
  return guardCuda([&] {
    constexpr unsigned int kKnown =
        cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;
    const auto start = reinterpret_cast<uintptr_t>(pointer);
    if (pointer == nullptr || bytes == 0 || bytes > UINTPTR_MAX - start || (flags & ~kKnown) != 0) {
      return cudaErrorInvalidValue;
    }
    if ((flags & (cudaHostRegisterIoMemory | cudaHostRegisterReadOnly)) != 0) {
      return cudaErrorNotSupported;
    }
    if (isDeviceMemory(pointer) || !isMapped(start, bytes)) {
      return cudaErrorInvalidValue;
    }
    std::lock_guard<std::mutex> lock(pinned().mutex);
    // The last block that starts before the end of the range is the only one that can reach into it.
    const auto next = pinned().blocks.lower_bound(start + bytes);
    if (next != pinned().blocks.begin()) {
      const PinnedBlock &before = std::prev(next)->second;
      if (before.start + before.bytes > start) {
        return cudaErrorHostMemoryAlreadyRegistered;
      }
    }
    pinned().blocks[start] = {start, bytes, currentDevice(), flags, true};
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void *pointer) {
  return guardCuda([&] {
    if (pointer == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (onStreamWorker()) {
      return cudaErrorNotPermitted;
    }
    return remove(pointer, true) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
  });
}

// With unified addressing all pinned memory is mapped, asked for or not.
cudaError_t cudaHostGetFlags(unsigned int *flags, void *host) {
  return guardCuda([&] {
    const std::optional<PinnedBlock> block = findPinned(host);
    if (flags == nullptr || !block) {
      return cudaErrorInvalidValue;
    }
    *flags = block->flags | cudaHostAllocMapped;
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags) {
  return guardCuda([&] {
    if (device == nullptr || flags != 0 || !findPinned(host)) {
      return cudaErrorInvalidValue;
    }
    *device = host;
    return cudaSuccess;
  });
}

// Device memory, copies and fills.
#include "memory.h"

#include <cstring>

#include "abi.h"
#include "capture.h"
#include "device.h"
#include "error.h"
#include "heap.h"
#include "ipc.h"
#include "pinned.h"
#include "process.h"
#include "stream.h"

namespace ncclffm::cpu {

namespace {

constexpr uint64_t kPage = 4096;

enum class Residence { kDevice, kPinned, kPageable, kBadRange };

struct Place {
  Residence residence;
  int device;
};

/// Where a range lies. kBadRange: it starts in memory that the backend knows and leaves its allocation, or was freed.
Place locate(const void *pointer, uint64_t bytes) {
  if (Heap::instance().contains(pointer)) {
    const std::optional<Allocation> allocation = Heap::instance().find(pointer);
    if (!allocation) {
      return {Residence::kBadRange, 0};
    }
    const auto start = static_cast<uint64_t>(static_cast<const char *>(pointer) - Heap::instance().base());
    const bool inside = bytes <= allocation->offset + allocation->bytes - start;
    return {inside ? Residence::kDevice : Residence::kBadRange, allocation->device};
  }
  if (const std::optional<IpcMemory> memory = findIpcMemory(pointer)) {
    const auto start = static_cast<uint64_t>(static_cast<const char *>(pointer) - memory->base);
    return {bytes <= memory->bytes - start ? Residence::kDevice : Residence::kBadRange, memory->device};
  }
  if (Mapping::anyContains(pointer, bytes)) {
    return {Residence::kDevice, currentDevice()};  // a peer process's memory, reached through a window
  }
  if (const std::optional<PinnedBlock> block = findPinned(pointer)) {
    const uint64_t start = reinterpret_cast<uintptr_t>(pointer) - block->start;
    return {bytes <= block->bytes - start ? Residence::kPinned : Residence::kBadRange, block->device};
  }
  return {Residence::kPageable, 0};
}

/// Pinned host memory counts as either side: it is mapped into the devices at the same address.
bool fits(Residence residence, bool device) {
  return residence == Residence::kPinned || residence == (device ? Residence::kDevice : Residence::kPageable);
}

struct Copy {
  Residence to;
  Residence from;
};

cudaError_t checkCopy(const void *to, const void *from, uint64_t bytes, cudaMemcpyKind kind, Copy *copy) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return cudaErrorInvalidMemcpyDirection;
  }
  if (to == nullptr || from == nullptr) {
    return cudaErrorInvalidValue;
  }
  *copy = {locate(to, bytes).residence, locate(from, bytes).residence};
  if (copy->to == Residence::kBadRange || copy->from == Residence::kBadRange) {
    return cudaErrorInvalidValue;
  }
  const bool toDevice = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool fromDevice = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind != cudaMemcpyDefault && (!fits(copy->to, toDevice) || !fits(copy->from, fromDevice))) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

std::function<cudaError_t()> copyWork(void *to, const void *from, uint64_t bytes) {
  return [to, from, bytes] {
    std::memmove(to, from, bytes);
    return cudaSuccess;
  };
}

/// Appends and waits: what CUDA does when a side is pageable and cannot be read or written later.
cudaError_t runAndWait(const std::shared_ptr<Stream> &stream, std::function<cudaError_t()> work) {
  if (onStreamWorker()) {
    return cudaErrorNotPermitted;
  }
  const cudaError_t captured = checkNotCaptured(stream);
  if (captured != cudaSuccess) {
    return captured;
  }
  const std::optional<Ticket> ticket = append(stream, Work{std::move(work)});
  return ticket ? stream->wait(ticket->number) : cudaErrorInvalidResourceHandle;
}

cudaError_t allocate(void **pointer, size_t bytes, uint64_t alignment, AllocatedBy by) {
  if (pointer == nullptr) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t captures = checkUnsafeCall();
  if (captures != cudaSuccess) {
    return captures;
  }
  *pointer = bytes == 0 ? nullptr : Heap::instance().allocate(currentDevice(), bytes, alignment, by);
  return bytes == 0 || *pointer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

/// As cudaFree: waits for the device first, so that nothing enqueued earlier touches memory that is gone.
cudaError_t release(void *pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const std::optional<Allocation> allocation = Heap::instance().find(pointer);
  if (!allocation) {
    return cudaErrorInvalidValue;
  }
  if (onStreamWorker()) {
    return cudaErrorNotPermitted;
  }
  const cudaError_t captures = checkUnsafeCall();
  if (captures != cudaSuccess) {
    return captures;
  }
  (void)synchronizeDevice(allocation->device);  // a failed stream keeps its own error; the memory goes all the same
  return Heap::instance().release(pointer) ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

bool isDeviceMemory(const void *pointer) {
  const Residence residence = locate(pointer, 1).residence;
  return residence == Residence::kDevice || residence == Residence::kBadRange;
}

bool isDeviceVisible(const void *pointer, uint64_t bytes) {
  const Residence residence = locate(pointer, bytes).residence;
  return residence == Residence::kDevice || residence == Residence::kPinned;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  return guardCuda([&] { return allocate(pointer, bytes, 512, AllocatedBy::kCudaMalloc); });
}

cudaError_t cudaFree(void *pointer) {
  return guardCuda([&] { return release(pointer); });
}

ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
  return guardNccl("ncclMemAlloc", [&] {
    if (pointer == nullptr) {
      return failNccl(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL");
    }
    if (allocate(pointer, bytes, kPage, AllocatedBy::kNcclMemAlloc) != cudaSuccess) {
      return failNccl(ncclUnhandledCudaError, format("ncclMemAlloc: no %zu bytes of device memory left", bytes));
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclMemFree(void *pointer) {
  return guardNccl("ncclMemFree", [&] {
    const cudaError_t error = release(pointer);
    return error == cudaSuccess ? ncclSuccess
                                : failNccl(ncclUnhandledCudaError, format("ncclMemFree: %p is not an allocation (%s)",
                                                                          pointer, cudaGetErrorName(error)));
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  return guardCuda([&] {
    if (attributes == nullptr || pointer == nullptr) {
      return cudaErrorInvalidValue;
    }
    const Place place = locate(pointer, 1);
    void *address = const_cast<void *>(pointer);
    *attributes = cudaPointerAttributes();
    switch (place.residence) {
      case Residence::kDevice:
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = place.device;
        attributes->devicePointer = address;
        return cudaSuccess;
      case Residence::kPinned:
        attributes->type = cudaMemoryTypeHost;
        attributes->device = place.device;
        attributes->devicePointer = address;
        attributes->hostPointer = address;
        return cudaSuccess;
      case Residence::kPageable:
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;  // cudaInvalidDeviceId
        attributes->hostPointer = address;
        return cudaSuccess;
      case Residence::kBadRange:
        return cudaErrorInvalidValue;
    }
    return cudaErrorUnknown;
  });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  return guardCuda([&] {
    if (bytes == 0) {
      return cudaSuccess;
    }
    Copy copy;
    cudaError_t error = checkCopy(to, from, bytes, kind, &copy);
    error = error != cudaSuccess ? error : checkUnsafeCall();
    return error != cudaSuccess ? error : runAndWait(findStream(nullptr, currentDevice()), copyWork(to, from, bytes));
  });
}

// A pageable source is staged before the call returns, a pageable target is complete when it returns; everything else
// is asynchronous.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (bytes == 0) {
      return cudaSuccess;
    }
    Copy copy;
    const cudaError_t error = checkCopy(to, from, bytes, kind, &copy);
    if (error != cudaSuccess) {
      return error;
    }
    if (copy.to == Residence::kPageable) {
      return runAndWait(stream, copyWork(to, from, bytes));
    }
    std::function<cudaError_t()> work = copyWork(to, from, bytes);
    if (copy.from == Residence::kPageable) {
      const cudaError_t captured = checkNotCaptured(stream);  // the memory may be gone at a replay
      if (captured != cudaSuccess) {
        return captured;
      }
      std::shared_ptr<char[]> staged(new char[bytes]);
      std::memcpy(staged.get(), from, bytes);
      work = [to, staged, bytes] {
        std::memcpy(to, staged.get(), bytes);
        return cudaSuccess;
      };
    }
    return enqueue(stream, std::move(work));
  });
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
  return guardCuda([&] {
    const cudaError_t captures = checkUnsafeCall();
    return captures != cudaSuccess ? captures : cudaMemsetAsync(pointer, value, bytes, nullptr);
  });
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (bytes == 0) {
      return cudaSuccess;
    }
    if (pointer == nullptr || !fits(locate(pointer, bytes).residence, true)) {
      return cudaErrorInvalidValue;
    }
    return enqueue(stream, [pointer, value, bytes] {
      std::memset(pointer, value, bytes);
      return cudaSuccess;
    });
  });
}

// CUDA IPC: a handle names a process, the descriptor of its heap and an allocation in it; opening one maps the
// allocation through /proc/PID/fd, which the system allows to processes of the same user.
#include "ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "abi.h"
#include "device.h"
#include "error.h"
#include "fd.h"
#include "heap.h"
#include "stream.h"
#include "topology.h"

namespace ncclffm::cpu {

namespace {

constexpr uint32_t kMagic = 0x43504946;  // "FIPC"

/// What is in the bytes of a cudaIpcMemHandle_t.
struct Record {
  uint32_t magic;
  int32_t pid;
  uint64_t startTime;  // of the process: a pid may be given again
  int32_t fd;          // of the heap, in that process
  int32_t device;
  uint64_t inode;  // of the heap
  uint64_t offset;
  uint64_t bytes;
  uint64_t serial;  // of the allocation: memory at the same place that was allocated later has another handle
  uint64_t checksum;
};
static_assert(sizeof(Record) == sizeof(cudaIpcMemHandle_t), "a handle has no room to spare");

/// FNV-1a over all that stands before the checksum.
uint64_t checksumOf(const Record &record) {
  unsigned char bytes[offsetof(Record, checksum)];
  std::memcpy(bytes, &record, sizeof(bytes));
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : bytes) {
    hash = (hash ^ byte) * 0x100000001b3u;
  }
  return hash;
}

/// When a process was started, in clock ticks since boot; nothing if there is no such process.
std::optional<uint64_t> startTimeOf(int pid) {
  const Fd file(open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t length = file.open() ? read(file.get(), text, sizeof(text) - 1) : -1;
  if (length <= 0) {
    return std::nullopt;
  }
  text[length] = '\0';
  // The second field is a name in parentheses that may hold anything; the start time is the 22nd.
  const char *field = std::strrchr(text, ')');
  for (int number = 2; field != nullptr && number < 22; ++number) {
    field = std::strchr(field + 1, ' ');
  }
  unsigned long long ticks = 0;
  return field != nullptr && std::sscanf(field, "%llu", &ticks) == 1 ? std::optional<uint64_t>(ticks) : std::nullopt;
}

struct Opened {
  Record record;
  void *mapped;  // whole pages around the memory
  uint64_t mappedBytes;
  uint64_t count;
};

struct IpcTable {
  std::mutex mutex;
  std::map<uintptr_t, Opened> opened;  // by address of the memory
};

IpcTable &ipcTable() {
  static auto *table = new IpcTable;  // leaked, as every table of the backend
  return *table;
}

std::optional<uint64_t> inodeOf(int fd, uint64_t *bytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) {
    return std::nullopt;
  }
  *bytes = static_cast<uint64_t>(status.st_size);
  return static_cast<uint64_t>(status.st_ino);
}

/// Maps what an intact record of another process names.
cudaError_t map(const Record &record, Opened *opened, uintptr_t *address) {
  if (startTimeOf(record.pid) != record.startTime) {
    return cudaErrorInvalidValue;  // that process has ended, or is of another pid namespace
  }
  const std::string path = "/proc/" + std::to_string(record.pid) + "/fd/" + std::to_string(record.fd);
  const Fd heap(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!heap.open()) {
    return cudaErrorMapBufferObjectFailed;
  }
  uint64_t heapBytes = 0;
  if (inodeOf(heap.get(), &heapBytes) != record.inode || record.bytes > heapBytes ||
      record.offset > heapBytes - record.bytes) {
    return cudaErrorInvalidValue;
  }
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t from = record.offset / page * page;
  const uint64_t length = record.offset - from + record.bytes;
  void *mapped =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, heap.get(), static_cast<off_t>(from));
  if (mapped == MAP_FAILED) {
    return cudaErrorMapBufferObjectFailed;
  }
  madvise(mapped, length, MADV_DONTDUMP);
  *opened = {record, mapped, length, 0};
  *address = reinterpret_cast<uintptr_t>(mapped) + (record.offset - from);
  return cudaSuccess;
}

cudaError_t openRecord(const Record &record, void **pointer) {
  if (record.magic != kMagic || record.checksum != checksumOf(record)) {
    return cudaErrorInvalidValue;
  }
  static const std::optional<uint64_t> ownStart = startTimeOf(getpid());
  if (record.pid == getpid() && record.startTime == ownStart) {
    return cudaErrorDeviceUninitialized;  // what CUDA says of memory of the same process
  }
  if (record.device != currentDevice() && !canAccessPeer(currentDevice(), record.device)) {
    return cudaErrorPeerAccessUnsupported;
  }
  std::lock_guard<std::mutex> lock(ipcTable().mutex);
  for (auto &entry : ipcTable().opened) {
    if (std::memcmp(&entry.second.record, &record, sizeof(record)) == 0) {
      ++entry.second.count;
      *pointer = reinterpret_cast<void *>(entry.first);
      return cudaSuccess;
    }
  }
  Opened opened;
  uintptr_t address = 0;
  const cudaError_t error = map(record, &opened, &address);
  if (error == cudaSuccess) {
    opened.count = 1;
    ipcTable().opened[address] = opened;
    *pointer = reinterpret_cast<void *>(address);
  }
  return error;
}

}  // namespace

std::optional<IpcMemory> findIpcMemory(const void *pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(ipcTable().mutex);
  const auto next = ipcTable().opened.upper_bound(address);
  if (next == ipcTable().opened.begin()) {
    return std::nullopt;
  }
  const auto &[base, opened] = *std::prev(next);
  if (address - base >= opened.record.bytes) {
    return std::nullopt;
  }
  return IpcMemory{reinterpret_cast<const char *>(base), opened.record.bytes, opened.record.device};
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

// An address inside an allocation gives the handle of the whole, as with CUDA. Memory of ncclMemAlloc comes from CUDA's
// virtual memory management, which has handles of another kind.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
  return guardCuda([&] {
    const std::optional<Allocation> allocation = Heap::instance().find(pointer);
    if (handle == nullptr || !allocation || allocation->by != AllocatedBy::kCudaMalloc) {
      return cudaErrorInvalidValue;
    }
    const std::optional<uint64_t> startTime = startTimeOf(getpid());
    uint64_t heapBytes = 0;
    const std::optional<uint64_t> inode = inodeOf(Heap::instance().fd(), &heapBytes);
    if (!startTime || !inode) {
      return cudaErrorMapBufferObjectFailed;
    }
    Record record = {kMagic, getpid(),           *startTime,        Heap::instance().fd(), allocation->device,
                     *inode, allocation->offset, allocation->bytes, allocation->serial,    0};
    record.checksum = checksumOf(record);
    std::memcpy(handle->reserved, &record, sizeof(record));
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags) {
  return guardCuda([&] {
    if (pointer == nullptr || flags != cudaIpcMemLazyEnablePeerAccess) {
      return cudaErrorInvalidValue;
    }
    Record record;
    std::memcpy(&record, handle.reserved, sizeof(record));
    return openRecord(record, pointer);
  });
}

// Waits for the current device first, so that nothing enqueued earlier touches memory that is gone.
cudaError_t cudaIpcCloseMemHandle(void *pointer) {
  return guardCuda([&] {
    if (onStreamWorker()) {
      return cudaErrorNotPermitted;
    }
    const std::optional<IpcMemory> memory = findIpcMemory(pointer);
    if (!memory || memory->base != pointer) {
      return cudaErrorInvalidValue;
    }
    (void)synchronizeDevice(currentDevice());  // a failed stream keeps its own error
    std::lock_guard<std::mutex> lock(ipcTable().mutex);
    const auto found = ipcTable().opened.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == ipcTable().opened.end()) {
      return cudaErrorInvalidValue;
    }
    if (--found->second.count == 0) {
      munmap(found->second.mapped, found->second.mappedBytes);
      ipcTable().opened.erase(found);
    }
    return cudaSuccess;
  });
}

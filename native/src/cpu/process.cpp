// Mappings by inode, peers' heaps, lifelines.
#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "error.h"
#include "heap.h"

namespace ncclffm::cpu {

namespace {

using FileKey = std::pair<dev_t, ino_t>;

struct MappingTable {
  std::mutex mutex;
  std::map<FileKey, std::weak_ptr<Mapping>> byFile;
};

MappingTable &mappingTable() {
  static auto *table = new MappingTable;  // leaked: used by detached threads
  return *table;
}

struct stat statOf(const Fd &fd) {
  struct stat status;
  if (fstat(fd.get(), &status) != 0) {
    throw NcclFailure(ncclSystemError, "fstat of shared memory" + systemReason());
  }
  return status;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::of(Fd fd) {
  const struct stat status = statOf(fd);
  MappingTable &table = mappingTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  for (auto entry = table.byFile.begin(); entry != table.byFile.end();) {
    entry = entry->second.expired() ? table.byFile.erase(entry) : std::next(entry);
  }
  std::weak_ptr<Mapping> &known = table.byFile[FileKey(status.st_dev, status.st_ino)];
  std::shared_ptr<Mapping> mapping = known.lock();
  if (mapping == nullptr) {
    const auto bytes = static_cast<uint64_t>(status.st_size);
    void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
    if (base == MAP_FAILED) {
      throw NcclFailure(ncclSystemError,
                        format("mapping %zu bytes of shared memory", static_cast<size_t>(bytes)) + systemReason());
    }
    madvise(base, bytes, MADV_DONTDUMP);
    mapping = std::shared_ptr<Mapping>(new Mapping(static_cast<char *>(base), bytes));
    known = mapping;
  }
  return mapping;
}

bool Mapping::anyContains(const void *pointer, uint64_t bytes) {
  MappingTable &table = mappingTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (const auto &entry : table.byFile) {
    if (std::shared_ptr<Mapping> mapping = entry.second.lock()) {
      const auto base = reinterpret_cast<uintptr_t>(mapping->base());
      if (address >= base && bytes <= mapping->bytes() && address - base <= mapping->bytes() - bytes) {
        return true;
      }
    }
  }
  return false;
}

Mapping::~Mapping() {
  munmap(base_, bytes_);
}

PeerProcess PeerProcess::open(Fd heap, Fd lifeline, int pid) {
  PeerProcess process;
  process.pid = pid;
  struct stat own;
  if (fstat(Heap::instance().fd(), &own) != 0) {
    throw NcclFailure(ncclSystemError, "fstat of the heap" + systemReason());
  }
  const struct stat peer = statOf(heap);
  if (peer.st_dev == own.st_dev && peer.st_ino == own.st_ino) {
    process.heapBase = Heap::instance().base();
    process.heapBytes = Heap::instance().bytes();
    return process;
  }
  process.heap = Mapping::of(std::move(heap));
  process.heapBase = process.heap->base();
  process.heapBytes = process.heap->bytes();
  process.lifeline = std::move(lifeline);
  return process;
}

bool PeerProcess::dead() const {
  if (!lifeline.open()) {
    return false;
  }
  pollfd line = {lifeline.get(), 0, 0};
  return poll(&line, 1, 0) == 1 && (line.revents & POLLHUP) != 0;
}

int lifelineFd() {
  static const int readEnd = [] {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      throw NcclFailure(ncclSystemError, "creating a pipe" + systemReason());
    }
    return ends[0];
  }();
  return readEnd;
}

}  // namespace ncclffm::cpu

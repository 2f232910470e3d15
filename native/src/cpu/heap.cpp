// The allocator over the heap's memfd.
#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace ncclffm::cpu {

namespace {

// cudaMalloc's own alignment is at least 256; 512 keeps neighbours of odd sizes apart.
constexpr uint64_t kUnit = 512;

// The address range is as long as the machine's memory: more could never be backed.
uint64_t heapBytes() {
  const uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  constexpr uint64_t kGranule = 2u << 20;
  return std::max(memory, kGranule) / kGranule * kGranule;
}

uint64_t roundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Heap &Heap::instance() {
  static auto *heap = new Heap;  // leaked: stream workers may touch it until the process is gone
  return *heap;
}

Heap::Heap() : fd_(memfd_create("ncclffm-heap", MFD_CLOEXEC)), bytes_(heapBytes()) {
  if (!fd_.open() || ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) {
    throw std::bad_alloc();
  }
  void *mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw std::bad_alloc();
  }
  // Emulated device memory may be most of the machine's: it has no place in core dumps.
  madvise(mapped, bytes_, MADV_DONTDUMP);
  base_ = static_cast<char *>(mapped);
  free_[0] = bytes_;
}

void *Heap::allocate(int device, uint64_t bytes, uint64_t alignment, AllocatedBy by) {
  alignment = std::max(alignment, kUnit);
  if (bytes > bytes_) {
    return nullptr;
  }
  const uint64_t reserved = roundUp(bytes, alignment);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const uint64_t from = range->first;
    const uint64_t to = from + range->second;
    const uint64_t offset = roundUp(from, alignment);
    if (offset + reserved > to) {
      continue;
    }
    used_[offset] = Block{Allocation{offset, bytes, device, by, ++allocations_}, reserved};
    free_.erase(range);
    if (offset > from) {
      free_[from] = offset - from;
    }
    if (offset + reserved < to) {
      free_[offset + reserved] = to - offset - reserved;
    }
    return base_ + offset;
  }
  return nullptr;
}

bool Heap::release(void *pointer) {
  if (!contains(pointer)) {
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(static_cast<uint64_t>(static_cast<char *>(pointer) - base_));
  if (found == used_.end()) {
    return false;
  }
  uint64_t from = found->first;
  uint64_t to = from + found->second.reserved;
  used_.erase(found);
  auto next = free_.lower_bound(from);
  if (next != free_.end() && next->first == to) {
    to += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == from) {
      from = previous->first;
      free_.erase(previous);
    }
  }
  free_[from] = to - from;
  punch(from, to);
  return true;
}

std::optional<Allocation> Heap::find(const void *pointer) const {
  if (!contains(pointer)) {
    return std::nullopt;
  }
  const auto offset = static_cast<uint64_t>(static_cast<const char *>(pointer) - base_);
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = used_.upper_bound(offset);
  if (next == used_.begin()) {
    return std::nullopt;
  }
  const Allocation &allocation = std::prev(next)->second.allocation;
  if (offset >= allocation.offset + allocation.bytes) {
    return std::nullopt;
  }
  return allocation;
}

uint64_t Heap::freeBytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t total = 0;
  for (const auto &range : free_) {
    total += range.second;
  }
  return total;
}

// Gives the whole pages of a free range back. Failure only keeps the memory, so it is not an error.
void Heap::punch(uint64_t from, uint64_t to) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  from = roundUp(from, page);
  to = to / page * page;
  if (from < to) {
    (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from),
                    static_cast<off_t>(to - from));
  }
}

}  // namespace ncclffm::cpu

// Emulated device memory: one sparse memfd per process. A peer process maps the whole of it once, so that any device
// pointer is (process, offset) and collectives, windows and copies reach peers' memory directly.
#ifndef NCCLFFM_CPU_HEAP_H_
#define NCCLFFM_CPU_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "fd.h"

namespace ncclffm::cpu {

enum class AllocatedBy { kCudaMalloc, kNcclMemAlloc };

struct Allocation {
  uint64_t offset;  // from the start of the heap
  uint64_t bytes;   // as asked for
  int device;
  AllocatedBy by;
  uint64_t serial;  // counts the allocations of this process
};

/// Thread-safe. Addresses are cut first fit and returned to the system page by page when freed.
class Heap {
 public:
  /// The heap of this process, created on first use; throws std::bad_alloc when the system refuses.
  static Heap &instance();

  /// Null when no free range is long enough. bytes > 0; alignment is a power of two.
  void *allocate(int device, uint64_t bytes, uint64_t alignment, AllocatedBy by);

  /// False when the pointer is not the start of an allocation.
  bool release(void *pointer);

  /// The allocation that holds the address, if any.
  std::optional<Allocation> find(const void *pointer) const;

  bool contains(const void *pointer) const { return pointer >= base_ && pointer < base_ + bytes_; }
  char *base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t freeBytes() const;
  int fd() const { return fd_.get(); }

 private:
  Heap();

  void punch(uint64_t from, uint64_t to);

  Fd fd_;
  char *base_;
  uint64_t bytes_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes, neighbours always merged
  struct Block {
    Allocation allocation;
    uint64_t reserved;  // bytes taken from the heap
  };
  std::map<uint64_t, Block> used_;  // by offset
  uint64_t allocations_ = 0;        // so far
};

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_HEAP_H_

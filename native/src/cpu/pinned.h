// Pinned host memory: allocated by cudaHostAlloc, or the caller's own and registered. Mapped into every device at its
// own address.
#ifndef NCCLFFM_CPU_PINNED_H_
#define NCCLFFM_CPU_PINNED_H_

#include <cstdint>
#include <optional>

namespace ncclffm::cpu {

struct PinnedBlock {
  uintptr_t start;
  uint64_t bytes;
  int device;          // current when it was allocated or registered
  unsigned int flags;  // as given; cudaHostAlloc's and cudaHostRegister's have the same values
  bool registered;     // the caller's memory, not to be freed here
};

/// The block that holds the address, if any. Thread-safe.
std::optional<PinnedBlock> findPinned(const void *pointer);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_PINNED_H_

// What kinds of memory the backend tells apart.
#ifndef NCCLFFM_CPU_MEMORY_H_
#define NCCLFFM_CPU_MEMORY_H_

#include <cstdint>

namespace ncclffm::cpu {

/// Whether the address is one of device memory, in an allocation or not.
bool isDeviceMemory(const void *pointer);

/// Whether a range is device memory or pinned host memory, within one allocation.
bool isDeviceVisible(const void *pointer, uint64_t bytes);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_MEMORY_H_

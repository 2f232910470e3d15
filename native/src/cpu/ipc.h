// Device memory of other processes, opened through a handle.
#ifndef NCCLFFM_CPU_IPC_H_
#define NCCLFFM_CPU_IPC_H_

#include <cstdint>
#include <optional>

namespace ncclffm::cpu {

struct IpcMemory {
  const char *base;  // as mapped here
  uint64_t bytes;
  int device;  // of the process that allocated it
};

/// The opened allocation that holds the address, if any. Thread-safe.
std::optional<IpcMemory> findIpcMemory(const void *pointer);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_IPC_H_

// Fault injection for tests: exported functions that fail, are slow, or write their results late.
//
// The rules come from the environment variable NCCLFFM_CPU_FAULTS, read once, or from ncclFfmCpuSetFaults:
//
//   function:key=value,key=value;function:...
//
// result=CODE   the function returns CODE (an ncclResult_t or cudaError_t) and does nothing else
// after=N       result only from call N + 1 on
// times=N       result at most N times
// delay_ms=N    the function takes N ms longer
// late_ms=N     a non-blocking communicator's call goes on for N ms after it has returned: what it writes, a handle of
// a
//               child or a window, is written late, from another thread
//
// All exported functions that return a result code can be named, but those of the shim, of which every launch of a
// kernel goes by the name ncclFfmLaunch (and fails with a cudaError_t). A symbol cannot be hidden from dlsym; to meet a
// library that is too old, let it claim another version with NCCLFFM_CPU_NCCL_VERSION.
#ifndef NCCLFFM_CPU_FAULT_H_
#define NCCLFFM_CPU_FAULT_H_

#include <optional>

#include "abi.h"

namespace ncclffm::cpu {

/// At the start of every exported function: waits if a rule says so; the code to return instead of doing anything, if
/// any.
std::optional<int> injectedFault(const char *function);

/// How much longer a non-blocking call has to go on in the background, in milliseconds.
int injectedLateness(const char *function);

}  // namespace ncclffm::cpu

/// Replaces all rules; NULL or "" removes them. ncclInvalidArgument, with a text for ncclGetLastError, when the rules
/// cannot be read; then they stay as they were. Thread-safe.
extern "C" NCCLFFM_EXPORT ncclResult_t ncclFfmCpuSetFaults(const char *rules);

#endif  // NCCLFFM_CPU_FAULT_H_

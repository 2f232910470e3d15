// Result codes and texts: CUDA's last error per thread, NCCL's last error text, and the guards that keep C++ exceptions
// inside the C ABI.
#ifndef NCCLFFM_CPU_ERROR_H_
#define NCCLFFM_CPU_ERROR_H_

#include <new>
#include <stdexcept>
#include <string>

#include "abi.h"
#include "fault.h"

namespace ncclffm::cpu {

/// Remembers a failure for cudaGetLastError on this thread and hands it back.
cudaError_t remember(cudaError_t error);

/// Stores the text that ncclGetLastError returns (on this thread, and as the process's latest) and hands the code back.
ncclResult_t failNccl(ncclResult_t code, const std::string &text);

/// The text of this thread's last failure; the process's latest one for a thread that had none, as with NCCL's global
/// buffer. Valid until the thread's next call.
const char *lastNcclText();

/// printf into a std::string.
std::string format(const char *pattern, ...) __attribute__((format(printf, 1, 2)));

/// ": " and the text of errno, for texts about failed system calls.
std::string systemReason();

/// A failure inside the backend that carries the NCCL code it is to be reported with.
struct NcclFailure : std::runtime_error {
  NcclFailure(ncclResult_t resultCode, const std::string &text) : std::runtime_error(text), code(resultCode) {}
  ncclResult_t code;
};

/// Runs the body of an exported cuda* function: remembers its error, turns exceptions into codes. Its name is the
/// caller's.
template <class Body>
cudaError_t guardCuda(Body body, const char *function = __builtin_FUNCTION()) noexcept {
  try {
    const std::optional<int> fault = injectedFault(function);
    return remember(fault ? static_cast<cudaError_t>(*fault) : body());
  } catch (const std::bad_alloc &) {
    return remember(cudaErrorMemoryAllocation);
  } catch (...) {
    return remember(cudaErrorUnknown);
  }
}

/// Runs the body of an exported nccl* function; turns exceptions into codes with a text.
template <class Body>
ncclResult_t guardNccl(const char *function, Body body) noexcept {
  try {
    if (const std::optional<int> fault = injectedFault(function)) {
      return failNccl(static_cast<ncclResult_t>(*fault), std::string(function) + ": injected fault");
    }
    return body();
  } catch (const NcclFailure &failure) {
    return failNccl(failure.code, failure.what());
  } catch (const std::exception &failure) {
    return failNccl(ncclSystemError, std::string(function) + ": " + failure.what());
  } catch (...) {
    return failNccl(ncclInternalError, std::string(function) + ": unknown failure");
  }
}

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_ERROR_H_

// Error names, error texts and the last-error state.
#include "error.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace ncclffm::cpu {

namespace {

// NCCL's own buffer has 1024 bytes.
constexpr size_t kTextBytes = 1024;

struct ErrorText {
  char text[kTextBytes] = "";
};

struct ProcessText : ErrorText {
  std::mutex mutex;
};

// Leaked: threads of the backend may fail while the process runs its static destructors.
ProcessText &processText() {
  static auto *text = new ProcessText;
  return *text;
}

thread_local ErrorText threadText;
thread_local cudaError_t lastCudaError = cudaSuccess;

struct CudaErrorRow {
  cudaError_t code;
  const char *name;
  const char *text;
};

constexpr CudaErrorRow kCudaErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated graph update"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const CudaErrorRow *findCudaError(cudaError_t code) {
  for (const CudaErrorRow &row : kCudaErrors) {
    if (row.code == code) {
      return &row;
    }
  }
  return nullptr;
}

void copyText(ErrorText &to, const char *from) {
  std::snprintf(to.text, sizeof(to.text), "%s", from);
}

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) {
    lastCudaError = error;
  }
  return error;
}

ncclResult_t failNccl(ncclResult_t code, const std::string &text) {
  copyText(threadText, text.c_str());
  std::lock_guard<std::mutex> lock(processText().mutex);
  copyText(processText(), text.c_str());
  return code;
}

std::string format(const char *pattern, ...) {
  char buffer[kTextBytes];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof(buffer), pattern, arguments);
  va_end(arguments);
  return buffer;
}

const char *lastNcclText() {
  if (threadText.text[0] != '\0') {
    return threadText.text;
  }
  thread_local ErrorText copy;
  std::lock_guard<std::mutex> lock(processText().mutex);
  copyText(copy, processText().text);
  return copy.text;
}

std::string systemReason() {
  return std::string(": ") + std::strerror(errno);
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

const char *cudaGetErrorName(cudaError_t error) {
  const CudaErrorRow *row = findCudaError(error);
  return row != nullptr ? row->name : "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
  const CudaErrorRow *row = findCudaError(error);
  return row != nullptr ? row->text : "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = lastCudaError;
  lastCudaError = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) {
  return lastCudaError;
}

const char *ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "timeout";
  }
  return "unknown result code";
}

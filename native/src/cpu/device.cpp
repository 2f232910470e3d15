// Versions, the devices and their properties.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "abi.h"
#include "capture.h"
#include "error.h"
#include "heap.h"
#include "stream.h"
#include "topology.h"

namespace ncclffm::cpu {

namespace {

constexpr int kCudaVersion = 13000;
constexpr int kDefaultDevices = 8;
constexpr int kMostDevices = 1024;

thread_local int current = 0;

/// The environment's number when it lies in [low, high], else the fallback.
int numberFromEnvironment(const char *name, int low, int high, int fallback) {
  const char *text = std::getenv(name);
  if (text == nullptr) {
    return fallback;
  }
  char *end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return end != text && *end == '\0' && value >= low && value <= high ? static_cast<int>(value) : fallback;
}

int processors() {
  const unsigned int count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

bool isDevice(int device) {
  return device >= 0 && device < deviceCount();
}

}  // namespace

int deviceCount() {
  static const int count = numberFromEnvironment("NCCLFFM_CPU_DEVICES", 1, kMostDevices, kDefaultDevices);
  return count;
}

int currentDevice() {
  return current;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaRuntimeGetVersion(int *version) {
  return guardCuda([&] {
    if (version == nullptr) {
      return cudaErrorInvalidValue;
    }
    *version = kCudaVersion;
    return cudaSuccess;
  });
}

cudaError_t cudaDriverGetVersion(int *version) {
  return guardCuda([&] { return cudaRuntimeGetVersion(version); });
}

// NCCLFFM_CPU_NCCL_VERSION makes the backend claim another version, so that tests can meet a library that is too old.
ncclResult_t ncclGetVersion(int *version) {
  return guardNccl("ncclGetVersion", [&] {
    if (version == nullptr) {
      return failNccl(ncclInvalidArgument, "ncclGetVersion: version is NULL");
    }
    *version = numberFromEnvironment("NCCLFFM_CPU_NCCL_VERSION", 1, 999999, kNcclVersion);
    return ncclSuccess;
  });
}

cudaError_t cudaGetDeviceCount(int *count) {
  return guardCuda([&] {
    if (count == nullptr) {
      return cudaErrorInvalidValue;
    }
    *count = deviceCount();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return guardCuda([&] {
    if (!isDevice(device)) {
      return cudaErrorInvalidDevice;
    }
    current = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int *device) {
  return guardCuda([&] {
    if (device == nullptr) {
      return cudaErrorInvalidValue;
    }
    *device = current;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize(void) {
  return guardCuda([&] {
    const cudaError_t captures = checkUnsafeCall();
    return captures != cudaSuccess ? captures : synchronizeDevice(current);
  });
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  return guardCuda([&] {
    if (value == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(device)) {
      return cudaErrorInvalidDevice;
    }
    switch (attribute) {
      case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        return cudaSuccess;
      case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
      case cudaDevAttrMultiProcessorCount:
        *value = processors();
        return cudaSuccess;
      case cudaDevAttrIntegrated:
      case cudaDevAttrCanMapHostMemory:
      case cudaDevAttrConcurrentKernels:
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrCanUseHostPointerForRegisteredMem:
      case cudaDevAttrCooperativeLaunch:
      case cudaDevAttrHostRegisterSupported:
        *value = 1;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;  // the features of the device headers are those of compute capability 9.0
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  return guardCuda([&] {
    if (properties == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(device)) {
      return cudaErrorInvalidDevice;
    }
    *properties = cudaDeviceProp();
    std::snprintf(properties->name, sizeof(properties->name), "nccl-ffm CPU backend, emulated device %d", device);
    fillUuid(device, properties->uuid);
    properties->totalGlobalMem = Heap::instance().bytes();
    return cudaSuccess;
  });
}

// The emulated devices share the machine's memory: what one allocates, every one misses.
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  return guardCuda([&] {
    if (free == nullptr || total == nullptr) {
      return cudaErrorInvalidValue;
    }
    *free = Heap::instance().freeBytes();
    *total = Heap::instance().bytes();
    return cudaSuccess;
  });
}

// Emulated devices.
#ifndef NCCLFFM_CPU_DEVICE_H_
#define NCCLFFM_CPU_DEVICE_H_

namespace ncclffm::cpu {

/// What ncclGetVersion tells by default (X*10000 + Y*100 + Z).
extern const int kNcclVersion;

/// NCCLFFM_CPU_DEVICES as read at the first call, default 8.
int deviceCount();

/// The calling thread's current device, as set by cudaSetDevice; 0 at first.
int currentDevice();

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_DEVICE_H_

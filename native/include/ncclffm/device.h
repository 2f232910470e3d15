// The device library: collectives inside a kernel, compiled by nvcc, by NVRTC and by any C++17 host compiler. Kernels
// include this one file.
#ifndef NCCLFFM_DEVICE_H_
#define NCCLFFM_DEVICE_H_

#include "collectives.h"
#include "fused.h"
#include "lsa.h"
#include "scheduler.h"
#include "task_queue.h"

#endif  // NCCLFFM_DEVICE_H_

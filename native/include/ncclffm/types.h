// The structs shared with Java (../ncclffm.h), under their C++ names, with the promises that both sides rely on; and
// the values of NCCL's enums that the library uses. They are declared here, in this namespace, because the library
// includes no header of NCCL; functions take them as int, so that NCCL's own constants can be passed as well.
#ifndef NCCLFFM_TYPES_H_
#define NCCLFFM_TYPES_H_

// Before ../ncclffm.h, which needs its integer types where there are no system headers (NVRTC).
#include "impl/config.h"

#include "../ncclffm.h"

namespace ncclffm {

using DevComm = ::ncclFfmDevComm;
using Channel = ::ncclFfmChannel;
using Pair = ::ncclFfmPair;
using Status = ::ncclFfmStatus;
using Call = ::ncclFfmCall;
using LsaWindow = ::ncclLsaWindow;
using Lsa = ::ncclLsa;
using LsaBuffer = ::ncclLsaBuffer;
using RmsNorm = ::ncclFfmRmsNorm;
using Optimizer = ::ncclFfmOptimizer;
using Task = ::ncclFfmTask;
using TaskSlot = ::ncclFfmTaskSlot;
using TaskRecord = ::ncclFfmTaskRecord;
using TaskLane = ::ncclFfmTaskLane;
using TaskShared = ::ncclFfmTaskShared;
using TaskControl = ::ncclFfmTaskControl;
using TaskQueue = ::ncclFfmTaskQueue;
using Ticket = ::ncclFfmTicket;

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,
};

enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

enum ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

static_assert(sizeof(Status) == 120, "ncclFfmStatus is read by Java");
static_assert(sizeof(Channel) == 128, "one channel, one cache line of the GPU");
static_assert(sizeof(Pair) == 16, "two pairs, one sector of the GPU's cache lines");
static_assert(sizeof(Lsa) == 96, "ncclLsa is filled by Java");
static_assert(sizeof(DevComm) <= 256, "a kernel takes the communicator by value");
static_assert(sizeof(TaskSlot) == 128, "a task is a line of its own");
static_assert(sizeof(TaskLane) == 640 && offsetof(TaskLane, launched) == 128 && offsetof(TaskLane, done) == 256 &&
                  offsetof(TaskLane, go) == 384 && offsetof(TaskLane, failed) == 512,
              "words of a lane that different threads write are on lines of their own");
static_assert(sizeof(TaskShared) == 128 && sizeof(TaskControl) == 128, "lines of their own");
static_assert(sizeof(TaskQueue) <= 128, "a kernel takes the queue by value");
static_assert(sizeof(void *) == 8, "64-bit addresses");

}  // namespace ncclffm

#endif  // NCCLFFM_TYPES_H_

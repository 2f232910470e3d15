// The NCCL that this backend stands in for; apart from the rest, so that tests can link one that is older.
#include "device.h"

#ifndef NCCLFFM_CPU_NCCL_VERSION
#define NCCLFFM_CPU_NCCL_VERSION 23007
#endif

namespace ncclffm::cpu {

const int kNcclVersion = NCCLFFM_CPU_NCCL_VERSION;

}  // namespace ncclffm::cpu

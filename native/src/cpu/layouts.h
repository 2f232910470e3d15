// sizeof and offsetof of the CUDA and NCCL structs of abi.h, for ncclFfmGetLayouts and for the test over the real
// headers.
#ifndef NCCLFFM_CPU_LAYOUTS_H_
#define NCCLFFM_CPU_LAYOUTS_H_

#include <cstddef>
#include <cstdint>

#include "../../include/ncclffm.h"

namespace ncclffm::cpu {

/// Rows of one table: each struct, then its fields (fieldName "" is the struct itself). Static storage.
extern const ncclFfmLayout abiLayouts[];
extern const size_t abiLayoutCount;

struct AbiValue {
  const char *name;
  int64_t value;
};

/// The enum values and constants of abi.h. Static storage.
extern const AbiValue abiValues[];
extern const size_t abiValueCount;

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_LAYOUTS_H_

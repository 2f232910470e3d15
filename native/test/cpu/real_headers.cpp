// The declarations of the CPU backend against NVIDIA's own headers: signatures (a difference does not compile), struct
// layouts and values (a difference is printed).
// Without it nccl.h declares no ncclResetDebugInit.
#define NCCL_OS_LINUX
#include <cuda_runtime.h>
#include <nccl.h>
// nccl_device/core.h needs nccl.h before it.
#include <nccl_device/core.h>
#include <nccl_device/gin_barrier.h>
#include <nccl_device/ll_a2a.h>
#include <nccl_device/lsa_barrier.h>

#include <nccl_device/impl/core__types.h>
#include <nccl_device/impl/gin_barrier__types.h>
#include <nccl_device/impl/ll_a2a__types.h>
#include <nccl_device/impl/lsa_barrier__types.h>

#include <cstdio>
#include <cstring>

#include "abi_functions.h"
#include "layouts.h"

namespace {

#define VALUE(name)
#define STRUCT(type) {#type, "", 0, sizeof(type)},
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(type::field)},
const ncclFfmLayout kReal[] = {
#include "layout_rows.h"
};
#undef VALUE
#undef STRUCT
#undef FIELD

#define VALUE(name) {#name, static_cast<int64_t>(name)},
#define STRUCT(type)
#define FIELD(type, field)
const ncclffm::cpu::AbiValue kRealValues[] = {
#include "layout_rows.h"
};

}  // namespace

int main() {
  int wrong = 0;
  for (size_t i = 0; i < ncclffm::cpu::abiLayoutCount; ++i) {
    const ncclFfmLayout &own = ncclffm::cpu::abiLayouts[i];
    if (own.offset != kReal[i].offset || own.size != kReal[i].size) {
      std::printf("%s.%s: offset %llu size %llu, real offset %llu size %llu\n", own.structName, own.fieldName,
                  static_cast<unsigned long long>(own.offset), static_cast<unsigned long long>(own.size),
                  static_cast<unsigned long long>(kReal[i].offset), static_cast<unsigned long long>(kReal[i].size));
      ++wrong;
    }
  }
  for (size_t i = 0; i < ncclffm::cpu::abiValueCount; ++i) {
    const ncclffm::cpu::AbiValue &own = ncclffm::cpu::abiValues[i];
    if (own.value != kRealValues[i].value) {
      std::printf("%s: %lld, real %lld\n", own.name, static_cast<long long>(own.value),
                  static_cast<long long>(kRealValues[i].value));
      ++wrong;
    }
  }
  std::printf("%zu layout rows and %zu values compared with NCCL %d and CUDA %d, %d wrong\n",
              ncclffm::cpu::abiLayoutCount, ncclffm::cpu::abiValueCount, NCCL_VERSION_CODE, CUDART_VERSION, wrong);
  return wrong == 0 && ncclffm::cpu::abiLayoutCount > 0 ? 0 : 1;
}

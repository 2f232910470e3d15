// The layout table over abi.h. Every CPU struct has the same rows here as NVIDIA's headers give (test
// cpu_real_headers).
#include "layouts.h"

#include "abi.h"

namespace ncclffm::cpu {

#define VALUE(name)
#define STRUCT(type) {#type, "", 0, sizeof(type)},
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(type::field)},
const ncclFfmLayout abiLayouts[] = {
#include "layout_rows.h"
};
const size_t abiLayoutCount = sizeof(abiLayouts) / sizeof(abiLayouts[0]);
#undef VALUE
#undef STRUCT
#undef FIELD

#define VALUE(name) {#name, static_cast<int64_t>(name)},
#define STRUCT(type)
#define FIELD(type, field)
const AbiValue abiValues[] = {
#include "layout_rows.h"
};
const size_t abiValueCount = sizeof(abiValues) / sizeof(abiValues[0]);

}  // namespace ncclffm::cpu

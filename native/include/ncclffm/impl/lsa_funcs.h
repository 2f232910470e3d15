// Bodies of lsa.h.
#ifndef NCCLFFM_IMPL_LSA_FUNCS_H_
#define NCCLFFM_IMPL_LSA_FUNCS_H_

namespace ncclffm {

NCCLFFM_DEVICE bool isLsaWindow(const LsaWindow &window) {
  return window.base != nullptr && window.bytes <= ~uint64_t{0} - reinterpret_cast<uintptr_t>(window.base);
}

NCCLFFM_DEVICE void *lsaAddress(const LsaWindow &window, uint64_t offset, uint64_t length) {
  if (!isLsaWindow(window) || length > window.bytes || offset > window.bytes - length) return nullptr;
  return static_cast<char *>(window.base) + offset;
}

NCCLFFM_DEVICE bool isLsaAligned(const LsaWindow &window, uint64_t offset, uint64_t length, uint64_t alignment) {
  // The low bits of the sum are right even if it wraps, for the alignment divides 2^64.
  return ((reinterpret_cast<uintptr_t>(window.base) + offset) | length) % alignment == 0;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_LSA_FUNCS_H_

// Windows that a kernel can load from and store to: where a range of one is, and which accesses its place allows. Every
// function that takes an LSA has Lsa in its name.
#ifndef NCCLFFM_LSA_H_
#define NCCLFFM_LSA_H_

#include "types.h"

namespace ncclffm {

// What lies at a multiple of this can be moved in the widest single access of a thread.
constexpr uint64_t kLsaVectorBytes = 16;
// Offsets and sizes of protocol buffers are multiples of this: what a warp stores in one transaction.
constexpr uint64_t kLsaLineBytes = 128;

// Whether there is memory behind the window: it has an address, and ends within the address space.
NCCLFFM_DEVICE bool isLsaWindow(const LsaWindow &window);

// Where [offset, offset + length) of the window is, or null when a byte of it is outside, or the window is none. A
// length of 0 is inside up to the end of the window. No sum of the arguments overflows, whatever they are.
NCCLFFM_DEVICE void *lsaAddress(const LsaWindow &window, uint64_t offset, uint64_t length);

// Whether [offset, offset + length) starts at an address that is a multiple of alignment, a power of two, and is a
// multiple of it long. Says nothing of the window's bounds.
NCCLFFM_DEVICE bool isLsaAligned(const LsaWindow &window, uint64_t offset, uint64_t length, uint64_t alignment);

}  // namespace ncclffm

#include "impl/lsa_funcs.h"

#endif  // NCCLFFM_LSA_H_

// Every load, store, read-modify-write and clock read that other threads, GPUs or the host take part in, each named
// after its order and its scope: Gpu for what one rank's kernels share, Sys for what peers or the host see. Other
// inline PTX is no such access: numbers of threads and barriers (coop.h, the scheduler), plain loads that stay where
// they are written (impl/memory.h), conversions (impl/half.h). On the host both scopes are the same, and the compiler's
// __atomic builtins stand for them.
#ifndef NCCLFFM_ATOMICS_H_
#define NCCLFFM_ATOMICS_H_

#include "impl/config.h"
#include "impl/rules.h"

#ifndef __CUDACC__
#include <sched.h>
#include <time.h>
#endif

#ifdef __SANITIZE_THREAD__
extern "C" {
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#endif

namespace ncclffm {

// Two elements of 8 bytes that one access moves. Each element is written and read whole; the two together are not.
struct alignas(16) Vec16 {
  uint64_t word[2];
};

#ifdef __CUDACC__

NCCLFFM_DEVICE uint32_t loadRelaxedGpu(const uint32_t *address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE uint32_t loadRelaxedSys(const uint32_t *address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE uint32_t loadAcquireGpu(const uint32_t *address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE uint64_t loadRelaxedSys(const uint64_t *address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE uint64_t loadAcquireSys(const uint64_t *address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE uint64_t loadAcquireGpu(const uint64_t *address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

NCCLFFM_DEVICE void storeRelaxedGpu(uint32_t *address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

NCCLFFM_DEVICE void storeReleaseGpu(uint32_t *address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

NCCLFFM_DEVICE void storeReleaseGpu(uint64_t *address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
}

NCCLFFM_DEVICE uint32_t fetchAddRelaxedGpu(uint32_t *address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return old;
}

NCCLFFM_DEVICE void storeRelaxedGpu(uint64_t *address, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
}

NCCLFFM_DEVICE void storeRelaxedSys(uint32_t *address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

NCCLFFM_DEVICE void storeRelaxedSys(uint64_t *address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
}

NCCLFFM_DEVICE void storeReleaseSys(uint32_t *address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

NCCLFFM_DEVICE void storeReleaseSys(uint64_t *address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
}

NCCLFFM_DEVICE uint32_t fetchAddAcqRelGpu(uint32_t *address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return old;
}

NCCLFFM_DEVICE uint64_t fetchAddAcqRelGpu(uint64_t *address, uint64_t value) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(address)), "l"(value)
               : "memory");
  return old;
}

NCCLFFM_DEVICE uint64_t fetchOrAcquireGpu(uint64_t *address, uint64_t bits) {
  uint64_t old;
  asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(address)), "l"(bits)
               : "memory");
  return old;
}

NCCLFFM_DEVICE uint32_t compareAndSwapRelaxedGpu(uint32_t *address, uint32_t expected, uint32_t desired) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address)), "r"(expected), "r"(desired)
               : "memory");
  return old;
}

// *address = min(*address, value). At GPU scope even where the host reads the result: no CUDA device promises more for
// memory behind PCIe, and the end of the kernel publishes it.
NCCLFFM_DEVICE void minRelaxedGpu(uint64_t *address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value)
               : "memory");
}

// One 16-byte access, of two 8-byte elements: PTX promises that an element is whole, never that the vector is.
NCCLFFM_DEVICE Vec16 loadVec16RelaxedSys(const Vec16 *address) {
  Vec16 vec;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(vec.word[0]), "=l"(vec.word[1])
               : "l"(__cvta_generic_to_global(address))
               : "memory");
  return vec;
}

NCCLFFM_DEVICE void storeVec16RelaxedSys(Vec16 *address, Vec16 vec) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)),
               "l"(vec.word[0]), "l"(vec.word[1])
               : "memory");
}

NCCLFFM_DEVICE void fenceGpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

NCCLFFM_DEVICE void fenceSys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Between a store and a load of two who each must not miss both the other's store.
NCCLFFM_DEVICE void fenceBothWaysSys() {
  asm volatile("fence.sc.sys;" ::: "memory");
}

NCCLFFM_DEVICE uint64_t nowNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

NCCLFFM_DEVICE void pauseNs(uint32_t ns) {
  __nanosleep(ns);
}

#else

NCCLFFM_DEVICE uint32_t loadRelaxedGpu(const uint32_t *address) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE uint32_t loadRelaxedSys(const uint32_t *address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE uint32_t loadAcquireGpu(const uint32_t *address) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

NCCLFFM_DEVICE uint64_t loadRelaxedSys(const uint64_t *address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE uint64_t loadAcquireSys(const uint64_t *address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

NCCLFFM_DEVICE uint64_t loadAcquireGpu(const uint64_t *address) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

NCCLFFM_DEVICE void storeRelaxedGpu(uint32_t *address, uint32_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void storeReleaseGpu(uint32_t *address, uint32_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

NCCLFFM_DEVICE void storeReleaseGpu(uint64_t *address, uint64_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

NCCLFFM_DEVICE uint32_t fetchAddRelaxedGpu(uint32_t *address, uint32_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void storeRelaxedGpu(uint64_t *address, uint64_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void storeRelaxedSys(uint32_t *address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void storeRelaxedSys(uint64_t *address, uint64_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void storeReleaseSys(uint32_t *address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

NCCLFFM_DEVICE void storeReleaseSys(uint64_t *address, uint64_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

NCCLFFM_DEVICE uint32_t fetchAddAcqRelGpu(uint32_t *address, uint32_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

NCCLFFM_DEVICE uint64_t fetchAddAcqRelGpu(uint64_t *address, uint64_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

NCCLFFM_DEVICE uint64_t fetchOrAcquireGpu(uint64_t *address, uint64_t bits) {
  NCCLFFM_AT_GPU_SCOPE(address);
  return __atomic_fetch_or(address, bits, __ATOMIC_ACQUIRE);
}

NCCLFFM_DEVICE uint32_t compareAndSwapRelaxedGpu(uint32_t *address, uint32_t expected, uint32_t desired) {
  NCCLFFM_AT_GPU_SCOPE(address);
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

NCCLFFM_DEVICE void minRelaxedGpu(uint64_t *address, uint64_t value) {
  NCCLFFM_AT_GPU_SCOPE(address);
  uint64_t now = __atomic_load_n(address, __ATOMIC_RELAXED);
  NCCLFFM_STALL();
  while (value < now && !__atomic_compare_exchange_n(address, &now, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

NCCLFFM_DEVICE Vec16 loadVec16RelaxedSys(const Vec16 *address) {
  Vec16 vec;
  vec.word[0] = __atomic_load_n(&address->word[0], __ATOMIC_RELAXED);
  vec.word[1] = __atomic_load_n(&address->word[1], __ATOMIC_RELAXED);
  return vec;
}

NCCLFFM_DEVICE void storeVec16RelaxedSys(Vec16 *address, Vec16 vec) {
  __atomic_store_n(&address->word[0], vec.word[0], __ATOMIC_RELAXED);
  NCCLFFM_STALL();
  __atomic_store_n(&address->word[1], vec.word[1], __ATOMIC_RELAXED);
}

NCCLFFM_DEVICE void fenceSys() {
#ifndef __SANITIZE_THREAD__  // it does not know fences; every access that the fence orders is atomic, so it misses none
                             // here (but what is told by acquireForSanitizer)
  __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

NCCLFFM_DEVICE void fenceGpu() {
  fenceSys();
}

NCCLFFM_DEVICE void fenceBothWaysSys() {
#ifdef __SANITIZE_THREAD__  // which knows no fences; a read-modify-write is one on the machines that it runs on
  static uint32_t word = 0;
  __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST);
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

NCCLFFM_DEVICE uint64_t nowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// 0 gives the processor to whoever is ready to run: ranks are host threads, and may be more than the processors.
NCCLFFM_DEVICE void pauseNs(uint32_t ns) {
  if (ns == 0) {
    sched_yield();
    return;
  }
  timespec pause = {0, static_cast<long>(ns)};
  nanosleep(&pause, nullptr);
}

#endif

// ThreadSanitizer takes relaxed accesses for no order at all; these tell it of one that is there nevertheless: what was
// before the release at an address is before what comes after the acquire.
NCCLFFM_DEVICE void releaseForSanitizer(void *address) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(address);
#else
  (void)address;
#endif
}

NCCLFFM_DEVICE void acquireForSanitizer(void *address) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(address);
#else
  (void)address;
#endif
}

}  // namespace ncclffm

#endif  // NCCLFFM_ATOMICS_H_

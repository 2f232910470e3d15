// Who cooperates in a call: one thread, a warp or a block. Each group has rank(), size(), and
//   sync()             all threads have arrived; memory they wrote is visible to the group
//   syncAny(flag)      sync(), and whether any thread gave true
//   syncBroadcast(v)   sync(), and the value that the thread of rank 0 gave
//   syncSum(x)         sync(), and in each x[k] the sum of what all threads had there: always added in the same order
// A group's functions are called by all of its threads. Block sizes are multiples of 32, so that a warp is a whole one.
// On the host a block is one thread: CoopThread is the only group there, and CoopBlock is another name for it.
#ifndef NCCLFFM_COOP_H_
#define NCCLFFM_COOP_H_

#include "impl/config.h"

namespace ncclffm {

struct CoopThread {
  NCCLFFM_DEVICE uint32_t rank() const { return 0; }
  NCCLFFM_DEVICE uint32_t size() const { return 1; }
  NCCLFFM_DEVICE void sync() const {}
  NCCLFFM_DEVICE bool syncAny(bool flag) const { return flag; }
  NCCLFFM_DEVICE uint64_t syncBroadcast(uint64_t value) const { return value; }
  template <class V, int N>
  NCCLFFM_DEVICE void syncSum(V (&)[N]) const {}
};

#ifdef __CUDACC__

struct CoopWarp {
  NCCLFFM_DEVICE uint32_t rank() const {
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
  }
  NCCLFFM_DEVICE uint32_t size() const { return 32; }
  NCCLFFM_DEVICE void sync() const { __syncwarp(); }
  NCCLFFM_DEVICE bool syncAny(bool flag) const {
    __syncwarp();
    return __any_sync(0xffffffffu, flag);
  }
  NCCLFFM_DEVICE uint64_t syncBroadcast(uint64_t value) const {
    __syncwarp();
    return __shfl_sync(0xffffffffu, static_cast<unsigned long long>(value), 0);
  }
  template <class V, int N>
  NCCLFFM_DEVICE void syncSum(V (&x)[N]) const {
    __syncwarp();
    NCCLFFM_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
      NCCLFFM_UNROLL
      for (int k = 0; k < N; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], distance);
    }
  }
};

struct CoopBlock {
  NCCLFFM_DEVICE uint32_t rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
  NCCLFFM_DEVICE uint32_t size() const { return blockDim.x * blockDim.y * blockDim.z; }
  NCCLFFM_DEVICE void sync() const { __syncthreads(); }
  NCCLFFM_DEVICE bool syncAny(bool flag) const { return __syncthreads_or(flag) != 0; }
  NCCLFFM_DEVICE uint64_t syncBroadcast(uint64_t value) const {
    __shared__ uint64_t shared;
    if (rank() == 0) shared = value;
    __syncthreads();
    uint64_t result = shared;
    __syncthreads();  // nobody writes the next value before everybody has this one
    return result;
  }
  template <class V, int N>
  NCCLFFM_DEVICE void syncSum(V (&x)[N]) const {
    __shared__ V ofWarps[N][32];
    const uint32_t lane = rank() % 32, nWarps = size() / 32;
    CoopWarp().syncSum(x);
    if (lane == 0) {
      NCCLFFM_UNROLL
      for (int k = 0; k < N; ++k) ofWarps[k][rank() / 32] = x[k];
    }
    __syncthreads();
    NCCLFFM_UNROLL
    for (int k = 0; k < N; ++k) x[k] = lane < nWarps ? ofWarps[k][lane] : V(0);
    CoopWarp().syncSum(x);
    __syncthreads();  // nobody writes the next values before everybody has these
  }
};

// After something that only some threads of a warp have done: without it, a warp may go on in two parts, one after the
// other, and take twice as long over all that follows. Groups of whole warps only; others have nothing to gain.
template <class Coop>
NCCLFFM_DEVICE void reconverge(const Coop &) {}
NCCLFFM_DEVICE void reconverge(const CoopWarp &) {
  __syncwarp();
}
NCCLFFM_DEVICE void reconverge(const CoopBlock &) {
  __syncwarp();
}

#else

using CoopBlock = CoopThread;

template <class Coop>
NCCLFFM_DEVICE void reconverge(const Coop &) {}

#endif

}  // namespace ncclffm

#endif  // NCCLFFM_COOP_H_

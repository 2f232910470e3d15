// A kernel against NCCL's own device headers (2.30): every rank of the LSA team adds up the inputs of all, element by
// element, between two barriers. Both windows hold count floats; results has an ncclResult_t for each block. Compiled
// here, launched by src/test's KernelModuleTest.
#include <nccl.h>
#include <nccl_device.h>

constexpr uint64_t kTimeoutCycles = 20'000'000'000;  // some 10 s; NCCL's abort does not end a kernel of one's own

extern "C" __global__ void lsaSum(ncclDevComm comm, ncclWindow_t in, ncclWindow_t out, size_t count, int *results) {
  if (count == 0) return;  // on every rank: to have been launched
  const ncclCoopCta block;
  ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
  ncclResult_t result = barrier.sync(block, cuda::memory_order_acquire, kTimeoutCycles);
  // A thread waits for some peers only, and all threads go the same way.
  bool failed = __syncthreads_or(result != ncclSuccess);
  if (!failed) {
    float *sums = static_cast<float *>(ncclGetLocalPointer(out, 0));
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * size_t{blockDim.x}) {
      float sum = 0;
      for (int peer = 0; peer < comm.lsaSize; ++peer) {
        sum += static_cast<const float *>(ncclGetLsaPointer(in, 0, peer))[i];
      }
      sums[i] = sum;
    }
    // Nobody overwrites an input that somebody still reads.
    result = barrier.sync(block, cuda::memory_order_release, kTimeoutCycles);
    failed = __syncthreads_or(result != ncclSuccess);
  }
  if (threadIdx.x == 0) results[blockIdx.x] = failed ? ncclTimeout : ncclSuccess;
}

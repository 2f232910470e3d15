// What a user would write without this library: an all-reduce against NCCL's own device headers (2.30), in the style of
// NCCL's examples. Between two barriers, every rank of the LSA team adds up its part of everybody's input and stores the
// sums to everybody. results has an ncclResult_t for each block. The Java class WorldBenchmark launches it.
#include <nccl.h>
#include <nccl_device.h>

constexpr uint64_t kTimeoutCycles = 20'000'000'000;  // some 10 s

extern "C" __global__ void __launch_bounds__(512)
    lsaAllReduce(ncclDevComm comm, ncclWindow_t in, ncclWindow_t out, size_t count, int *results) {
  if (count == 0) return;  // on every rank: to have been launched
  const ncclCoopCta block;
  ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
  ncclResult_t result = barrier.sync(block, cuda::memory_order_acquire, kTimeoutCycles);
  // A thread waits for some peers only, and all threads go the same way.
  bool failed = __syncthreads_or(result != ncclSuccess);
  if (!failed) {
    const int nRanks = comm.lsaSize;
    const size_t threads = size_t{blockDim.x} * gridDim.x * nRanks;
    for (size_t i = threadIdx.x + blockDim.x * (comm.lsaRank + size_t{blockIdx.x} * nRanks); i < count; i += threads) {
      float sum = 0;
      for (int peer = 0; peer < nRanks; ++peer) {
        sum += static_cast<const float *>(ncclGetLsaPointer(in, 0, peer))[i];
      }
      for (int peer = 0; peer < nRanks; ++peer) {
        static_cast<float *>(ncclGetLsaPointer(out, 0, peer))[i] = sum;
      }
    }
    result = barrier.sync(block, cuda::memory_order_acq_rel, kTimeoutCycles);
    failed = __syncthreads_or(result != ncclSuccess);
  }
  if (failed && threadIdx.x == 0) results[blockIdx.x] = ncclTimeout;
}

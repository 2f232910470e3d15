// The kernels of task queues: the scheduler, and those that append.
#include "../../include/ncclffm/device.h"
#include "../../include/ncclffm/impl/producers.h"
#include "kernels.cuh"

namespace ncclffm::shim {
namespace {

// Every kernel returns at once for a queue of no lanes: primed.
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    schedulerKernel(const __grid_constant__ ncclFfmDevComm comm, const __grid_constant__ ncclFfmTaskQueue queue,
                    ncclFfmSchedulerMode mode) {
  if (queue.nLanes == 0) return;
#if __CUDACC_VER_MAJOR__ >= 13
  asm volatile(".pragma \"enable_smem_spilling\";");  // an acquire empties the cache that the stack is in
#endif
  // A thread's rank is then its number, which need not be kept.
  __builtin_assume(threadIdx.y == 0);
  __builtin_assume(threadIdx.z == 0);
  runScheduler(CoopBlock(), comm, queue, mode, static_cast<int>(blockIdx.x));
}

__global__ void clearQueueKernel(const __grid_constant__ ncclFfmTaskQueue queue, uint32_t firstSequence) {
  if (queue.nLanes == 0) return;
  clearQueue(queue, firstSequence, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

__global__ void appendBatchKernel(const __grid_constant__ ncclFfmTaskQueue queue,
                                  const __grid_constant__ ncclFfmTaskBatch batch) {
  if (queue.nLanes != 0) appendBatch(queue, batch);
}

__global__ void reserveKernel(const __grid_constant__ ncclFfmTaskQueue queue, uint64_t nTasks, ncclFfmTicket *first) {
  if (queue.nLanes != 0) reserveInTurn(queue, nTasks, first);
}

__global__ void __launch_bounds__(kThreadsPerBlock)
    bucketsKernel(const __grid_constant__ ncclFfmTaskQueue queue, const __grid_constant__ ncclFfmTaskBuckets buckets) {
  if (queue.nLanes == 0) return;
  produceBuckets(CoopBlock(), queue, buckets, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

constexpr int kIteratingThreads = kThreadsPerBlock + kHandingThreads;

__global__ void __launch_bounds__(kIteratingThreads)
    iterateKernel(const __grid_constant__ ncclFfmTaskQueue queue, const __grid_constant__ ncclFfmTaskOverlap overlap) {
  if (queue.nLanes == 0) return;
  produceIterations(CoopBlock(), queue, overlap, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

__global__ void producerEndKernel(const __grid_constant__ ncclFfmTaskQueue queue) {
  if (queue.nLanes != 0) ncclTaskProducerEnd(queue);
}

constexpr int kClearBlocks = 32;

cudaStream_t streamOf(void *stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

Failure launch(const QueueLaunch &launch) {
  clearQueueKernel<<<kClearBlocks, kThreadsPerBlock, 0, streamOf(launch.stream)>>>(launch.queue, launch.firstSequence);
  return lastLaunch("clearQueueKernel");
}

Failure launch(const SchedulerLaunch &launch) {
  schedulerKernel<<<launch.blocks, kThreadsPerBlock, 0, streamOf(launch.stream)>>>(launch.comm, launch.queue,
                                                                                   launch.mode);
  return lastLaunch("schedulerKernel");
}

Failure launch(const BatchLaunch &launch) {
  appendBatchKernel<<<1, 1, 0, streamOf(launch.stream)>>>(launch.queue, launch.batch);
  return lastLaunch("appendBatchKernel");
}

Failure launch(const ReserveLaunch &launch) {
  reserveKernel<<<1, 1, 0, streamOf(launch.stream)>>>(launch.queue, launch.nTasks, launch.first);
  return lastLaunch("reserveKernel");
}

Failure launch(const BucketsLaunch &launch) {
  bucketsKernel<<<launch.blocks, kThreadsPerBlock, 0, streamOf(launch.stream)>>>(launch.queue, launch.buckets);
  return lastLaunch("bucketsKernel");
}

Failure launch(const OverlapLaunch &launch) {
  iterateKernel<<<launch.blocks, kIteratingThreads, 0, streamOf(launch.stream)>>>(launch.queue, launch.overlap);
  return lastLaunch("iterateKernel");
}

Failure launch(const ProducerEndLaunch &launch) {
  producerEndKernel<<<1, 1, 0, streamOf(launch.stream)>>>(launch.queue);
  return lastLaunch("producerEndKernel");
}

Failure primeTasks(void *stream) {
  const ncclFfmTaskQueue none = {};
  Failure failure = launch(QueueLaunch{none, 0, stream});
  if (failure.empty()) failure = launch(SchedulerLaunch{{}, none, ncclFfmSchedulerDrain, 1, stream});
  if (failure.empty()) failure = launch(BatchLaunch{none, {}, stream});
  if (failure.empty()) failure = launch(ReserveLaunch{none, 0, nullptr, stream});
  if (failure.empty()) failure = launch(BucketsLaunch{none, {}, 1, stream});
  if (failure.empty()) failure = launch(OverlapLaunch{none, {}, 1, stream});
  return failure.empty() ? launch(ProducerEndLaunch{none, stream}) : failure;
}

}  // namespace ncclffm::shim

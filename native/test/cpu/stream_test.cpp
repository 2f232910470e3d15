// Streams and events are asynchronous, ordered, and keep their failures.
#include <atomic>
#include <cstring>

#include "world.h"

using namespace test;

TEST(eventIsPendingUntilTheHostFunctionBeforeItReturns) {
  const cudaStream_t stream = newStream();
  cudaEvent_t event = nullptr;
  CUDA_OK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  CUDA_OK(cudaEventQuery(event));  // never recorded
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaEventRecord(event, stream));
  CHECK_EQ(cudaEventQuery(event), cudaErrorNotReady);
  CHECK_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.open();
  CUDA_OK(cudaEventSynchronize(event));
  CUDA_OK(cudaEventQuery(event));
  CUDA_OK(cudaStreamQuery(stream));
  CUDA_OK(cudaEventDestroy(event));
  CUDA_OK(cudaStreamDestroy(stream));
}

TEST(streamsRunIndependentlyUntilOneWaitsForAnEvent) {
  const cudaStream_t first = newStream();
  const cudaStream_t second = newStream();
  const cudaStream_t third = newStream();
  cudaEvent_t event = nullptr;
  CUDA_OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(first, Gate::waitAt, &gate));
  CUDA_OK(cudaEventRecord(event, first));
  CUDA_OK(cudaStreamWaitEvent(second, event, 0));
  CUDA_OK(cudaStreamSynchronize(third));
  CHECK_EQ(cudaStreamQuery(second), cudaErrorNotReady);
  gate.open();
  CUDA_OK(cudaStreamSynchronize(second));
  CUDA_OK(cudaEventQuery(event));
  for (cudaStream_t stream : {first, second, third}) {
    CUDA_OK(cudaStreamDestroy(stream));
  }
  CUDA_OK(cudaEventDestroy(event));
}

TEST(elapsedTimeNeedsTwoCompleteTimedEvents) {
  const cudaStream_t stream = newStream();
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  cudaEvent_t untimed = nullptr;
  CUDA_OK(cudaEventCreateWithFlags(&start, cudaEventDefault));
  CUDA_OK(cudaEventCreateWithFlags(&end, cudaEventDefault));
  CUDA_OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  float milliseconds = -1;
  CHECK_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
  Gate gate;
  CUDA_OK(cudaEventRecord(start, stream));
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaEventRecord(end, stream));
  CUDA_OK(cudaEventRecord(untimed, stream));
  CHECK_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
  gate.open();
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 0 && milliseconds < 60000);
  CHECK_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
}

TEST(defaultStreamKeepsOrderWithBlockingStreamsOnly) {
  CUDA_OK(cudaSetDevice(1));
  cudaStream_t blocking = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
  const cudaStream_t independent = newStream();
  Gate gate;
  auto *data = deviceArray<int>(1);
  CUDA_OK(cudaLaunchHostFunc(blocking, Gate::waitAt, &gate));
  CUDA_OK(cudaMemsetAsync(data, 1, sizeof(int), nullptr));
  CHECK_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);  // waits for the blocking stream
  CUDA_OK(cudaMemsetAsync(data, 2, sizeof(int), blocking));
  CUDA_OK(cudaStreamSynchronize(independent));
  gate.open();
  CUDA_OK(cudaStreamSynchronize(blocking));
  CUDA_OK(cudaStreamQuery(nullptr));  // was before the blocking stream's second piece of work
  CHECK_EQ(toHost(data, 1)[0], 0x02020202);
  CUDA_OK(cudaStreamDestroy(blocking));
  CUDA_OK(cudaFree(data));
}

TEST(pageableSourceIsStagedAndPageableTargetIsComplete) {
  const cudaStream_t stream = newStream();
  auto *device = deviceArray<int>(1);
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  int source = 42;
  CUDA_OK(cudaMemcpyAsync(device, &source, sizeof(int), cudaMemcpyHostToDevice, stream));
  source = 0;
  CHECK_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.open();
  int target = 0;
  CUDA_OK(cudaMemcpyAsync(&target, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
  CHECK_EQ(target, 42);
  CUDA_OK(cudaFree(device));
}

TEST(pinnedCopiesAreAsynchronousBothWays) {
  const cudaStream_t stream = newStream();
  auto *device = deviceArray<int>(1);
  void *memory = nullptr;
  CUDA_OK(cudaHostAlloc(&memory, 2 * sizeof(int), 0));
  auto *pinned = static_cast<int *>(memory);
  pinned[0] = 1;
  pinned[1] = 0;
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaMemcpyAsync(device, pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  CUDA_OK(cudaMemcpyAsync(pinned + 1, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
  pinned[0] = 7;  // not yet read
  CHECK_EQ(pinned[1], 0);
  gate.open();
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(pinned[1], 7);
  CUDA_OK(cudaFreeHost(memory));
  CUDA_OK(cudaFree(device));
}

TEST(destroyedStreamFinishesItsWork) {
  const cudaStream_t stream = newStream();
  Gate gate;
  Gate done;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::openIt, &done));
  CUDA_OK(cudaStreamDestroy(stream));
  CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  gate.open();
  done.wait();
}

TEST(closedAndForeignHandlesAreRefused) {
  cudaEvent_t event = nullptr;
  CUDA_OK(cudaEventCreateWithFlags(&event, cudaEventDefault));
  CUDA_OK(cudaEventDestroy(event));
  CHECK_EQ(cudaEventRecord(event, nullptr), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  int local = 0;
  CHECK_EQ(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(&local)), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaStreamCreateWithFlags(nullptr, 0), cudaErrorInvalidValue);
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&stream, 9), cudaErrorInvalidValue);
}

TEST(callsThatWaitAreNotPermittedInHostFunctions) {
  const cudaStream_t stream = newStream();
  std::atomic<int> result{-1};
  CUDA_OK(cudaLaunchHostFunc(
      stream, [](void *out) { *static_cast<std::atomic<int> *>(out) = cudaDeviceSynchronize(); }, &result));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(result.load(), static_cast<int>(cudaErrorNotPermitted));
}

TEST(failedStreamKeepsItsErrorAndSkipsWhatFollows) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(4);
    cudaEvent_t before = nullptr;
    cudaEvent_t after = nullptr;
    CUDA_OK(cudaEventCreateWithFlags(&before, cudaEventDefault));
    CUDA_OK(cudaEventCreateWithFlags(&after, cudaEventDefault));
    CUDA_OK(cudaMemsetAsync(data, 1, 4 * sizeof(int), rank.stream));
    CUDA_OK(cudaEventRecord(before, rank.stream));
    NCCL_OK(ncclAllReduce(data, data, static_cast<size_t>(1 + rank.rank), ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaMemsetAsync(data, 2, 4 * sizeof(int), rank.stream));
    CUDA_OK(cudaEventRecord(after, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    CHECK_EQ(cudaStreamQuery(rank.stream), cudaErrorLaunchFailure);
    CUDA_OK(cudaEventSynchronize(before));
    CHECK_EQ(cudaEventSynchronize(after), cudaErrorLaunchFailure);
    CHECK_EQ(toHost(data, 4)[3], 0x01010101);
    const cudaStream_t other = newStream();
    CUDA_OK(cudaStreamWaitEvent(other, before, 0));
    CUDA_OK(cudaStreamSynchronize(other));
    CUDA_OK(cudaStreamWaitEvent(other, after, 0));
    CHECK_EQ(cudaStreamSynchronize(other), cudaErrorLaunchFailure);
    CUDA_OK(cudaStreamDestroy(other));
  });
}

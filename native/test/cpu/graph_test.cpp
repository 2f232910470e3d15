// Captured calls are kept, not run; their graph runs them as often as it is launched.
#include <atomic>
#include <cstring>

#include "world.h"

using namespace test;

namespace {

cudaStreamCaptureStatus statusOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusInvalidated;
  CUDA_OK(cudaStreamIsCapturing(stream, &status));
  return status;
}

void beginCapture(cudaStream_t stream) {
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

/// Ends the capture; only the executable graph is left of it.
cudaGraphExec_t endCapture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CUDA_OK(cudaGraphInstantiateWithFlags(&executable, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  CHECK_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
  return executable;
}

void checkEnd(cudaStream_t stream, cudaError_t error) {
  auto *graph = reinterpret_cast<cudaGraph_t>(1);
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), error);
  CHECK(graph == nullptr);
  CHECK_EQ(statusOf(stream), cudaStreamCaptureStatusNone);
  CUDA_OK(cudaStreamSynchronize(stream));
}

cudaEvent_t newEvent() {
  cudaEvent_t event = nullptr;
  CUDA_OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

int *pinnedArray(size_t count) {
  void *memory = nullptr;
  CUDA_OK(cudaHostAlloc(&memory, count * sizeof(int), 0));
  std::memset(memory, 0, count * sizeof(int));
  return static_cast<int *>(memory);
}

void countUp(void *counter) {
  ++*static_cast<std::atomic<int> *>(counter);
}

template <class Function>
void call(void *function) {
  (*static_cast<Function *>(function))();
}

}  // namespace

TEST(capturedCallsRunAtEveryLaunchAndNotBefore) {
  const cudaStream_t stream = newStream();
  const cudaStream_t other = newStream();
  int *pinned = pinnedArray(2);
  auto *data = deviceArray<int>(1);
  std::atomic<int> count{0};
  CHECK_EQ(statusOf(stream), cudaStreamCaptureStatusNone);
  beginCapture(stream);
  CHECK_EQ(statusOf(stream), cudaStreamCaptureStatusActive);
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaErrorIllegalState);
  CUDA_OK(cudaMemsetAsync(data, 0x11, sizeof(int), stream));
  CUDA_OK(cudaMemcpyAsync(data, &pinned[0], sizeof(int), cudaMemcpyHostToDevice, stream));
  CUDA_OK(cudaLaunchHostFunc(stream, countUp, &count));
  CUDA_OK(cudaMemcpyAsync(&pinned[1], data, sizeof(int), cudaMemcpyDeviceToHost, stream));
  const cudaGraphExec_t graph = endCapture(stream);
  CHECK_EQ(statusOf(stream), cudaStreamCaptureStatusNone);
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(count.load(), 0);
  CUDA_OK(cudaGraphUpload(graph, stream));
  for (int i = 1; i <= 50; ++i) {
    pinned[0] = i;
    const cudaStream_t on = i % 3 == 0 ? other : stream;
    CUDA_OK(cudaGraphLaunch(graph, on));
    CUDA_OK(cudaStreamSynchronize(on));
    CHECK_EQ(count.load(), i);
    CHECK_EQ(pinned[1], i);
  }
  CUDA_OK(cudaGraphExecDestroy(graph));
  CHECK_EQ(cudaGraphExecDestroy(graph), cudaErrorInvalidValue);
  CHECK_EQ(cudaGraphLaunch(graph, stream), cudaErrorInvalidValue);
  CHECK_EQ(cudaGraphUpload(graph, stream), cudaErrorInvalidValue);
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaStreamDestroy(other));
  CUDA_OK(cudaFree(data));
  CUDA_OK(cudaFreeHost(pinned));
}

TEST(anUpdateTakesCallsOfAnotherGraphIfTheyAreAsMany) {
  const cudaStream_t stream = newStream();
  std::atomic<int> first{0}, second{0};
  beginCapture(stream);
  CUDA_OK(cudaLaunchHostFunc(stream, countUp, &first));
  const cudaGraphExec_t executable = endCapture(stream);
  for (int calls = 1; calls <= 2; ++calls) {
    cudaGraph_t graph = nullptr;
    beginCapture(stream);
    for (int i = 0; i < calls; ++i) CUDA_OK(cudaLaunchHostFunc(stream, countUp, &second));
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExecUpdateResultInfo info = {};
    CHECK_EQ(cudaGraphExecUpdate(executable, graph, &info), calls == 1 ? cudaSuccess : cudaErrorGraphExecUpdateFailure);
    CHECK_EQ(info.result, calls == 1 ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged);
    CHECK_EQ(cudaGraphExecUpdate(executable, graph, nullptr), cudaErrorInvalidValue);
    CUDA_OK(cudaGraphDestroy(graph));
    CHECK_EQ(cudaGraphExecUpdate(executable, graph, &info), cudaErrorInvalidValue);
    CUDA_OK(cudaGraphLaunch(executable, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    CHECK_EQ(first.load(), 0);
    CHECK_EQ(second.load(), calls);
  }
  CUDA_OK(cudaGraphExecDestroy(executable));
  CUDA_OK(cudaStreamDestroy(stream));
}

TEST(launchesOfOneGraphFollowEachOtherOnWhateverStream) {
  const cudaStream_t first = newStream();
  const cudaStream_t second = newStream();
  Gate gate;
  auto waitOnce = [&gate, waited = false]() mutable {
    if (!waited) {
      waited = true;
      gate.wait();
    }
  };
  std::atomic<int> count{0};
  beginCapture(first);
  CUDA_OK(cudaLaunchHostFunc(first, call<decltype(waitOnce)>, &waitOnce));
  CUDA_OK(cudaLaunchHostFunc(first, countUp, &count));
  const cudaGraphExec_t graph = endCapture(first);
  CUDA_OK(cudaGraphLaunch(graph, first));
  CUDA_OK(cudaGraphLaunch(graph, second));
  CUDA_OK(cudaGraphExecDestroy(graph));  // what is launched goes on
  CHECK(waitsForGate(&gate, [&] { CUDA_OK(cudaStreamSynchronize(second)); }));
  CHECK_EQ(count.load(), 2);
  CUDA_OK(cudaStreamQuery(first));
  CUDA_OK(cudaStreamDestroy(first));
  CUDA_OK(cudaStreamDestroy(second));
}

TEST(captureFollowsEventsToOtherStreamsAndBack) {
  const cudaStream_t stream = newStream();
  const cudaStream_t branch = newStream();
  const cudaEvent_t fork = newEvent();
  const cudaEvent_t join = newEvent();
  int *pinned = pinnedArray(3);
  auto *data = deviceArray<int>(1);
  for (bool joined : {true, false}) {
    beginCapture(stream);
    CUDA_OK(cudaMemcpyAsync(data, &pinned[0], sizeof(int), cudaMemcpyHostToDevice, stream));
    CUDA_OK(cudaEventRecord(fork, stream));
    CHECK_EQ(statusOf(branch), cudaStreamCaptureStatusNone);
    CUDA_OK(cudaStreamWaitEvent(branch, fork, 0));
    CHECK_EQ(statusOf(branch), cudaStreamCaptureStatusActive);
    CUDA_OK(cudaMemcpyAsync(&pinned[1], data, sizeof(int), cudaMemcpyDeviceToHost, branch));
    CUDA_OK(cudaEventRecord(join, branch));
    if (joined) {
      CUDA_OK(cudaStreamWaitEvent(stream, join, 0));
      CUDA_OK(cudaMemcpyAsync(&pinned[2], &pinned[1], sizeof(int), cudaMemcpyHostToHost, stream));
      const cudaGraphExec_t graph = endCapture(stream);
      for (int i = 1; i <= 10; ++i) {
        pinned[0] = i;
        CUDA_OK(cudaGraphLaunch(graph, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        CHECK_EQ(pinned[2], i);
      }
      CUDA_OK(cudaGraphExecDestroy(graph));
    } else {
      cudaGraph_t graph = nullptr;
      CHECK_EQ(cudaStreamEndCapture(branch, &graph), cudaErrorStreamCaptureUnmatched);
      checkEnd(stream, cudaErrorStreamCaptureUnjoined);
    }
    CHECK_EQ(statusOf(branch), cudaStreamCaptureStatusNone);
    CHECK_EQ(cudaEventQuery(join), cudaErrorCapturedEvent);
    CHECK_EQ(cudaStreamWaitEvent(branch, join, 0), cudaErrorCapturedEvent);
  }
  CUDA_OK(cudaEventRecord(join, branch));  // an event of the usual kind again
  CUDA_OK(cudaEventSynchronize(join));
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaStreamDestroy(branch));
  CUDA_OK(cudaEventDestroy(fork));
  CUDA_OK(cudaEventDestroy(join));
  CUDA_OK(cudaFree(data));
  CUDA_OK(cudaFreeHost(pinned));
}

TEST(whatACaptureCannotHoldSpoilsIt) {
  const cudaStream_t stream = newStream();
  const cudaStream_t other = newStream();
  cudaStream_t blocking = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
  const cudaEvent_t outside = newEvent();
  const cudaEvent_t inside = newEvent();
  CUDA_OK(cudaEventRecord(outside, other));
  auto *data = deviceArray<int>(1);
  int *pinned = pinnedArray(1);
  int pageable = 0;
  const struct {
    const char *name;
    std::function<cudaError_t()> call;
    cudaError_t error;
  } calls[] = {
      {"synchronize", [&] { return cudaStreamSynchronize(stream); }, cudaErrorStreamCaptureUnsupported},
      {"query", [&] { return cudaStreamQuery(stream); }, cudaErrorStreamCaptureUnsupported},
      {"query of its event", [&] { return cudaEventQuery(inside); }, cudaErrorCapturedEvent},
      {"wait for its event", [&] { return cudaEventSynchronize(inside); }, cudaErrorCapturedEvent},
      {"foreign event", [&] { return cudaStreamWaitEvent(stream, outside, 0); }, cudaErrorStreamCaptureIsolation},
      {"blocking stream", [&] { return cudaStreamWaitEvent(blocking, inside, 0); }, cudaErrorNotSupported},
      {"copy of pageable memory",
       [&] { return cudaMemcpyAsync(data, &pageable, sizeof(int), cudaMemcpyHostToDevice, stream); },
       cudaErrorStreamCaptureUnsupported},
      {"copy to pageable memory",
       [&] { return cudaMemcpyAsync(&pageable, data, sizeof(int), cudaMemcpyDeviceToHost, stream); },
       cudaErrorStreamCaptureUnsupported},
      {"synchronous copy", [&] { return cudaMemcpy(&pageable, data, sizeof(int), cudaMemcpyDeviceToHost); },
       cudaErrorStreamCaptureUnsupported},
      {"synchronous fill", [&] { return cudaMemset(data, 0, sizeof(int)); }, cudaErrorStreamCaptureUnsupported},
      {"device", [&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported},
      {"allocation",
       [&] {
         void *pointer = nullptr;
         return cudaMalloc(&pointer, 8);
       },
       cudaErrorStreamCaptureUnsupported},
      {"release", [&] { return cudaFree(data); }, cudaErrorStreamCaptureUnsupported},
      {"pinned allocation",
       [&] {
         void *pointer = nullptr;
         return cudaHostAlloc(&pointer, 8, 0);
       },
       cudaErrorStreamCaptureUnsupported},
      {"pinned release", [&] { return cudaFreeHost(pinned); }, cudaErrorStreamCaptureUnsupported},
  };
  for (const auto &forbidden : calls) {
    beginCapture(stream);
    CUDA_OK(cudaEventRecord(inside, stream));
    CHECK_EQ_IN(forbidden.call(), forbidden.error, forbidden.name);
    CHECK_EQ_IN(statusOf(stream), cudaStreamCaptureStatusInvalidated, forbidden.name);
    CHECK_EQ(cudaMemsetAsync(data, 0, sizeof(int), stream), cudaErrorStreamCaptureInvalidated);
    CHECK_EQ(cudaEventRecord(inside, stream), cudaErrorStreamCaptureInvalidated);
    checkEnd(stream, cudaErrorStreamCaptureInvalidated);
  }
  CUDA_OK(cudaFree(data));
  CUDA_OK(cudaFreeHost(pinned));
}

TEST(twoCapturesDoNotMix) {
  const cudaStream_t first = newStream();
  const cudaStream_t second = newStream();
  const cudaEvent_t event = newEvent();
  beginCapture(first);
  beginCapture(second);
  CUDA_OK(cudaEventRecord(event, first));
  CHECK_EQ(cudaStreamWaitEvent(second, event, 0), cudaErrorStreamCaptureMerge);
  checkEnd(first, cudaErrorStreamCaptureInvalidated);
  checkEnd(second, cudaErrorStreamCaptureInvalidated);
}

TEST(captureBelongsToItsThreadAndStream) {
  const cudaStream_t stream = newStream();
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
  beginCapture(stream);
  std::thread([&] {
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureWrongThread);
    // Other threads are not disturbed, nor do they disturb it.
    CUDA_OK(cudaFree(deviceArray<int>(1)));
    CUDA_OK(cudaDeviceSynchronize());
  }).join();
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphDestroy(graph));

  beginCapture(stream);
  CUDA_OK(cudaStreamDestroy(stream));
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorInvalidResourceHandle);
  CUDA_OK(cudaFree(deviceArray<int>(1)));  // the capture is over with its stream
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaErrorInvalidResourceHandle);
}

TEST(onlyThreadLocalCapturesOfNonBlockingStreamsAreTaken) {
  const cudaStream_t stream = newStream();
  cudaStream_t blocking = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
  CHECK_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal), cudaErrorStreamCaptureUnsupported);
  CHECK_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal), cudaErrorNotSupported);
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaErrorNotSupported);
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaErrorNotSupported);
  CHECK_EQ(cudaStreamBeginCapture(stream, static_cast<cudaStreamCaptureMode>(3)), cudaErrorInvalidValue);
  CHECK_EQ(statusOf(stream), cudaStreamCaptureStatusNone);
}

TEST(graphLaunchedInACaptureSpoilsIt) {
  const cudaStream_t stream = newStream();
  std::atomic<int> count{0};
  beginCapture(stream);
  CUDA_OK(cudaLaunchHostFunc(stream, countUp, &count));
  const cudaGraphExec_t inner = endCapture(stream);
  beginCapture(stream);
  CHECK_EQ(cudaGraphLaunch(inner, stream), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t spoilt = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &spoilt), cudaErrorStreamCaptureInvalidated);
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(count.load(), 0);
  CUDA_OK(cudaGraphExecDestroy(inner));
}

TEST(collectivesAndMessagesAreReplayedInOrderWithOthers) {
  constexpr int kRanks = 3;
  constexpr int kLaunches = 200;
  onRanks(kRanks, [](Rank &rank) {
    const cudaStream_t other = newStream();
    auto *data = deviceArray<int>(3);
    int *pinned = pinnedArray(3);
    const int next = (rank.rank + 1) % kRanks;
    const int previous = (rank.rank + kRanks - 1) % kRanks;
    beginCapture(rank.stream);
    CUDA_OK(cudaMemcpyAsync(data, pinned, sizeof(int), cudaMemcpyHostToDevice, rank.stream));
    NCCL_OK(ncclAllReduce(data, data + 1, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclSend(data, 1, ncclInt32, next, rank.comm, rank.stream));
    NCCL_OK(ncclRecv(data + 2, 1, ncclInt32, previous, rank.comm, rank.stream));
    NCCL_OK(ncclGroupEnd());
    CUDA_OK(cudaMemcpyAsync(pinned + 1, data + 1, 2 * sizeof(int), cudaMemcpyDeviceToHost, rank.stream));
    const cudaGraphExec_t graph = endCapture(rank.stream);
    auto *single = deviceArray<int>(1);
    for (int i = 0; i < kLaunches; ++i) {
      pinned[0] = 1000 * i + rank.rank;
      CUDA_OK(cudaGraphLaunch(graph, rank.stream));
      // Not captured, on another stream: after the launch, as everything of one communicator.
      NCCL_OK(ncclAllReduce(single, single, 1, ncclInt32, ncclSum, rank.comm, other));
      CUDA_OK(cudaStreamSynchronize(rank.stream));
      CHECK_EQ(pinned[1], 3000 * i + 3);
      CHECK_EQ(pinned[2], 1000 * i + previous);
    }
    CUDA_OK(cudaStreamSynchronize(other));
    CUDA_OK(cudaGraphExecDestroy(graph));
    CUDA_OK(cudaStreamDestroy(other));
    CUDA_OK(cudaFree(single));
    CUDA_OK(cudaFree(data));
    CUDA_OK(cudaFreeHost(pinned));
  });
}

TEST(operationsThatCannotBeCapturedSayWhy) {
  onRanks(1, [](Rank &rank) {
    const cudaStream_t other = newStream();
    auto *data = deviceArray<int>(2);
    beginCapture(rank.stream);
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclSend(data, 1, ncclInt32, 0, rank.comm, rank.stream));
    NCCL_OK(ncclRecv(data + 1, 1, ncclInt32, 0, rank.comm, other));
    CHECK_EQ(ncclGroupEnd(), ncclInvalidUsage);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "captured in one graph");
    CHECK_EQ(cudaStreamQuery(rank.stream), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream), ncclUnhandledCudaError);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "cudaErrorStreamCaptureInvalidated");
    checkEnd(rank.stream, cudaErrorStreamCaptureInvalidated);
    CUDA_OK(cudaStreamDestroy(other));
    CUDA_OK(cudaFree(data));
  });
}

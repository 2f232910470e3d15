// The CPU backend of the shim: the same device headers, compiled for the host. A block is one thread; a launch of
// several blocks runs each on a thread of its own, at the same time, as blocks of a GPU do.
#include <exception>
#include <optional>
#include <thread>
#include <vector>

#include "../../include/ncclffm/device.h"
#include "../../include/ncclffm/impl/lsa_pattern.h"
#include "../../include/ncclffm/impl/producers.h"
#include "../shim.h"
#include "abi.h"
#include "fault.h"
#include "layouts.h"
#include "stream.h"

namespace ncclffm::shim {
namespace {

// What goes wrong in here is in the status record of the communicator, as on a GPU; the stream knows nothing of it.
void runBlock(const CallLaunch &launch, int block) {
  withElementType(launch.call, [&](auto tag) {
    return callBlock<typename decltype(tag)::Type>(CoopBlock(), launch.comm, launch.call, block, launch.call.blocks);
  });
  signalHost(CoopGrid{CoopBlock(), block, launch.call.blocks}, launch.comm);
}

template <class T>
ncclResult_t runFusedBlock(const FusedLaunch &launch, int block) {
  const int blocks = launch.call.blocks;
  switch (launch.function) {
    case ncclFfmFunctionFusedScaleAllReduceSqrt:
      return scaleAllReduceSqrt<T>(CoopBlock(), launch.comm, block, blocks, launch.call, launch.a, launch.b);
    case ncclFfmFunctionFusedRmsNorm:
      return allReduceRmsNorm<T>(CoopBlock(), launch.comm, block, blocks, launch.call, launch.norm);
    default:
      return allReduceUpdate<T>(CoopBlock(), launch.comm, block, blocks, launch.call, launch.optimizer,
                                launch.function == ncclFfmFunctionFusedAdamW);
  }
}

void runBlock(const FusedLaunch &launch, int block) {
  switch (launch.call.datatype) {
    case ncclFloat32:
      runFusedBlock<float>(launch, block);
      break;
    case ncclFloat16:
      runFusedBlock<Float16>(launch, block);
      break;
    default:
      runFusedBlock<Bfloat16>(launch, block);
  }
  signalHost(CoopGrid{CoopBlock(), block, launch.call.blocks}, launch.comm);
}

void runBlock(const PatternLaunch &launch, int block) {
  if (launch.firstBad == nullptr) {
    writeLsaPattern(CoopBlock(), block, launch.blocks, launch.window, launch.offset, launch.bytes, launch.seed);
  } else {
    checkLsaPattern(CoopBlock(), block, launch.blocks, launch.window, launch.offset, launch.bytes, launch.seed,
                    launch.firstBad);
  }
}

void runBlock(const QueueLaunch &launch, int) {
  clearQueue(launch.queue, launch.firstSequence, 0, 1);
}

void runBlock(const SchedulerLaunch &launch, int block) {
  runScheduler(CoopBlock(), launch.comm, launch.queue, launch.mode, block);
}

void runBlock(const BatchLaunch &launch, int) {
  appendBatch(launch.queue, launch.batch);
}

void runBlock(const ReserveLaunch &launch, int) {
  reserveInTurn(launch.queue, launch.nTasks, launch.first);
}

void runBlock(const BucketsLaunch &launch, int block) {
  produceBuckets(CoopBlock(), launch.queue, launch.buckets, block, launch.blocks);
}

void runBlock(const OverlapLaunch &launch, int block) {
  produceIterations(CoopBlock(), launch.queue, launch.overlap, block, launch.blocks);
}

void runBlock(const ProducerEndLaunch &launch, int) {
  ncclTaskProducerEnd(launch.queue);
}

// If not every block gets its thread, the stream has failed; the blocks that did start end with their peers or at the
// deadline.
template <class AnyLaunch>
cudaError_t runBlocks(const AnyLaunch &launch, int blocks) {
  std::vector<std::thread> others;
  cudaError_t result = cudaSuccess;
  try {
    for (int block = 1; block < blocks; ++block) {
      others.emplace_back([&launch, block] { runBlock(launch, block); });
    }
  } catch (const std::exception &) {
    result = cudaErrorLaunchFailure;
  }
  if (result == cudaSuccess) runBlock(launch, 0);
  for (std::thread &thread : others) thread.join();
  return result;
}

Failure enqueued(cudaError_t error) {
  if (error == cudaSuccess) return "";
  return std::string("the CPU backend's stream refused the launch: ") + cudaGetErrorName(error) + ": " +
         cudaGetErrorString(error);
}

template <class AnyLaunch>
Failure enqueueBlocks(const AnyLaunch &launch, int blocks) {
  const std::optional<int> fault = cpu::injectedFault("ncclFfmLaunch");
  if (fault) return enqueued(static_cast<cudaError_t>(*fault));
  return enqueued(
      cpu::enqueue(static_cast<cudaStream_t>(launch.stream), [launch, blocks] { return runBlocks(launch, blocks); }));
}

}  // namespace

Failure launch(const CallLaunch &launch) {
  return enqueueBlocks(launch, launch.call.blocks);
}

Failure launch(const FusedLaunch &launch) {
  return enqueueBlocks(launch, launch.call.blocks);
}

Failure launch(const PatternLaunch &launch) {
  return enqueueBlocks(launch, launch.blocks);
}

Failure launch(const QueueLaunch &launch) {
  return enqueueBlocks(launch, 1);
}

Failure launch(const SchedulerLaunch &launch) {
  return enqueueBlocks(launch, launch.blocks);
}

Failure launch(const BatchLaunch &launch) {
  return enqueueBlocks(launch, 1);
}

Failure launch(const ReserveLaunch &launch) {
  return enqueueBlocks(launch, 1);
}

Failure launch(const BucketsLaunch &launch) {
  return enqueueBlocks(launch, launch.blocks);
}

Failure launch(const OverlapLaunch &launch) {
  return enqueueBlocks(launch, launch.blocks);
}

Failure launch(const ProducerEndLaunch &launch) {
  return enqueueBlocks(launch, 1);
}

// Nothing is loaded at a first launch here; but a stream that would refuse one says so now.
Failure prime(void *stream) {
  return enqueued(cpu::enqueue(static_cast<cudaStream_t>(stream), [] { return cudaSuccess; }));
}

uint32_t blockThreads() {
  return 1;
}

// A block is a thread that shares the processors with every other rank's: two show that blocks do run side by side.
Failure maxBlocks(int, int *blocks) {
  *blocks = 2;
  return "";
}

// More of them only take the processors from each other; but a lane needs its own.
Failure maxSchedulerBlocks(int, int *blocks) {
  *blocks = NCCLFFM_MAX_LANES;
  return "";
}

const char *buildInfo() {
  return "cpu, compiler " __VERSION__ ", for development: a block is one host thread";
}

void backendLayouts(const ncclFfmLayout **layouts, size_t *count) {
  *layouts = cpu::abiLayouts;
  *count = cpu::abiLayoutCount;
}

}  // namespace ncclffm::shim

// The CUDA backend of the shim: launches on a stream, and the kernels that are not collectives (those are in
// kernels.cuh).
#include <algorithm>
#include <cstddef>

#include "../../include/ncclffm/impl/lsa_pattern.h"
#include "../shim.h"
#include "fused.cuh"
#include "kernels.cuh"

namespace ncclffm::shim {
namespace {

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    writeLsaPatternKernel(ncclLsaWindow window, uint64_t offset, uint64_t bytes, uint64_t seed) {
  writeLsaPattern(CoopBlock(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), window, offset, bytes, seed);
}

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    checkLsaPatternKernel(ncclLsaWindow window, uint64_t offset, uint64_t bytes, uint64_t seed, uint64_t *firstBad) {
  checkLsaPattern(CoopBlock(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), window, offset, bytes, seed,
                  firstBad);
}

void launchCall(const ncclFfmDevComm &comm, const ncclFfmCall &call, int elementType, int blocks, cudaStream_t stream) {
  switch (elementType) {
    case kUnreduced:
      return launchCallOf<Unreduced>(comm, call, blocks, stream);
    case ncclInt8:
      return launchCallOf<int8_t>(comm, call, blocks, stream);
    case ncclUint8:
      return launchCallOf<uint8_t>(comm, call, blocks, stream);
    case ncclInt32:
      return launchCallOf<int32_t>(comm, call, blocks, stream);
    case ncclUint32:
      return launchCallOf<uint32_t>(comm, call, blocks, stream);
    case ncclInt64:
      return launchCallOf<int64_t>(comm, call, blocks, stream);
    case ncclUint64:
      return launchCallOf<uint64_t>(comm, call, blocks, stream);
    case ncclFloat16:
      return launchCallOf<Float16>(comm, call, blocks, stream);
    case ncclFloat32:
      return launchCallOf<float>(comm, call, blocks, stream);
    case ncclFloat64:
      return launchCallOf<double>(comm, call, blocks, stream);
    default:
      return launchCallOf<Bfloat16>(comm, call, blocks, stream);
  }
}

#define NCCLFFM_TEXT_OF(x) #x
#define NCCLFFM_TEXT(x) NCCLFFM_TEXT_OF(x)

}  // namespace

Failure reported(const char *what, cudaError_t error) {
  if (error == cudaSuccess) return "";
  return std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
}

Failure lastLaunch(const char *kernel) {
  return reported((std::string("launch of ") + kernel).c_str(), cudaGetLastError());
}

Failure launch(const CallLaunch &launch) {
  launchCall(launch.comm, launch.call, launch.elementType, launch.call.blocks,
             static_cast<cudaStream_t>(launch.stream));
  return lastLaunch("callKernel");
}

Failure launch(const FusedLaunch &launch) {
  const cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  switch (launch.call.datatype) {
    case ncclFloat32:
      launchFusedOf<float>(launch, stream);
      break;
    case ncclFloat16:
      launchFusedOf<Float16>(launch, stream);
      break;
    default:
      launchFusedOf<Bfloat16>(launch, stream);
  }
  return lastLaunch("a fused kernel");
}

Failure launch(const PatternLaunch &launch) {
  cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  if (launch.firstBad == nullptr) {
    writeLsaPatternKernel<<<launch.blocks, kThreadsPerBlock, 0, stream>>>(launch.window, launch.offset, launch.bytes,
                                                                          launch.seed);
    return lastLaunch("writeLsaPatternKernel");
  }
  checkLsaPatternKernel<<<launch.blocks, kThreadsPerBlock, 0, stream>>>(launch.window, launch.offset, launch.bytes,
                                                                        launch.seed, launch.firstBad);
  return lastLaunch("checkLsaPatternKernel");
}

Failure prime(void *stream) {
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  const ncclFfmCall nothing = {};  // of 0 blocks: a kernel returns at once
  Failure failure;
  for (int type = kUnreduced; type <= ncclBfloat16 && failure.empty(); ++type) {
    launchCall(ncclFfmDevComm{}, nothing, type, 1, on);
    failure = lastLaunch("callKernel");
  }
  if (!failure.empty()) return failure;
  for (ncclFfmFunction function :
       {ncclFfmFunctionFusedScaleAllReduceSqrt, ncclFfmFunctionFusedRmsNorm, ncclFfmFunctionFusedAdamW}) {
    for (int type : {ncclFloat32, ncclFloat16, ncclBfloat16}) {
      FusedLaunch none = {};
      none.function = function;
      none.call.datatype = type;
      none.stream = stream;
      failure = launch(none);
      if (!failure.empty()) return failure;
    }
  }
  writeLsaPatternKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclLsaWindow{}, 0, 0, 0);
  failure = lastLaunch("writeLsaPatternKernel");
  if (!failure.empty()) return failure;
  checkLsaPatternKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclLsaWindow{}, 0, 0, 0, nullptr);
  failure = lastLaunch("checkLsaPatternKernel");
  return failure.empty() ? primeTasks(stream) : failure;
}

uint32_t blockThreads() {
  return kThreadsPerBlock;
}

// Kernels here are bounded to a block's worth of registers, so each processor has room for one block at least.
Failure maxBlocks(int ranksPerDevice, int *blocks) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  *blocks = processors / ranksPerDevice;
  return reported("number of processors", error);
}

// A processor at least is left to producers, which the blocks of a scheduler wait for.
Failure maxSchedulerBlocks(int ranksPerDevice, int *blocks) {
  const Failure failure = maxBlocks(ranksPerDevice, blocks);
  if (*blocks > 1) --*blocks;
  return failure;
}

const char *buildInfo() {
  return "cuda, nvcc " NCCLFFM_TEXT(__CUDACC_VER_MAJOR__) "." NCCLFFM_TEXT(__CUDACC_VER_MINOR__) "." NCCLFFM_TEXT(
      __CUDACC_VER_BUILD__) ", static CUDA runtime, architectures " NCCLFFM_CUDA_ARCHITECTURES;
}

void backendLayouts(const ncclFfmLayout **layouts, size_t *count) {
  *layouts = nullptr;
  *count = 0;
}

}  // namespace ncclffm::shim

// The CUDA backend of the shim: the kernels, and their launches on a stream.
#include <cuda_runtime.h>

#include <limits>

#include "../../include/ncclffm/device.h"
#include "../../include/ncclffm/impl/lsa_pattern.h"
#include "../shim.h"

namespace ncclffm::shim {
namespace {

constexpr int kThreadsPerBlock = 512;
// At most 64 registers a thread: ranks that share a GPU wait for each other, so all their blocks must find room at
// once.
constexpr int kBlocksPerSm = 2;

__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerSm)
    allReduceKernel(const __grid_constant__ ncclFfmDevComm comm, const float *sendbuff, float *recvbuff, size_t count) {
  fusedAllReduceKernel(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
                       ncclFfmFunctionAllReduce, sendbuff, recvbuff, count, Identity(), Identity());
}

__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerSm)
    scaleAllReduceSqrtKernel(const __grid_constant__ ncclFfmDevComm comm, float *buff, size_t count, float a, float b) {
  fusedAllReduceKernel(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
                       ncclFfmFunctionFusedScaleAllReduceSqrt, buff, buff, count, ScaleAdd{a, b}, SqrtAbs());
}

__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerSm)
    writeLsaPatternKernel(ncclLsaWindow window, uint64_t offset, uint64_t bytes, uint64_t seed) {
  writeLsaPattern(CoopBlock(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), window, offset, bytes, seed);
}

__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerSm)
    checkLsaPatternKernel(ncclLsaWindow window, uint64_t offset, uint64_t bytes, uint64_t seed, uint64_t *firstBad) {
  checkLsaPattern(CoopBlock(), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), window, offset, bytes, seed,
                  firstBad);
}

Failure lastLaunch(const char *kernel) {
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return "";
  return std::string("launch of ") + kernel + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
}

#define NCCLFFM_TEXT_OF(x) #x
#define NCCLFFM_TEXT(x) NCCLFFM_TEXT_OF(x)

}  // namespace

Failure launch(const Launch &launch) {
  cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  if (launch.function == ncclFfmFunctionAllReduce) {
    allReduceKernel<<<launch.blocks, kThreadsPerBlock, 0, stream>>>(launch.comm, launch.sendbuff, launch.recvbuff,
                                                                    launch.count);
    return lastLaunch("allReduceKernel");
  }
  scaleAllReduceSqrtKernel<<<launch.blocks, kThreadsPerBlock, 0, stream>>>(launch.comm, launch.recvbuff, launch.count,
                                                                           launch.a, launch.b);
  return lastLaunch("scaleAllReduceSqrtKernel");
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
  allReduceKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclFfmDevComm{}, nullptr, nullptr, 0);
  Failure failure = lastLaunch("allReduceKernel");
  if (!failure.empty()) return failure;
  scaleAllReduceSqrtKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclFfmDevComm{}, nullptr, 0, 0, 0);
  failure = lastLaunch("scaleAllReduceSqrtKernel");
  if (!failure.empty()) return failure;
  writeLsaPatternKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclLsaWindow{}, 0, 0, 0);
  failure = lastLaunch("writeLsaPatternKernel");
  if (!failure.empty()) return failure;
  checkLsaPatternKernel<<<1, kThreadsPerBlock, 0, on>>>(ncclLsaWindow{}, 0, 0, 0, nullptr);
  return lastLaunch("checkLsaPatternKernel");
}

int maxBlocks() {
  return std::numeric_limits<int>::max();
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

// The fused kernels of ncclffm.h for one element type. As those of kernels.cuh, they take long to compile.
#ifndef NCCLFFM_CUDA_FUSED_CUH_
#define NCCLFFM_CUDA_FUSED_CUH_

#include "../../include/ncclffm/fused.h"
#include "kernels.cuh"

namespace ncclffm::shim {

template <class T>
void launchFusedOf(const FusedLaunch &launch, cudaStream_t stream);

}  // namespace ncclffm::shim

#ifdef NCCLFFM_FUSED_OF

namespace ncclffm::shim {

// Every kernel returns at once for a call of no blocks: primed.
template <class T>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    scaleAllReduceSqrtKernel(const __grid_constant__ ncclFfmDevComm comm, const __grid_constant__ ncclFfmCall call,
                             float a, float b) {
  if (call.blocks == 0) return;
  scaleAllReduceSqrt<T>(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), call, a, b);
  signalHost(thisGrid(), comm);
}

template <class T>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    rmsNormKernel(const __grid_constant__ ncclFfmDevComm comm, const __grid_constant__ ncclFfmCall call,
                  const __grid_constant__ ncclFfmRmsNorm norm) {
  if (call.blocks == 0) return;
  allReduceRmsNorm<T>(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), call, norm);
  signalHost(thisGrid(), comm);
}

template <class T>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    updateKernel(const __grid_constant__ ncclFfmDevComm comm, const __grid_constant__ ncclFfmCall call,
                 const __grid_constant__ ncclFfmOptimizer optimizer, bool adamW) {
  if (call.blocks == 0) return;
  allReduceUpdate<T>(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), call, optimizer,
                     adamW);
  signalHost(thisGrid(), comm);
}

template <class T>
void launchFusedOf(const FusedLaunch &launch, cudaStream_t stream) {
  const int blocks = launch.call.blocks == 0 ? 1 : launch.call.blocks;
  switch (launch.function) {
    case ncclFfmFunctionFusedScaleAllReduceSqrt:
      scaleAllReduceSqrtKernel<T>
          <<<blocks, kThreadsPerBlock, 0, stream>>>(launch.comm, launch.call, launch.a, launch.b);
      break;
    case ncclFfmFunctionFusedRmsNorm:
      rmsNormKernel<T><<<blocks, kThreadsPerBlock, 0, stream>>>(launch.comm, launch.call, launch.norm);
      break;
    default:
      updateKernel<T><<<blocks, kThreadsPerBlock, 0, stream>>>(launch.comm, launch.call, launch.optimizer,
                                                               launch.function == ncclFfmFunctionFusedAdamW);
  }
}

template void launchFusedOf<NCCLFFM_FUSED_OF>(const FusedLaunch &launch, cudaStream_t stream);

}  // namespace ncclffm::shim

#endif

#endif  // NCCLFFM_CUDA_FUSED_CUH_

// The kernel of ncclFfmLaunch for one element type, or for calls that do not reduce. It takes long to compile, so the
// types are spread over files.
#ifndef NCCLFFM_CUDA_KERNELS_CUH_
#define NCCLFFM_CUDA_KERNELS_CUH_

#include <cuda_runtime.h>

#include "../../include/ncclffm/collectives.h"
#include "../shim.h"

namespace ncclffm::shim {

constexpr int kThreadsPerBlock = 512;

// "" or what went wrong, in words.
Failure reported(const char *what, cudaError_t error);
Failure lastLaunch(const char *kernel);

// Launches the kernels of tasks.cu once with nothing to do.
Failure primeTasks(void *stream);

template <class T>
void launchCallOf(const ncclFfmDevComm &comm, const ncclFfmCall &call, int blocks, cudaStream_t stream);

}  // namespace ncclffm::shim

#ifdef NCCLFFM_KERNELS_OF

namespace ncclffm::shim {

// At least one block on a processor: ranks that share a GPU wait for each other, so their blocks must find room at once
// (maxBlocks).
template <class T>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    callKernel(const __grid_constant__ ncclFfmDevComm comm, const __grid_constant__ ncclFfmCall call) {
  if (call.blocks == 0) return;  // primed
  callBlock<T>(CoopBlock(), comm, call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  signalHost(thisGrid(), comm);
}

template <class T>
void launchCallOf(const ncclFfmDevComm &comm, const ncclFfmCall &call, int blocks, cudaStream_t stream) {
  callKernel<T><<<blocks, kThreadsPerBlock, 0, stream>>>(comm, call);
}

#define NCCLFFM_KERNEL(T) \
  template void launchCallOf<T>(const ncclFfmDevComm &comm, const ncclFfmCall &call, int blocks, cudaStream_t stream);
NCCLFFM_KERNELS_OF(NCCLFFM_KERNEL)

}  // namespace ncclffm::shim

#endif

#endif  // NCCLFFM_CUDA_KERNELS_CUH_

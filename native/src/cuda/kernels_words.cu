// Kernels of the collectives for int32_t and uint32_t.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(int32_t) KERNEL(uint32_t)
#include "kernels.cuh"

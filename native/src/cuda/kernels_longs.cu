// Kernels of the collectives for int64_t and uint64_t.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(int64_t) KERNEL(uint64_t)
#include "kernels.cuh"

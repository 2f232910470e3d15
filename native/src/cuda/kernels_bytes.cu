// Kernels of the collectives for int8_t and uint8_t, and of those that do not reduce.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(int8_t) KERNEL(uint8_t) KERNEL(Unreduced)
#include "kernels.cuh"

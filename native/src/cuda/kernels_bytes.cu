// Kernels of the collectives for int8_t and uint8_t.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(int8_t) KERNEL(uint8_t)
#include "kernels.cuh"

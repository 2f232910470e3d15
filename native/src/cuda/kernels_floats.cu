// Kernels of the collectives for float and double.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(float) KERNEL(double)
#include "kernels.cuh"

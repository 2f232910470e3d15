// Kernels of the collectives for Float16 and Bfloat16.
#define NCCLFFM_KERNELS_OF(KERNEL) KERNEL(Float16) KERNEL(Bfloat16)
#include "kernels.cuh"

// The fused kernels for Bfloat16.
#define NCCLFFM_FUSED_OF Bfloat16
#include "fused.cuh"

// The fused kernels for float.
#define NCCLFFM_FUSED_OF float
#include "fused.cuh"

// The fused kernels for Float16.
#define NCCLFFM_FUSED_OF Float16
#include "fused.cuh"

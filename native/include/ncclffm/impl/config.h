// How a function of the device library is compiled: for the GPU by nvcc or NVRTC, or for host threads by any C++17
// compiler.
#ifndef NCCLFFM_IMPL_CONFIG_H_
#define NCCLFFM_IMPL_CONFIG_H_

#ifdef __CUDACC_RTC__
// NVRTC has no system headers. The same types as libcu++ declares there, so that both can be included.
typedef signed int int32_t;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef signed long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#ifndef offsetof
#define offsetof(type, field) __INTADDR__(&((type *)nullptr)->field)
#endif
#else
#include <stddef.h>
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define NCCLFFM_DEVICE __device__ __forceinline__
// What moves so much, or is called so rarely, that a call costs nothing: kernels stay small.
#ifdef __CUDA_ARCH__
#define NCCLFFM_DEVICE_CALL __device__ __noinline__ inline
#else
#define NCCLFFM_DEVICE_CALL __device__ inline  // compilers of the host, which see this too, find the two at odds
#endif
#define NCCLFFM_UNROLL _Pragma("unroll")
#define NCCLFFM_NO_UNROLL _Pragma("unroll 1")  // what is rarely taken stays small
#else
#define NCCLFFM_DEVICE inline
#define NCCLFFM_DEVICE_CALL inline
#define NCCLFFM_UNROLL
#define NCCLFFM_NO_UNROLL
#endif

#endif  // NCCLFFM_IMPL_CONFIG_H_

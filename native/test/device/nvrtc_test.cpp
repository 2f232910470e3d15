// Compiles kernels that include the device library by NVRTC, as a program does that builds kernels at run time: without
// any header of CUDA's or of the system's.
//
// nvrtc_test LIBNVRTC INCLUDE_FOLDER; skipped (77) where there is no such library. It stops at PTX: ptxas would take
// minutes more, and has its say in the build of libncclffm_cuda.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kSkipped = 77;

constexpr char kSource[] = R"(
#include "ncclffm/device.h"

using namespace ncclffm;

extern "C" __global__ void byBlock(DevComm comm, const float *in, float *out, uint64_t n, int *result) {
  ncclResult_t r = ncclDevAllReduce(comm, in, out, n, ncclFloat32, ncclSum, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) *result = r;
}

#ifndef ONLY_BY_BLOCK
extern "C" __global__ void byWarp(DevComm comm, const void *in, void *out, uint64_t n, int *result) {
  ncclResult_t r = ncclDevAllReduce(CoopWarp(), comm, in, out, n, ncclBfloat16, ncclMax, 0);
  if (threadIdx.x == 0) *result = r;
}

extern "C" __global__ void byGrid(DevComm comm, const float *in, float *out, uint64_t n, int *result) {
  ncclResult_t r = ncclDevAllReduce(thisGrid(), comm, in, out, n, ncclFloat32, ncclAvg, 0);
  if (threadIdx.x == 0 && blockIdx.x == 0) *result = r;
}

struct TimesIndex {
  __device__ float operator()(float x, uint64_t i) const { return x * static_cast<float>(i); }
};

extern "C" __global__ void fused(DevComm comm, const Float16 *in, Float16 *out, uint64_t n, int *result) {
  ncclResult_t r = fusedAllReduceKernel<Float16>(CoopBlock(), comm, static_cast<int>(blockIdx.x),
                                                 static_cast<int>(gridDim.x), in, out, n, ncclSum, TimesIndex(),
                                                 AddTo<Float16>{out});
  if (threadIdx.x == 0) *result = r;
  signalHost(thisGrid(), comm);
}

extern "C" __global__ void rmsNorm(const __grid_constant__ DevComm comm, const __grid_constant__ Call call,
                                const __grid_constant__ RmsNorm n) {
  allReduceRmsNorm<Bfloat16>(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), call, n);
}

extern "C" __global__ void update(const __grid_constant__ DevComm comm, const __grid_constant__ Call call,
                                  const __grid_constant__ Optimizer optimizer) {
  allReduceUpdate<float>(CoopBlock(), comm, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), call, optimizer,
                         true);
}
#endif
)";

// What is used of nvrtc.h, which need not be there.
struct Nvrtc {
  using Program = void *;
  int (*version)(int *major, int *minor);
  int (*createProgram)(Program *, const char *source, const char *name, int headers, const char *const *,
                       const char *const *);
  int (*compileProgram)(Program, int options, const char *const *);
  int (*getProgramLogSize)(Program, size_t *);
  int (*getProgramLog)(Program, char *);
  int (*getPtxSize)(Program, size_t *);
  int (*destroyProgram)(Program *);
  const char *(*getErrorString)(int);
};

template <class F>
void load(void *library, const char *name, F &function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) {
    fprintf(stderr, "nvrtc_test: the library has no %s\n", name);
    exit(1);
  }
}

// All kernels for the first architecture; one for the others, for each takes half a minute.
bool compiles(const Nvrtc &nvrtc, const std::string &architecture, const std::string &includes) {
  Nvrtc::Program program = nullptr;
  int result = nvrtc.createProgram(&program, kSource, "kernels.cu", 0, nullptr, nullptr);
  const std::string arch = "--gpu-architecture=" + architecture, include = "--include-path=" + includes;
  std::vector<const char *> options = {"--std=c++17", arch.c_str(), include.c_str()};
  if (architecture != "compute_80") options.push_back("--define-macro=ONLY_BY_BLOCK");
  if (result == 0) result = nvrtc.compileProgram(program, static_cast<int>(options.size()), options.data());
  size_t logBytes = 0, ptxBytes = 0;
  std::string log;
  if (program != nullptr && nvrtc.getProgramLogSize(program, &logBytes) == 0 && logBytes > 1) {
    log.resize(logBytes);
    nvrtc.getProgramLog(program, log.data());
  }
  if (result == 0) nvrtc.getPtxSize(program, &ptxBytes);
  // A warning is an error here as everywhere; the remark on what went by is not one.
  const bool warned = log.find("warning") != std::string::npos;
  fprintf(stderr, "nvrtc_test: %s: %s, %zu bytes of PTX\n%s", architecture.c_str(), nvrtc.getErrorString(result),
          ptxBytes, log.c_str());
  if (program != nullptr) nvrtc.destroyProgram(&program);
  return result == 0 && ptxBytes > 0 && !warned;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "nvrtc_test: skipped: there is no libnvrtc; set NCCLFFM_NVRTC to one\n");
    return kSkipped;
  }
  void *library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "nvrtc_test: %s\n", dlerror());
    return 1;
  }
  Nvrtc nvrtc = {};
  load(library, "nvrtcVersion", nvrtc.version);
  load(library, "nvrtcCreateProgram", nvrtc.createProgram);
  load(library, "nvrtcCompileProgram", nvrtc.compileProgram);
  load(library, "nvrtcGetProgramLogSize", nvrtc.getProgramLogSize);
  load(library, "nvrtcGetProgramLog", nvrtc.getProgramLog);
  load(library, "nvrtcGetPTXSize", nvrtc.getPtxSize);
  load(library, "nvrtcDestroyProgram", nvrtc.destroyProgram);
  load(library, "nvrtcGetErrorString", nvrtc.getErrorString);
  int major = 0, minor = 0;
  nvrtc.version(&major, &minor);
  fprintf(stderr, "nvrtc_test: NVRTC %d.%d\n", major, minor);
  bool all = compiles(nvrtc, "compute_80", argv[2]) && compiles(nvrtc, "compute_90", argv[2]);
  if (major > 12 || (major == 12 && minor >= 8)) all = all && compiles(nvrtc, "compute_100", argv[2]);
  fprintf(stderr, "nvrtc_test: %s\n", all ? "PASS" : "FAIL");
  return all ? 0 : 1;
}

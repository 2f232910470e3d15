// Which CUDA calls wait for a kernel that spins on another stream of the process: what must not stand between two
// ranks' launches when ranks share a GPU. Prints a row a call; "waits" means that it returned only after the kernel had
// ended.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::milliseconds(500);  // for a call that does not wait
constexpr size_t kMiB = 1 << 20;

void cuda(cudaError_t error, const char *call, int line) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "line %d: %s: %s\n", line, call, cudaGetErrorString(error));
  exit(1);
}
#define CUDA(call) cuda(call, #call, __LINE__)

__global__ void spin(const volatile int *stop, volatile int *started) {
  *started = 1;
  while (*stop == 0) {
  }
}

__global__ void neverLaunchedBefore() {}

struct Call {
  const char *name;
  std::function<cudaError_t()> make;
};

}  // namespace

int main() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  volatile int *flags;  // stop, started
  CUDA(cudaHostAlloc(const_cast<int **>(&flags), 2 * sizeof(int), cudaHostAllocMapped));
  cudaStream_t spinning, other, made;
  CUDA(cudaStreamCreateWithFlags(&spinning, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cudaEvent_t event;
  void *pinned, *secondPinned, *device, *secondDevice, *small, *large, *host;
  std::vector<char> pageable(kMiB);
  CUDA(cudaHostAlloc(&pinned, kMiB, cudaHostAllocDefault));
  CUDA(cudaHostAlloc(&secondPinned, kMiB, cudaHostAllocDefault));
  CUDA(cudaMalloc(&device, kMiB));
  CUDA(cudaMalloc(&secondDevice, 64 * kMiB));

  const std::vector<Call> calls = {
      {"cudaMalloc, 1 KiB", [&] { return cudaMalloc(&small, 1024); }},
      {"cudaMalloc, 256 MiB", [&] { return cudaMalloc(&large, 256 * kMiB); }},
      {"cudaHostAlloc, 1 MiB", [&] { return cudaHostAlloc(&host, kMiB, cudaHostAllocMapped); }},
      {"cudaStreamCreateWithFlags", [&] { return cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking); }},
      {"cudaEventCreate", [&] { return cudaEventCreate(&event); }},
      {"cudaMemcpyAsync from pinned memory, synchronised",
       [&] {
         const cudaError_t error = cudaMemcpyAsync(device, pinned, kMiB, cudaMemcpyHostToDevice, other);
         return error != cudaSuccess ? error : cudaStreamSynchronize(other);
       }},
      {"cudaMemcpyAsync from pageable memory",
       [&] { return cudaMemcpyAsync(device, pageable.data(), kMiB, cudaMemcpyHostToDevice, other); }},
      {"cudaMemcpyAsync to pageable memory",
       [&] { return cudaMemcpyAsync(pageable.data(), device, kMiB, cudaMemcpyDeviceToHost, other); }},
      {"first launch of a kernel, synchronised",
       [&] {
         neverLaunchedBefore<<<1, 1, 0, other>>>();
         const cudaError_t error = cudaGetLastError();
         return error != cudaSuccess ? error : cudaStreamSynchronize(other);
       }},
      {"cudaStreamDestroy", [&] { return cudaStreamDestroy(made); }},
      {"cudaEventDestroy", [&] { return cudaEventDestroy(event); }},
      {"cudaFree, 1 MiB", [&] { return cudaFree(device); }},
      {"cudaFree, 64 MiB", [&] { return cudaFree(secondDevice); }},
      {"cudaFreeHost, 1 MiB", [&] { return cudaFreeHost(secondPinned); }},
  };
  for (const Call &call : calls) {
    flags[0] = flags[1] = 0;
    spin<<<1, 1, 0, spinning>>>(flags, flags + 1);
    CUDA(cudaGetLastError());
    while (flags[1] == 0) {
    }
    const auto start = Clock::now();
    auto returned = std::async(std::launch::async, call.make);
    const bool waits = returned.wait_for(kPatience) == std::future_status::timeout;
    flags[0] = 1;
    CUDA(returned.get());
    const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
    CUDA(cudaStreamSynchronize(spinning));
    if (waits) {
      printf("%-50s waits for the kernel\n", call.name);
    } else {
      printf("%-50s returns after %lld us\n", call.name, static_cast<long long>(microseconds));
    }
  }
}

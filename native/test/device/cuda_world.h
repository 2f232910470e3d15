// What the programs for a real GPU share: the memory of all ranks of a communicator, without Java and without NCCL.
// Several ranks may be on one GPU, each on a stream of its own; windows are plain device memory. The buffers of all
// ranks can be reached from all, so they serve as windows of zero-copy collectives, too.
#ifndef NCCLFFM_TEST_DEVICE_CUDA_WORLD_H_
#define NCCLFFM_TEST_DEVICE_CUDA_WORLD_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../../include/ncclffm/device.h"

using namespace ncclffm;

namespace {

constexpr uint64_t kSeed = 20250117;
constexpr uint64_t kMs = 1000000;
constexpr float kScale = 1.5f, kOffset = -0.25f;
constexpr int kChannels = 16;
constexpr uint32_t kSlotBytes = 64 << 10;

int gpus = 1;
int failures = 0;

void cuda(cudaError_t error, const char *call, int line) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "FAILED: line %d: %s: %s\n", line, call, cudaGetErrorString(error));
  exit(1);
}
#define CUDA(call) cuda(call, #call, __LINE__)

void shim(int code, const char *call, int line) {
  if (code == ncclSuccess) return;
  fprintf(stderr, "FAILED: line %d: %s: %d: %s\n", line, call, code, ncclFfmGetLastError());
  exit(1);
}
#define SHIM(call) shim(call, #call, __LINE__)

void check(bool holds, const char *what, long long a = 0, long long b = 0, long long c = 0) {
  if (holds || ++failures > 20) return;
  fprintf(stderr, "FAILED: %s (%lld, %lld, %lld)\n", what, a, b, c);
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

float contribution(int rank, uint64_t call, size_t i) {
  uint64_t h = mix(mix(mix(kSeed + static_cast<uint64_t>(rank)) + call) + i);
  float mantissa = static_cast<float>(static_cast<int32_t>(h >> 40) - (1 << 23)) / (1 << 23);
  return std::ldexp(mantissa, static_cast<int>(h % 8));
}

// Calls body(from, to) for all parts of [0, n), on several threads if n is large.
template <class Body>
void inParts(size_t n, Body body) {
  constexpr size_t kPart = 1 << 14;
  const size_t parts = std::min<size_t>(n / kPart + 1, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (size_t p = 1; p < parts; ++p) threads.emplace_back(body, n * p / parts, n * (p + 1) / parts);
  body(0, n / parts);
  for (std::thread &thread : threads) thread.join();
}

// A sum, with protocol, algorithm and blocks left open.
inline ncclFfmCall allReduceOf(const void *send, void *recv, size_t count, int datatype) {
  ncclFfmCall call = {};
  call.function = ncclFfmFunctionAllReduce;
  call.datatype = datatype;
  call.op = ncclSum;
  call.count = count;
  call.sendbuff = send;
  call.recvbuff = recv;
  return call;
}

struct Rank {
  DevComm comm;
  DevComm signalling;  // the same, whose kernels signal the host
  cudaStream_t stream;
  float *send, *recv;          // device memory
  void **sends, **recvs;       // device memory: those of all ranks
  float *hostSend, *hostRecv;  // pinned
  Status *status;              // as the host sees it
  uint32_t *hostSignal;        // likewise
  uint64_t *ns;                // pinned; one per block
  ncclResult_t *results;       // pinned; one per block
};

class World {
 public:
  // Buffers of maxCount floats. prime(rank) launches every kernel of the program's own once, with nothing to do.
  template <class Prime>
  World(int nRanks, uint64_t timeoutNs, size_t maxCount, Prime prime, int nChannels = kChannels)
      : ranks(nRanks), maxCount_(maxCount) {
    uint64_t windowBytes = 0;
    SHIM(ncclFfmGetWindowBytes(nRanks, nChannels, kSlotBytes, &windowBytes));
    std::vector<void *> windows(nRanks);
    for (int r = 0; r < nRanks; ++r) {
      Rank &rank = ranks[r];
      use(r);
      CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      CUDA(cudaMalloc(&windows[r], windowBytes));
      CUDA(cudaMemset(windows[r], 0, windowBytes));
      CUDA(cudaMalloc(&rank.send, maxCount * sizeof(float)));
      CUDA(cudaMalloc(&rank.recv, maxCount * sizeof(float)));
      CUDA(cudaMemset(rank.recv, 0, maxCount * sizeof(float)));
      CUDA(cudaMallocHost(&rank.hostSend, maxCount * sizeof(float)));
      CUDA(cudaMallocHost(&rank.hostRecv, maxCount * sizeof(float)));
      CUDA(cudaMallocHost(&rank.ns, nChannels * sizeof(uint64_t)));
      CUDA(cudaMallocHost(&rank.results, nChannels * sizeof(ncclResult_t)));
      CUDA(cudaHostAlloc(&rank.status, sizeof(Status), cudaHostAllocMapped));
      memset(rank.status, 0, sizeof(Status));
      CUDA(cudaHostAlloc(&rank.hostSignal, sizeof(uint32_t), cudaHostAllocMapped));
      *rank.hostSignal = 0;
      DevComm comm = {};
      comm.magic = NCCLFFM_DEVCOMM_MAGIC;
      comm.version = NCCLFFM_ABI_VERSION;
      comm.rank = r;
      comm.nRanks = nRanks;
      comm.nChannels = nChannels;
      comm.slotBytes = kSlotBytes;
      comm.timeoutNs = timeoutNs;
      CUDA(cudaMalloc(&comm.channels, nChannels * sizeof(Channel)));
      CUDA(cudaMemset(comm.channels, 0, nChannels * sizeof(Channel)));
      CUDA(cudaMalloc(&comm.pairs, nChannels * nRanks * sizeof(Pair)));
      CUDA(cudaMemset(comm.pairs, 0, nChannels * nRanks * sizeof(Pair)));
      CUDA(cudaMalloc(&comm.peers, nRanks * sizeof(void *)));
      CUDA(cudaMalloc(&rank.sends, nRanks * sizeof(void *)));
      CUDA(cudaMalloc(&rank.recvs, nRanks * sizeof(void *)));
      comm.path = gpus == 1 ? ncclFfmPathSameGpu : ncclFfmPathNvLink;
      comm.ranksPerDevice = (nRanks + gpus - 1) / gpus;
      CUDA(cudaHostGetDevicePointer(&comm.status, rank.status, 0));
      rank.comm = rank.signalling = comm;
      CUDA(cudaHostGetDevicePointer(&rank.signalling.hostSignal, rank.hostSignal, 0));
    }
    for (int r = 0; r < nRanks; ++r) {
      use(r);
      std::vector<void *> sends, recvs;
      for (const Rank &rank : ranks) sends.push_back(rank.send), recvs.push_back(rank.recv);
      CUDA(cudaMemcpy(ranks[r].comm.peers, windows.data(), nRanks * sizeof(void *), cudaMemcpyHostToDevice));
      CUDA(cudaMemcpy(ranks[r].sends, sends.data(), nRanks * sizeof(void *), cudaMemcpyHostToDevice));
      CUDA(cudaMemcpy(ranks[r].recvs, recvs.data(), nRanks * sizeof(void *), cudaMemcpyHostToDevice));
    }
    windows_ = windows;
    for (int r = 0; r < nRanks; ++r) {
      use(r);
      cudaStream_t s = ranks[r].stream;
      SHIM(ncclFfmPrime(s));
      prime(ranks[r]);
      CUDA(cudaGetLastError());
    }
    synchronize();
  }

  ~World() {
    for (size_t r = 0; r < ranks.size(); ++r) {
      Rank &rank = ranks[r];
      use(static_cast<int>(r));
      CUDA(cudaDeviceSynchronize());
      CUDA(cudaFree(windows_[r]));
      CUDA(cudaFree(rank.send));
      CUDA(cudaFree(rank.recv));
      CUDA(cudaFree(rank.comm.channels));
      CUDA(cudaFree(rank.comm.pairs));
      CUDA(cudaFree(rank.comm.peers));
      CUDA(cudaFree(rank.sends));
      CUDA(cudaFree(rank.recvs));
      CUDA(cudaFreeHost(rank.hostSend));
      CUDA(cudaFreeHost(rank.hostRecv));
      CUDA(cudaFreeHost(rank.ns));
      CUDA(cudaFreeHost(rank.results));
      CUDA(cudaFreeHost(rank.status));
      CUDA(cudaFreeHost(rank.hostSignal));
      CUDA(cudaStreamDestroy(rank.stream));
    }
  }

  static void use(int rank) { CUDA(cudaSetDevice(rank % gpus)); }

  void synchronize() {
    for (size_t r = 0; r < ranks.size(); ++r) {
      use(static_cast<int>(r));
      CUDA(cudaStreamSynchronize(ranks[r].stream));
    }
  }

  int size() const { return static_cast<int>(ranks.size()); }
  size_t maxCount() const { return maxCount_; }

  // Calls launch(rank, r) for each, with its device current.
  template <class Launch>
  void onEach(Launch launch) {
    for (int r = 0; r < size(); ++r) {
      use(r);
      launch(ranks[r], r);
      CUDA(cudaGetLastError());
    }
  }

  void fill(uint64_t call, size_t offset, size_t count) {
    onEach([&](Rank &rank, int r) {
      inParts(count, [&](size_t from, size_t to) {
        for (size_t i = from; i < to; ++i) rank.hostSend[offset + i] = contribution(r, call, i);
      });
      CUDA(cudaMemcpyAsync(rank.send + offset, rank.hostSend + offset, count * sizeof(float), cudaMemcpyHostToDevice,
                           rank.stream));
    });
    synchronize();
  }

  void verify(const char *what, uint64_t call, float *Rank::*buffer, size_t offset, size_t count, bool fused) {
    onEach([&](Rank &rank, int) {
      CUDA(cudaMemcpyAsync(rank.hostRecv, rank.*buffer + offset, count * sizeof(float), cudaMemcpyDeviceToHost,
                           rank.stream));
    });
    synchronize();
    std::vector<float> expected(count);
    std::vector<double> exact(count), bound(count);
    for (size_t i = 0; i < count; ++i) {
      double magnitude = 0;
      for (int r = 0; r < size(); ++r) {
        float x = contribution(r, call, i);
        if (fused) x = std::fmaf(kScale, x, kOffset);
        expected[i] = r == 0 ? x : expected[i] + x;
        exact[i] += x;
        magnitude += std::fabs(x);
      }
      bound[i] = magnitude * size() * 0x1p-24;
      if (fused) {
        expected[i] = std::sqrt(std::fabs(expected[i]));
        exact[i] = std::sqrt(std::fabs(exact[i]));
        bound[i] = std::sqrt(bound[i]) + exact[i] * 0x1p-24;
      }
    }
    for (int r = 0; r < size(); ++r) {
      const Rank &rank = ranks[r];
      check(rank.status->code == 0, "status code, peer, epoch", rank.status->code, rank.status->peer,
            rank.status->epoch);
      size_t wrong = 0, first = 0;
      for (size_t i = count; i-- > 0;) {
        if (std::fabs(rank.hostRecv[i] - exact[i]) > bound[i] ||
            memcmp(&rank.hostRecv[i], &expected[i], sizeof(float)) != 0) {
          ++wrong;
          first = i;
        }
      }
      if (wrong > 0) {
        ++failures;
        fprintf(stderr,
                "FAILED: %s: rank %d of %d, call %llu, %zu elements at offset %zu: %zu wrong, the first is %zu: %.9g, "
                "not %.9g\n",
                what, r, size(), static_cast<unsigned long long>(call), count, offset, wrong, first,
                rank.hostRecv[first], expected[first]);
      }
    }
  }

  std::vector<Rank> ranks;

 private:
  const size_t maxCount_;
  std::vector<void *> windows_;
};

// The first thing a program does.
void begin(int argc, char **argv) {
  // Read by the driver before its first call: ranks that share a GPU must not wait for a module to load or for a queue.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc > 1) gpus = atoi(argv[1]);
  int found = 0;
  CUDA(cudaGetDeviceCount(&found));
  if (gpus < 1 || gpus > found) {
    fprintf(stderr, "%d GPUs were asked for, %d are here\n", gpus, found);
    exit(2);
  }
  for (int a = 0; a < gpus; ++a) {
    CUDA(cudaSetDevice(a));
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, a));
    printf("GPU %d: %s; epochs of %d bits; %s\n", a, properties.name, NCCLFFM_EPOCH_BITS, ncclFfmGetBuildInfo());
    for (int b = 0; b < gpus; ++b) {
      if (a != b) CUDA(cudaDeviceEnablePeerAccess(b, 0));
    }
  }
}

}  // namespace

#endif  // NCCLFFM_TEST_DEVICE_CUDA_WORLD_H_

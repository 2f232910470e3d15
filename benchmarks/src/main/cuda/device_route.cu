// What a collective takes inside a running kernel, in one launch, and by NCCL, in one run: the CUDA twin of the device
// route's benchmarks. Ranks are threads of this process, rank r on GPU r % GPUS; buffers and windows are plain device
// memory. NCCL is the library that NCCLFFM_NCCL names; without it, its columns are empty.
//
//   NCCLFFM_NCCL=/path/to/libnccl.so.2 device_route [GPUS [RANKS [functions]]]
//
// functions: those other than the all-reduce, inside a kernel; without it, the all-reduce by every way.
// Figures are medians, in microseconds an operation; "in kernel" is the slowest block of the slowest rank. Floors: of
// latency, a loop that does no more than exchange and add lines with flags (no epoch in memory, no checks, no
// deadline, no status); of bytes, what all ranks together load and store at the memory's peak rate.
#include <map>

#include "route.h"

namespace {

constexpr size_t kMaxCount = (256 << 20) / sizeof(float) + 64;

// How often an operation on so many bytes is done, and how many samples are taken of that: a run has its limit.
struct Effort {
  int times, samples;
};
Effort effortOf(size_t bytes) {
  return bytes > (64 << 20) ? Effort{3, 7} : bytes > (4 << 20) ? Effort{10, 15} : Effort{50, 21};
}
// Inside a kernel.
Effort effortInKernel(size_t bytes) {
  return bytes > (64 << 20)    ? Effort{3, 3}
         : bytes > (4 << 20)   ? Effort{10, 5}
         : bytes > (256 << 10) ? Effort{200, 9}
                               : Effort{2000, 9};
}
constexpr size_t kLarge = 4 << 20;  // bytes beyond which no way by one-shot is measured

// Of a launch, and of a kernel. Ranks that share a GPU leave each other room; links want more.
int mostBlocks() {
  return gpus > 1 ? 64 : kChannels;
}

// Every rank's send buffer, as checkSums expects it.
constexpr uint64_t kFilled = 1;

void clear(World &world, size_t count, const std::function<float *(int)> &recv) {
  world.onEach([&](Rank &rank, int r) { CUDA(cudaMemsetAsync(recv(r), 0xff, count * sizeof(float), rank.stream)); });
  world.synchronize();
}

// The element of rank p's send buffer that belongs into the sum at element i of what rank r receives, or kNone.
using Source = std::function<size_t(int r, size_t i, int p)>;
constexpr size_t kNone = ~size_t{0};

// Elements from ... from + n - 1 of what every rank has received.
void checkElements(World &world, const char *what, const std::function<float *(int)> &recv, size_t from, size_t n,
                   const Source &source) {
  std::vector<float> got(n);
  for (int r = 0; r < world.size(); ++r) {
    World::use(r);
    CUDA(cudaMemcpy(got.data(), recv(r) + from, n * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; ++i) {
      double sum = 0, magnitude = 0;
      int summands = 0;
      for (int p = 0; p < world.size(); ++p) {
        const size_t at = source(r, from + i, p);
        if (at == kNone) continue;
        const double x = contribution(p, kFilled, at);
        sum += x;
        magnitude += std::fabs(x);
        ++summands;
      }
      if (summands == 0 || std::fabs(got[i] - sum) <= magnitude * (summands - 1) * 0x1p-23) continue;
      check(false, what, r, static_cast<long long>(from + i), world.size());
      break;
    }
  }
}

// Both ends of what an all-reduce of send + offset has left.
void checkSums(World &world, const char *what, size_t count, const std::function<float *(int)> &recv,
               size_t offset = 0) {
  const size_t n = std::min<size_t>(count, 1024);
  for (size_t from : {size_t{0}, count - n}) {
    checkElements(world, what, recv, from, n, [&](int, size_t i, int) { return offset + i; });
  }
}

// Each block all-reduces its own slice, again and again, holding the channel. The first time is not measured: it waits
// for everybody.
__global__ void __launch_bounds__(512, 1) loopKernel(const __grid_constant__ DevComm comm, const float *send,
                                                     float *recv, size_t perBlock, int times, uint64_t *ns) {
  if (times == 0) return;
  const float *in = send + perBlock * blockIdx.x;
  float *out = recv + perBlock * blockIdx.x;
  ChannelSession<CoopBlock> session(CoopBlock(), comm, static_cast<int>(blockIdx.x), ncclFfmFunctionAllReduce);
  uint64_t start = 0;
  ncclResult_t r = ncclSuccess;
  for (int i = 0; i <= times && r == ncclSuccess; ++i) {
    r = ncclDevAllReduce(session, in, out, perBlock, ncclFloat32, ncclSum);
    if (i == 0) start = nowNs();
  }
  if (threadIdx.x == 0) ns[blockIdx.x] = nowNs() - start;
}

// The same of another function; perBlock is of the larger buffer, of which each rank has one part.
template <ncclFfmFunction kFunction>
__global__ void __launch_bounds__(512, 1) functionKernel(const __grid_constant__ DevComm comm, const float *send,
                                                         float *recv, size_t perBlock, int times, uint64_t *ns) {
  if (times == 0) return;
  const float *in = send + perBlock * blockIdx.x;
  float *out = recv + perBlock * blockIdx.x;
  const size_t part = perBlock / comm.nRanks;
  const int channel = static_cast<int>(blockIdx.x);
  const int next = (comm.rank + 1) % comm.nRanks, previous = (comm.rank + comm.nRanks - 1) % comm.nRanks;
  uint64_t start = 0;
  ncclResult_t r = ncclSuccess;
  auto loop = [&](auto call) {
    for (int i = 0; i <= times && r == ncclSuccess; ++i) {
      r = call();
      if (i == 0) start = nowNs();
    }
  };
  if constexpr (kFunction == ncclFfmFunctionSendRecv) {
    loop([&] { return ncclDevSendRecv(CoopBlock(), comm, in, next, out, previous, perBlock, ncclFloat32, channel); });
  } else {
    ChannelSession<CoopBlock> session(CoopBlock(), comm, channel, kFunction);
    loop([&] {
      if constexpr (kFunction == ncclFfmFunctionReduceScatter) {
        return ncclDevReduceScatter(session, in, out, part, ncclFloat32, ncclSum);
      } else if constexpr (kFunction == ncclFfmFunctionAllGather) {
        return ncclDevAllGather(session, in, out, part, ncclFloat32);
      } else if constexpr (kFunction == ncclFfmFunctionBroadcast) {
        return ncclDevBroadcast(session, in, out, perBlock, ncclFloat32, 0);
      } else if constexpr (kFunction == ncclFfmFunctionReduce) {
        return ncclDevReduce(session, in, out, perBlock, ncclFloat32, ncclSum, 0);
      } else if constexpr (kFunction == ncclFfmFunctionAllToAll) {
        return ncclDevAllToAll(session, in, out, part, ncclFloat32);
      } else {
        return ncclDevBarrier(session);
      }
    });
  }
  if (threadIdx.x == 0) ns[blockIdx.x] = nowNs() - start;
}

// The least that an all-reduce by lines with flags has to do. Each block's lines of each rank have 64 KiB of every
// rank's receive buffer, twice.
__global__ void __launch_bounds__(512, 1)
    floorKernel(void **windows, int rank, int nRanks, const float2 *send, float2 *out, uint32_t lines, int times,
                uint32_t epoch, uint64_t *ns) {
  if (times == 0) return;
  const float2 *in = send + static_cast<size_t>(lines) * blockIdx.x;
  auto slot = [&](int at, int from) {
    const size_t number = ((epoch & 1) * kChannels + blockIdx.x) * static_cast<size_t>(nRanks) + from;
    return reinterpret_cast<Vec16 *>(loadPeer(windows, at) + number * kSlotBytes);
  };
  uint64_t start = 0;
  for (int i = 0; i <= times; ++i) {
    ++epoch;
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    for (uint32_t line = threadIdx.x; line < lines; line += blockDim.x) {
      const float2 x = in[line];
      const Vec16 vec = {{flag | __float_as_uint(x.x), flag | __float_as_uint(x.y)}};
      for (int p = 1; p < nRanks; ++p) storeVec16RelaxedSys(slot((rank + p) % nRanks, rank) + line, vec);
    }
    for (uint32_t line = threadIdx.x; line < lines; line += blockDim.x) {
      float2 sum = in[line];
      for (int p = 1; p < nRanks; ++p) {
        const Vec16 *from = slot(rank, (rank + p) % nRanks) + line;
        Vec16 vec;
        do {
          vec = loadVec16RelaxedSys(from);
        } while (vec.word[0] >> 32 != epoch || vec.word[1] >> 32 != epoch);
        sum.x += __uint_as_float(static_cast<uint32_t>(vec.word[0]));
        sum.y += __uint_as_float(static_cast<uint32_t>(vec.word[1]));
      }
      out[static_cast<size_t>(lines) * blockIdx.x + line] = sum;
    }
    __syncthreads();
    if (i == 0) start = nowNs();
  }
  if (threadIdx.x == 0) ns[blockIdx.x] = nowNs() - start;
}

uint64_t slowestNs(const World &world, int blocks) {
  uint64_t slowest = 0;
  for (const Rank &rank : world.ranks) {
    for (int b = 0; b < blocks; ++b) slowest = std::max(slowest, rank.ns[b]);
  }
  return slowest;
}

double latencyFloor(World &world, size_t bytes, int blocks, int threads) {
  static uint32_t epoch = 0x40000000;  // none that was used before
  constexpr int kTimes = 2000;
  std::vector<double> us;
  for (int k = 0; k < 9; ++k) {
    world.onEach([&](Rank &rank, int r) {
      // The sums go where nobody else looks: behind the data that is sent.
      float2 *out = reinterpret_cast<float2 *>(rank.send) + kMaxCount / 4;
      floorKernel<<<blocks, threads, 0, rank.stream>>>(
          rank.recvs, r, world.size(), reinterpret_cast<const float2 *>(rank.send), out,
          static_cast<uint32_t>(bytes / 8 / blocks), kTimes, epoch, rank.ns);
    });
    epoch += kTimes + 1;
    world.synchronize();
    us.push_back(static_cast<double>(slowestNs(world, blocks)) / 1000 / kTimes);
  }
  return median(us);
}

std::vector<double> inKernel(World &world, size_t bytes, int blocks, int threads, uint32_t protocol,
                             uint32_t algorithm) {
  const int times = effortInKernel(bytes).times, samples = effortInKernel(bytes).samples;
  const size_t perBlock = bytes / sizeof(float) / blocks;
  auto recv = [&](int r) { return world.ranks[r].recv; };
  clear(world, perBlock * blocks, recv);
  std::vector<double> us;
  for (int k = 0; k < samples; ++k) {
    world.onEach([&](Rank &rank, int) {
      DevComm comm = rank.comm;
      comm.protocol = protocol;
      comm.algorithm = algorithm;
      loopKernel<<<blocks, threads, 0, rank.stream>>>(comm, rank.send, rank.recv, perBlock, times, rank.ns);
    });
    world.synchronize();
    for (const Rank &rank : world.ranks) {
      check(rank.status->code == 0, "in kernel: status", rank.status->code, rank.status->peer, rank.status->epoch);
    }
    us.push_back(static_cast<double>(slowestNs(world, blocks)) / 1000 / times);
  }
  checkSums(world, "in kernel: rank, element, ranks", perBlock * blocks, recv);
  return us;
}

struct Way {
  uint32_t protocol, algorithm;
  const char *name;
  const char *suffix;  // of the routes in sample lines, as Java's benchmarks name them
};
constexpr Way kWays[] = {{1, 1, "LL one-shot", " LL ONE_SHOT"},
                         {1, 2, "LL two-shot", " LL TWO_SHOT"},
                         {1, 3, "LL ring", " LL RING"},
                         {2, 1, "LL128 one-shot", " LL128 ONE_SHOT"},
                         {2, 2, "LL128 two-shot", " LL128 TWO_SHOT"},
                         {2, 3, "LL128 ring", " LL128 RING"},
                         {3, 1, "Simple one-shot", " SIMPLE ONE_SHOT"},
                         {3, 2, "Simple two-shot", " SIMPLE TWO_SHOT"},
                         {3, 3, "Simple ring", " SIMPLE RING"},
                         {3, 2, "zero-copy", " zero-copy"},
                         {0, 0, "auto", ""}};

ncclFfmCall callOf(const Rank &rank, size_t count, const Way &way, int blocks, size_t offset = 0) {
  ncclFfmCall call = {};
  call.function = ncclFfmFunctionAllReduce;
  call.datatype = ncclFloat32;
  call.op = ncclSum;
  call.count = count;
  call.protocol = way.protocol;
  call.algorithm = way.algorithm;
  call.blocks = blocks;
  call.sendbuff = rank.send + offset;
  call.recvbuff = rank.recv + offset;
  if (strcmp(way.name, "zero-copy") == 0) {
    call.send = {rank.sends, kMaxCount * sizeof(float), offset * sizeof(float)};
    call.recv = {rank.recvs, kMaxCount * sizeof(float), offset * sizeof(float)};
  }
  return call;
}

double oneLaunch(World &world, size_t bytes, const Way &way, int blocks, size_t offset = 0) {
  const Effort effort = effortOf(bytes);
  auto recv = [&](int r) { return world.ranks[r].recv + offset; };
  clear(world, bytes / sizeof(float), recv);
  const std::vector<double> us = backToBackSamples(world, effort.times, effort.samples, [&](int r) {
    const Rank &rank = world.ranks[r];
    const ncclFfmCall call = callOf(rank, bytes / sizeof(float), way, blocks, offset);
    SHIM(ncclFfmLaunch(&rank.comm, &call, rank.stream));
  });
  checkSums(world, "one launch: rank, element, ranks", bytes / sizeof(float), recv, offset);
  const std::string route = std::string("device") + way.suffix;
  printSamples(route, offset == 0 ? "allReduce" : "misaligned allReduce", world.size(), bytes, us);
  return median(us);
}

// What rank r receives at element i of a block's slice, of which a part is as long as `part`.
Source sourceOf(uint32_t function, int nRanks, size_t perBlock) {
  return [=](int r, size_t i, int p) {
    const size_t slice = i / perBlock * perBlock, at = i % perBlock, part = perBlock / nRanks;
    const size_t from = at / part, within = at % part, mine = static_cast<size_t>(r) * part;
    const bool sender = static_cast<size_t>(p) == from;
    switch (function) {
      case ncclFfmFunctionReduceScatter:
        return at < part ? slice + mine + at : kNone;
      case ncclFfmFunctionAllGather:
        return sender ? slice + within : kNone;
      case ncclFfmFunctionBroadcast:
        return p == 0 ? i : kNone;
      case ncclFfmFunctionReduce:
        return r == 0 ? i : kNone;
      case ncclFfmFunctionAllToAll:
        return sender ? slice + mine + within : kNone;
      case ncclFfmFunctionSendRecv:
        return (p + 1) % nRanks == r ? i : kNone;
      default:
        return kNone;
    }
  };
}

template <ncclFfmFunction kFunction>
void primeFunction(const Rank &rank) {
  functionKernel<kFunction><<<1, 32, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr);
}

template <ncclFfmFunction kFunction>
void functionInKernel(World &world, const char *name) {
  constexpr bool kBarrier = kFunction == ncclFfmFunctionBarrier;
  auto recv = [&](int r) { return world.ranks[r].recv; };
  for (size_t bytes : {64u, 512u, 4096u, 65536u, 1u << 20, 16u << 20, 256u << 20}) {
    if (kBarrier && bytes != 64) continue;
    const int times = std::min(500, effortInKernel(bytes).times), samples = std::min(5, effortInKernel(bytes).samples);
    const int blocks = bytes < 4096 ? 1 : bytes < 65536 ? 4 : 16, threads = bytes < 65536 ? 128 : 512;
    const size_t perBlock = bytes / sizeof(float) / blocks;
    for (const Way &way : {Way{0, 0, "auto", ""}, Way{1, 0, "LL", " LL"}, Way{2, 0, "LL128", " LL128"},
                           Way{3, 0, "Simple", " SIMPLE"}}) {
      if (kBarrier && way.protocol != 0) continue;
      clear(world, perBlock * blocks, recv);
      std::vector<double> us;
      for (int k = 0; k < samples; ++k) {
        world.onEach([&](Rank &rank, int) {
          DevComm comm = rank.comm;
          comm.protocol = way.protocol;
          functionKernel<kFunction>
              <<<blocks, threads, 0, rank.stream>>>(comm, rank.send, rank.recv, perBlock, times, rank.ns);
        });
        world.synchronize();
        for (const Rank &rank : world.ranks) {
          check(rank.status->code == 0, "in kernel: status", rank.status->code, rank.status->peer, rank.status->epoch);
        }
        us.push_back(static_cast<double>(slowestNs(world, blocks)) / 1000 / times);
      }
      const Source source = sourceOf(kFunction, world.size(), perBlock);
      const size_t checked = std::min<size_t>(perBlock, 1 << 16);
      for (size_t block : {0, blocks - 1}) {
        checkElements(world, name, recv, block * perBlock, checked, source);
        checkElements(world, name, recv, (block + 1) * perBlock - checked, checked, source);
      }
      printf("%10zu %-14s %-8s %2d x %3d %10.2f\n", kBarrier ? 0 : bytes, name, way.name, blocks, threads, median(us));
      printSamples(std::string("in kernel") + way.suffix, name, world.size(), kBarrier ? 0 : bytes, us);
    }
  }
}

void measureFunctions(int nRanks) {
  World world(nRanks, 20000 * kMs, kMaxCount, [](const Rank &rank) {
    primeFunction<ncclFfmFunctionReduceScatter>(rank);
    primeFunction<ncclFfmFunctionAllGather>(rank);
    primeFunction<ncclFfmFunctionBroadcast>(rank);
    primeFunction<ncclFfmFunctionReduce>(rank);
    primeFunction<ncclFfmFunctionAllToAll>(rank);
    primeFunction<ncclFfmFunctionSendRecv>(rank);
    primeFunction<ncclFfmFunctionBarrier>(rank);
  });
  world.fill(kFilled, 0, kMaxCount);
  printf("\n== %d ranks on %d GPUs, float32 sum ==\n", nRanks, gpus);
  printf("in kernel: bytes of the larger buffer, function, protocol, blocks x threads\n");
  functionInKernel<ncclFfmFunctionReduceScatter>(world, "reduceScatter");
  functionInKernel<ncclFfmFunctionAllGather>(world, "allGather");
  functionInKernel<ncclFfmFunctionBroadcast>(world, "broadcast");
  functionInKernel<ncclFfmFunctionReduce>(world, "reduce");
  functionInKernel<ncclFfmFunctionAllToAll>(world, "allToAll");
  functionInKernel<ncclFfmFunctionSendRecv>(world, "sendRecv");
  functionInKernel<ncclFfmFunctionBarrier>(world, "barrier");
}

void measure(int nRanks) {
  World world(
      nRanks, 20000 * kMs, kMaxCount,
      [](const Rank &rank) {
        loopKernel<<<1, 32, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr);
        floorKernel<<<1, 32, 0, rank.stream>>>(nullptr, 0, 0, nullptr, nullptr, 0, 0, 0, nullptr);
      },
      mostBlocks());
  Communicators communicators(world);
  world.fill(kFilled, 0, kMaxCount);
  world.onEach([&](Rank &rank, int r) {
    if (nccl.allReduce == nullptr) return;
    CUDA(cudaMemcpyAsync(communicators.buffers[r], rank.send, kMaxCount * sizeof(float), cudaMemcpyDeviceToDevice,
                         rank.stream));
  });
  world.synchronize();
  auto byNccl = [&](size_t bytes, bool symmetric) {
    if (nccl.allReduce == nullptr) return 0.0;
    const Effort effort = effortOf(bytes);
    auto send = [&](int r) { return symmetric ? static_cast<float *>(communicators.buffers[r]) : world.ranks[r].send; };
    auto recv = [&](int r) { return symmetric ? send(r) + kMaxCount : world.ranks[r].recv; };
    const size_t count = bytes / sizeof(float);
    clear(world, count, recv);
    const std::vector<double> us = backToBackSamples(world, effort.times, effort.samples, [&](int r) {
      NCCL(
          nccl.allReduce(send(r), recv(r), count, ncclFloat32, ncclSum, communicators.comms[r], world.ranks[r].stream));
    });
    checkSums(world, "ncclAllReduce: rank, element, ranks", count, recv);
    // Not "host": that is what host_route measures, in a process of its own.
    printSamples(symmetric ? "host-symmetric, device_route" : "host, device_route", "allReduce", nRanks, bytes, us);
    return median(us);
  };
  printf("\n== %d ranks on %d GPUs, float32 sum ==\n", nRanks, gpus);
  printf("%10s %12s %12s\n", "bytes", "NCCL", "symmetric");
  std::map<size_t, double> host, symmetric;
  for (size_t bytes : {512u, 4096u, 65536u, 1u << 20, 16u << 20, 64u << 20, 256u << 20}) {
    host[bytes] = byNccl(bytes, false);
    symmetric[bytes] = byNccl(bytes, true);
    printf("%10zu %12.2f %12.2f\n", bytes, host[bytes], symmetric[bytes]);
  }
  printf("in kernel, on one session: bytes, way, blocks x threads\n");
  std::map<size_t, double> best;
  for (size_t bytes : {8u, 512u, 4096u, 65536u, 262144u, 1u << 20, 16u << 20, 256u << 20}) {
    for (const Way &way : kWays) {
      if (strcmp(way.name, "zero-copy") == 0 || (bytes < 65536 && way.algorithm == 3)) continue;
      if (bytes > kLarge && way.algorithm == 1) continue;
      std::vector<double> bestShape;
      for (int blocks : {1, 4, 16, 64}) {
        if (blocks > mostBlocks() || (bytes / blocks < 512 && blocks > 1)) continue;
        if (bytes >= 65536 && blocks < 4) continue;
        if (bytes > kLarge && blocks < 16) continue;
        for (int threads : {128, 512}) {
          if (bytes / blocks / 8 > 256 && threads < 512) continue;
          const std::vector<double> us = inKernel(world, bytes, blocks, threads, way.protocol, way.algorithm);
          printf("%10zu %-16s %2d x %3d %10.2f\n", bytes, way.name, blocks, threads, median(us));
          if (bestShape.empty() || median(us) < median(bestShape)) bestShape = us;
        }
      }
      printSamples(std::string("in kernel") + way.suffix, "allReduce", nRanks, bytes, bestShape);
      if (way.protocol == 0) best[bytes] = median(bestShape);
    }
  }
  printf("one launch each, %d blocks at most: bytes, way\n", mostBlocks());
  double zeroCopy = 0;
  for (size_t bytes : {4096u, 65536u, 262144u, 524288u, 1u << 20, 4u << 20, 16u << 20, 64u << 20, 256u << 20}) {
    for (const Way &way : kWays) {
      if (bytes > kLarge && way.algorithm == 1) continue;
      const double us = oneLaunch(world, bytes, way, bytes < 65536 ? 0 : bytes <= (1 << 20) ? 16 : mostBlocks());
      printf("%10zu %-16s %10.2f\n", bytes, way.name, us);
      if (strcmp(way.name, "zero-copy") == 0 && bytes == (64 << 20)) zeroCopy = us;
    }
  }
  printf("misaligned by 4 bytes, 1 MiB, one launch each: aligned, misaligned, ratio\n");
  for (const Way &way : kWays) {
    const double aligned = oneLaunch(world, 1 << 20, way, 16), misaligned = oneLaunch(world, 1 << 20, way, 16, 1);
    printf("%-16s %10.2f %10.2f %6.2f\n", way.name, aligned, misaligned, misaligned / aligned);
  }
  printf("in kernel, the best shape of auto: bytes, us, floor of latency, NCCL / us\n");
  for (size_t bytes : {512u, 4096u, 65536u}) {
    const int blocks = bytes < 4096 ? 1 : bytes < 65536 ? 4 : 16;
    printf("%10zu %10.2f %10.2f %10.1f\n", bytes, best[bytes],
           latencyFloor(world, bytes, blocks, bytes < 65536 ? 128 : 512), host[bytes] / best[bytes]);
  }
  const size_t large = 64 << 20;
  printf("zero-copy: bytes, us, floor of bytes, us / symmetric\n%10zu %10.2f %10.2f %10.2f\n", large, zeroCopy,
         bytesFloor(nRanks, large), symmetric[large] == 0 ? 0 : zeroCopy / symmetric[large]);
  communicators.abort();
}

}  // namespace

int main(int argc, char **argv) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  begin(argc, argv);
  loadNccl();
  std::vector<int> sizes = {2, 4, 8};
  if (argc > 2) sizes = {atoi(argv[2])};
  const bool functions = argc > 3 && strcmp(argv[3], "functions") == 0;
  for (int nRanks : sizes) functions ? measureFunctions(nRanks) : measure(nRanks);
  return failures == 0 ? 0 : 1;
}

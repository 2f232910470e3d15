// The device library and the shim on a real GPU, without Java and without NCCL: several ranks on one GPU, each on a
// stream of its own, windows are plain device memory. Checks results, deadlines, aborts and refusals, then prints what
// an all-reduce takes inside a running kernel. Needs nothing but the driver.
//
//   device_cuda_test [GPUS]     rank r runs on GPU r % GPUS, 1 by default
#include "cuda_world.h"

namespace {

constexpr size_t kMaxCount = (1 << 20) + 64;

// Blocks of any size, whole warps or whole blocks as groups; each group uses one channel for all the elements.
template <class Coop>
__global__ void __launch_bounds__(1024) groupKernel(const __grid_constant__ DevComm comm, const float *send,
                                                    float *recv, size_t count, int channel, ncclResult_t *result) {
  if (count == 0) return;
  Coop coop;
  if (threadIdx.x >= coop.size()) return;
  ncclResult_t r = ncclDevAllReduce(coop, comm, send, recv, count, ncclFloat32, ncclSum, channel);
  if (coop.rank() == 0) *result = r;
}

// Each block all-reduces its own share, again and again: on one session, or taking the channel each time. The first
// time is not measured: it waits for everybody.
template <bool kOneSession>
__global__ void __launch_bounds__(512, 2)
    loopKernel(const __grid_constant__ DevComm comm, const float *send, float *recv, size_t perBlock, int times,
               uint64_t *ns, ncclResult_t *result) {
  if (times == 0) return;
  const int channel = static_cast<int>(blockIdx.x);
  const float *in = send + perBlock * blockIdx.x;
  float *out = recv + perBlock * blockIdx.x;
  ncclResult_t r = ncclSuccess;
  uint64_t start = 0;
  if (kOneSession) {
    ChannelSession<CoopBlock> session(CoopBlock(), comm, channel, ncclFfmFunctionAllReduce);
    for (int i = 0; i <= times && r == ncclSuccess; ++i) {
      r = ncclDevAllReduce(session, in, out, perBlock, ncclFloat32, ncclSum);
      if (i == 0) start = nowNs();
    }
  } else {
    for (int i = 0; i <= times && r == ncclSuccess; ++i) {
      r = ncclDevAllReduce(comm, in, out, perBlock, ncclFloat32, ncclSum, channel);
      if (i == 0) start = nowNs();
    }
  }
  if (threadIdx.x == 0) {
    ns[blockIdx.x] = nowNs() - start;
    result[blockIdx.x] = r;
  }
}

struct PrimedWorld : World {
  PrimedWorld(int nRanks, uint64_t timeoutNs)
      : World(nRanks, timeoutNs, kMaxCount, [](const Rank &rank) {
          groupKernel<CoopBlock><<<1, 32, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr);
          groupKernel<CoopWarp><<<1, 32, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr);
          loopKernel<true><<<1, 512, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr, nullptr);
          loopKernel<false><<<1, 512, 0, rank.stream>>>(rank.comm, nullptr, nullptr, 0, 0, nullptr, nullptr);
        }) {}
};

void allReduce(const Rank &rank, const float *send, float *recv, size_t count, cudaStream_t stream) {
  ncclFfmCall call = {};
  call.function = ncclFfmFunctionAllReduce;
  call.datatype = ncclFloat32;
  call.op = ncclSum;
  call.count = count;
  call.sendbuff = send;
  call.recvbuff = recv;
  call.protocol = ncclFfmProtocolLL;
  call.algorithm = ncclFfmAlgorithmOneShot;
  SHIM(ncclFfmLaunch(&rank.comm, &call, stream));
}

void launchesMatchFloat64(int nRanks) {
  PrimedWorld world(nRanks, 5000 * kMs);
  uint64_t call = 0;
  for (size_t count : {0u, 1u, 2u, 3u, 31u, 128u, 1023u, 1024u, 1025u, 16384u, 16385u, 65537u, 1u << 18, 1u << 20}) {
    for (size_t offset : {0u, 1u, 3u}) {
      world.fill(++call, offset, count);
      world.onEach(
          [&](Rank &rank, int) { allReduce(rank, rank.send + offset, rank.recv + offset / 2, count, rank.stream); });
      world.verify("all-reduce", call, &Rank::recv, offset / 2, count, false);
      world.onEach(
          [&](Rank &rank, int) { allReduce(rank, rank.send + offset, rank.send + offset, count, rank.stream); });
      world.verify("in place", call, &Rank::send, offset, count, false);
      world.fill(++call, offset, count);
      world.onEach([&](Rank &rank, int) {
        float *x = rank.send + offset;
        const ncclFfmCall fused = allReduceOf(x, x, count, ncclFloat32);
        SHIM(ncclFfmFusedScaleAllReduceSqrt(&rank.comm, &fused, kScale, kOffset, rank.stream));
      });
      world.verify("fused", call, &Rank::send, offset, count, true);
    }
  }
  // Back to back: the last of many launches, each with the sum of the one before; then other counts in between.
  world.fill(++call, 0, 2000);
  for (int i = 0; i < 500; ++i) {
    const size_t count = mix(kSeed + i) % 3000;
    world.onEach([&](Rank &rank, int) { allReduce(rank, rank.recv + 4096, rank.recv + 8192, count, rank.stream); });
  }
  world.onEach([&](Rank &rank, int) { allReduce(rank, rank.send, rank.recv, 2000, rank.stream); });
  world.verify("after 500 launches", call, &Rank::recv, 0, 2000, false);
}

void groupsOfAnySizeMatchFloat64(int nRanks) {
  PrimedWorld world(nRanks, 5000 * kMs);
  uint64_t call = 1000;
  const int sizes[] = {32, 64, 96, 256, 512, 1024};
  for (int i = 0; i < 12; ++i) {
    for (bool warp : {false, true}) {
      const size_t count = 1 + mix(kSeed + ++call) % 9000, offset = call % 4;
      world.fill(call, offset, count);
      // A size of its own on each rank: only the lines have to agree.
      world.onEach([&](Rank &rank, int r) {
        const int threads = sizes[(i + r) % 6];
        if (warp) {
          groupKernel<CoopWarp><<<1, threads, 0, rank.stream>>>(rank.comm, rank.send + offset, rank.recv + 1, count,
                                                                i % kChannels, rank.results);
        } else {
          groupKernel<CoopBlock><<<1, threads, 0, rank.stream>>>(rank.comm, rank.send + offset, rank.recv + 1, count,
                                                                 i % kChannels, rank.results);
        }
      });
      world.verify(warp ? "warps" : "blocks", call, &Rank::recv, 1, count, false);
    }
  }
}

void expectStatus(const char *what, const Rank &rank, const Status &expected) {
  Status s = *rank.status;
  check(s.ready == 1, what, s.ready);
  check(s.code == expected.code && s.function == expected.function && s.rank == expected.rank, what, s.code, s.function,
        s.rank);
  check(s.peer == expected.peer && s.channel == expected.channel && s.epoch == expected.epoch, what, s.peer, s.channel,
        s.epoch);
}

void rankThatNeverArrivesIsNamed() {
  PrimedWorld world(4, 100 * kMs);
  constexpr int kAbsent = 2;
  world.fill(1, 0, 100);
  for (int calls = 0; calls < 2; ++calls) {
    world.onEach([&](Rank &rank, int r) {
      if (calls == 1 && r == kAbsent) return;
      allReduce(rank, rank.send, rank.recv, 100, rank.stream);
    });
    world.synchronize();
  }
  for (int r = 0; r < 4; ++r) {
    if (r == kAbsent) continue;
    expectStatus("a rank that never arrives", world.ranks[r],
                 {ncclTimeout, ncclFfmFunctionAllReduce, r, kAbsent, 0, 2, 0, 0, 1, {}, {}});
    uint64_t waited = world.ranks[r].status->waitedNs;
    check(waited >= 100 * kMs && waited < 1000 * kMs, "waited ns", static_cast<long long>(waited));
  }
  // Failed for good: without a deadline, this would hang if it waited.
  world.onEach([&](Rank &rank, int r) {
    if (r == kAbsent) return;
    rank.comm.timeoutNs = 0;
    allReduce(rank, rank.send, rank.recv, 100000, rank.stream);
  });
  world.synchronize();
}

void abortEndsAWaitThatHasNoDeadline() {
  PrimedWorld world(2, 0);
  Rank &rank = world.ranks[0];
  World::use(0);
  allReduce(rank, rank.send, rank.recv, 100, rank.stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // long enough to be waiting; right if it is not, too
  check(cudaStreamQuery(rank.stream) == cudaErrorNotReady, "it did not wait");
  *const_cast<volatile uint32_t *>(&rank.status->abort) = 1;
  CUDA(cudaStreamSynchronize(rank.stream));
  expectStatus("abort", rank, {ncclRemoteError, ncclFfmFunctionAllReduce, 0, 1, 0, 1, 0, 0, 1, {}, {}});
}

void secondCollectiveOnABusyChannelIsRefused() {
  PrimedWorld world(2, 5000 * kMs);
  Rank &rank = world.ranks[0];
  World::use(0);
  cudaStream_t other;
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  allReduce(rank, rank.send, rank.recv, 100, rank.stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // whichever comes second is refused
  allReduce(rank, rank.send, rank.recv, 100, other);
  CUDA(cudaStreamSynchronize(other));
  CUDA(cudaStreamSynchronize(rank.stream));
  expectStatus("busy channel", rank, {ncclInvalidUsage, ncclFfmFunctionAllReduce, 0, kNobody, 0, 0, 0, 0, 1, {}, {}});
  CUDA(cudaStreamDestroy(other));
}

// Every rank writes a part of its own into every rank's memory, at any alignment; each checks what it was given, then
// with two bytes wrong. The words that the checks answer in are pinned host memory.
void patternsBetweenAllRanksAreFoundWhereTheyWereWritten(int nRanks, uint64_t part) {
  PrimedWorld world(nRanks, 5000 * kMs);
  const size_t n = static_cast<size_t>(nRanks);
  std::vector<unsigned char *> memory(n);
  std::vector<uint64_t *> firstBad(n), firstBadOnDevice(n);
  constexpr uint64_t kMostShift = 16;
  world.onEach([&](Rank &, int r) {
    CUDA(cudaMalloc(&memory[r], kMostShift + n * part));
    CUDA(cudaHostAlloc(&firstBad[r], sizeof(uint64_t), cudaHostAllocMapped));
    CUDA(cudaHostGetDevicePointer(&firstBadOnDevice[r], firstBad[r], 0));
  });
  for (uint64_t shift : {0u, 1u, 8u, 15u}) {
    auto windowOf = [&](int r) { return ncclLsaWindow{memory[r] + shift, n * part, nullptr}; };
    auto seedOf = [&](int writer, int reader) { return kSeed + shift * 10000 + writer * 100 + reader; };
    world.onEach([&](Rank &rank, int writer) {
      for (int reader = 0; reader < nRanks; ++reader) {
        const ncclLsaWindow window = windowOf(reader);
        SHIM(ncclFfmLsaWritePattern(&window, writer * part, part, seedOf(writer, reader), rank.stream));
      }
    });
    world.synchronize();
    for (bool broken : {false, true}) {
      const uint64_t first = n * part / 2 + 5, second = n * part - 1;
      world.onEach([&](Rank &rank, int reader) {
        const ncclLsaWindow window = windowOf(reader);
        *firstBad[reader] = UINT64_MAX;
        for (uint64_t at : {first, second}) {
          unsigned char byte;
          CUDA(cudaMemcpyAsync(&byte, memory[reader] + shift + at, 1, cudaMemcpyDeviceToHost, rank.stream));
          CUDA(cudaStreamSynchronize(rank.stream));
          byte ^= 1;
          if (broken) {
            CUDA(cudaMemcpyAsync(memory[reader] + shift + at, &byte, 1, cudaMemcpyHostToDevice, rank.stream));
            CUDA(cudaStreamSynchronize(rank.stream));
          }
        }
        for (int writer = 0; writer < nRanks; ++writer) {
          SHIM(ncclFfmLsaCheckPattern(&window, writer * part, part, seedOf(writer, reader), firstBadOnDevice[reader],
                                      rank.stream));
        }
      });
      world.synchronize();
      for (int r = 0; r < nRanks; ++r) {
        check(*firstBad[r] == (broken ? first : UINT64_MAX), broken ? "pattern with a wrong byte" : "pattern", r,
              static_cast<long long>(shift), static_cast<long long>(*firstBad[r]));
      }
    }
  }
  world.onEach([&](Rank &, int r) {
    CUDA(cudaFree(memory[r]));
    CUDA(cudaFreeHost(firstBad[r]));
  });
}

// Median over repetitions of the slowest block of the slowest rank.
void printLatency(int nRanks) {
  PrimedWorld world(nRanks, 5000 * kMs);
  constexpr int kTimes = 2000, kRepetitions = 9;
  for (size_t bytes : {512u, 4096u, 65536u}) {
    for (int blocks : {1, 4, 16}) {
      if (bytes / blocks < 512) continue;
      const size_t perBlock = bytes / sizeof(float) / blocks;
      double us[2] = {};
      world.fill(bytes, 0, perBlock * blocks);
      for (bool oneSession : {true, false}) {
        std::vector<double> median;
        for (int repetition = 0; repetition < kRepetitions; ++repetition) {
          world.onEach([&](Rank &rank, int) {
            (oneSession ? loopKernel<true> : loopKernel<false>)<<<blocks, 512, 0, rank.stream>>>(
                rank.comm, rank.send, rank.recv, perBlock, kTimes, rank.ns, rank.results);
          });
          world.synchronize();
          uint64_t slowest = 0;
          for (const Rank &rank : world.ranks) {
            for (int b = 0; b < blocks; ++b) {
              slowest = std::max(slowest, rank.ns[b]);
              check(rank.results[b] == ncclSuccess, "result in the loop", rank.results[b]);
            }
          }
          median.push_back(static_cast<double>(slowest) / 1000 / kTimes);
        }
        std::sort(median.begin(), median.end());
        us[oneSession ? 0 : 1] = median[kRepetitions / 2];
      }
      world.verify("in the loop", bytes, &Rank::recv, 0, perBlock * blocks, false);
      printf("%d ranks, %6zu B, %2d blocks of 512: %6.2f us on one session, %6.2f us taking the channel each time\n",
             nRanks, bytes, blocks, us[0], us[1]);
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  begin(argc, argv);
  for (int nRanks : {1, 2, 4, 8}) {
    launchesMatchFloat64(nRanks);
    groupsOfAnySizeMatchFloat64(nRanks);
    patternsBetweenAllRanksAreFoundWhereTheyWereWritten(nRanks, 1023);
    patternsBetweenAllRanksAreFoundWhereTheyWereWritten(nRanks, (16 << 20) + 3);
    printf("%d ranks: launches, groups and patterns checked, %d failures so far\n", nRanks, failures);
  }
  rankThatNeverArrivesIsNamed();
  abortEndsAWaitThatHasNoDeadline();
  secondCollectiveOnABusyChannelIsRefused();
  printf("deadline, abort, busy channel checked, %d failures so far\n", failures);
  for (int nRanks : {2, 4, 8}) printLatency(nRanks);
  printf("device_cuda_test: %s, %d failures\n", failures == 0 ? "PASS" : "FAIL", failures);
  return failures == 0 ? 0 : 1;
}

// The CPU backend's half of the shim (src/cpu/launch.cpp) through the C ABI, as Java uses it: streams, several blocks a
// launch, failures that land in the status record and leave the stream alone.
#include "../../src/cpu/abi.h"
#include "harness.h"

namespace ncclffm::test {
namespace {

constexpr int kRanks = 4, kChannels = 4;
constexpr uint32_t kSlotBytes = 1024;
constexpr uint64_t kSeed = 20250118;

void cuda(cudaError_t error, const char *what) {
  check(error == cudaSuccess, "%s: %s", what, cudaGetErrorString(error));
}

void shim(int code, const char *what) {
  check(code == ncclSuccess, "%s: %d: %s", what, code, ncclFfmGetLastError());
}

class Streams {
 public:
  Streams() {
    for (cudaStream_t &stream : streams_) cuda(cudaStreamCreateWithFlags(&stream, 1), "cudaStreamCreateWithFlags");
  }
  ~Streams() {
    for (cudaStream_t stream : streams_) cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
  cudaStream_t operator[](int rank) const { return streams_[rank]; }
  void synchronize() {
    for (cudaStream_t stream : streams_) cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t streams_[kRanks];
};

// One host thread launches for all ranks, so every launch must return before its peers have come.
void launchesOfOneThreadMatchTheSumInRankOrder() {
  World world(kRanks, kChannels, kSlotBytes, 60000 * kMs);
  Streams streams;
  for (int r = 0; r < kRanks; ++r) shim(ncclFfmPrime(streams[r]), "ncclFfmPrime");
  uint64_t number = 0;
  for (size_t count : {1u, 2u, 777u, 1025u, 5001u, 40000u}) {
    for (bool fused : {false, true}) {
      ++number;
      std::vector<std::vector<float>> send(kRanks), recv(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        send[r].resize(count);
        recv[r].resize(count);
        for (size_t i = 0; i < count; ++i) send[r][i] = contribution(kSeed, r, number, i);
      }
      for (int r = 0; r < kRanks; ++r) {
        if (fused) {
          recv[r] = send[r];
          const ncclFfmCall call =
              makeCall(ncclFfmFunctionAllReduce, recv[r].data(), recv[r].data(), count, ncclFloat32, ncclSum, 0, 0);
          shim(ncclFfmFusedScaleAllReduceSqrt(&world.comm(r), &call, 2, 1, streams[r]), "fused");
        } else {
          const ncclFfmCall call =
              makeCall(ncclFfmFunctionAllReduce, send[r].data(), recv[r].data(), count, ncclFloat32, ncclSum, 0, 0);
          shim(ncclFfmLaunch(&world.comm(r), &call, streams[r]), "ncclFfmLaunch");
        }
      }
      streams.synchronize();
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < kRanks; ++r) {
          float x = fused ? std::fmaf(2.0f, send[r][i], 1.0f) : send[r][i];
          sum = r == 0 ? x : sum + x;
        }
        if (fused) sum = std::sqrt(std::fabs(sum));
        for (int r = 0; r < kRanks; ++r) {
          check(recv[r][i] == sum, "seed %llu, %zu elements%s, rank %d, element %zu: %.9g, not %.9g",
                static_cast<unsigned long long>(kSeed), count, fused ? ", fused" : "", r, i, recv[r][i], sum);
        }
      }
    }
  }
}

// Every function, on streams: what a rank gets is data of the right ranks. What it computes is the same code as in
// collectives_test.
void everyFunctionRunsOnAStream() {
  constexpr uint64_t kCount = 3001;
  World world(kRanks, kChannels, kSlotBytes, 60000 * kMs);
  Streams streams;
  uint64_t number = 1000;
  for (uint32_t function = ncclFfmFunctionAllReduce; function <= ncclFfmFunctionSendRecv; ++function) {
    for (int blocks : {0, 1, 2}) {
      ++number;
      std::vector<std::vector<int64_t>> send(kRanks), recv(kRanks);
      auto value = [&](int rank, uint64_t i) {
        return static_cast<int64_t>(mix(mix(number * 8 + static_cast<uint64_t>(rank)) + i));
      };
      for (int r = 0; r < kRanks; ++r) {
        recv[r].assign(kRanks * kCount, -1);
        for (uint64_t i = 0; i < kRanks * kCount; ++i) send[r].push_back(value(r, i));
        ncclFfmCall call = makeCall(static_cast<ncclFfmFunction>(function), send[r].data(), recv[r].data(), kCount,
                                    ncclInt64, ncclSum, 2, 0);
        call.blocks = blocks;
        if (function == ncclFfmFunctionSend || function == ncclFfmFunctionRecv) {
          call.function = r % 2 == 0 ? ncclFfmFunctionSend : ncclFfmFunctionRecv;
          call.root = call.source = r ^ 1;
        } else if (function == ncclFfmFunctionSendRecv) {
          call.root = (r + 1) % kRanks;
          call.source = (r + kRanks - 1) % kRanks;
        }
        shim(ncclFfmLaunch(&world.comm(r), &call, streams[r]), "ncclFfmLaunch");
      }
      streams.synchronize();
      auto sum = [&](uint64_t i) {
        uint64_t total = 0;
        for (int r = 0; r < kRanks; ++r) total += static_cast<uint64_t>(value(r, i));
        return static_cast<int64_t>(total);
      };
      for (int r = 0; r < kRanks; ++r) {
        for (uint64_t i = 0; i < kRanks * kCount; ++i) {
          const int part = static_cast<int>(i / kCount);
          const uint64_t inPart = i % kCount, own = static_cast<uint64_t>(r) * kCount;
          int64_t expected = -1;
          if (function == ncclFfmFunctionAllGather) {
            expected = value(part, inPart);
          } else if (function == ncclFfmFunctionAllToAll) {
            expected = value(part, own + inPart);
          } else if (part == 0) {
            switch (function) {
              case ncclFfmFunctionReduceScatter:
                expected = sum(own + i);
                break;
              case ncclFfmFunctionBroadcast:
                expected = value(2, i);
                break;
              case ncclFfmFunctionReduce:
                expected = r == 2 ? sum(i) : -1;
                break;
              case ncclFfmFunctionBarrier:
                break;
              case ncclFfmFunctionSend:
              case ncclFfmFunctionRecv:
                expected = r % 2 == 1 ? value(r - 1, i) : -1;
                break;
              case ncclFfmFunctionSendRecv:
                expected = value((r + kRanks - 1) % kRanks, i);
                break;
              default:
                expected = sum(i);
            }
          }
          check(recv[r][i] == expected, "function %u, %d blocks, rank %d, element %llu: %lld, not %lld", function,
                blocks, r, static_cast<unsigned long long>(i), static_cast<long long>(recv[r][i]),
                static_cast<long long>(expected));
        }
        check(world.status(r).code == 0, "function %u, rank %d: status %u", function, r, world.status(r).code);
      }
    }
  }
}

void moreBlocksThanTheBackendRunsAreRefused() {
  World world(kRanks, kChannels, kSlotBytes, 60000 * kMs);
  float p[8] = {};
  ncclFfmCall call = makeCall(ncclFfmFunctionAllReduce, p, p, 8, ncclFloat32, ncclSum, 0, 0);
  call.blocks = 3;
  const int code = ncclFfmLaunch(&world.comm(0), &call, nullptr);
  check(code == ncclInvalidArgument && strstr(ncclFfmGetLastError(), "3 blocks: 2 fit") != nullptr, "%d: %s", code,
        ncclFfmGetLastError());
}

void failureIsInTheStatusRecordAndNotInTheStream() {
  World world(kRanks, kChannels, kSlotBytes, 200 * kMs);
  Streams streams;
  std::vector<float> buffer(8, 1.0f);
  const ncclFfmCall call =
      makeCall(ncclFfmFunctionAllReduce, buffer.data(), buffer.data(), 8, ncclFloat32, ncclSum, 0, 0);
  shim(ncclFfmLaunch(&world.comm(0), &call, streams[0]), "alone");
  cuda(cudaStreamSynchronize(streams[0]), "the stream of a collective that timed out");
  Status status = world.status(0);
  check(status.code == ncclTimeout && status.peer == 1 && status.channel == 0, "status: code %u, peer %d, channel %d",
        status.code, status.peer, status.channel);
}

// Every rank writes a part of its own into every rank's memory; each checks all that it was given, then one byte is
// wrong.
void patternsBetweenAllRanksAreFoundWhereTheyWereWritten() {
  constexpr uint64_t kPart = 100003;  // odd, so that parts start anywhere, and more than one block's share
  Streams streams;
  for (uint64_t shift : {0u, 1u, 7u, 8u, 15u}) {
    std::vector<std::vector<char>> memory(kRanks, std::vector<char>(shift + kRanks * kPart));
    uint64_t *firstBad = nullptr;
    cuda(cudaHostAlloc(reinterpret_cast<void **>(&firstBad), kRanks * sizeof(uint64_t), 2), "cudaHostAlloc");
    auto windowOf = [&](int r) { return ncclLsaWindow{memory[r].data() + shift, kRanks * kPart, nullptr}; };
    auto seedOf = [&](int writer, int reader) { return kSeed + shift * 100 + writer * kRanks + reader; };
    auto checkAll = [&] {
      for (int reader = 0; reader < kRanks; ++reader) {
        firstBad[reader] = UINT64_MAX;
        ncclLsaWindow window = windowOf(reader);
        for (int writer = 0; writer < kRanks; ++writer) {
          shim(ncclFfmLsaCheckPattern(&window, writer * kPart, kPart, seedOf(writer, reader), &firstBad[reader],
                                      streams[reader]),
               "ncclFfmLsaCheckPattern");
        }
      }
      streams.synchronize();
    };
    for (int writer = 0; writer < kRanks; ++writer) {
      for (int reader = 0; reader < kRanks; ++reader) {
        ncclLsaWindow window = windowOf(reader);
        shim(ncclFfmLsaWritePattern(&window, writer * kPart, kPart, seedOf(writer, reader), streams[writer]),
             "ncclFfmLsaWritePattern");
      }
    }
    streams.synchronize();
    checkAll();
    for (int r = 0; r < kRanks; ++r) {
      check(firstBad[r] == UINT64_MAX, "shift %llu, reader %d: offset %llu is wrong",
            static_cast<unsigned long long>(shift), r, static_cast<unsigned long long>(firstBad[r]));
      memory[r][shift + static_cast<uint64_t>(r + 1) * 54321] ^= 1;
      memory[r][shift + static_cast<uint64_t>(r + 1) * 54321 + 9999] ^= 1;
    }
    checkAll();
    for (int r = 0; r < kRanks; ++r) {
      check(firstBad[r] == static_cast<uint64_t>(r + 1) * 54321, "shift %llu, reader %d: %llu, not %d",
            static_cast<unsigned long long>(shift), r, static_cast<unsigned long long>(firstBad[r]), (r + 1) * 54321);
    }
    cuda(cudaFreeHost(firstBad), "cudaFreeHost");
  }
}

void layoutsHoldTheRowsOfBothHalves() {
  const ncclFfmLayout *layouts = nullptr;
  size_t count = 0;
  shim(ncclFfmGetLayouts(&layouts, &count), "ncclFfmGetLayouts");
  bool shimRow = false, backendRow = false;
  for (size_t i = 0; i < count; ++i) {
    shimRow |= strcmp(layouts[i].structName, "ncclFfmDevComm") == 0;
    backendRow |= strcmp(layouts[i].structName, "ncclConfig_t") == 0;
  }
  check(shimRow && backendRow, "rows of the shim: %d, of the backend: %d", shimRow, backendRow);
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  launchesOfOneThreadMatchTheSumInRankOrder();
  everyFunctionRunsOnAStream();
  moreBlocksThanTheBackendRunsAreRefused();
  failureIsInTheStatusRecordAndNotInTheStream();
  patternsBetweenAllRanksAreFoundWhereTheyWereWritten();
  layoutsHoldTheRowsOfBothHalves();
  return report("launch_cpu_test");
}

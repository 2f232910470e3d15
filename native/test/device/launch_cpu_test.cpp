// The CPU backend's half of the shim (src/cpu/launch.cpp) through the C ABI, as Java uses it: streams, several blocks a
// launch, failures that land in the status record and leave the stream alone.
#include "../../src/cpu/abi.h"
#include "harness.h"

namespace ncclffm::test {
namespace {

constexpr int kRanks = 4, kChannels = 4;
constexpr uint32_t kLines = 64;
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
  World world(kRanks, kChannels, kLines, 60000 * kMs);
  Streams streams;
  for (int r = 0; r < kRanks; ++r) shim(ncclFfmPrime(streams[r]), "ncclFfmPrime");
  uint64_t call = 0;
  for (size_t count : {1u, 2u, 777u, 1025u, 5001u, 40000u}) {
    for (bool fused : {false, true}) {
      ++call;
      std::vector<std::vector<float>> send(kRanks), recv(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        send[r].resize(count);
        recv[r].resize(count);
        for (size_t i = 0; i < count; ++i) send[r][i] = contribution(kSeed, r, call, i);
      }
      for (int r = 0; r < kRanks; ++r) {
        if (fused) {
          recv[r] = send[r];
          shim(ncclFfmFusedScaleAllReduceSqrt(&world.comm(r), recv[r].data(), count, 2, 1, streams[r]), "fused");
        } else {
          shim(
              ncclFfmAllReduce(&world.comm(r), send[r].data(), recv[r].data(), count, ncclFloat32, ncclSum, streams[r]),
              "ncclFfmAllReduce");
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

void failureIsInTheStatusRecordAndNotInTheStream() {
  World world(kRanks, kChannels, kLines, 200 * kMs);
  Streams streams;
  std::vector<float> buffer(8, 1.0f);
  shim(ncclFfmAllReduce(&world.comm(0), buffer.data(), buffer.data(), 8, ncclFloat32, ncclSum, streams[0]), "alone");
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
  failureIsInTheStatusRecordAndNotInTheStream();
  patternsBetweenAllRanksAreFoundWhereTheyWereWritten();
  layoutsHoldTheRowsOfBothHalves();
  return report("launch_cpu_test");
}

// CUDA IPC: memory of other processes by handles. The other process is this program started again.
#include <algorithm>
#include <cstring>
#include <fstream>

#include "ncclffm.h"
#include "process_rank.h"
#include "rank_process.h"
#include "resources.h"

using namespace test;

namespace {

constexpr size_t kBytes = 70001;  // more than a page, and no whole number of them
constexpr uint64_t kSeed = 20250714;

cudaIpcMemHandle_t handleOf(void *pointer) {
  cudaIpcMemHandle_t handle;
  CUDA_OK(cudaIpcGetMemHandle(&handle, pointer));
  return handle;
}

cudaError_t tryOpen(const cudaIpcMemHandle_t &handle, void **pointer) {
  return cudaIpcOpenMemHandle(pointer, handle, cudaIpcMemLazyEnablePeerAccess);
}

char *opened(const cudaIpcMemHandle_t &handle) {
  void *pointer = nullptr;
  CUDA_OK(tryOpen(handle, &pointer));
  return static_cast<char *>(pointer);
}

bool same(const cudaIpcMemHandle_t &a, const cudaIpcMemHandle_t &b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

/// Starts what then lives as long as the process: the heap, the current device's default stream, a sanitizer's thread.
void warmUp() {
  (void)toHost(deviceArray<char>(1), 1);
}

/// How many mappings of heaps this process has.
int heapMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:ncclffm-heap") != std::string::npos ? 1 : 0;
  }
  return count;
}

void writePattern(const ncclLsaWindow &window, uint64_t seed, cudaStream_t stream) {
  CHECK_EQ(ncclFfmLsaWritePattern(&window, 0, window.bytes, seed, stream), 0);
}

/// Waits for the stream; the first wrong offset, UINT64_MAX if there is none.
uint64_t checkPattern(const ncclLsaWindow &window, uint64_t seed, cudaStream_t stream) {
  void *answer = nullptr;
  CUDA_OK(cudaHostAlloc(&answer, sizeof(uint64_t), cudaHostAllocMapped));
  auto *firstBad = static_cast<uint64_t *>(answer);
  *firstBad = UINT64_MAX;
  CHECK_EQ(ncclFfmLsaCheckPattern(&window, 0, window.bytes, seed, firstBad, stream), 0);
  CUDA_OK(cudaStreamSynchronize(stream));
  const uint64_t result = *firstBad;
  CUDA_OK(cudaFreeHost(answer));
  return result;
}

std::string uuids() {
  std::string all;
  for (int device = 0; device < 8; ++device) {
    cudaDeviceProp properties;
    CUDA_OK(cudaGetDeviceProperties(&properties, device));
    all.append(properties.uuid, sizeof(properties.uuid));
  }
  return all;
}

// ---- The other process ----

/// Hands out the handle of memory of a device, then checks what the test has written there by the time it goes on.
void exportScenario(int device) {
  CUDA_OK(cudaSetDevice(device));
  (void)deviceArray<char>(5000);  // so that the memory does not begin a page
  auto *memory = deviceArray<char>(kBytes);
  (void)deviceArray<char>(100);
  const cudaStream_t stream = newStream();
  writePattern({memory, kBytes, nullptr}, kSeed, stream);
  CUDA_OK(cudaStreamSynchronize(stream));
  const cudaIpcMemHandle_t handle = handleOf(memory);
  writeAll(1, &handle, sizeof(handle));
  awaitPermission();
  CHECK_EQ(checkPattern({memory, kBytes, nullptr}, kSeed + 1, stream), UINT64_MAX);
  mark();
}

void uuidScenario() {
  const std::string all = uuids();
  writeAll(1, all.data(), all.size());
}

/// Each rank opens the memory of all others by handles that came over the communicator, and writes its part of each.
void allPairsScenario(int number, int n) {
  const Rank rank = join(idFromParent(), number, n);
  const auto count = static_cast<size_t>(n);
  const auto me = static_cast<size_t>(number);
  (void)deviceArray<char>(100);  // so that the memory does not begin a page
  auto *memory = deviceArray<char>(count * kBytes);
  auto *handles = deviceArray<char>(count * sizeof(cudaIpcMemHandle_t));
  const cudaIpcMemHandle_t own = handleOf(memory);
  CUDA_OK(cudaMemcpy(handles + me * sizeof(own), &own, sizeof(own), cudaMemcpyHostToDevice));
  NCCL_OK(ncclAllGather(handles + me * sizeof(own), handles, sizeof(own), ncclInt8, rank.comm, rank.stream));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  std::vector<cudaIpcMemHandle_t> all(count);
  CUDA_OK(cudaMemcpy(all.data(), handles, count * sizeof(own), cudaMemcpyDeviceToHost));
  std::vector<char *> bases(count);
  const auto seedOf = [&](size_t writer, size_t reader) { return kSeed + writer * 100 + reader; };
  for (size_t peer = 0; peer < count; ++peer) {
    bases[peer] = peer == me ? memory : opened(all[peer]);
    cudaPointerAttributes attributes;
    CUDA_OK(cudaPointerGetAttributes(&attributes, bases[peer]));
    CHECK_EQ(attributes.type, cudaMemoryTypeDevice);
    CHECK_EQ(attributes.device, static_cast<int>(peer));
    writePattern({bases[peer] + me * kBytes, kBytes, nullptr}, seedOf(me, peer), rank.stream);
  }
  auto *token = deviceArray<int>(1);
  const auto barrier = [&] {
    NCCL_OK(ncclAllReduce(token, token, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
  };
  barrier();
  for (size_t writer = 0; writer < count; ++writer) {
    CHECK_EQ(checkPattern({memory + writer * kBytes, kBytes, nullptr}, seedOf(writer, me), rank.stream), UINT64_MAX);
  }
  for (size_t peer = 0; peer < count; ++peer) {
    const size_t next = (me + 1) % count;
    CHECK_EQ(checkPattern({bases[peer] + next * kBytes, kBytes, nullptr}, seedOf(next, peer), rank.stream), UINT64_MAX);
  }
  barrier();  // nobody frees what others still read
  for (size_t peer = 0; peer < count; ++peer) {
    if (peer != me) {
      CUDA_OK(cudaIpcCloseMemHandle(bases[peer]));
    }
  }
  leave(rank);
}

// ---- The test's side ----

/// A process with memory on a device, its handle, and the end of it.
class Exporter {
 public:
  explicit Exporter(int device) : process_("ipcExport", device, 8) { process_.take(&handle_, sizeof(handle_)); }

  const cudaIpcMemHandle_t &handle() const { return handle_; }

  /// The pattern that it waits for, then the end.
  void finish(char *memory) {
    const cudaStream_t stream = newStream();
    writePattern({memory, kBytes, nullptr}, kSeed + 1, stream);
    CUDA_OK(cudaStreamSynchronize(stream));
    CUDA_OK(cudaStreamDestroy(stream));
    process_.goOn();
    process_.awaitMark();
    CHECK_EQ(process_.end(), 0);
  }

 private:
  RankProcess process_;
  cudaIpcMemHandle_t handle_;
};

}  // namespace

namespace test {

bool runIpcScenario(const std::string &scenario, int rank, int nRanks) {
  if (scenario == "ipcExport") {
    exportScenario(rank);
  } else if (scenario == "ipcUuid") {
    uuidScenario();
  } else if (scenario == "ipcAllPairs") {
    allPairsScenario(rank, nRanks);
  } else {
    return false;
  }
  return true;
}

}  // namespace test

TEST(handleNamesAnAllocationOfThisProcessOnly) {
  auto *memory = deviceArray<char>(1000);
  const cudaIpcMemHandle_t handle = handleOf(memory);
  CHECK(same(handle, handleOf(memory)));
  CHECK(same(handle, handleOf(memory + 999)));
  void *pointer = &pointer;
  CHECK_EQ(tryOpen(handle, &pointer), cudaErrorDeviceUninitialized);
  CHECK_EQ(pointer, static_cast<void *>(&pointer));
  cudaIpcMemHandle_t none;
  int local = 0;
  CHECK_EQ(cudaIpcGetMemHandle(&none, memory + 1000), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcGetMemHandle(&none, &local), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcGetMemHandle(&none, nullptr), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcGetMemHandle(nullptr, memory), cudaErrorInvalidValue);
  void *pinned = nullptr;
  CUDA_OK(cudaHostAlloc(&pinned, 100, 0));
  CHECK_EQ(cudaIpcGetMemHandle(&none, pinned), cudaErrorInvalidValue);
  CUDA_OK(cudaFreeHost(pinned));
  void *window = nullptr;
  NCCL_OK(ncclMemAlloc(&window, 100));
  CHECK_EQ(cudaIpcGetMemHandle(&none, window), cudaErrorInvalidValue);
  NCCL_OK(ncclMemFree(window));
  CUDA_OK(cudaFree(memory));
  CHECK_EQ(cudaIpcGetMemHandle(&none, memory), cudaErrorInvalidValue);
  auto *again = deviceArray<char>(1000);
  CHECK_EQ(static_cast<void *>(again), static_cast<void *>(memory));
  CHECK(!same(handle, handleOf(again)));  // new memory at the old address
  CUDA_OK(cudaFree(again));
}

TEST(openedMemoryIsThatOfTheOtherProcess) {
  CUDA_OK(cudaSetDevice(5));
  warmUp();
  Exporter exporter(2);
  const int mappings = heapMappings();
  const Resources before = Resources::now();
  char *memory = opened(exporter.handle());
  cudaPointerAttributes attributes;
  CUDA_OK(cudaPointerGetAttributes(&attributes, memory + kBytes - 1));
  CHECK_EQ(attributes.type, cudaMemoryTypeDevice);
  CHECK_EQ(attributes.device, 2);
  CHECK_EQ(attributes.devicePointer, static_cast<void *>(memory + kBytes - 1));
  const cudaStream_t stream = newStream();
  CHECK_EQ(checkPattern({memory, kBytes, nullptr}, kSeed, stream), UINT64_MAX);
  CHECK_EQ(checkPattern({memory, kBytes, nullptr}, kSeed + 1, stream), 0u);

  std::vector<char> host(kBytes + 1, 1);
  CUDA_OK(cudaMemcpyAsync(memory, host.data(), kBytes, cudaMemcpyHostToDevice, stream));
  auto *own = deviceArray<char>(kBytes);
  CUDA_OK(cudaMemcpyAsync(own, memory, kBytes, cudaMemcpyDeviceToDevice, stream));
  CUDA_OK(cudaMemsetAsync(memory, 3, kBytes, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK_EQ(toHost(own, kBytes)[kBytes - 1], 1);
  CHECK_EQ(toHost(memory, kBytes)[kBytes - 1], 3);
  // Not a byte more than the allocation, whatever the system maps.
  CHECK_EQ(cudaMemcpy(memory, host.data(), kBytes + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(memory + 1, 0, kBytes), cudaErrorInvalidValue);

  cudaIpcMemHandle_t none;
  CHECK_EQ(cudaIpcGetMemHandle(&none, memory), cudaErrorInvalidValue);
  CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
  CHECK_EQ(cudaHostRegister(memory, 100, 0), cudaErrorInvalidValue);
  CUDA_OK(cudaFree(own));
  CUDA_OK(cudaStreamDestroy(stream));
  exporter.finish(memory);
  // The mapping outlives the process that it came from.
  CHECK_EQ(memory[0] == 3 && memory[1] == 3 && memory[2] == 3, false);
  CUDA_OK(cudaIpcCloseMemHandle(memory));
  CHECK_EQ(heapMappings(), mappings);
  before.expectAtMost({0, 0});
}

TEST(openingCountsAndTheLastCloseUnmaps) {
  warmUp();
  Exporter exporter(0);
  const int mappings = heapMappings();
  char *memory = opened(exporter.handle());
  CUDA_OK(cudaSetDevice(3));
  CHECK_EQ(static_cast<void *>(opened(exporter.handle())), static_cast<void *>(memory));
  CHECK_EQ(heapMappings(), mappings + 1);
  CHECK_EQ(cudaIpcCloseMemHandle(memory + 1), cudaErrorInvalidValue);
  CUDA_OK(cudaIpcCloseMemHandle(memory));
  CHECK_EQ(heapMappings(), mappings + 1);
  CUDA_OK(cudaMemset(memory, 0, kBytes));
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaIpcCloseMemHandle(memory));
  CHECK_EQ(heapMappings(), mappings);
  CHECK_EQ(cudaIpcCloseMemHandle(memory), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemset(memory, 0, kBytes), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcCloseMemHandle(nullptr), cudaErrorInvalidValue);
  auto *own = deviceArray<char>(1);
  CHECK_EQ(cudaIpcCloseMemHandle(own), cudaErrorInvalidValue);
  exporter.finish(opened(exporter.handle()));
}

TEST(closingWaitsForWhatUsesTheMemory) {
  Exporter exporter(0);
  char *memory = opened(exporter.handle());
  const cudaStream_t stream = newStream();
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  writePattern({memory, kBytes, nullptr}, kSeed + 1, stream);
  CHECK(waitsForGate(&gate, [&] { CUDA_OK(cudaIpcCloseMemHandle(memory)); }));
  CUDA_OK(cudaStreamQuery(stream));
  exporter.finish(opened(exporter.handle()));
  CUDA_OK(cudaStreamDestroy(stream));
}

TEST(foreignAndDamagedHandlesAreRefused) {
  Exporter exporter(1);
  void *pointer = nullptr;
  const cudaIpcMemHandle_t good = exporter.handle();
  for (size_t i = 0; i < sizeof(good); ++i) {
    for (int bit : {0, 7}) {
      cudaIpcMemHandle_t damaged = good;
      damaged.reserved[i] = static_cast<char>(damaged.reserved[i] ^ (1 << bit));
      CHECK_EQ_IN(tryOpen(damaged, &pointer), cudaErrorInvalidValue, "byte " + std::to_string(i));
    }
  }
  cudaIpcMemHandle_t zero = {};
  CHECK_EQ(tryOpen(zero, &pointer), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcOpenMemHandle(&pointer, good, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaIpcOpenMemHandle(&pointer, good, 3), cudaErrorInvalidValue);
  CHECK_EQ(tryOpen(good, nullptr), cudaErrorInvalidValue);
  CHECK_EQ(pointer, nullptr);
  char *memory = opened(good);
  exporter.finish(memory);
  CUDA_OK(cudaIpcCloseMemHandle(memory));
  CHECK_EQ(tryOpen(good, &pointer), cudaErrorInvalidValue);  // its process is gone
}

TEST(peerAccessIsNeededAcrossDevices) {
  Exporter exporter(1);
  setenv("NCCLFFM_CPU_PEER_ACCESS", "0", 1);
  void *pointer = nullptr;
  CUDA_OK(cudaSetDevice(0));
  CHECK_EQ(tryOpen(exporter.handle(), &pointer), cudaErrorPeerAccessUnsupported);
  CUDA_OK(cudaSetDevice(1));
  char *memory = opened(exporter.handle());
  exporter.finish(memory);
  CUDA_OK(cudaIpcCloseMemHandle(memory));
}

TEST(handlesAreOpenedAndClosedByManyThreadsWithoutLeaks) {
  warmUp();
  Exporter exporter(0);
  Exporter other(1);
  const Resources before = Resources::now();
  const int mappings = heapMappings();
  constexpr int kTimes = kSanitized ? 100 : 1000;
  onThreads(4, [&](int thread) {
    CUDA_OK(cudaSetDevice(thread));
    for (int i = 0; i < kTimes; ++i) {
      char *memory = opened((thread % 2 == 0 ? exporter : other).handle());
      cudaPointerAttributes attributes;
      CUDA_OK(cudaPointerGetAttributes(&attributes, memory + i));
      CHECK_EQ(attributes.device, thread % 2);
      CUDA_OK(cudaIpcCloseMemHandle(memory));
    }
  });
  before.expectAtMost({0, 0});
  CHECK_EQ(heapMappings(), mappings);
  exporter.finish(opened(exporter.handle()));
  other.finish(opened(other.handle()));
}

TEST(processesReachEachOthersMemoryByHandles) {
  for (int n : {2, 4}) {
    const RankProcesses ranks = start("ipcAllPairs", n);
    giveIdTo(ranks);
    for (const auto &rank : ranks) {
      CHECK_EQ(rank->end(), 0);
    }
  }
}

TEST(uuidsAreTheSameInEveryProcess) {
  const std::string own = uuids();
  for (int i = 0; i < 2; ++i) {
    RankProcess process("ipcUuid", 0, 1);
    std::string theirs(own.size(), '\0');
    process.take(theirs.data(), theirs.size());
    CHECK(theirs == own);
    CHECK_EQ(process.end(), 0);
  }
}

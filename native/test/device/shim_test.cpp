// The C ABI in shim.cpp, over a backend that only notes what it is asked to launch.
#include "../../src/shim.h"

#include <limits>
#include <map>
#include <set>
#include <string>

#include "harness.h"

namespace ncclffm::shim {
namespace {
std::vector<CallLaunch> launches;
std::vector<FusedLaunch> fusedLaunches;
std::vector<PatternLaunch> patternLaunches;
struct {
  std::vector<QueueLaunch> queues;
  std::vector<SchedulerLaunch> schedulers;
  std::vector<BatchLaunch> batches;
  std::vector<ReserveLaunch> reserves;
  std::vector<BucketsLaunch> buckets;
  std::vector<OverlapLaunch> overlaps;
  std::vector<ProducerEndLaunch> ends;

  bool empty() const {
    return queues.empty() && schedulers.empty() && batches.empty() && reserves.empty() && buckets.empty() &&
           overlaps.empty() && ends.empty();
  }
} tasks;
int fittingSchedulers = std::numeric_limits<int>::max();
Failure nextFailure, noBlocks;
uint32_t threadsOfABlock = 512;
int fitting = std::numeric_limits<int>::max();
int askedRanksPerDevice = 0;
}  // namespace

Failure launch(const CallLaunch &launch) {
  launches.push_back(launch);
  return nextFailure;
}

Failure launch(const FusedLaunch &launch) {
  fusedLaunches.push_back(launch);
  return nextFailure;
}

Failure launch(const PatternLaunch &launch) {
  patternLaunches.push_back(launch);
  return nextFailure;
}

Failure launch(const QueueLaunch &launch) {
  tasks.queues.push_back(launch);
  return nextFailure;
}

Failure launch(const SchedulerLaunch &launch) {
  tasks.schedulers.push_back(launch);
  return nextFailure;
}

Failure launch(const BatchLaunch &launch) {
  tasks.batches.push_back(launch);
  return nextFailure;
}

Failure launch(const ReserveLaunch &launch) {
  tasks.reserves.push_back(launch);
  return nextFailure;
}

Failure launch(const BucketsLaunch &launch) {
  tasks.buckets.push_back(launch);
  return nextFailure;
}

Failure launch(const OverlapLaunch &launch) {
  tasks.overlaps.push_back(launch);
  return nextFailure;
}

Failure launch(const ProducerEndLaunch &launch) {
  tasks.ends.push_back(launch);
  return nextFailure;
}

Failure maxSchedulerBlocks(int, int *blocks) {
  *blocks = fittingSchedulers;
  return noBlocks;
}

Failure prime(void *) {
  return nextFailure;
}

uint32_t blockThreads() {
  return threadsOfABlock;
}

Failure maxBlocks(int ranksPerDevice, int *blocks) {
  askedRanksPerDevice = ranksPerDevice;
  *blocks = fitting;
  return noBlocks;
}

const char *buildInfo() {
  return "a test";
}

void backendLayouts(const ncclFfmLayout **layouts, size_t *count) {
  static const ncclFfmLayout row = {"struct of the backend", "", 0, 4};
  *layouts = &row;
  *count = 1;
}

}  // namespace ncclffm::shim

namespace ncclffm::test {
namespace {

using shim::fusedLaunches;
using shim::launches;
using shim::patternLaunches;

constexpr int kBad = ncclInvalidArgument;
constexpr int kRanks = 4, kChannels = 4;

void expect(const char *what, int code, int expected, const char *inText) {
  check(code == expected && strstr(ncclFfmGetLastError(), inText) != nullptr,
        "%s: code %d, text \"%s\"; expected %d, \"%s\"", what, code, ncclFfmGetLastError(), expected, inText);
}

// Addresses that are never followed.
float *at(uint64_t address) {
  return reinterpret_cast<float *>(address);
}

ncclFfmCall goodCall(uint32_t function) {
  ncclFfmCall call = {};
  call.function = function;
  call.datatype = ncclFloat32;
  call.op = ncclSum;
  call.root = function == ncclFfmFunctionHierarchicalAllReduce ? 2 : 0;
  call.count = 8;
  call.sendbuff = at(1 << 20);
  call.recvbuff = at(2 << 20);
  return call;
}

void badCommunicatorsAreRefusedWithAText() {
  World world(kRanks, kChannels, 512, kMs);
  auto with = [&](const char *inText, auto change) {
    ncclFfmDevComm comm = world.comm(1);
    change(comm);
    ncclFfmCall call = goodCall(ncclFfmFunctionAllReduce);
    expect("ncclFfmLaunch", ncclFfmLaunch(&comm, &call, nullptr), kBad, inText);
    expect("ncclFfmLaunch", ncclFfmLaunch(&comm, &call, nullptr), kBad, "ncclFfmLaunch: ");
    expect("ncclFfmChoose", ncclFfmChoose(&comm, &call), kBad, inText);
    expect("ncclFfmChoose", ncclFfmChoose(&comm, &call), kBad, "ncclFfmChoose: ");
    expect("fused", ncclFfmFusedScaleAllReduceSqrt(&comm, &call, 2, 1, nullptr), kBad, inText);
    expect("fused", ncclFfmFusedScaleAllReduceSqrt(&comm, &call, 2, 1, nullptr), kBad,
           "ncclFfmFusedScaleAllReduceSqrt: ");
  };
  with("magic is 0x00000007", [](ncclFfmDevComm &c) { c.magic = 7; });
  with("version 9", [](ncclFfmDevComm &c) { c.version = 9; });
  with("rank 4 of 4", [](ncclFfmDevComm &c) { c.rank = 4; });
  with("rank -1 of 4", [](ncclFfmDevComm &c) { c.rank = -1; });
  with("of 0 ranks", [](ncclFfmDevComm &c) { c.nRanks = 0; });
  with("of 65537 ranks", [](ncclFfmDevComm &c) { c.nRanks = 65537; });
  with("0 channels", [](ncclFfmDevComm &c) { c.nChannels = 0; });
  with("1025 channels", [](ncclFfmDevComm &c) { c.nChannels = 1025; });
  with("slots of 0 bytes", [](ncclFfmDevComm &c) { c.slotBytes = 0; });
  with("slots of 520 bytes", [](ncclFfmDevComm &c) { c.slotBytes = 520; });
  with("slots of 67109376 bytes", [](ncclFfmDevComm &c) { c.slotBytes = (1 << 26) + 512; });
  with("comm->channels is null", [](ncclFfmDevComm &c) { c.channels = nullptr; });
  with("comm->pairs is null", [](ncclFfmDevComm &c) { c.pairs = nullptr; });
  with("comm->peers is null", [](ncclFfmDevComm &c) { c.peers = nullptr; });
  with("comm->status is null", [](ncclFfmDevComm &c) { c.status = nullptr; });
  with("path 4", [](ncclFfmDevComm &c) { c.path = 4; });
  with("0 ranks per device", [](ncclFfmDevComm &c) { c.ranksPerDevice = 0; });
  with("5 ranks per device", [](ncclFfmDevComm &c) { c.ranksPerDevice = 5; });
  ncclFfmCall call = goodCall(ncclFfmFunctionAllReduce);
  expect("no comm", ncclFfmLaunch(nullptr, &call, nullptr), kBad, "comm is null");
  expect("no comm", ncclFfmChoose(nullptr, &call), kBad, "comm is null");
  expect("no comm", ncclFfmFusedScaleAllReduceSqrt(nullptr, &call, 2, 1, nullptr), kBad, "comm is null");
  expect("no call", ncclFfmLaunch(&world.comm(0), nullptr, nullptr), kBad, "ncclFfmLaunch: call is null");
  expect("no call", ncclFfmChoose(&world.comm(0), nullptr), kBad, "ncclFfmChoose: call is null");
  check(launches.empty() && fusedLaunches.empty(), "a bad communicator launched something");
}

// Every Problem of impl/plans.h has its text.
void badCallsAreRefusedWithATextAndLaunchNothing() {
  World world(kRanks, kChannels, 512, kMs);
  std::vector<void *> windows(kRanks), others(kRanks);
  ncclFfmDevComm comm = world.comm(1);
  auto with = [&](uint32_t function, const char *inText, auto change) {
    ncclFfmCall call = goodCall(function);
    change(call);
    expect("ncclFfmLaunch", ncclFfmLaunch(&comm, &call, nullptr), kBad, inText);
    expect("ncclFfmChoose", ncclFfmChoose(&comm, &call), kBad, inText);
  };
  constexpr uint32_t kAllReduce = ncclFfmFunctionAllReduce;
  with(0, "function 0 is no collective", [](ncclFfmCall &) {});
  with(ncclFfmFunctionFusedScaleAllReduceSqrt, "function 12 is no collective", [](ncclFfmCall &) {});
  with(99, "function 99 is no collective", [](ncclFfmCall &) {});
  with(kAllReduce, "AllReduce: datatype 10", [](ncclFfmCall &c) { c.datatype = 10; });
  with(ncclFfmFunctionAllGather, "AllGather: datatype -1", [](ncclFfmCall &c) { c.datatype = -1; });
  with(ncclFfmFunctionReduceScatter, "ReduceScatter: op 5", [](ncclFfmCall &c) { c.op = 5; });
  with(ncclFfmFunctionReduce, "Reduce: root 4: there are 4 ranks", [](ncclFfmCall &c) { c.root = 4; });
  with(ncclFfmFunctionBroadcast, "Broadcast: root -1", [](ncclFfmCall &c) { c.root = -1; });
  with(ncclFfmFunctionHierarchicalAllReduce,
       "HierarchicalAllReduce: groups of 3: there are 4 ranks, which the group must",
       [](ncclFfmCall &c) { c.root = 3; });
  with(ncclFfmFunctionSend, "Send: to 1, from 0: a peer is another one of the 4 ranks than rank 1",
       [](ncclFfmCall &c) { c.root = 1; });
  with(ncclFfmFunctionRecv, "Recv: to 0, from 4", [](ncclFfmCall &c) { c.source = 4; });
  with(ncclFfmFunctionSendRecv, "SendRecv: to 0, from 1", [](ncclFfmCall &c) { c.source = 1; });
  with(kAllReduce, "AllReduce: protocol 4", [](ncclFfmCall &c) { c.protocol = 4; });
  with(ncclFfmFunctionAllToAll, "AllToAll does not have algorithm 3", [](ncclFfmCall &c) { c.algorithm = 3; });
  with(ncclFfmFunctionBarrier, "Barrier does not have algorithm 2", [](ncclFfmCall &c) { c.algorithm = 2; });
  with(kAllReduce, "zero-copy AllReduce does not have algorithm 1", [&](ncclFfmCall &c) {
    c.send = c.recv = {windows.data(), 64, 0};
    c.algorithm = 1;
  });
  with(kAllReduce, "the bytes of 18446744073709551615 elements", [](ncclFfmCall &c) { c.count = UINT64_MAX; });
  with(kAllReduce, "sendbuff (nil)", [](ncclFfmCall &c) { c.sendbuff = nullptr; });
  with(kAllReduce, "recvbuff (nil)", [](ncclFfmCall &c) { c.recvbuff = nullptr; });
  with(kAllReduce, "an element of 4 bytes", [](ncclFfmCall &c) { c.sendbuff = at(66); });
  with(kAllReduce, "send at 4 of 32 bytes", [&](ncclFfmCall &c) {
    c.send = {windows.data(), 32, 4};
    c.recv = {others.data(), 32, 0};
  });
  with(kAllReduce, "both must be in windows", [&](ncclFfmCall &c) { c.send = {windows.data(), 32, 0}; });
  with(kAllReduce, "overlap", [](ncclFfmCall &c) { c.recvbuff = at((1 << 20) + 28); });
  with(kAllReduce, "5 blocks: 4 fit, of 4 channels", [](ncclFfmCall &c) { c.blocks = 5; });
  with(kAllReduce, "-1 blocks", [](ncclFfmCall &c) { c.blocks = -1; });
  comm.path = ncclFfmPathPcie;
  with(kAllReduce, "LL128 (2, on the same GPU and NVLink only)",
       [](ncclFfmCall &c) { c.protocol = ncclFfmProtocolLL128; });
  comm.path = ncclFfmPathSameGpu;
  comm.ranksPerDevice = 3;
  shim::fitting = 2;
  with(kAllReduce, "3 blocks: 2 fit, of 4 channels, side by side with those of 3 ranks",
       [](ncclFfmCall &c) { c.blocks = 3; });
  check(shim::askedRanksPerDevice == 3, "the device was asked for %d ranks", shim::askedRanksPerDevice);
  shim::fitting = 0;
  with(kAllReduce, "0 blocks: 0 fit", [](ncclFfmCall &) {});
  shim::fitting = std::numeric_limits<int>::max();
  shim::noBlocks = "no such device";
  ncclFfmCall call = goodCall(kAllReduce);
  expect("occupancy", ncclFfmLaunch(&comm, &call, nullptr), ncclUnhandledCudaError, "ncclFfmLaunch: no such device");
  shim::noBlocks.clear();

  uint64_t n;
  expect("window", ncclFfmGetWindowBytes(0, 4, 512, &n), kBad, "0 ranks");
  expect("window", ncclFfmGetWindowBytes(65537, 4, 512, &n), kBad, "65537 ranks");
  expect("window", ncclFfmGetWindowBytes(2, 0, 512, &n), kBad, "0 channels");
  expect("window", ncclFfmGetWindowBytes(2, 1025, 512, &n), kBad, "1025 channels");
  expect("window", ncclFfmGetWindowBytes(2, 4, 0, &n), kBad, "slots of 0 bytes");
  expect("window", ncclFfmGetWindowBytes(2, 4, 513, &n), kBad, "slots of 513 bytes");
  expect("window", ncclFfmGetWindowBytes(2, 4, 512, nullptr), kBad, "bytes is null");
  expect("layouts", ncclFfmGetLayouts(nullptr, nullptr), kBad, "layouts is null");
  const ncclFfmLayout *rows;
  expect("layouts", ncclFfmGetLayouts(&rows, nullptr), kBad, "count is null");
  expect("version", ncclFfmGetAbiVersion(nullptr), kBad, "version is null");
  check(launches.empty() && fusedLaunches.empty(), "a bad call launched something");
}

void rangesOutsideALsaWindowAreRefusedAndLaunchNothing() {
  char memory[64];
  uint64_t bad = 0;
  constexpr uint64_t kMax = UINT64_MAX;
  const ncclLsaWindow good = {memory, sizeof memory, nullptr};
  auto both = [&](const char *what, const ncclLsaWindow *window, uint64_t offset, uint64_t bytes, const char *inText) {
    expect(what, ncclFfmLsaWritePattern(window, offset, bytes, 1, nullptr), kBad, inText);
    expect(what, ncclFfmLsaWritePattern(window, offset, bytes, 1, nullptr), kBad, "ncclFfmLsaWritePattern: ");
    expect(what, ncclFfmLsaCheckPattern(window, offset, bytes, 1, &bad, nullptr), kBad, inText);
    expect(what, ncclFfmLsaCheckPattern(window, offset, bytes, 1, &bad, nullptr), kBad, "ncclFfmLsaCheckPattern: ");
  };
  both("null window", nullptr, 0, 1, "window is null");
  const ncclLsaWindow noBase = {nullptr, 64, nullptr}, noEnd = {memory, kMax, nullptr}, empty = {nullptr, 0, nullptr};
  both("no base", &noBase, 0, 1, "and 64 bytes: it must have an address");
  both("empty without base", &empty, 0, 0, "must have an address");
  both("end beyond the address space", &noEnd, 0, 1, "end within the address space");
  both("one byte too many", &good, 0, 65, "65 bytes at offset 0 are not all in the window of 64 bytes");
  both("the byte behind the end", &good, 64, 1, "1 bytes at offset 64");
  both("nothing behind the end", &good, 65, 0, "0 bytes at offset 65");
  both("offset wraps", &good, kMax, 1, "1 bytes at offset 18446744073709551615");
  both("length wraps", &good, 1, kMax, "18446744073709551615 bytes at offset 1");
  both("both wrap to a sum inside", &good, kMax - 7, 16, "16 bytes at offset 18446744073709551608");
  expect("null firstBad", ncclFfmLsaCheckPattern(&good, 0, 1, 1, nullptr, nullptr), kBad, "firstBad is ");
  uint64_t *odd = reinterpret_cast<uint64_t *>(reinterpret_cast<uintptr_t>(memory) | 4);
  expect("misaligned firstBad", ncclFfmLsaCheckPattern(&good, 0, 1, 1, odd, nullptr), kBad, "8-byte aligned");
  check(patternLaunches.empty(), "a bad argument launched something");
  check(ncclFfmLsaWritePattern(&good, 64, 0, 1, nullptr) == ncclSuccess &&
            ncclFfmLsaCheckPattern(&good, 0, 0, 1, &bad, nullptr) == ncclSuccess && patternLaunches.empty(),
        "0 bytes are fine and launch nothing");
}

void patternLaunchesHaveABlockFor32KiBUpTo256() {
  const ncclLsaWindow window = {reinterpret_cast<void *>(uintptr_t{1} << 20), uint64_t{1} << 40, nullptr};
  struct {
    uint64_t bytes;
    int blocks;
  } cases[] = {{1, 1}, {32 << 10, 1}, {(32 << 10) + 1, 2}, {uint64_t{1} << 40, 256}};
  uint64_t bad;
  for (const auto &c : cases) {
    for (bool isCheck : {false, true}) {
      patternLaunches.clear();
      int code = isCheck ? ncclFfmLsaCheckPattern(&window, 0, c.bytes, 77, &bad, &bad)
                         : ncclFfmLsaWritePattern(&window, 0, c.bytes, 77, &bad);
      check(code == ncclSuccess && patternLaunches.size() == 1, "%llu bytes: code %d",
            static_cast<unsigned long long>(c.bytes), code);
      if (patternLaunches.size() != 1) continue;
      const shim::PatternLaunch &l = patternLaunches[0];
      check(l.blocks == c.blocks && l.bytes == c.bytes && l.offset == 0 && l.seed == 77 && l.stream == &bad &&
                l.firstBad == (isCheck ? &bad : nullptr) && l.window.base == window.base,
            "%llu bytes: %d blocks, not %d", static_cast<unsigned long long>(c.bytes), l.blocks, c.blocks);
    }
  }
}

// What a call leaves open is filled in: by the communicator, else by the table; the same on every rank.
void choicesAreFilledInAndKept() {
  World world(kRanks, kChannels, 512, kMs);
  struct {
    uint32_t function, protocol, algorithm, commProtocol, commAlgorithm, path;
    uint64_t count;
    uint32_t expectedProtocol, expectedAlgorithm;
    int blocks;
  } rows[] = {
      // AllReduce, f32, by the table: LL, then Simple; one shot, then two.
      {1, 0, 0, 0, 0, 3, 1, 1, 1, 1},
      {1, 0, 0, 0, 0, 3, 1024, 1, 1, 1},
      {1, 0, 0, 0, 0, 3, 1025, 1, 1, 2},
      {1, 0, 0, 0, 0, 3, 20 << 10, 1, 1, 4},
      {1, 0, 0, 0, 0, 3, (20 << 10) + 1, 3, 1, 4},
      {1, 0, 0, 0, 0, 3, 64 << 10, 3, 1, 4},
      {1, 0, 0, 0, 0, 1, (64 << 10) + 1, 3, 2, 4},
      {1, 0, 0, 0, 0, 0, 10 << 10, 1, 1, 4},
      {1, 0, 0, 0, 0, 0, (10 << 10) + 1, 3, 1, 4},
      {1, 0, 0, 0, 0, 3, 1 << 24, 3, 2, 4},
      // The call's own wish, the communicator's, and where neither has what the function or the path knows.
      {1, 3, 3, 1, 1, 3, 1, 3, 3, 1},
      {1, 0, 0, 3, 3, 3, 1, 3, 3, 1},
      {1, 0, 2, 2, 3, 3, 1, 2, 2, 1},
      {1, 0, 0, 2, 0, 1, 1, 1, 1, 1},
      {2, 0, 0, 0, 3, 3, 1, 1, 1, 1},
      {1, 0, 0, 77, 77, 3, 1, 1, 1, 1},
      // Parts: four of 1 KiB are four blocks' worth at most.
      {3, 0, 0, 0, 0, 3, 256, 1, 1, 1},
      {3, 0, 0, 0, 0, 3, 257, 1, 1, 2},
      {6, 0, 0, 0, 0, 3, 4096, 1, 1, 4},
      {7, 0, 0, 0, 0, 3, 1 << 24, 3, 1, 1},
      {8, 0, 0, 0, 0, 3, 1, 1, 2, 1},
  };
  for (const auto &row : rows) {
    for (int rank = 0; rank < 2; ++rank) {
      ncclFfmDevComm comm = world.comm(rank);
      comm.path = row.path;
      comm.protocol = row.commProtocol;
      comm.algorithm = row.commAlgorithm;
      ncclFfmCall call = goodCall(row.function);
      call.protocol = row.protocol;
      call.algorithm = row.algorithm;
      call.count = row.count;
      call.recvbuff = at(uint64_t{1} << 40);
      const ncclFfmCall open = call;
      launches.clear();
      int code = ncclFfmChoose(&comm, &call);
      check(code == ncclSuccess && launches.empty(), "ncclFfmChoose: %d: %s", code, ncclFfmGetLastError());
      check(
          call.protocol == row.expectedProtocol && call.algorithm == row.expectedAlgorithm && call.blocks == row.blocks,
          "function %u, %llu elements, protocol %u, algorithm %u, of the communicator %u and %u, path %u: protocol %u, "
          "algorithm %u, %d blocks; expected %u, %u and %d",
          row.function, static_cast<unsigned long long>(row.count), row.protocol, row.algorithm, row.commProtocol,
          row.commAlgorithm, row.path, call.protocol, call.algorithm, call.blocks, row.expectedProtocol,
          row.expectedAlgorithm, row.blocks);
      code = ncclFfmLaunch(&comm, &open, at(64));
      check(code == ncclSuccess && launches.size() == 1 && memcmp(&launches[0].call, &call, sizeof call) == 0 &&
                memcmp(&launches[0].comm, &comm, sizeof comm) == 0 && launches[0].stream == at(64),
            "function %u: what is launched is not what was chosen", row.function);
    }
  }
  for (int blocks = 1; blocks <= kChannels; ++blocks) {
    ncclFfmCall call = goodCall(ncclFfmFunctionAllReduce);
    call.blocks = blocks;
    launches.clear();
    check(ncclFfmLaunch(&world.comm(0), &call, nullptr) == ncclSuccess && launches[0].call.blocks == blocks,
          "%d blocks: %s", blocks, ncclFfmGetLastError());
  }
  std::vector<void *> windows(kRanks);
  ncclFfmCall call = goodCall(ncclFfmFunctionAllReduce);
  call.send = call.recv = {windows.data(), 64, 4};
  check(ncclFfmChoose(&world.comm(0), &call) == ncclSuccess && call.protocol == ncclFfmProtocolSimple &&
            call.algorithm == ncclFfmAlgorithmTwoShot,
        "zero-copy: protocol %u, algorithm %u", call.protocol, call.algorithm);
  shim::fitting = 2;
  call = goodCall(ncclFfmFunctionAllReduce);
  call.count = 1 << 20;
  call.recvbuff = at(uint64_t{1} << 40);
  check(ncclFfmChoose(&world.comm(0), &call) == ncclSuccess && call.blocks == 2, "%d blocks, 2 fit", call.blocks);
  shim::fitting = std::numeric_limits<int>::max();
}

ncclFfmRmsNorm goodNorm() {
  return {2, 4, at(3 << 20), at(4 << 20), 1e-5f, 0};
}

ncclFfmOptimizer goodOptimizer() {
  return {at(3 << 20), at(4 << 20), at(5 << 20), nullptr, nullptr, 1, 0.1f, 0.9f, 0.99f, 1e-8f, 0.01f, 1};
}

void badFusedCallsAreRefusedWithATextAndLaunchNothing() {
  World world(kRanks, kChannels, 512, kMs);
  const ncclFfmDevComm *comm = &world.comm(1);
  constexpr uint32_t kAllReduce = ncclFfmFunctionAllReduce;
  const float nan = std::numeric_limits<float>::quiet_NaN();

  auto call = [&](const char *inText, auto change) {
    ncclFfmCall bad = goodCall(kAllReduce);
    change(bad);
    const ncclFfmRmsNorm norm = goodNorm();
    const ncclFfmOptimizer optimizer = goodOptimizer();
    expect("scale", ncclFfmFusedScaleAllReduceSqrt(comm, &bad, 2, 1, nullptr), kBad, inText);
    expect("norm", ncclFfmFusedRmsNorm(comm, &bad, &norm, nullptr), kBad, inText);
    expect("sgd", ncclFfmFusedSgd(comm, &bad, &optimizer, nullptr), kBad, inText);
    expect("adamw", ncclFfmFusedAdamW(comm, &bad, &optimizer, nullptr), kBad, inText);
  };
  call("datatype 2: float16 (6), float32 (7) and bfloat16 (9)", [](ncclFfmCall &c) { c.datatype = ncclInt32; });
  call("protocol 2", [](ncclFfmCall &c) { c.protocol = ncclFfmProtocolLL128; });
  call("algorithm 3", [](ncclFfmCall &c) { c.algorithm = ncclFfmAlgorithmRing; });
  call("sendbuff (nil)", [](ncclFfmCall &c) { c.sendbuff = nullptr; });
  call("recvbuff 0x200002", [](ncclFfmCall &c) { c.recvbuff = at((2 << 20) + 2); });
  call("overlap", [](ncclFfmCall &c) { c.recvbuff = at((1 << 20) + 4); });
  call("do not fit an address", [](ncclFfmCall &c) { c.count = uint64_t{1} << 62; });
  call("-1 blocks", [](ncclFfmCall &c) { c.blocks = -1; });
  call("5 blocks: 4 fit", [](ncclFfmCall &c) {
    c.blocks = 5;
    shim::fitting = 4;
  });
  shim::fitting = std::numeric_limits<int>::max();

  auto norm = [&](const char *inText, auto change) {
    ncclFfmCall c = goodCall(kAllReduce);
    ncclFfmRmsNorm bad = goodNorm();
    change(c, bad);
    expect("norm", ncclFfmFusedRmsNorm(comm, &c, &bad, nullptr), kBad, inText);
  };
  norm("hidden 0", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.hidden = 0; });
  norm("eps -0.1", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.eps = -0.1f; });
  norm("eps nan", [&](ncclFfmCall &, ncclFfmRmsNorm &n) { n.eps = nan; });
  norm("count 8 is not 3 tokens of 4", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.tokens = 3; });
  norm("count 8 is not 0 tokens of 4", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.tokens = 0; });
  norm("count 8 is not 4611686018427387906 tokens of 4",
       [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.tokens = (uint64_t{1} << 62) + 2; });
  norm("weight (nil)", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.weight = nullptr; });
  norm("out (nil)", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.out = nullptr; });
  norm("out 0x400002: it must not be null, and aligned to an element of 4 bytes",
       [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.out = at((4 << 20) + 2); });
  norm("sendbuff 0x200000 and recvbuff 0x200000", [](ncclFfmCall &c, ncclFfmRmsNorm &) { c.sendbuff = c.recvbuff; });
  norm("weight 0x3ffffc and out 0x400000", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.weight = at((4 << 20) - 4); });
  norm("weight 0x200000 and recvbuff", [](ncclFfmCall &c, ncclFfmRmsNorm &n) { n.weight = c.recvbuff; });
  norm("out 0x200000 and recvbuff", [](ncclFfmCall &c, ncclFfmRmsNorm &n) { n.out = c.recvbuff; });
  norm("out 0x100004 and sendbuff", [](ncclFfmCall &, ncclFfmRmsNorm &n) { n.out = at((1 << 20) + 4); });
  void *windows[kRanks] = {};
  norm("send and recv are the same place of a window", [&](ncclFfmCall &c, ncclFfmRmsNorm &) {
    c.send = c.recv = {windows, 1024, 64};
  });
  ncclFfmCall good = goodCall(kAllReduce);
  expect("no norm", ncclFfmFusedRmsNorm(comm, &good, nullptr, nullptr), kBad, "norm is null");
  expect("no call", ncclFfmFusedScaleAllReduceSqrt(comm, nullptr, 2, 1, nullptr), kBad, "call is null");

  auto both = [&](const char *inText, auto change) {
    ncclFfmOptimizer bad = goodOptimizer();
    change(bad);
    expect("sgd", ncclFfmFusedSgd(comm, &good, &bad, nullptr), kBad, inText);
    expect("adamw", ncclFfmFusedAdamW(comm, &good, &bad, nullptr), kBad, inText);
  };
  both("learningRate -1", [](ncclFfmOptimizer &o) { o.learningRate = -1; });
  both("learningRate nan", [&](ncclFfmOptimizer &o) { o.learningRate = nan; });
  both("weightDecay -1", [](ncclFfmOptimizer &o) { o.weightDecay = -1; });
  both("maxNorm -1", [](ncclFfmOptimizer &o) { o.maxNorm = -1; });
  both("maxNorm inf", [](ncclFfmOptimizer &o) { o.maxNorm = std::numeric_limits<float>::infinity(); });
  both(" 1: it must be in [0, 1)", [](ncclFfmOptimizer &o) { o.beta1 = 1; });
  both("weights (nil)", [](ncclFfmOptimizer &o) { o.weights = nullptr; });
  both("momentum 0x400002", [](ncclFfmOptimizer &o) { o.momentum = at((4 << 20) + 2); });
  both("weights 0x300000 and momentum 0x300000", [](ncclFfmOptimizer &o) { o.momentum = o.weights; });
  both("weights 0x200000 and recvbuff", [&](ncclFfmOptimizer &o) { o.weights = static_cast<float *>(good.recvbuff); });
  both("and weightCopy 0x300000 of 32 and 16 bytes overlap",
       [](ncclFfmOptimizer &o) { o.weightCopy = reinterpret_cast<uint16_t *>(o.weights); });
  auto adamW = [&](const char *inText, auto change) {
    ncclFfmOptimizer bad = goodOptimizer();
    change(bad);
    expect("adamw", ncclFfmFusedAdamW(comm, &good, &bad, nullptr), kBad, inText);
  };
  adamW("beta2 -0.5", [](ncclFfmOptimizer &o) { o.beta2 = -0.5f; });
  adamW("eps -1", [](ncclFfmOptimizer &o) { o.eps = -1; });
  adamW("step 0", [](ncclFfmOptimizer &o) { o.step = 0; });
  adamW("steps 0x2", [](ncclFfmOptimizer &o) { o.steps = reinterpret_cast<uint32_t *>(2); });
  adamW("variance (nil)", [](ncclFfmOptimizer &o) { o.variance = nullptr; });
  expect("no optimizer", ncclFfmFusedSgd(comm, &good, nullptr, nullptr), kBad, "optimizer is null");
  check(fusedLaunches.empty(), "a bad fused call launched something");
}

void fusedLaunchesAreWhatTheCallsSay() {
  World world(kRanks, kChannels, 512, kMs);
  const ncclFfmDevComm *comm = &world.comm(0);
  ncclFfmCall none = goodCall(ncclFfmFunctionAllReduce);
  none.count = 0;
  none.sendbuff = none.recvbuff = nullptr;
  const ncclFfmRmsNorm noNorm = {0, 4, nullptr, nullptr, 1, 0};
  ncclFfmOptimizer o = goodOptimizer();
  check(ncclFfmFusedScaleAllReduceSqrt(comm, &none, 2, 1, nullptr) == ncclSuccess &&
            ncclFfmFusedRmsNorm(comm, &none, &noNorm, nullptr) == ncclSuccess &&
            ncclFfmFusedSgd(comm, &none, &o, nullptr) == ncclSuccess &&
            ncclFfmFusedAdamW(comm, &none, &o, nullptr) == ncclSuccess && fusedLaunches.empty(),
        "nothing to do: %s", ncclFfmGetLastError());

  ncclFfmCall call = goodCall(ncclFfmFunctionSend);  // is not looked at
  call.count = 3000;
  call.op = ncclMax;
  check(ncclFfmFusedScaleAllReduceSqrt(comm, &call, 2, 1, at(128)) == ncclSuccess && fusedLaunches.size() == 1,
        "scale: %s", ncclFfmGetLastError());
  const shim::FusedLaunch &scale = fusedLaunches.back();
  check(scale.call.blocks == 3 && scale.call.function == ncclFfmFunctionAllReduce && scale.call.op == ncclSum &&
            scale.call.protocol == ncclFfmProtocolLL && scale.a == 2 && scale.b == 1 && scale.stream == at(128) &&
            scale.comm.rank == 0 && scale.function == ncclFfmFunctionFusedScaleAllReduceSqrt,
        "scale: %d blocks, function %u", scale.call.blocks, scale.function);

  // A block has whole tokens: there are no more blocks than tokens.
  const ncclFfmRmsNorm norm = {2, 1500, at(3 << 20), at(4 << 20), 1e-5f, 0};
  check(ncclFfmFusedRmsNorm(comm, &call, &norm, nullptr) == ncclSuccess && fusedLaunches.back().call.blocks == 2,
        "norm: %d blocks: %s", fusedLaunches.back().call.blocks, ncclFfmGetLastError());

  // Whatever must be equal on all ranks makes another hash; what need not be, does not.
  auto rootOf = [&](auto change) {
    ncclFfmOptimizer other = goodOptimizer();
    change(other);
    check(ncclFfmFusedAdamW(comm, &call, &other, nullptr) == ncclSuccess && fusedLaunches.back().call.op == ncclAvg,
          "adamw: %s", ncclFfmGetLastError());
    return fusedLaunches.back().call.root;
  };
  const int32_t root = rootOf([](ncclFfmOptimizer &) {});
  check(root == rootOf([](ncclFfmOptimizer &b) { b.weights = at(9 << 20); }), "the address of the weights is hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.learningRate = 0.2f; }), "learningRate is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.beta1 = 0.2f; }), "beta1 is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.beta2 = 0.2f; }), "beta2 is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.eps = 0.2f; }), "eps is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.weightDecay = 0.2f; }), "weightDecay is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.maxNorm = 0.2f; }), "maxNorm is not hashed");
  check(root != rootOf([](ncclFfmOptimizer &b) { b.step = 2; }), "step is not hashed");
  fusedLaunches.clear();
}

// All-reduces that were measured (benchmarks/results): of the ways that differ by more than a twentieth, the table has
// the fastest. By launches of 16 blocks, and by blocks of a running kernel that are calls of their own.
void tableHasWhatWasFastest() {
  constexpr uint64_t kKiB = 1 << 10, kMiB = 1 << 20;
  constexpr struct {
    int nRanks, nGroups;
    uint64_t bytes;
    uint32_t protocol, algorithm;
  } kRows[] = {
      {2, 16, 64 * kKiB, 1, 1},  {2, 16, 256 * kKiB, 1, 1}, {2, 16, 512 * kKiB, 3, 1}, {2, 16, kMiB, 3, 1},
      {2, 16, 64 * kMiB, 3, 2},  {2, 1, 16 * kKiB, 1, 1},   {2, 1, 64 * kKiB, 3, 1},   {4, 16, 64 * kKiB, 1, 1},
      {4, 16, 256 * kKiB, 1, 1}, {4, 16, 512 * kKiB, 3, 1}, {4, 16, kMiB, 3, 1},       {4, 16, 4 * kMiB, 3, 2},
      {4, 16, 64 * kMiB, 3, 2},  {4, 1, 16 * kKiB, 1, 1},   {4, 1, 64 * kKiB, 3, 1},   {4, 1, 256 * kKiB, 3, 2},
      {8, 16, 64 * kKiB, 1, 1},  {8, 16, 256 * kKiB, 1, 2}, {8, 16, 512 * kKiB, 1, 2}, {8, 16, kMiB, 1, 2},
      {8, 16, 4 * kMiB, 3, 2},   {8, 16, 64 * kMiB, 3, 2},  {8, 1, 4 * kKiB, 1, 1},    {8, 1, 16 * kKiB, 1, 1},
      {8, 1, 64 * kKiB, 1, 2},   {8, 1, 256 * kKiB, 3, 2},
  };
  for (const auto &row : kRows) {
    const Choice choice = choose(ncclFfmFunctionAllReduce, ncclFfmProtocolAuto, ncclFfmAlgorithmAuto, row.nRanks,
                                 row.bytes, row.nGroups, ncclFfmPathSameGpu, false);
    check(choice.protocol == row.protocol && choice.algorithm == row.algorithm,
          "%d ranks, %d groups, %llu bytes: protocol %u, algorithm %u; %u and %u were the fastest", row.nRanks,
          row.nGroups, static_cast<unsigned long long>(row.bytes), choice.protocol, choice.algorithm, row.protocol,
          row.algorithm);
  }
  const Choice overPcie = choose(ncclFfmFunctionAllReduce, 0, 0, 8, 512 * kKiB, 16, ncclFfmPathPcie, false);
  check(overPcie.protocol == ncclFfmProtocolSimple, "over PCIe: protocol %u", overPcie.protocol);
}

// A rank may take the short way for a small all-reduce (smallAllReduceBytes) while another asks the table.
void shortWayIsWhatTheTableSays() {
  for (int nRanks : {1, 2, 3, 4, 8, 63, 1000}) {
    for (uint32_t slotBytes : {512u, 16384u, 1u << 20}) {
      for (uint32_t path = 0; path <= ncclFfmPathSameGpu; ++path) {
        for (uint32_t protocol : {0, 1, 2, 3, 77}) {
          for (uint32_t algorithm : {0, 1, 2, 3, 77}) {
            ncclFfmDevComm comm = {};
            comm.nRanks = nRanks;
            comm.slotBytes = slotBytes;
            comm.path = path;
            comm.protocol = protocol;
            comm.algorithm = algorithm;
            const uint64_t most = smallAllReduceBytes(comm);
            check(most <= LL::payloadBytes(slotBytes), "%llu bytes do not fit a slot of %u",
                  static_cast<unsigned long long>(most), slotBytes);
            for (uint64_t bytes : {uint64_t{1}, most / 2, most}) {
              if (bytes > most || bytes == 0) continue;
              ncclFfmCall call = makeCall(ncclFfmFunctionAllReduce, nullptr, nullptr, bytes, ncclInt8, ncclSum, 0, 0);
              chooseFor(comm, call, 512, 1);
              check(call.protocol == ncclFfmProtocolLL && call.algorithm == ncclFfmAlgorithmOneShot,
                    "%d ranks, slots of %u, path %u, protocol %u, algorithm %u: %llu bytes go by %u and %u", nRanks,
                    slotBytes, path, protocol, algorithm, static_cast<unsigned long long>(bytes), call.protocol,
                    call.algorithm);
            }
          }
        }
      }
    }
  }
}

void nothingToDoLaunchesNothingButABarrier() {
  World world(kRanks, kChannels, 512, kMs);
  for (uint32_t function = ncclFfmFunctionAllReduce; function <= ncclFfmFunctionSendRecv; ++function) {
    launches.clear();
    ncclFfmCall call = goodCall(function);
    call.count = 0;
    call.sendbuff = call.recvbuff = nullptr;
    const int code = ncclFfmLaunch(&world.comm(1), &call, nullptr);
    check(code == ncclSuccess && launches.size() == (function == ncclFfmFunctionBarrier ? 1 : 0),
          "function %u of no elements: %d, %zu launches: %s", function, code, launches.size(), ncclFfmGetLastError());
  }
}

void failureOfALaunchIsAnUnhandledCudaErrorWithItsText() {
  World world(kRanks, kChannels, 512, kMs);
  float p[8];
  const ncclFfmCall call = goodCall(ncclFfmFunctionAllReduce);
  shim::nextFailure = "no such stream";
  expect("launch", ncclFfmLaunch(&world.comm(0), &call, nullptr), ncclUnhandledCudaError,
         "ncclFfmLaunch: no such stream");
  expect("fused", ncclFfmFusedScaleAllReduceSqrt(&world.comm(0), &call, 2, 1, nullptr), ncclUnhandledCudaError,
         "ncclFfmFusedScaleAllReduceSqrt: no such stream");
  ncclLsaWindow window = {p, sizeof p, nullptr};
  expect("pattern", ncclFfmLsaWritePattern(&window, 0, 8, 1, nullptr), ncclUnhandledCudaError,
         "ncclFfmLsaWritePattern: no such stream");
  expect("prime", ncclFfmPrime(nullptr), ncclUnhandledCudaError, "ncclFfmPrime: no such stream");
  shim::nextFailure.clear();
  std::thread([] { check(*ncclFfmGetLastError() == '\0', "the last error is that of another thread"); }).join();
}

void queriesAnswer() {
  int version = 0;
  check(ncclFfmGetAbiVersion(&version) == ncclSuccess && version == NCCLFFM_ABI_VERSION, "version %d", version);
  uint64_t bytes = 0;
  // Letters of 128 bytes; slots of three protocols, for collectives and for sends, of two halves.
  check(ncclFfmGetWindowBytes(3, 2, 1024, &bytes) == ncclSuccess && bytes == 2u * 3 * (128 + 2 * 3 * 2 * 1024),
        "%llu bytes", static_cast<unsigned long long>(bytes));
  check(ncclFfmGetWindowBytes(65536, 1024, 1 << 26, &bytes) == ncclSuccess &&
            bytes == (uint64_t{1} << 26) * (128 + 12 * (uint64_t{1} << 26)),
        "%llu bytes", static_cast<unsigned long long>(bytes));
}

void badQueuesAreRefusedWithAText() {
  World world(kRanks, kChannels, 512, kMs);
  ncclFfmStatus status[2] = {};
  uint32_t progress[2] = {};
  ncclFfmTaskControl control = {};
  ncclFfmTicket first[2] = {};
  float x[4] = {};
  uint32_t results[4] = {};
  ncclFfmTaskQueue good = {};
  good.magic = NCCLFFM_QUEUE_MAGIC;
  good.version = NCCLFFM_ABI_VERSION;
  good.nLanes = 2;
  good.depth = 8;
  good.blocksPerLane = 2;
  good.status = status;
  good.progress = progress;
  good.control = &control;
  uint64_t bytes = 0;
  check(ncclFfmTaskQueueBytes(2, 8, &bytes) == ncclSuccess && bytes == 128 + 2 * (640 + 8 * 128), "%llu bytes",
        static_cast<unsigned long long>(bytes));
  for (auto [lanes, depth] : {std::pair{0u, 8u}, {65u, 8u}, {1u, 0u}, {1u, 12u}, {1u, 1u << 21}}) {
    expect("bytes", ncclFfmTaskQueueBytes(lanes, depth, &bytes), kBad, "a power of two");
  }
  expect("bytes", ncclFfmTaskQueueBytes(1, 1, nullptr), kBad, "bytes is null");
  char *memory = reinterpret_cast<char *>(at(1 << 20));
  auto with = [&](const char *inText, auto change) {
    ncclFfmTaskQueue queue = good;
    change(queue);
    expect("init", ncclFfmTaskQueueInit(&queue, memory, 0, nullptr), kBad, inText);
    expect("scheduler", ncclFfmLaunchScheduler(&world.comm(0), &queue, 0, nullptr), kBad, inText);
    expect("end", ncclFfmTaskProducerEnd(&queue, nullptr), kBad, inText);
  };
  with("magic is 0x00000007", [](ncclFfmTaskQueue &q) { q.magic = 7; });
  with("version 3", [](ncclFfmTaskQueue &q) { q.version = 3; });
  with("0 lanes", [](ncclFfmTaskQueue &q) { q.nLanes = 0; });
  with("depth 9", [](ncclFfmTaskQueue &q) { q.depth = 9; });
  with("with 0 blocks", [](ncclFfmTaskQueue &q) { q.blocksPerLane = 0; });
  with("queue->status is null", [](ncclFfmTaskQueue &q) { q.status = nullptr; });
  with("queue->progress is null", [](ncclFfmTaskQueue &q) { q.progress = nullptr; });
  with("queue->control is null", [](ncclFfmTaskQueue &q) { q.control = nullptr; });
  expect("init", ncclFfmTaskQueueInit(&good, nullptr, 0, nullptr), kBad, "memory is");
  expect("init", ncclFfmTaskQueueInit(&good, memory + 64, 0, nullptr), kBad, "128-byte aligned");
  expect("init", ncclFfmTaskQueueInit(nullptr, memory, 0, nullptr), kBad, "queue is null");
  expect("scheduler", ncclFfmLaunchScheduler(&world.comm(0), &good, 0, nullptr), kBad, "ncclFfmTaskQueueInit fills");
  check(shim::tasks.empty(), "a bad queue launched something");

  check(ncclFfmTaskQueueInit(&good, memory, 7, nullptr) == ncclSuccess && shim::tasks.queues.size() == 1 &&
            shim::tasks.queues[0].firstSequence == 7 && reinterpret_cast<char *>(good.shared) == memory &&
            reinterpret_cast<char *>(good.lanes) == memory + 128 &&
            reinterpret_cast<char *>(good.tasks) == memory + 128 + 2 * 640,
        "the addresses of a queue");
  expect("mode", ncclFfmLaunchScheduler(&world.comm(0), &good, 3, nullptr), kBad, "mode 3");
  expect("debug", ncclFfmLaunchScheduler(&world.comm(0), &good, ncclFfmSchedulerDebug, nullptr), kBad, "depth 1");
  expect("comm", ncclFfmLaunchScheduler(nullptr, &good, 0, nullptr), kBad, "comm is null");
  ncclFfmTaskQueue wide = good;
  wide.blocksPerLane = 3;
  expect("channels", ncclFfmLaunchScheduler(&world.comm(0), &wide, 0, nullptr), kBad, "4 blocks fit, of 4 channels");
  shim::fittingSchedulers = 3;
  expect("blocks", ncclFfmLaunchScheduler(&world.comm(0), &good, 0, nullptr), kBad, "3 blocks fit, of 4 channels");
  shim::fittingSchedulers = 4;
  check(ncclFfmLaunchScheduler(&world.comm(1), &good, ncclFfmSchedulerDrain, nullptr) == ncclSuccess &&
            shim::tasks.schedulers.size() == 1 && shim::tasks.schedulers[0].blocks == 4 &&
            shim::tasks.schedulers[0].comm.status == status && shim::tasks.schedulers[0].comm.laneChannels == 2 &&
            shim::tasks.schedulers[0].comm.lanes == good.lanes,
        "the launch of a scheduler");

  ncclFfmTaskBatch batch = {};
  expect("batch", ncclFfmTaskAppendOnStream(&good, nullptr, nullptr), kBad, "1 to 16 tasks, not 0");
  expect("batch", ncclFfmTaskAppendOnStream(&good, &batch, nullptr), kBad, "1 to 16 tasks, not 0");
  batch.nTasks = 17;
  expect("batch", ncclFfmTaskAppendOnStream(&good, &batch, nullptr), kBad, "not 17");
  batch.nTasks = 2;
  batch.tasks[1].lane = 2;
  expect("batch", ncclFfmTaskAppendOnStream(&good, &batch, nullptr), kBad, "task 1: function 0");
  batch.tasks[1].lane = 1;
  check(ncclFfmTaskAppendOnStream(&good, &batch, nullptr) == ncclSuccess && shim::tasks.batches.size() == 1, "batch");

  ncclFfmTaskBuckets buckets = {x, 10, 3, 1, 0, 5, 2, first};
  auto badBuckets = [&](const char *inText, auto change) {
    ncclFfmTaskBuckets bad = buckets;
    change(bad);
    expect("buckets", ncclFfmTaskAppendBuckets(&good, &bad, nullptr), kBad, inText);
  };
  badBuckets("0 blocks", [](ncclFfmTaskBuckets &b) { b.blocks = 0; });
  badBuckets("first is null", [](ncclFfmTaskBuckets &b) { b.first = nullptr; });
  badBuckets("buckets of 0", [](ncclFfmTaskBuckets &b) { b.bucketCount = 0; });
  badBuckets("buff must not", [](ncclFfmTaskBuckets &b) { b.buff = nullptr; });
  badBuckets("at most 2^30 a lane", [](ncclFfmTaskBuckets &b) { b.count = uint64_t{1} << 40, b.bucketCount = 1; });
  badBuckets("at most 2^40", [](ncclFfmTaskBuckets &b) { b.count = (uint64_t{1} << 40) + 1; });
  expect("buckets", ncclFfmTaskAppendBuckets(&good, nullptr, nullptr), kBad, "buckets is null");
  check(shim::tasks.reserves.empty() && shim::tasks.ends.empty(), "a bad producer launched something");
  check(ncclFfmTaskAppendBuckets(&good, &buckets, nullptr) == ncclSuccess && shim::tasks.buckets.size() == 1 &&
            shim::tasks.reserves.size() == 1 && shim::tasks.reserves[0].nTasks == 4 && shim::tasks.ends.size() == 1,
        "the launch of buckets");
  ncclFfmTaskOverlap overlap = {x, x, x, 4, 5, 1, 1, 0, 5, 2, 3, 0, first, results};
  auto badOverlap = [&](const char *inText, auto change) {
    ncclFfmTaskOverlap bad = overlap;
    change(bad);
    expect("overlap", ncclFfmTaskIterate(&good, &bad, nullptr), kBad, inText);
  };
  badOverlap("0 blocks", [](ncclFfmTaskOverlap &o) { o.blocks = 0; });
  badOverlap("first is null", [](ncclFfmTaskOverlap &o) { o.first = nullptr; });
  badOverlap("must not be null", [](ncclFfmTaskOverlap &o) { o.work = nullptr; });
  badOverlap("at most 2^30 a lane", [](ncclFfmTaskOverlap &o) { o.iterations = 0xffffffffu, o.blocks = 2; });
  badOverlap("parts 4", [](ncclFfmTaskOverlap &o) { o.parts = 4; });
  expect("overlap", ncclFfmTaskIterate(&good, nullptr, nullptr), kBad, "overlap is null");
  check(ncclFfmTaskIterate(&good, &overlap, nullptr) == ncclSuccess && shim::tasks.overlaps.size() == 1 &&
            shim::tasks.reserves.size() == 2 && shim::tasks.reserves[1].nTasks == 10 && shim::tasks.ends.size() == 2,
        "the launch of iterations");
  shim::nextFailure = "no such stream";
  expect("buckets", ncclFfmTaskAppendBuckets(&good, &buckets, nullptr), ncclUnhandledCudaError, "no such stream");
  check(shim::tasks.ends.size() == 2, "a producer that is not counted has said its end");
  shim::nextFailure.clear();
}

// A row for every field, at its place: fields follow each other with no more between them than alignment asks for, and
// the last one ends where the struct does. So a field that is not in the table leaves a hole.
void layoutsAreComplete() {
  const ncclFfmLayout *layouts = nullptr;
  size_t count = 0;
  check(ncclFfmGetLayouts(&layouts, &count) == ncclSuccess, "no layouts");
  std::set<std::string> names, structs;
  std::map<std::string, std::map<uint64_t, uint64_t>> fields;
  std::map<std::string, uint64_t> sizes;
  for (size_t i = 0; i < count; ++i) {
    names.insert(std::string(layouts[i].structName) + "." + layouts[i].fieldName);
    if (*layouts[i].fieldName == '\0') {
      sizes[layouts[i].structName] = layouts[i].size;
    } else {
      fields[layouts[i].structName][layouts[i].offset] = layouts[i].size;
    }
  }
  check(names.size() == count, "a row is there twice");
  const std::map<std::string, uint64_t> expected = {{"ncclFfmStatus", sizeof(ncclFfmStatus)},
                                                    {"ncclFfmChannel", sizeof(ncclFfmChannel)},
                                                    {"ncclFfmPair", sizeof(ncclFfmPair)},
                                                    {"ncclFfmDevComm", sizeof(ncclFfmDevComm)},
                                                    {"ncclLsaBuffer", sizeof(ncclLsaBuffer)},
                                                    {"ncclFfmCall", sizeof(ncclFfmCall)},
                                                    {"ncclLsaWindow", sizeof(ncclLsaWindow)},
                                                    {"ncclLsa", sizeof(ncclLsa)},
                                                    {"ncclFfmLayout", sizeof(ncclFfmLayout)},
                                                    {"ncclFfmTaskRecord", sizeof(ncclFfmTaskRecord)},
                                                    {"ncclFfmRmsNorm", sizeof(ncclFfmRmsNorm)},
                                                    {"ncclFfmOptimizer", sizeof(ncclFfmOptimizer)},
                                                    {"ncclFfmTask", sizeof(ncclFfmTask)},
                                                    {"ncclFfmTaskSlot", sizeof(ncclFfmTaskSlot)},
                                                    {"ncclFfmTaskLane", sizeof(ncclFfmTaskLane)},
                                                    {"ncclFfmTaskShared", sizeof(ncclFfmTaskShared)},
                                                    {"ncclFfmTaskControl", sizeof(ncclFfmTaskControl)},
                                                    {"ncclFfmTaskQueue", sizeof(ncclFfmTaskQueue)},
                                                    {"ncclFfmTicket", sizeof(ncclFfmTicket)},
                                                    {"ncclFfmTaskBatch", sizeof(ncclFfmTaskBatch)},
                                                    {"ncclFfmTaskBuckets", sizeof(ncclFfmTaskBuckets)},
                                                    {"ncclFfmTaskOverlap", sizeof(ncclFfmTaskOverlap)},
                                                    {"struct of the backend", 4}};
  check(sizes == expected, "%zu structs, not %zu, or one of another size", sizes.size(), expected.size());
  for (const auto &[name, size] : sizes) {
    if (name == "struct of the backend") continue;
    uint64_t end = 0;
    for (const auto &[offset, length] : fields[name]) {
      check(offset >= end && offset - end < 4, "%s: nothing is known of bytes %llu to %llu", name.c_str(),
            static_cast<unsigned long long>(end), static_cast<unsigned long long>(offset));
      end = offset + length;
    }
    check(end <= size && size - end < 8, "%s: nothing is known from byte %llu on", name.c_str(),
          static_cast<unsigned long long>(end));
  }
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  badCommunicatorsAreRefusedWithAText();
  badCallsAreRefusedWithATextAndLaunchNothing();
  badFusedCallsAreRefusedWithATextAndLaunchNothing();
  fusedLaunchesAreWhatTheCallsSay();
  rangesOutsideALsaWindowAreRefusedAndLaunchNothing();
  choicesAreFilledInAndKept();
  tableHasWhatWasFastest();
  shortWayIsWhatTheTableSays();
  nothingToDoLaunchesNothingButABarrier();
  patternLaunchesHaveABlockFor32KiBUpTo256();
  failureOfALaunchIsAnUnhandledCudaErrorWithItsText();
  queriesAnswer();
  badQueuesAreRefusedWithAText();
  layoutsAreComplete();
  return report("shim_test");
}

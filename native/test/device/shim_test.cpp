// The C ABI in shim.cpp, over a backend that only notes what it is asked to launch.
#include "../../src/shim.h"

#include <limits>
#include <set>

#include "harness.h"

namespace ncclffm::shim {
namespace {
std::vector<Launch> launches;
std::vector<PatternLaunch> patternLaunches;
Failure nextFailure;
}  // namespace

Failure launch(const Launch &launch) {
  launches.push_back(launch);
  return nextFailure;
}

Failure launch(const PatternLaunch &launch) {
  patternLaunches.push_back(launch);
  return nextFailure;
}

Failure prime(void *) {
  return nextFailure;
}

int maxBlocks() {
  return std::numeric_limits<int>::max();
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

using shim::launches;
using shim::patternLaunches;

void expect(const char *what, int code, int expected, const char *inText) {
  check(code == expected && strstr(ncclFfmGetLastError(), inText) != nullptr,
        "%s: code %d, text \"%s\"; expected %d, \"%s\"", what, code, ncclFfmGetLastError(), expected, inText);
}

void badArgumentsAreRefusedWithATextAndLaunchNothing() {
  World world(2, 4, 8, kMs);
  const DevComm good = world.comm(1);
  float p[64] = {};
  char *bytes = reinterpret_cast<char *>(p);
  auto call = [&](const DevComm &comm, const void *send, void *recv, size_t count) {
    return ncclFfmAllReduce(&comm, send, recv, count, ncclFloat32, ncclSum, nullptr);
  };
  auto with = [&](auto change) {
    DevComm comm = good;
    change(comm);
    return call(comm, p, p, 8);
  };
  constexpr int kBad = ncclInvalidArgument;
  expect("comm", ncclFfmAllReduce(nullptr, p, p, 8, ncclFloat32, ncclSum, nullptr), kBad, "comm is null");
  expect("magic", with([](DevComm &c) { c.magic = 7; }), kBad, "magic is 0x00000007");
  expect("version", with([](DevComm &c) { c.version = 9; }), kBad, "version 9");
  expect("rank", with([](DevComm &c) { c.rank = 2; }), kBad, "rank 2 of 2");
  expect("rank", with([](DevComm &c) { c.rank = -1; }), kBad, "rank -1 of 2");
  expect("nRanks", with([](DevComm &c) { c.nRanks = 0; }), kBad, "0 ranks");
  expect("nChannels", with([](DevComm &c) { c.nChannels = 0; }), kBad, "0 channels");
  expect("linesPerSlot", with([](DevComm &c) { c.linesPerSlot = 0; }), kBad, "0 lines");
  expect("linesPerSlot", with([](DevComm &c) { c.linesPerSlot = 1 << 25; }), kBad, "33554432 lines");
  expect("channels", with([](DevComm &c) { c.channels = nullptr; }), kBad, "comm->channels is null");
  expect("peers", with([](DevComm &c) { c.peers = nullptr; }), kBad, "comm->peers is null");
  expect("status", with([](DevComm &c) { c.status = nullptr; }), kBad, "comm->status is null");
  expect("datatype", ncclFfmAllReduce(&good, p, p, 8, 6, ncclSum, nullptr), kBad, "datatype 6");
  expect("op", ncclFfmAllReduce(&good, p, p, 8, ncclFloat32, 2, nullptr), kBad, "op 2");
  expect("null", call(good, nullptr, p, 8), kBad, "non-null");
  expect("null", call(good, p, nullptr, 8), kBad, "non-null");
  expect("alignment", call(good, bytes + 1, p + 32, 8), kBad, "4-byte aligned");
  expect("overlap", call(good, p, p + 7, 8), kBad, "disjoint");
  expect("count", call(good, p, p, SIZE_MAX), kBad, "18446744073709551615 float32");
  expect("fused null", ncclFfmFusedScaleAllReduceSqrt(&good, nullptr, 8, 2, 1, nullptr), kBad,
         "ncclFfmFusedScaleAllReduceSqrt");
  expect("fused comm", ncclFfmFusedScaleAllReduceSqrt(nullptr, p, 8, 2, 1, nullptr), kBad, "comm is null");
  uint64_t n;
  expect("window", ncclFfmGetWindowBytes(0, 4, 8, &n), kBad, "0 ranks");
  expect("window", ncclFfmGetWindowBytes(2, 0, 8, &n), kBad, "0 channels");
  expect("window", ncclFfmGetWindowBytes(2, 4, 0, &n), kBad, "0 lines");
  expect("window", ncclFfmGetWindowBytes(2, 4, 8, nullptr), kBad, "bytes is null");
  expect("layouts", ncclFfmGetLayouts(nullptr, nullptr), kBad, "layouts is null");
  expect("version", ncclFfmGetAbiVersion(nullptr), kBad, "version is null");
  check(launches.empty(), "a bad argument launched something");
}

void rangesOutsideALsaWindowAreRefusedAndLaunchNothing() {
  char memory[64];
  uint64_t bad = 0;
  constexpr int kBad = ncclInvalidArgument;
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

void launchShapeDependsOnCountAndChannelsOnly() {
  World world(2, 4, 8, kMs);
  float *p = reinterpret_cast<float *>(uintptr_t{1} << 20);  // never followed
  struct {
    size_t count;
    int blocks;
  } cases[] = {{1, 1}, {1024, 1}, {1025, 2}, {3000, 3}, {4096, 4}, {1 << 24, 4}};
  for (const auto &c : cases) {
    for (int rank = 0; rank < 2; ++rank) {
      launches.clear();
      int code = ncclFfmAllReduce(&world.comm(rank), p, p + c.count, c.count, ncclFloat32, ncclSum, p);
      check(code == ncclSuccess && launches.size() == 1 && launches[0].blocks == c.blocks &&
                launches[0].count == c.count && launches[0].comm.rank == rank && launches[0].stream == p,
            "%zu elements: code %d, %d blocks, not %d", c.count, code, launches.empty() ? 0 : launches[0].blocks,
            c.blocks);
    }
  }
  launches.clear();
  check(ncclFfmAllReduce(&world.comm(0), nullptr, nullptr, 0, ncclFloat32, ncclSum, nullptr) == ncclSuccess &&
            launches.empty(),
        "nothing to do launches nothing");
}

void failureOfALaunchIsAnUnhandledCudaErrorWithItsText() {
  World world(2, 4, 8, kMs);
  float p[8];
  shim::nextFailure = "no such stream";
  expect("launch", ncclFfmAllReduce(&world.comm(0), p, p, 8, ncclFloat32, ncclSum, nullptr), ncclUnhandledCudaError,
         "ncclFfmAllReduce: no such stream");
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
  check(ncclFfmGetWindowBytes(3, 2, 5, &bytes) == ncclSuccess && bytes == 2u * 2 * 3 * 5 * 16, "%llu bytes",
        static_cast<unsigned long long>(bytes));
  const ncclFfmLayout *layouts = nullptr;
  size_t count = 0;
  check(ncclFfmGetLayouts(&layouts, &count) == ncclSuccess, "no layouts");
  std::set<std::string> names;
  uint64_t waitedNs = 0;
  for (size_t i = 0; i < count; ++i) {
    names.insert(std::string(layouts[i].structName) + "." + layouts[i].fieldName);
    if (strcmp(layouts[i].fieldName, "waitedNs") == 0) waitedNs = layouts[i].offset;
  }
  check(names.size() == count, "a row is there twice");
  check(waitedNs == offsetof(ncclFfmStatus, waitedNs), "waitedNs is at %llu",
        static_cast<unsigned long long>(waitedNs));
  for (const char *name : {"ncclFfmDevComm.", "ncclFfmStatus.ready", "ncclFfmChannel.state", "ncclLsa.y",
                           "ncclLsaWindow.handle", "struct of the backend."}) {
    check(names.count(name) == 1, "no row %s", name);
  }
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  badArgumentsAreRefusedWithATextAndLaunchNothing();
  rangesOutsideALsaWindowAreRefusedAndLaunchNothing();
  launchShapeDependsOnCountAndChannelsOnly();
  patternLaunchesHaveABlockFor32KiBUpTo256();
  failureOfALaunchIsAnUnhandledCudaErrorWithItsText();
  queriesAnswer();
  return report("shim_test");
}

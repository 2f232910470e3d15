// Every collective of the device library on a real GPU: functions x types x operations x protocols x algorithms through
// the shim, warps, blocks and grids as groups, zero-copy, sends; also captured in a graph and replayed. Values are
// small numbers whose results every type represents exactly, so every element is compared bit by bit.
//
//   device_calls_cuda_test [GPUS [reduced|RANKS]]     rank r runs on GPU r % GPUS; reduced: few sizes, for
//   compute-sanitizer; RANKS: only so many, of 1 to 8
#include <mutex>

#include "cuda_world.h"

namespace {

bool reduced = false;

struct Type {
  int datatype;
  size_t bytes;
  bool isSigned;
};
constexpr Type kTypes[] = {{ncclInt8, 1, true},    {ncclUint8, 1, false},  {ncclInt32, 4, true},
                           {ncclUint32, 4, false}, {ncclInt64, 8, true},   {ncclUint64, 8, false},
                           {ncclFloat16, 2, true}, {ncclFloat32, 4, true}, {ncclFloat64, 8, true},
                           {ncclBfloat16, 2, true}};

bool isFloat(int datatype) {
  return datatype >= ncclFloat16;
}

// Rounded to nearest, ties to even, as all numbers here are normal or zero.
uint64_t encode(int datatype, double x) {
  const float f = static_cast<float>(x);
  uint64_t word = 0;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  switch (datatype) {
    case ncclFloat64:
      memcpy(&word, &x, sizeof x);
      return word;
    case ncclFloat32:
      return bits;
    case ncclBfloat16:
      return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    case ncclFloat16:
      if (x == 0) return bits >> 16;
      return (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
    default:
      return static_cast<uint64_t>(static_cast<int64_t>(x));
  }
}

// What a rank has as element i of a call: -3 to 3, and powers of two where factors are multiplied.
int valueOf(uint64_t call, int rank, size_t i, int op, bool isSigned) {
  const uint64_t h = mix(mix(call * 1000 + rank) + i);
  if (op == ncclProd) return h % 3 == 0 ? 2 : h % 3 == 1 || !isSigned ? 1 : -1;
  return isSigned ? static_cast<int>(h % 7) - 3 : static_cast<int>(h % 7);
}

uint64_t reducedValue(uint64_t call, int nRanks, size_t i, int op, const Type &type) {
  int64_t result = 0;
  for (int r = 0; r < nRanks; ++r) {
    const int64_t x = valueOf(call, r, i, op, type.isSigned);
    result = r == 0           ? x
             : op == ncclProd ? result * x
             : op == ncclMax  ? std::max(result, x)
             : op == ncclMin  ? std::min(result, x)
                              : result + x;
  }
  if (op != ncclAvg) return encode(type.datatype, static_cast<double>(result));
  if (type.datatype == ncclFloat64) return encode(type.datatype, static_cast<double>(result) / nRanks);
  if (isFloat(type.datatype)) return encode(type.datatype, static_cast<float>(result) / static_cast<float>(nRanks));
  return static_cast<uint64_t>(result / nRanks);
}

bool moves(uint32_t function) {
  return !(function == ncclFfmFunctionAllReduce || function == ncclFfmFunctionReduceScatter ||
           function == ncclFfmFunctionReduce || function == ncclFfmFunctionHierarchicalAllReduce);
}

// The element that rank `rank` must have at i of its recvbuff; false if it is not to be written.
bool expectedValue(const ncclFfmCall &call, uint64_t number, int nRanks, int rank, size_t i, const Type &type,
                   uint64_t *value) {
  const size_t count = call.count, part = i / count, k = i % count;
  auto raw = [&](int from, size_t at) {
    return encode(type.datatype, valueOf(number, from, at, call.op, type.isSigned));
  };
  switch (call.function) {
    case ncclFfmFunctionAllReduce:
    case ncclFfmFunctionHierarchicalAllReduce:
      *value = reducedValue(number, nRanks, i, call.op, type);
      return part == 0;
    case ncclFfmFunctionReduceScatter:
      *value = reducedValue(number, nRanks, rank * count + i, call.op, type);
      return part == 0;
    case ncclFfmFunctionReduce:
      *value = reducedValue(number, nRanks, i, call.op, type);
      return part == 0 && rank == call.root;
    case ncclFfmFunctionBroadcast:
      *value = raw(call.root, i);
      return part == 0;
    case ncclFfmFunctionAllGather:
      *value = raw(static_cast<int>(part), k);
      return part < static_cast<size_t>(nRanks);
    case ncclFfmFunctionAllToAll:
      *value = raw(static_cast<int>(part), rank * count + k);
      return part < static_cast<size_t>(nRanks);
    case ncclFfmFunctionSendRecv:
      *value = raw((rank + nRanks - 1) % nRanks, i);
      return part == 0;
    case ncclFfmFunctionSend:  // rank 0 to the last
      *value = raw(0, i);
      return part == 0 && rank == nRanks - 1;
    default:
      return false;
  }
}

constexpr uint8_t kGuard = 0xa5;

// What is filled and compared of a call's buffers: as many parts as there are ranks, if they have so much room.
size_t elementsOf(const World &world, const ncclFfmCall &call, const Type &type) {
  return std::min(world.size() * call.count, world.maxCount() * sizeof(float) / type.bytes - 2 * 16);
}

// Fills the send buffers, runs `launch` on all ranks, compares every byte of the receive buffers.
template <class Launch>
void runAndCompare(World &world, const ncclFfmCall &call, const Type &type, uint64_t number, size_t offset,
                   const char *what, Launch launch) {
  const int n = world.size();
  const size_t elements = elementsOf(world, call, type), bytes = (elements + 2 * 16) * type.bytes;
  world.onEach([&](Rank &rank, int r) {
    memset(rank.hostSend, kGuard, bytes);
    char *send = reinterpret_cast<char *>(rank.hostSend) + offset * type.bytes;
    inParts(elements, [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        const uint64_t word = encode(type.datatype, valueOf(number, r, i, call.op, type.isSigned));
        memcpy(send + i * type.bytes, &word, type.bytes);
      }
    });
    CUDA(cudaMemcpyAsync(rank.send, rank.hostSend, bytes, cudaMemcpyHostToDevice, rank.stream));
    CUDA(cudaMemsetAsync(rank.recv, kGuard, bytes, rank.stream));
  });
  world.synchronize();
  launch();
  world.synchronize();
  world.onEach([&](Rank &rank, int) {
    CUDA(cudaMemcpyAsync(rank.hostRecv, rank.recv, bytes, cudaMemcpyDeviceToHost, rank.stream));
  });
  world.synchronize();
  const uint64_t guard = 0x0101010101010101u * kGuard;
  for (int r = 0; r < n; ++r) {
    const Rank &rank = world.ranks[r];
    check(rank.status->code == 0, "status code, peer, epoch", rank.status->code, rank.status->peer, rank.status->epoch);
    if (rank.status->code != 0) exit(1);
    std::mutex mutex;
    size_t wrong = 0, first = bytes;
    const char *recv = reinterpret_cast<const char *>(rank.hostRecv);
    inParts(bytes / type.bytes, [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        uint64_t got = 0, want = guard;
        memcpy(&got, recv + i * type.bytes, type.bytes);
        if (i >= offset && call.count > 0) {
          uint64_t value;
          if (expectedValue(call, number, n, r, i - offset, type, &value)) want = value;
        }
        if (memcmp(&got, &want, type.bytes) == 0) continue;
        // Of zeros, the sign is the order's; values are small integers, so only then do bits differ.
        const bool zeros =
            isFloat(type.datatype) && (got << (65 - 8 * type.bytes)) == 0 && (want << (65 - 8 * type.bytes)) == 0;
        if (zeros) continue;
        std::lock_guard<std::mutex> lock(mutex);
        ++wrong;
        first = std::min(first, i);
      }
    });
    if (wrong == 0) continue;
    if (++failures <= 20) {
      uint64_t got = 0, want = guard;
      memcpy(&got, recv + first * type.bytes, type.bytes);
      if (first >= offset) expectedValue(call, number, n, r, first - offset, type, &want);
      fprintf(stderr,
              "FAILED: %s: function %u, type %d, op %d, root %d, protocol %u, algorithm %u, %llu elements at %zu, call "
              "%llu, rank %d of %d: %zu wrong, the first is %zu: %llx, not %llx\n",
              what, call.function, type.datatype, call.op, call.root, call.protocol, call.algorithm,
              static_cast<unsigned long long>(call.count), offset, static_cast<unsigned long long>(number), r, n, wrong,
              first, static_cast<unsigned long long>(got), static_cast<unsigned long long>(want));
    }
  }
}

// The call as one rank makes it.
ncclFfmCall callOf(ncclFfmCall call, const World &world, int r, size_t offset, const Type &type, bool zeroCopy) {
  const int n = world.size();
  const Rank &rank = world.ranks[r];
  call.sendbuff = reinterpret_cast<const char *>(rank.send) + offset * type.bytes;
  call.recvbuff = reinterpret_cast<char *>(rank.recv) + offset * type.bytes;
  if (zeroCopy) {
    const size_t bytes = (elementsOf(world, call, type) + 2 * 16) * type.bytes;
    call.send = {rank.sends, bytes, offset * type.bytes};
    call.recv = {rank.recvs, bytes, offset * type.bytes};
  }
  if (call.function == ncclFfmFunctionSendRecv) {
    call.root = (r + 1) % n;
    call.source = (r + n - 1) % n;
  }
  if (call.function == ncclFfmFunctionSend) {
    call.root = n - 1;
    if (r == n - 1) call.function = ncclFfmFunctionRecv, call.source = 0;
  }
  return call;
}

void launch(World &world, const ncclFfmCall &call, size_t offset, const Type &type, bool zeroCopy) {
  world.onEach([&](Rank &rank, int r) {
    if (call.function == ncclFfmFunctionSend && r != 0 && r != world.size() - 1) return;
    const ncclFfmCall mine = callOf(call, world, r, offset, type, zeroCopy);
    SHIM(ncclFfmLaunch(&rank.comm, &mine, rank.stream));
  });
}

struct Way {
  uint32_t protocol, algorithm;
};

std::vector<Way> waysOf(bool zeroCopy) {
  std::vector<Way> ways;
  for (uint32_t protocol = 1; protocol <= 3; ++protocol) {
    if (zeroCopy && protocol != ncclFfmProtocolSimple) continue;
    for (uint32_t algorithm = 1; algorithm <= 3; ++algorithm) ways.push_back({protocol, algorithm});
  }
  return ways;
}

void allCallsAreRight(int nRanks) {
  World world(nRanks, 10000 * kMs, (8 << 20), [](const Rank &) {});
  uint64_t number = 0, calls = 0;
  for (uint32_t function = ncclFfmFunctionAllReduce; function <= ncclFfmFunctionSendRecv; ++function) {
    if (function == ncclFfmFunctionRecv || (nRanks == 1 && function >= ncclFfmFunctionSend)) continue;
    for (const Type &type : kTypes) {
      for (int op = ncclSum; op <= ncclAvg; ++op) {
        if (moves(function) && op != static_cast<int>(number % 2)) continue;
        for (bool zeroCopy : {false, true}) {
          for (const Way &way : waysOf(zeroCopy)) {
            ncclFfmCall call = {};
            call.function = function;
            call.datatype = type.datatype;
            call.op = op;
            call.protocol = way.protocol;
            call.algorithm = way.algorithm;
            call.root = static_cast<int>(mix(number) % nRanks);
            if (function == ncclFfmFunctionHierarchicalAllReduce) {
              call.root = 1 << mix(number) % 4;
              if (nRanks % call.root != 0) call.root = nRanks;
            }
            ++number;
            const size_t sizes[] = {1 + mix(number) % 40, 1 + mix(number) % (reduced ? 3000 : 20000)};
            for (size_t count : sizes) {
              call.count = count;
              const size_t offset = mix(number + count) % 16;
              const ncclFfmCall probe = callOf(call, world, 0, offset, type, zeroCopy);
              ncclFfmCall chosen = probe;
              if (ncclFfmChoose(&world.ranks[0].comm, &chosen) != ncclSuccess) continue;  // not for this function
              ++calls;
              runAndCompare(world, call, type, ++number, offset, zeroCopy ? "zero-copy" : "launch",
                            [&] { launch(world, call, offset, type, zeroCopy); });
            }
          }
        }
        if (reduced && op == ncclSum && type.bytes != 4) break;
      }
    }
  }
  printf("%d ranks: %llu calls of all kinds, %d failures so far\n", nRanks, static_cast<unsigned long long>(calls),
         failures);
}

// Up to 2^24 + 5 elements, by whatever the library chooses; every length of slot and share is passed several times.
void largeCallsAreRight(int nRanks) {
  constexpr size_t kLargest = (1 << 24) + 5;
  World world(nRanks, 20000 * kMs, kLargest + 64, [](const Rank &) {});
  const Type type = kTypes[7];
  for (size_t count : {(size_t{1} << 20) + 3, kLargest}) {
    for (uint32_t function : {ncclFfmFunctionAllReduce, ncclFfmFunctionReduceScatter, ncclFfmFunctionBroadcast}) {
      for (bool zeroCopy : {false, true}) {
        for (uint32_t protocol = zeroCopy ? 3 : 0; protocol <= 3; ++protocol) {
          ncclFfmCall call = {};
          call.function = function;
          call.datatype = type.datatype;
          call.protocol = protocol;
          call.count = function == ncclFfmFunctionReduceScatter ? count / nRanks : count;
          runAndCompare(world, call, type, count + protocol, 3, zeroCopy ? "large zero-copy" : "large",
                        [&] { launch(world, call, 3, type, zeroCopy); });
        }
      }
    }
  }
  ncclFfmCall call = {};
  call.function = ncclFfmFunctionAllGather;
  call.datatype = type.datatype;
  call.count = kLargest / nRanks;
  runAndCompare(world, call, type, 77, 1, "large gather", [&] { launch(world, call, 1, type, false); });
  printf("%d ranks: large calls, %d failures so far\n", nRanks, failures);
}

// As a user's kernel calls it: a warp, a block, a block that holds the channel, or the grid; of no function, nothing.
enum class Scope { kWarp, kBlock, kSession, kGrid };
constexpr int kScopeChannel = 2;

// The type is known where the call is compiled, as it is in most kernels.
template <class Who>
__device__ ncclResult_t callOfSomeType(Who &&who, const DevComm &comm, ncclFfmCall call) {
  switch (call.datatype) {
    case ncclInt8:
      call.datatype = ncclInt8;
      return who(comm, call);
    case ncclBfloat16:
      call.datatype = ncclBfloat16;
      return who(comm, call);
    default:
      call.datatype = ncclFloat32;
      return who(comm, call);
  }
}

template <class Coop>
struct ByGroup {
  Coop coop;
  __device__ ncclResult_t operator()(const DevComm &comm, const ncclFfmCall &call) const {
    return ncclDevCallLsa(coop, comm, call, kScopeChannel);
  }
};

struct BySession {
  __device__ ncclResult_t operator()(const DevComm &comm, const ncclFfmCall &call) const {
    ChannelSession<CoopBlock> session(CoopBlock(), comm, kScopeChannel, ncclFfmFunctionNone);
    return ncclDevCallLsa(session, call);
  }
};

template <Scope kScope>
__global__ void __launch_bounds__(512, 1)
    scopeKernel(const __grid_constant__ DevComm comm, const __grid_constant__ ncclFfmCall call, ncclResult_t *result) {
  if (call.function == ncclFfmFunctionNone) return;
  ncclResult_t r = ncclSuccess;
  if constexpr (kScope == Scope::kWarp) {
    if (threadIdx.x >= 32 || blockIdx.x != 0) return;
    r = callOfSomeType(ByGroup<CoopWarp>{}, comm, call);
  } else if constexpr (kScope == Scope::kGrid) {
    r = callOfSomeType(ByGroup<CoopGrid>{thisGrid()}, comm, call);
  } else {
    if (blockIdx.x != 0) return;
    if constexpr (kScope == Scope::kBlock) {
      r = callOfSomeType(ByGroup<CoopBlock>{}, comm, call);
    } else {
      r = callOfSomeType(BySession(), comm, call);
    }
  }
  if (threadIdx.x == 0) result[blockIdx.x] = r;
}

template <Scope kScope>
void scopesAreRight(int nRanks, const char *what) {
  World world(nRanks, 10000 * kMs, 1 << 20, [](const Rank &rank) {
    scopeKernel<kScope><<<1, 32, 0, rank.stream>>>(rank.comm, ncclFfmCall{}, nullptr);
  });
  const int threads[] = {32, 64, 96, 256, 512};
  uint64_t number = 0;
  for (uint32_t function = ncclFfmFunctionAllReduce; function <= ncclFfmFunctionSendRecv; ++function) {
    if (function == ncclFfmFunctionRecv || (nRanks == 1 && function >= ncclFfmFunctionSend)) continue;
    if (kScope == Scope::kSession && function >= ncclFfmFunctionSend) continue;  // channels are for collectives
    for (int t : {0, 7, 9}) {
      const Type &type = kTypes[t];
      for (bool zeroCopy : {false, true}) {
        for (const Way &way : waysOf(zeroCopy)) {
          ncclFfmCall call = {};
          call.function = function;
          call.datatype = type.datatype;
          call.protocol = way.protocol;
          call.algorithm = way.algorithm;
          ++number;
          call.op = moves(function) ? static_cast<int>(ncclSum) : static_cast<int>(mix(number) % 5);
          call.root = function == ncclFfmFunctionHierarchicalAllReduce ? (number % 2 == 0 ? 1 : nRanks)
                                                                       : static_cast<int>(mix(number) % nRanks);
          call.count = 1 + mix(number + 1) % (reduced ? 3000 : 30000);
          const size_t offset = mix(number + 2) % 16;
          ncclFfmCall chosen = callOf(call, world, 0, offset, type, zeroCopy);
          if (ncclFfmChoose(&world.ranks[0].comm, &chosen) != ncclSuccess) continue;  // not for this function
          const int blocks = kScope == Scope::kGrid ? static_cast<int>(1 + number % 6) : 1;
          runAndCompare(world, call, type, number, offset, what, [&] {
            world.onEach([&](Rank &rank, int r) {
              for (int b = 0; b < blocks; ++b) rank.results[b] = ncclSuccess;
              if (function == ncclFfmFunctionSend && r != 0 && r != nRanks - 1) return;
              scopeKernel<kScope><<<blocks, threads[number % 5], 0, rank.stream>>>(
                  rank.comm, callOf(call, world, r, offset, type, zeroCopy), rank.results);
            });
          });
          for (const Rank &rank : world.ranks) {
            for (int b = 0; b < blocks; ++b) check(rank.results[b] == ncclSuccess, what, rank.results[b], b, function);
          }
        }
      }
    }
  }
}

// 10,000 calls back to back on each rank's stream, each with a slice of its own of the data and of the results; then
// 100 calls captured in a graph, which is replayed 100 times with new data each time.
void manyCallsAndReplaysAreRight(int nRanks) {
  constexpr size_t kCount = 101;
  const int kCalls = reduced ? 100 : 10000, kInGraph = reduced ? 20 : 100, kReplays = reduced ? 5 : 100;
  World world(nRanks, 20000 * kMs, nRanks * kCount * kCalls + 64, [](const Rank &) {});
  const Type type = kTypes[7];
  ncclFfmCall all = {};
  all.function = ncclFfmFunctionAllReduce;
  all.datatype = type.datatype;
  auto enqueue = [&](Rank &rank, int i) {
    ncclFfmCall slice = all;
    slice.count = kCount;
    slice.protocol = 1 + i % 3;
    slice.sendbuff = rank.send + i * kCount;
    slice.recvbuff = rank.recv + i * kCount;
    SHIM(ncclFfmLaunch(&rank.comm, &slice, rank.stream));
  };
  all.count = kCount * kCalls;
  runAndCompare(world, all, type, 5, 0, "many calls", [&] {
    for (int i = 0; i < kCalls; ++i) world.onEach([&](Rank &rank, int) { enqueue(rank, i); });
  });
  std::vector<cudaGraphExec_t> graphs(nRanks);
  world.onEach([&](Rank &rank, int r) {
    cudaGraph_t graph;
    CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kInGraph; ++i) enqueue(rank, i);
    CUDA(cudaStreamEndCapture(rank.stream, &graph));
    CUDA(cudaGraphInstantiate(&graphs[r], graph, 0));
    CUDA(cudaGraphDestroy(graph));
  });
  all.count = kCount * kInGraph;
  for (int replay = 0; replay < kReplays; ++replay) {
    runAndCompare(world, all, type, 1000 + replay, 0, "replay",
                  [&] { world.onEach([&](Rank &rank, int r) { CUDA(cudaGraphLaunch(graphs[r], rank.stream)); }); });
  }
  for (cudaGraphExec_t graph : graphs) CUDA(cudaGraphExecDestroy(graph));
  printf("%d ranks: %d calls back to back, %d replays of %d calls; %d failures so far\n", nRanks, kCalls, kReplays,
         kInGraph, failures);
}

}  // namespace

int main(int argc, char **argv) {
  reduced = argc > 2 && strcmp(argv[2], "reduced") == 0;
  const int only = argc > 2 ? atoi(argv[2]) : 0;  // of "reduced": 0
  begin(argc, argv);
  for (int nRanks = 1; nRanks <= 8; ++nRanks) {
    if (only != 0 && nRanks != only) continue;
    if (reduced && nRanks != 2 && nRanks != 4) continue;
    allCallsAreRight(nRanks);
    scopesAreRight<Scope::kWarp>(nRanks, "warp");
    scopesAreRight<Scope::kBlock>(nRanks, "block");
    scopesAreRight<Scope::kSession>(nRanks, "session");
    scopesAreRight<Scope::kGrid>(nRanks, "grid");
    printf("%d ranks: warps, blocks, sessions, grids, %d failures so far\n", nRanks, failures);
    manyCallsAndReplaysAreRight(nRanks);
    if (!reduced) largeCallsAreRight(nRanks);
  }
  printf("device_calls_cuda_test: %s, %d failures\n", failures == 0 ? "PASS" : "FAIL", failures);
  return failures == 0 ? 0 : 1;
}

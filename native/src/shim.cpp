// The C ABI of the shim, the same for both backends; see shim.h.
#include "shim.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <limits>
#include <vector>

#include "../include/ncclffm/collectives.h"
#include "../include/ncclffm/fused.h"
#include "../include/ncclffm/lsa.h"
#include "../include/ncclffm/scheduler.h"

namespace ncclffm::shim {
namespace {

// A thread of a block takes one word up to this many bytes; more blocks than that would only add latency.
constexpr uint64_t kBytesPerBlock = 4096;

// Four vectors for each thread of a block, and never more blocks than keep a link busy.
constexpr uint64_t kPatternBytesPerBlock = 32 << 10;
constexpr int kMostPatternBlocks = 256;

// Bounds what ncclFfmGetWindowBytes multiplies: far beyond any machine, far below 64 bits.
constexpr int kMaxRanks = 1 << 16;
constexpr int kMaxChannels = 1 << 10;

// Of a producer: more than any device runs at a time.
constexpr int kMaxProducerBlocks = 1 << 10;

thread_local std::string lastError;

__attribute__((format(printf, 2, 3))) int failed(ncclResult_t code, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  lastError = text;
  return code;
}

int launched(const char *operation, const Failure &failure) {
  if (failure.empty()) return ncclSuccess;
  return failed(ncclUnhandledCudaError, "%s: %s", operation, failure.c_str());
}

bool isShape(int nChannels, unsigned int slotBytes) {
  return nChannels >= 1 && nChannels <= kMaxChannels && slotBytes >= NCCLFFM_SLOT_UNIT &&
         slotBytes <= NCCLFFM_MAX_SLOT_BYTES && slotBytes % NCCLFFM_SLOT_UNIT == 0;
}

int checkComm(const char *operation, const ncclFfmDevComm *comm) {
  if (comm == nullptr) return failed(ncclInvalidArgument, "%s: comm is null", operation);
  if (comm->magic != NCCLFFM_DEVCOMM_MAGIC) {
    return failed(ncclInvalidArgument, "%s: comm is not an ncclFfmDevComm: magic is 0x%08x, not 0x%08x", operation,
                  comm->magic, NCCLFFM_DEVCOMM_MAGIC);
  }
  if (comm->version != NCCLFFM_ABI_VERSION) {
    return failed(ncclInvalidArgument,
                  "%s: comm has version %u, this shim has %u; use the jar and the shim of one release", operation,
                  comm->version, static_cast<unsigned>(NCCLFFM_ABI_VERSION));
  }
  if (comm->nRanks < 1 || comm->nRanks > kMaxRanks || comm->rank < 0 || comm->rank >= comm->nRanks) {
    return failed(ncclInvalidArgument, "%s: comm has rank %d of %d ranks; a rank is in [0, nRanks), nRanks in [1, %d]",
                  operation, comm->rank, comm->nRanks, kMaxRanks);
  }
  if (!isShape(comm->nChannels, comm->slotBytes)) {
    return failed(
        ncclInvalidArgument,
        "%s: comm has %d channels with slots of %u bytes; there are 1 to %d channels, and a slot is a multiple "
        "of %u bytes up to %u",
        operation, comm->nChannels, comm->slotBytes, kMaxChannels, NCCLFFM_SLOT_UNIT, NCCLFFM_MAX_SLOT_BYTES);
  }
  if (comm->channels == nullptr || comm->pairs == nullptr || comm->peers == nullptr || comm->status == nullptr) {
    return failed(ncclInvalidArgument, "%s: comm->%s is null", operation,
                  comm->channels == nullptr ? "channels"
                  : comm->pairs == nullptr  ? "pairs"
                  : comm->peers == nullptr  ? "peers"
                                            : "status");
  }
  if (comm->path > ncclFfmPathSameGpu || comm->ranksPerDevice < 1 || comm->ranksPerDevice > comm->nRanks) {
    return failed(ncclInvalidArgument, "%s: comm has path %u and %d ranks per device; paths are 0 to %d, ranks 1 to %d",
                  operation, comm->path, comm->ranksPerDevice, ncclFfmPathSameGpu, comm->nRanks);
  }
  return ncclSuccess;
}

const char *functionName(uint32_t function) {
  constexpr const char *kNames[] = {
      "no function", "AllReduce", "ReduceScatter",         "AllGather", "Broadcast", "Reduce",
      "AllToAll",    "Barrier",   "HierarchicalAllReduce", "Send",      "Recv",      "SendRecv"};
  return function < std::size(kNames) ? kNames[function] : "an unknown function";
}

int refused(const char *operation, const ncclFfmDevComm &comm, const ncclFfmCall &call, Problem problem) {
  const char *function = functionName(call.function);
  switch (problem) {
    case Problem::kNone:
      return ncclSuccess;
    case Problem::kFunction:
      return failed(ncclInvalidArgument, "%s: function %u is no collective", operation, call.function);
    case Problem::kType:
      return failed(ncclInvalidArgument,
                    "%s: %s: datatype %d: in a kernel int8 to bfloat16 (0 to %d) are supported, not float8", operation,
                    function, call.datatype, ncclBfloat16);
    case Problem::kOp:
      return failed(ncclInvalidArgument,
                    "%s: %s: op %d: in a kernel sum, prod, max, min and avg (0 to %d) are supported", operation,
                    function, call.op, ncclAvg);
    case Problem::kRoot:
      return failed(ncclInvalidArgument, "%s: %s: %s %d: there are %d ranks%s", operation, function,
                    call.function == ncclFfmFunctionHierarchicalAllReduce ? "groups of" : "root", call.root,
                    comm.nRanks,
                    call.function == ncclFfmFunctionHierarchicalAllReduce ? ", which the group must divide" : "");
    case Problem::kPeer:
      return failed(ncclInvalidArgument, "%s: %s: to %d, from %d: a peer is another one of the %d ranks than rank %d",
                    operation, function, call.root, call.source, comm.nRanks, comm.rank);
    case Problem::kProtocol:
      return failed(ncclInvalidArgument,
                    "%s: %s: protocol %u: LL (1), LL128 (2, on the same GPU and NVLink only) and Simple (3) are known; "
                    "the path is %u",
                    operation, function, call.protocol, comm.path);
    case Problem::kAlgorithm:
      return failed(ncclInvalidArgument, "%s: %s%s does not have algorithm %u", operation,
                    isZeroCopy(call) ? "zero-copy " : "", function, call.algorithm);
    case Problem::kSize:
      return failed(ncclInvalidArgument, "%s: %s: the bytes of %" PRIu64 " elements do not fit an address", operation,
                    function, call.count);
    case Problem::kBuffer:
      return failed(ncclInvalidArgument,
                    "%s: %s: sendbuff %p, recvbuff %p: they must not be null, and aligned to an element of %u bytes",
                    operation, function, call.sendbuff, call.recvbuff, elementBytesOf(call.datatype));
    case Problem::kWindow:
      return failed(ncclInvalidArgument,
                    "%s: %s: send at %" PRIu64 " of %" PRIu64 " bytes, recv at %" PRIu64 " of %" PRIu64
                    ": both must be in windows, with all of their elements",
                    operation, function, call.send.offset, call.send.bytes, call.recv.offset, call.recv.bytes);
    case Problem::kOverlap:
      return failed(ncclInvalidArgument,
                    "%s: %s: sendbuff %p and recvbuff %p of %" PRIu64
                    " elements a part overlap, and not as this function's in-place form does",
                    operation, function, call.sendbuff, call.recvbuff, call.count);
  }
  return ncclSuccess;
}

// Fills in what the call leaves open, then looks at all of it. A fused kernel needs no more than mostWanted blocks.
int chooseAndCheck(const char *operation, const ncclFfmDevComm *comm, ncclFfmCall *call, bool isFused = false,
                   uint64_t mostWanted = kMaxChannels) {
  int code = checkComm(operation, comm);
  if (code != ncclSuccess) return code;
  if (call == nullptr) return failed(ncclInvalidArgument, "%s: call is null", operation);
  int most = 0;
  const Failure failure = shim::maxBlocks(comm->ranksPerDevice, &most);
  if (!failure.empty()) return launched(operation, failure);
  most = std::min(most, comm->nChannels);
  int blocks = call->blocks;
  if (blocks == 0) {
    const PartCounts parts = partCounts(*comm, *call);
    const uint64_t bytes = call->count * elementBytesOf(call->datatype) * std::max(parts.send, parts.recv);
    const uint64_t wanted =
        call->function == ncclFfmFunctionBarrier ? 1 : bytes / kBytesPerBlock + (bytes % kBytesPerBlock != 0);
    blocks = static_cast<int>(std::min({std::max<uint64_t>(wanted, 1), static_cast<uint64_t>(most), mostWanted}));
  }
  if (isFused) {
    chooseFused(*comm, *call, std::max(blocks, 1));
    code = refused(operation, *comm, *call, problemOfFused(*comm, *call, shim::blockThreads()));
  } else {
    chooseFor(*comm, *call, shim::blockThreads(), std::max(blocks, 1));
    code = refused(operation, *comm, *call, problemOf(*comm, *call, shim::blockThreads()));
  }
  if (code != ncclSuccess) return code;
  if (blocks < 1 || blocks > most) {
    return failed(ncclInvalidArgument,
                  "%s: %d blocks: %d fit, of %d channels, side by side with those of %d ranks on the device", operation,
                  blocks, most, comm->nChannels, comm->ranksPerDevice);
  }
  call->blocks = blocks;
  return ncclSuccess;
}

// Something in memory that a fused kernel reads or writes.
struct Named {
  const char *name;
  const void *address;
  uint64_t bytes;
  uint32_t elementBytes;
};

bool overlap(const Named &a, const Named &b) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(a.address), to = reinterpret_cast<uintptr_t>(b.address);
  return a.bytes != 0 && b.bytes != 0 && from < to + b.bytes && to < from + a.bytes;
}

int checkNamed(const char *operation, const Named &buffer) {
  if (buffer.bytes == 0 ||
      (buffer.address != nullptr && reinterpret_cast<uintptr_t>(buffer.address) % buffer.elementBytes == 0)) {
    return ncclSuccess;
  }
  return failed(ncclInvalidArgument, "%s: %s %p: it must not be null, and aligned to an element of %u bytes", operation,
                buffer.name, buffer.address, buffer.elementBytes);
}

int checkApart(const char *operation, const Named &a, const Named &b) {
  if (!overlap(a, b)) return ncclSuccess;
  return failed(ncclInvalidArgument, "%s: %s %p and %s %p of %" PRIu64 " and %" PRIu64 " bytes overlap", operation,
                a.name, a.address, b.name, b.address, a.bytes, b.bytes);
}

// The buffers of a call, as far as this rank's addresses are known: windows are named by offsets.
Named sendOf(const ncclFfmCall &call) {
  const uint32_t elementBytes = elementBytesOf(call.datatype);
  return {"sendbuff", call.sendbuff, isZeroCopy(call) ? 0 : call.count * elementBytes, elementBytes};
}

Named recvOf(const ncclFfmCall &call) {
  const uint32_t elementBytes = elementBytesOf(call.datatype);
  return {"recvbuff", call.recvbuff, isZeroCopy(call) ? 0 : call.count * elementBytes, elementBytes};
}

// So that ranks whose numbers differ are told so: the hash of a call covers its root, which an all-reduce has not.
class RootOf {
 public:
  explicit RootOf(ncclFfmFunction function) : hash_(function) {}
  RootOf &with(uint64_t value) {
    hash_ = (hash_ ^ value) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  RootOf &with(float value) { return with(uint64_t{bitCast<uint32_t>(value)}); }
  int32_t root() const { return static_cast<int32_t>(hash_); }

 private:
  uint64_t hash_;
};

// Of all fused kernels: the call as the all-reduce that it is.
int checkFused(const char *operation, const ncclFfmDevComm *comm, const ncclFfmCall *call, int op, int32_t root,
               uint64_t mostBlocks, ncclFfmCall &checked) {
  if (call == nullptr) return failed(ncclInvalidArgument, "%s: call is null", operation);
  checked = *call;
  checked.function = ncclFfmFunctionAllReduce;
  checked.op = op;
  checked.root = root;
  if (checked.datatype != ncclFloat32 && checked.datatype != ncclFloat16 && checked.datatype != ncclBfloat16) {
    return failed(ncclInvalidArgument, "%s: datatype %d: float16 (%d), float32 (%d) and bfloat16 (%d) are supported",
                  operation, checked.datatype, ncclFloat16, ncclFloat32, ncclBfloat16);
  }
  return chooseAndCheck(operation, comm, &checked, true, mostBlocks);
}

int launchFused(const char *operation, const ncclFfmDevComm *comm, FusedLaunch &fused) {
  if (fused.call.count == 0) return ncclSuccess;
  fused.comm = *comm;
  return launched(operation, shim::launch(fused));
}

// In [from, to), which no NaN is.
bool isIn(float x, float from, float to) {
  return x >= from && x < to;
}

int checkOptimizer(const char *operation, const ncclFfmOptimizer *o, bool isAdamW) {
  if (o == nullptr) return failed(ncclInvalidArgument, "%s: optimizer is null", operation);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!isIn(o->learningRate, 0, kInfinity) || !isIn(o->weightDecay, 0, kInfinity) || !isIn(o->maxNorm, 0, kInfinity)) {
    return failed(ncclInvalidArgument,
                  "%s: learningRate %g, weightDecay %g, maxNorm %g: they must be finite and not negative", operation,
                  o->learningRate, o->weightDecay, o->maxNorm);
  }
  if (!isIn(o->beta1, 0, 1)) {
    return failed(ncclInvalidArgument, "%s: %s %g: it must be in [0, 1)", operation, isAdamW ? "beta1" : "momentum",
                  o->beta1);
  }
  if (!isAdamW) return ncclSuccess;
  if (!isIn(o->beta2, 0, 1))
    return failed(ncclInvalidArgument, "%s: beta2 %g: it must be in [0, 1)", operation, o->beta2);
  if (!isIn(o->eps, 0, kInfinity)) {
    return failed(ncclInvalidArgument, "%s: eps %g: it must be finite and not negative", operation, o->eps);
  }
  if (o->steps == nullptr && o->step == 0) {
    return failed(ncclInvalidArgument, "%s: step 0: steps are counted from 1 on, or in device memory (steps)",
                  operation);
  }
  return checkNamed(operation, {"steps", o->steps, o->steps == nullptr ? 0u : 4u, 4});
}

int updateFused(const char *operation, ncclFfmFunction function, const ncclFfmDevComm *comm, const ncclFfmCall *call,
                const ncclFfmOptimizer *o, void *stream) {
  const bool isAdamW = function == ncclFfmFunctionFusedAdamW;
  FusedLaunch fused = {{}, {}, function, 0, 0, {}, {}, stream};
  int code = checkOptimizer(operation, o, isAdamW);
  if (code != ncclSuccess) return code;
  RootOf root(function);
  root.with(o->learningRate).with(o->beta1).with(o->weightDecay).with(o->maxNorm);
  // What a counter in memory says is not known here.
  if (isAdamW) root.with(o->beta2).with(o->eps).with(uint64_t{o->steps == nullptr ? o->step : 0});
  code = checkFused(operation, comm, call, ncclAvg, root.root(), kMaxChannels, fused.call);
  if (code != ncclSuccess || call->count == 0) return code;
  const uint64_t bytes = call->count * sizeof(float);
  const Named buffers[] = {{"weights", o->weights, bytes, sizeof(float)},
                           {"momentum", o->momentum, bytes, sizeof(float)},
                           {"variance", o->variance, isAdamW ? bytes : 0, sizeof(float)},
                           {"weightCopy", o->weightCopy, o->weightCopy == nullptr ? 0 : bytes / 2, sizeof(uint16_t)},
                           sendOf(fused.call),
                           recvOf(fused.call)};
  for (size_t i = 0; i < std::size(buffers) - 2 && code == ncclSuccess; ++i) {
    code = checkNamed(operation, buffers[i]);
    for (size_t k = i + 1; k < std::size(buffers) && code == ncclSuccess; ++k) {
      code = checkApart(operation, buffers[i], buffers[k]);
    }
  }
  if (code != ncclSuccess) return code;
  fused.optimizer = *o;
  return launchFused(operation, comm, fused);
}

int checkAndLaunchPattern(const char *operation, PatternLaunch launch, const ncclLsaWindow *window) {
  if (window == nullptr) return failed(ncclInvalidArgument, "%s: window is null", operation);
  if (!isLsaWindow(*window)) {
    return failed(ncclInvalidArgument,
                  "%s: window has base %p and %" PRIu64
                  " bytes: it must have an address and end within the address space",
                  operation, window->base, window->bytes);
  }
  if (lsaAddress(*window, launch.offset, launch.bytes) == nullptr) {
    return failed(ncclInvalidArgument,
                  "%s: %" PRIu64 " bytes at offset %" PRIu64 " are not all in the window of %" PRIu64 " bytes",
                  operation, launch.bytes, launch.offset, window->bytes);
  }
  if (launch.bytes == 0) return ncclSuccess;
  launch.window = *window;
  uint64_t blocks = launch.bytes / kPatternBytesPerBlock + (launch.bytes % kPatternBytesPerBlock != 0);
  int fit = 0;
  const Failure failure = shim::maxBlocks(1, &fit);
  if (!failure.empty()) return launched(operation, failure);
  uint64_t most = static_cast<uint64_t>(std::min(kMostPatternBlocks, fit));
  launch.blocks = static_cast<int>(std::min(blocks, most));
  return launched(operation, shim::launch(launch));
}

bool isQueueShape(unsigned int nLanes, unsigned int depth) {
  return nLanes >= 1 && nLanes <= NCCLFFM_MAX_LANES && depth >= 1 && depth <= NCCLFFM_MAX_DEPTH &&
         (depth & (depth - 1)) == 0;
}

uint64_t queueBytes(uint64_t nLanes, uint64_t depth) {
  return sizeof(ncclFfmTaskShared) + nLanes * (sizeof(ncclFfmTaskLane) + depth * sizeof(ncclFfmTaskSlot));
}

// What the caller fills in of a queue.
int checkQueueFields(const char *operation, const ncclFfmTaskQueue *queue) {
  if (queue == nullptr) return failed(ncclInvalidArgument, "%s: queue is null", operation);
  if (queue->magic != NCCLFFM_QUEUE_MAGIC) {
    return failed(ncclInvalidArgument, "%s: queue is not an ncclFfmTaskQueue: magic is 0x%08x, not 0x%08x", operation,
                  queue->magic, NCCLFFM_QUEUE_MAGIC);
  }
  if (queue->version != NCCLFFM_ABI_VERSION) {
    return failed(ncclInvalidArgument,
                  "%s: queue has version %u, this shim has %u; use the jar and the shim of one release", operation,
                  queue->version, static_cast<unsigned>(NCCLFFM_ABI_VERSION));
  }
  if (!isQueueShape(queue->nLanes, queue->depth) || queue->blocksPerLane < 1 ||
      queue->blocksPerLane > static_cast<unsigned>(kMaxChannels)) {
    return failed(
        ncclInvalidArgument,
        "%s: queue has %u lanes of depth %u with %u blocks each; there are 1 to %u lanes, a depth is a power of "
        "two up to %u, and a lane has 1 to %d blocks",
        operation, queue->nLanes, queue->depth, queue->blocksPerLane, NCCLFFM_MAX_LANES, NCCLFFM_MAX_DEPTH,
        kMaxChannels);
  }
  if (queue->status == nullptr || queue->progress == nullptr || queue->control == nullptr) {
    return failed(ncclInvalidArgument, "%s: queue->%s is null", operation,
                  queue->status == nullptr     ? "status"
                  : queue->progress == nullptr ? "progress"
                                               : "control");
  }
  return ncclSuccess;
}

int checkQueue(const char *operation, const ncclFfmTaskQueue *queue) {
  const int code = checkQueueFields(operation, queue);
  if (code != ncclSuccess) return code;
  if (queue->shared == nullptr || queue->lanes == nullptr || queue->tasks == nullptr) {
    return failed(ncclInvalidArgument, "%s: queue->%s is null: ncclFfmTaskQueueInit fills it in", operation,
                  queue->shared == nullptr  ? "shared"
                  : queue->lanes == nullptr ? "lanes"
                                            : "tasks");
  }
  return ncclSuccess;
}

int checkProducer(const char *operation, int blocks, const void *first) {
  if (blocks < 1 || blocks > kMaxProducerBlocks) {
    return failed(ncclInvalidArgument, "%s: %d blocks: there are 1 to %d", operation, blocks, kMaxProducerBlocks);
  }
  if (first == nullptr) return failed(ncclInvalidArgument, "%s: first is null", operation);
  return ncclSuccess;
}

// A producer between the taking of its numbers and its end. The host counts it if all three were launched. If
// only the first was, the lanes break at the deadline.
template <class Producer>
int launchProducer(const char *operation, const ReserveLaunch &reserve, const Producer &producer) {
  const uint64_t ofLane0 = reserve.nTasks / reserve.queue.nLanes + (reserve.nTasks % reserve.queue.nLanes != 0);
  if (ofLane0 > kMostReserved) {
    return failed(ncclInvalidArgument, "%s: %" PRIu64 " tasks on %u lanes: at most 2^30 a lane", operation,
                  reserve.nTasks, reserve.queue.nLanes);
  }
  Failure failure = shim::launch(reserve);
  if (failure.empty()) failure = shim::launch(producer);
  if (failure.empty()) failure = shim::launch(ProducerEndLaunch{reserve.queue, reserve.stream});
  return launched(operation, failure);
}

std::vector<ncclFfmLayout> makeLayouts() {
#define STRUCT(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(type::field)}
  std::vector<ncclFfmLayout> rows = {
      STRUCT(ncclFfmTaskRecord),
      FIELD(ncclFfmTaskRecord, present),
      FIELD(ncclFfmTaskRecord, symbol),
      FIELD(ncclFfmTaskRecord, lane),
      FIELD(ncclFfmTaskRecord, sequence),
      FIELD(ncclFfmTaskRecord, function),
      FIELD(ncclFfmTaskRecord, datatype),
      FIELD(ncclFfmTaskRecord, op),
      FIELD(ncclFfmTaskRecord, root),
      FIELD(ncclFfmTaskRecord, count),
      STRUCT(ncclFfmStatus),
      FIELD(ncclFfmStatus, code),
      FIELD(ncclFfmStatus, function),
      FIELD(ncclFfmStatus, rank),
      FIELD(ncclFfmStatus, peer),
      FIELD(ncclFfmStatus, channel),
      FIELD(ncclFfmStatus, epoch),
      FIELD(ncclFfmStatus, waitedNs),
      FIELD(ncclFfmStatus, abort),
      FIELD(ncclFfmStatus, ready),
      FIELD(ncclFfmStatus, task),
      FIELD(ncclFfmStatus, peerTask),
      STRUCT(ncclFfmChannel),
      FIELD(ncclFfmChannel, state),
      FIELD(ncclFfmChannel, failed),
      FIELD(ncclFfmChannel, gridSync),
      FIELD(ncclFfmChannel, partial),
      FIELD(ncclFfmChannel, arrived),
      FIELD(ncclFfmChannel, reserved0),
      FIELD(ncclFfmChannel, finished),
      FIELD(ncclFfmChannel, reserved),
      STRUCT(ncclFfmPair),
      FIELD(ncclFfmPair, send),
      FIELD(ncclFfmPair, recv),
      STRUCT(ncclLsaWindow),
      FIELD(ncclLsaWindow, base),
      FIELD(ncclLsaWindow, bytes),
      FIELD(ncclLsaWindow, handle),
      STRUCT(ncclLsa),
      FIELD(ncclLsa, x),
      FIELD(ncclLsa, y),
      STRUCT(ncclFfmDevComm),
      FIELD(ncclFfmDevComm, magic),
      FIELD(ncclFfmDevComm, version),
      FIELD(ncclFfmDevComm, rank),
      FIELD(ncclFfmDevComm, nRanks),
      FIELD(ncclFfmDevComm, nChannels),
      FIELD(ncclFfmDevComm, slotBytes),
      FIELD(ncclFfmDevComm, timeoutNs),
      FIELD(ncclFfmDevComm, channels),
      FIELD(ncclFfmDevComm, pairs),
      FIELD(ncclFfmDevComm, peers),
      FIELD(ncclFfmDevComm, status),
      FIELD(ncclFfmDevComm, lsa),
      FIELD(ncclFfmDevComm, path),
      FIELD(ncclFfmDevComm, ranksPerDevice),
      FIELD(ncclFfmDevComm, protocol),
      FIELD(ncclFfmDevComm, algorithm),
      FIELD(ncclFfmDevComm, lanes),
      FIELD(ncclFfmDevComm, laneChannels),
      FIELD(ncclFfmDevComm, reserved),
      FIELD(ncclFfmDevComm, hostSignal),
      STRUCT(ncclLsaBuffer),
      FIELD(ncclLsaBuffer, peers),
      FIELD(ncclLsaBuffer, bytes),
      FIELD(ncclLsaBuffer, offset),
      STRUCT(ncclFfmCall),
      FIELD(ncclFfmCall, function),
      FIELD(ncclFfmCall, datatype),
      FIELD(ncclFfmCall, op),
      FIELD(ncclFfmCall, root),
      FIELD(ncclFfmCall, source),
      FIELD(ncclFfmCall, protocol),
      FIELD(ncclFfmCall, algorithm),
      FIELD(ncclFfmCall, blocks),
      FIELD(ncclFfmCall, count),
      FIELD(ncclFfmCall, sendbuff),
      FIELD(ncclFfmCall, recvbuff),
      FIELD(ncclFfmCall, send),
      FIELD(ncclFfmCall, recv),
      STRUCT(ncclFfmRmsNorm),
      FIELD(ncclFfmRmsNorm, tokens),
      FIELD(ncclFfmRmsNorm, hidden),
      FIELD(ncclFfmRmsNorm, weight),
      FIELD(ncclFfmRmsNorm, out),
      FIELD(ncclFfmRmsNorm, eps),
      FIELD(ncclFfmRmsNorm, reserved),
      STRUCT(ncclFfmOptimizer),
      FIELD(ncclFfmOptimizer, weights),
      FIELD(ncclFfmOptimizer, momentum),
      FIELD(ncclFfmOptimizer, variance),
      FIELD(ncclFfmOptimizer, weightCopy),
      FIELD(ncclFfmOptimizer, steps),
      FIELD(ncclFfmOptimizer, step),
      FIELD(ncclFfmOptimizer, learningRate),
      FIELD(ncclFfmOptimizer, beta1),
      FIELD(ncclFfmOptimizer, beta2),
      FIELD(ncclFfmOptimizer, eps),
      FIELD(ncclFfmOptimizer, weightDecay),
      FIELD(ncclFfmOptimizer, maxNorm),
      STRUCT(ncclFfmTask),
      FIELD(ncclFfmTask, sequence),
      FIELD(ncclFfmTask, symbol),
      FIELD(ncclFfmTask, function),
      FIELD(ncclFfmTask, datatype),
      FIELD(ncclFfmTask, op),
      FIELD(ncclFfmTask, root),
      FIELD(ncclFfmTask, source),
      FIELD(ncclFfmTask, lane),
      FIELD(ncclFfmTask, count),
      FIELD(ncclFfmTask, sendbuff),
      FIELD(ncclFfmTask, recvbuff),
      FIELD(ncclFfmTask, reserved),
      STRUCT(ncclFfmTaskSlot),
      FIELD(ncclFfmTaskSlot, word),
      FIELD(ncclFfmTaskSlot, reserved),
      STRUCT(ncclFfmTaskLane),
      FIELD(ncclFfmTaskLane, head),
      FIELD(ncclFfmTaskLane, reserved0),
      FIELD(ncclFfmTaskLane, launched),
      FIELD(ncclFfmTaskLane, reserved1),
      FIELD(ncclFfmTaskLane, done),
      FIELD(ncclFfmTaskLane, reserved2),
      FIELD(ncclFfmTaskLane, go),
      FIELD(ncclFfmTaskLane, arrived),
      FIELD(ncclFfmTaskLane, parked),
      FIELD(ncclFfmTaskLane, reserved3),
      FIELD(ncclFfmTaskLane, failed),
      FIELD(ncclFfmTaskLane, owned),
      FIELD(ncclFfmTaskLane, running),
      FIELD(ncclFfmTaskLane, reserved5),
      STRUCT(ncclFfmTaskShared),
      FIELD(ncclFfmTaskShared, closing),
      FIELD(ncclFfmTaskShared, verdict),
      FIELD(ncclFfmTaskShared, left),
      FIELD(ncclFfmTaskShared, finished),
      FIELD(ncclFfmTaskShared, reserved),
      STRUCT(ncclFfmTaskControl),
      FIELD(ncclFfmTaskControl, state),
      FIELD(ncclFfmTaskControl, stop),
      FIELD(ncclFfmTaskControl, producers),
      FIELD(ncclFfmTaskControl, reserved),
      STRUCT(ncclFfmTaskQueue),
      FIELD(ncclFfmTaskQueue, magic),
      FIELD(ncclFfmTaskQueue, version),
      FIELD(ncclFfmTaskQueue, rank),
      FIELD(ncclFfmTaskQueue, nLanes),
      FIELD(ncclFfmTaskQueue, depth),
      FIELD(ncclFfmTaskQueue, blocksPerLane),
      FIELD(ncclFfmTaskQueue, timeoutNs),
      FIELD(ncclFfmTaskQueue, idleNs),
      FIELD(ncclFfmTaskQueue, shared),
      FIELD(ncclFfmTaskQueue, lanes),
      FIELD(ncclFfmTaskQueue, tasks),
      FIELD(ncclFfmTaskQueue, status),
      FIELD(ncclFfmTaskQueue, progress),
      FIELD(ncclFfmTaskQueue, control),
      STRUCT(ncclFfmTicket),
      FIELD(ncclFfmTicket, lane),
      FIELD(ncclFfmTicket, sequence),
      FIELD(ncclFfmTicket, result),
      FIELD(ncclFfmTicket, ready),
      STRUCT(ncclFfmTaskBatch),
      FIELD(ncclFfmTaskBatch, nTasks),
      FIELD(ncclFfmTaskBatch, named),
      FIELD(ncclFfmTaskBatch, tickets),
      FIELD(ncclFfmTaskBatch, tasks),
      STRUCT(ncclFfmTaskBuckets),
      FIELD(ncclFfmTaskBuckets, buff),
      FIELD(ncclFfmTaskBuckets, count),
      FIELD(ncclFfmTaskBuckets, bucketCount),
      FIELD(ncclFfmTaskBuckets, a),
      FIELD(ncclFfmTaskBuckets, b),
      FIELD(ncclFfmTaskBuckets, symbol),
      FIELD(ncclFfmTaskBuckets, blocks),
      FIELD(ncclFfmTaskBuckets, first),
      STRUCT(ncclFfmTaskOverlap),
      FIELD(ncclFfmTaskOverlap, in),
      FIELD(ncclFfmTaskOverlap, out),
      FIELD(ncclFfmTaskOverlap, work),
      FIELD(ncclFfmTaskOverlap, count),
      FIELD(ncclFfmTaskOverlap, iterations),
      FIELD(ncclFfmTaskOverlap, rounds),
      FIELD(ncclFfmTaskOverlap, a),
      FIELD(ncclFfmTaskOverlap, b),
      FIELD(ncclFfmTaskOverlap, symbol),
      FIELD(ncclFfmTaskOverlap, blocks),
      FIELD(ncclFfmTaskOverlap, parts),
      FIELD(ncclFfmTaskOverlap, reserved),
      FIELD(ncclFfmTaskOverlap, first),
      FIELD(ncclFfmTaskOverlap, results),
      STRUCT(ncclFfmLayout),
      FIELD(ncclFfmLayout, structName),
      FIELD(ncclFfmLayout, fieldName),
      FIELD(ncclFfmLayout, offset),
      FIELD(ncclFfmLayout, size),
  };
#undef STRUCT
#undef FIELD
  const ncclFfmLayout *more = nullptr;
  size_t count = 0;
  backendLayouts(&more, &count);
  rows.insert(rows.end(), more, more + count);
  return rows;
}

}  // namespace
}  // namespace ncclffm::shim

using namespace ncclffm;
using namespace ncclffm::shim;

int ncclFfmGetAbiVersion(int *version) {
  if (version == nullptr) return failed(ncclInvalidArgument, "ncclFfmGetAbiVersion: version is null");
  *version = NCCLFFM_ABI_VERSION;
  return ncclSuccess;
}

const char *ncclFfmGetBuildInfo(void) {
  return buildInfo();
}

const char *ncclFfmGetLastError(void) {
  return lastError.c_str();
}

int ncclFfmGetLayouts(const ncclFfmLayout **layouts, size_t *count) {
  if (layouts == nullptr || count == nullptr) {
    return failed(ncclInvalidArgument, "ncclFfmGetLayouts: %s is null", layouts == nullptr ? "layouts" : "count");
  }
  static const std::vector<ncclFfmLayout> rows = makeLayouts();
  *layouts = rows.data();
  *count = rows.size();
  return ncclSuccess;
}

int ncclFfmGetWindowBytes(int nRanks, int nChannels, unsigned int slotBytes, uint64_t *bytes) {
  if (bytes == nullptr) return failed(ncclInvalidArgument, "ncclFfmGetWindowBytes: bytes is null");
  if (nRanks < 1 || nRanks > kMaxRanks || !isShape(nChannels, slotBytes)) {
    return failed(ncclInvalidArgument,
                  "ncclFfmGetWindowBytes: %d ranks, %d channels, slots of %u bytes: there are 1 to %d ranks, 1 to %d "
                  "channels, and a slot is a multiple of %u bytes up to %u",
                  nRanks, nChannels, slotBytes, kMaxRanks, kMaxChannels, NCCLFFM_SLOT_UNIT, NCCLFFM_MAX_SLOT_BYTES);
  }
  *bytes = windowBytes(static_cast<uint64_t>(nRanks), static_cast<uint64_t>(nChannels), slotBytes);
  return ncclSuccess;
}

int ncclFfmPrime(void *stream) {
  return launched("ncclFfmPrime", prime(stream));
}

int ncclFfmChoose(const ncclFfmDevComm *comm, ncclFfmCall *call) {
  return chooseAndCheck("ncclFfmChoose", comm, call);
}

int ncclFfmLaunch(const ncclFfmDevComm *comm, const ncclFfmCall *call, void *stream) {
  if (call == nullptr) return failed(ncclInvalidArgument, "ncclFfmLaunch: call is null");
  CallLaunch launch = {{}, *call, reduces(call->function) ? call->datatype : kUnreduced, stream};
  int code = chooseAndCheck("ncclFfmLaunch", comm, &launch.call);
  if (code != ncclSuccess || (call->count == 0 && call->function != ncclFfmFunctionBarrier)) return code;
  launch.comm = *comm;
  return launched("ncclFfmLaunch", shim::launch(launch));
}

int ncclFfmFusedScaleAllReduceSqrt(const ncclFfmDevComm *comm, const ncclFfmCall *call, float a, float b,
                                   void *stream) {
  constexpr const char *kOperation = "ncclFfmFusedScaleAllReduceSqrt";
  constexpr ncclFfmFunction kFunction = ncclFfmFunctionFusedScaleAllReduceSqrt;
  FusedLaunch fused = {{}, {}, kFunction, a, b, {}, {}, stream};
  RootOf root(kFunction);
  if (call != nullptr && isZeroCopy(*call)) root.with(a).with(b);
  const int code = checkFused(kOperation, comm, call, ncclSum, root.root(), kMaxChannels, fused.call);
  return code != ncclSuccess ? code : launchFused(kOperation, comm, fused);
}

int ncclFfmFusedRmsNorm(const ncclFfmDevComm *comm, const ncclFfmCall *call, const ncclFfmRmsNorm *norm, void *stream) {
  constexpr const char *kOperation = "ncclFfmFusedRmsNorm";
  constexpr ncclFfmFunction kFunction = ncclFfmFunctionFusedRmsNorm;
  FusedLaunch fused = {{}, {}, kFunction, 0, 0, {}, {}, stream};
  if (norm == nullptr) return failed(ncclInvalidArgument, "%s: norm is null", kOperation);
  if (norm->hidden == 0 || !isIn(norm->eps, 0, std::numeric_limits<float>::infinity())) {
    return failed(ncclInvalidArgument,
                  "%s: hidden %" PRIu64 ", eps %g: hidden must not be 0, eps be finite and not negative", kOperation,
                  norm->hidden, norm->eps);
  }
  const uint64_t mostBlocks = std::max<uint64_t>(norm->tokens, 1);
  int code = checkFused(kOperation, comm, call, ncclSum, RootOf(kFunction).with(norm->hidden).with(norm->eps).root(),
                        mostBlocks, fused.call);
  if (code != ncclSuccess) return code;
  if (call->count % norm->hidden != 0 || call->count / norm->hidden != norm->tokens) {
    return failed(ncclInvalidArgument, "%s: count %" PRIu64 " is not %" PRIu64 " tokens of %" PRIu64 " elements",
                  kOperation, call->count, norm->tokens, norm->hidden);
  }
  if (call->count == 0) return ncclSuccess;
  if (isZeroCopy(*call) && call->send.peers == call->recv.peers && call->send.offset == call->recv.offset) {
    return failed(ncclInvalidArgument, "%s: send and recv are the same place of a window: recv holds the residual",
                  kOperation);
  }
  const Named send = sendOf(fused.call), recv = recvOf(fused.call);
  const uint64_t bytes = call->count * recv.elementBytes, rowBytes = norm->hidden * recv.elementBytes;
  const Named weight = {"weight", norm->weight, rowBytes, recv.elementBytes};
  const Named out = {"out", norm->out, bytes, recv.elementBytes};
  code = checkNamed(kOperation, weight);
  if (code == ncclSuccess) code = checkNamed(kOperation, out);
  if (code == ncclSuccess) code = checkApart(kOperation, send, recv);
  if (code == ncclSuccess) code = checkApart(kOperation, weight, out);
  if (code == ncclSuccess) code = checkApart(kOperation, weight, recv);
  if (code == ncclSuccess) code = checkApart(kOperation, out, recv);
  if (code == ncclSuccess && send.address != out.address) code = checkApart(kOperation, out, send);
  if (code != ncclSuccess) return code;
  fused.norm = *norm;
  return launchFused(kOperation, comm, fused);
}

int ncclFfmFusedSgd(const ncclFfmDevComm *comm, const ncclFfmCall *call, const ncclFfmOptimizer *optimizer,
                    void *stream) {
  return updateFused("ncclFfmFusedSgd", ncclFfmFunctionFusedSgd, comm, call, optimizer, stream);
}

int ncclFfmFusedAdamW(const ncclFfmDevComm *comm, const ncclFfmCall *call, const ncclFfmOptimizer *optimizer,
                      void *stream) {
  return updateFused("ncclFfmFusedAdamW", ncclFfmFunctionFusedAdamW, comm, call, optimizer, stream);
}

int ncclFfmLsaWritePattern(const ncclLsaWindow *window, uint64_t offset, uint64_t bytes, uint64_t seed, void *stream) {
  return checkAndLaunchPattern("ncclFfmLsaWritePattern", {{}, offset, bytes, seed, nullptr, 0, stream}, window);
}

int ncclFfmLsaCheckPattern(const ncclLsaWindow *window, uint64_t offset, uint64_t bytes, uint64_t seed,
                           uint64_t *firstBad, void *stream) {
  if (firstBad == nullptr || reinterpret_cast<uintptr_t>(firstBad) % alignof(uint64_t) != 0) {
    return failed(ncclInvalidArgument, "ncclFfmLsaCheckPattern: firstBad is %p, it must be an 8-byte aligned address",
                  static_cast<void *>(firstBad));
  }
  return checkAndLaunchPattern("ncclFfmLsaCheckPattern", {{}, offset, bytes, seed, firstBad, 0, stream}, window);
}

int ncclFfmTaskQueueBytes(unsigned int nLanes, unsigned int depth, uint64_t *bytes) {
  if (bytes == nullptr) return failed(ncclInvalidArgument, "ncclFfmTaskQueueBytes: bytes is null");
  if (!isQueueShape(nLanes, depth)) {
    return failed(
        ncclInvalidArgument,
        "ncclFfmTaskQueueBytes: %u lanes of depth %u: there are 1 to %u lanes, and a depth is a power of two up "
        "to %u",
        nLanes, depth, NCCLFFM_MAX_LANES, NCCLFFM_MAX_DEPTH);
  }
  *bytes = queueBytes(nLanes, depth);
  return ncclSuccess;
}

int ncclFfmTaskQueueInit(ncclFfmTaskQueue *queue, void *memory, unsigned int firstSequence, void *stream) {
  constexpr const char *kOperation = "ncclFfmTaskQueueInit";
  const int code = checkQueueFields(kOperation, queue);
  if (code != ncclSuccess) return code;
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % sizeof(ncclFfmTaskSlot) != 0) {
    return failed(ncclInvalidArgument, "%s: memory is %p: it must be a %zu-byte aligned address", kOperation, memory,
                  sizeof(ncclFfmTaskSlot));
  }
  char *base = static_cast<char *>(memory);
  queue->shared = reinterpret_cast<ncclFfmTaskShared *>(base);
  queue->lanes = reinterpret_cast<ncclFfmTaskLane *>(base + sizeof(ncclFfmTaskShared));
  queue->tasks = reinterpret_cast<ncclFfmTaskSlot *>(queue->lanes + queue->nLanes);
  return launched(kOperation, shim::launch(QueueLaunch{*queue, firstSequence, stream}));
}

int ncclFfmLaunchScheduler(const ncclFfmDevComm *comm, const ncclFfmTaskQueue *queue, unsigned int mode, void *stream) {
  constexpr const char *kOperation = "ncclFfmLaunchScheduler";
  int code = checkComm(kOperation, comm);
  if (code == ncclSuccess) code = checkQueue(kOperation, queue);
  if (code != ncclSuccess) return code;
  if (mode > ncclFfmSchedulerDebug) {
    return failed(ncclInvalidArgument, "%s: mode %u: there are Persistent (0), Drain (1) and Debug (2)", kOperation,
                  mode);
  }
  if (mode == ncclFfmSchedulerDebug && (queue->nLanes != 1 || queue->blocksPerLane != 1 || queue->depth != 1)) {
    return failed(ncclInvalidArgument,
                  "%s: mode Debug is for a queue of one lane, one block and depth 1, not %u, %u and %u", kOperation,
                  queue->nLanes, queue->blocksPerLane, queue->depth);
  }
  int most = 0;
  const Failure failure = shim::maxSchedulerBlocks(comm->ranksPerDevice, &most);
  if (!failure.empty()) return launched(kOperation, failure);
  most = std::min(most, comm->nChannels);
  const uint64_t blocks = uint64_t{queue->nLanes} * queue->blocksPerLane;
  if (blocks > static_cast<uint64_t>(most)) {
    return failed(
        ncclInvalidArgument,
        "%s: %u lanes of %u blocks: %d blocks fit, of %d channels, side by side with those of %d ranks on the "
        "device and with producers",
        kOperation, queue->nLanes, queue->blocksPerLane, most, comm->nChannels, comm->ranksPerDevice);
  }
  return launched(kOperation, shim::launch(SchedulerLaunch{schedulerComm(*comm, *queue), *queue,
                                                           static_cast<ncclFfmSchedulerMode>(mode),
                                                           static_cast<int>(blocks), stream}));
}

int ncclFfmTaskAppendOnStream(const ncclFfmTaskQueue *queue, const ncclFfmTaskBatch *batch, void *stream) {
  constexpr const char *kOperation = "ncclFfmTaskAppendOnStream";
  const int code = checkQueue(kOperation, queue);
  if (code != ncclSuccess) return code;
  if (batch == nullptr || batch->nTasks < 1 || batch->nTasks > NCCLFFM_MAX_BATCH) {
    return failed(ncclInvalidArgument, "%s: a batch has 1 to %u tasks, not %u", kOperation, NCCLFFM_MAX_BATCH,
                  batch == nullptr ? 0 : batch->nTasks);
  }
  for (uint32_t i = 0; i < batch->nTasks; ++i) {
    const ncclFfmTask &task = batch->tasks[i];
    if (!isTask(*queue, static_cast<int>(task.function), task.datatype, task.op, task.count, task.lane)) {
      return failed(ncclInvalidArgument,
                    "%s: task %u: function %u (0 to %d), datatype %d (0 to %d), op %d (0 to %d), count %" PRIu64
                    " (at most 2^40), lane %u of %u",
                    kOperation, i, task.function, ncclFfmFunctionSendRecv, task.datatype, ncclBfloat16, task.op,
                    ncclAvg, task.count, task.lane, queue->nLanes);
    }
  }
  return launched(kOperation, shim::launch(BatchLaunch{*queue, *batch, stream}));
}

int ncclFfmTaskProducerEnd(const ncclFfmTaskQueue *queue, void *stream) {
  const int code = checkQueue("ncclFfmTaskProducerEnd", queue);
  if (code != ncclSuccess) return code;
  return launched("ncclFfmTaskProducerEnd", shim::launch(ProducerEndLaunch{*queue, stream}));
}

int ncclFfmTaskAppendBuckets(const ncclFfmTaskQueue *queue, const ncclFfmTaskBuckets *buckets, void *stream) {
  constexpr const char *kOperation = "ncclFfmTaskAppendBuckets";
  int code = checkQueue(kOperation, queue);
  if (code != ncclSuccess) return code;
  if (buckets == nullptr) return failed(ncclInvalidArgument, "%s: buckets is null", kOperation);
  code = checkProducer(kOperation, buckets->blocks, buckets->first);
  if (code != ncclSuccess) return code;
  if (buckets->bucketCount == 0 || buckets->count > kMaxCount || (buckets->buff == nullptr && buckets->count != 0)) {
    return failed(ncclInvalidArgument,
                  "%s: %" PRIu64 " elements at %p in buckets of %" PRIu64
                  ": buff must not be null, nor a bucket empty, and there are at most 2^40 elements",
                  kOperation, buckets->count, static_cast<void *>(buckets->buff), buckets->bucketCount);
  }
  const uint64_t nBuckets = buckets->count == 0 ? 0 : (buckets->count - 1) / buckets->bucketCount + 1;
  return launchProducer(kOperation, {*queue, nBuckets, buckets->first, stream},
                        BucketsLaunch{*queue, *buckets, buckets->blocks, stream});
}

int ncclFfmTaskIterate(const ncclFfmTaskQueue *queue, const ncclFfmTaskOverlap *overlap, void *stream) {
  constexpr const char *kOperation = "ncclFfmTaskIterate";
  int code = checkQueue(kOperation, queue);
  if (code != ncclSuccess) return code;
  if (overlap == nullptr) return failed(ncclInvalidArgument, "%s: overlap is null", kOperation);
  code = checkProducer(kOperation, overlap->blocks, overlap->first);
  if (code != ncclSuccess) return code;
  if (overlap->in == nullptr || overlap->out == nullptr || overlap->work == nullptr || overlap->results == nullptr ||
      overlap->count > kMaxCount || overlap->parts < 1 || overlap->parts > 3) {
    return failed(ncclInvalidArgument,
                  "%s: in %p, out %p, work %p and results %p must not be null, %" PRIu64
                  " elements at most 2^40, parts %u is 1 to 3",
                  kOperation, static_cast<const void *>(overlap->in), static_cast<void *>(overlap->out),
                  static_cast<void *>(overlap->work), static_cast<void *>(overlap->results), overlap->count,
                  overlap->parts);
  }
  const uint64_t nTasks =
      (overlap->parts & 2) != 0 ? uint64_t{overlap->iterations} * static_cast<uint64_t>(overlap->blocks) : 0;
  return launchProducer(kOperation, {*queue, nTasks, overlap->first, stream},
                        OverlapLaunch{*queue, *overlap, overlap->blocks, stream});
}

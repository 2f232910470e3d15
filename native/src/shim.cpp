// The C ABI of the shim, the same for both backends; see shim.h.
#include "shim.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <vector>

#include "../include/ncclffm/impl/all_reduce.h"
#include "../include/ncclffm/lsa.h"

namespace ncclffm::shim {
namespace {

// Threads of one block take one LL line each up to this many elements; more blocks than that would only add latency.
constexpr size_t kElementsPerBlock = 1024;

// Four vectors for each thread of a block, and never more blocks than keep a link busy.
constexpr uint64_t kPatternBytesPerBlock = 32 << 10;
constexpr int kMostPatternBlocks = 256;

// Bounds what ncclFfmGetWindowBytes multiplies: far beyond any machine, far below 64 bits.
constexpr int kMaxRanks = 1 << 16;
constexpr int kMaxChannels = 1 << 10;

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
  if (comm->nChannels < 1 || comm->nChannels > kMaxChannels || comm->linesPerSlot < 1 ||
      comm->linesPerSlot > NCCLFFM_MAX_LINES_PER_SLOT) {
    return failed(ncclInvalidArgument,
                  "%s: comm has %d channels of %u lines per slot; there are 1 to %d channels and 1 to %u lines",
                  operation, comm->nChannels, comm->linesPerSlot, kMaxChannels, NCCLFFM_MAX_LINES_PER_SLOT);
  }
  if (comm->channels == nullptr || comm->peers == nullptr || comm->status == nullptr) {
    return failed(ncclInvalidArgument, "%s: comm->%s is null", operation,
                  comm->channels == nullptr ? "channels"
                  : comm->peers == nullptr  ? "peers"
                                            : "status");
  }
  return ncclSuccess;
}

int checkBuffers(const char *operation, const void *sendbuff, const void *recvbuff, size_t count) {
  const float *send = static_cast<const float *>(sendbuff), *recv = static_cast<const float *>(recvbuff);
  if (areValid(send, recv, count)) return ncclSuccess;
  return failed(
      ncclInvalidArgument,
      "%s: sendbuff %p and recvbuff %p of %zu float32: both must be non-null, 4-byte aligned and either equal or "
      "disjoint, and count * 4 must fit an address",
      operation, sendbuff, recvbuff, count);
}

int checkAndLaunch(const char *operation, const ncclFfmDevComm *comm, Launch launch) {
  int code = checkComm(operation, comm);
  if (code == ncclSuccess) code = checkBuffers(operation, launch.sendbuff, launch.recvbuff, launch.count);
  if (code != ncclSuccess || launch.count == 0) return code;
  launch.comm = *comm;
  size_t blocks = (launch.count + kElementsPerBlock - 1) / kElementsPerBlock;
  size_t most = static_cast<size_t>(std::min(comm->nChannels, shim::maxBlocks()));
  launch.blocks = static_cast<int>(std::min(blocks, most));
  return launched(operation, shim::launch(launch));
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
  uint64_t most = static_cast<uint64_t>(std::min(kMostPatternBlocks, shim::maxBlocks()));
  launch.blocks = static_cast<int>(std::min(blocks, most));
  return launched(operation, shim::launch(launch));
}

std::vector<ncclFfmLayout> makeLayouts() {
#define STRUCT(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, field) {#type, #field, offsetof(type, field), sizeof(type::field)}
  std::vector<ncclFfmLayout> rows = {
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
      STRUCT(ncclFfmChannel),
      FIELD(ncclFfmChannel, state),
      FIELD(ncclFfmChannel, failed),
      FIELD(ncclFfmChannel, reserved),
      STRUCT(ncclFfmDevComm),
      FIELD(ncclFfmDevComm, magic),
      FIELD(ncclFfmDevComm, version),
      FIELD(ncclFfmDevComm, rank),
      FIELD(ncclFfmDevComm, nRanks),
      FIELD(ncclFfmDevComm, nChannels),
      FIELD(ncclFfmDevComm, linesPerSlot),
      FIELD(ncclFfmDevComm, timeoutNs),
      FIELD(ncclFfmDevComm, channels),
      FIELD(ncclFfmDevComm, peers),
      FIELD(ncclFfmDevComm, status),
      STRUCT(ncclLsaWindow),
      FIELD(ncclLsaWindow, base),
      FIELD(ncclLsaWindow, bytes),
      FIELD(ncclLsaWindow, handle),
      STRUCT(ncclLsa),
      FIELD(ncclLsa, x),
      FIELD(ncclLsa, y),
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

int ncclFfmGetWindowBytes(int nRanks, int nChannels, unsigned int linesPerSlot, uint64_t *bytes) {
  if (bytes == nullptr) return failed(ncclInvalidArgument, "ncclFfmGetWindowBytes: bytes is null");
  if (nRanks < 1 || nRanks > kMaxRanks || nChannels < 1 || nChannels > kMaxChannels || linesPerSlot < 1 ||
      linesPerSlot > NCCLFFM_MAX_LINES_PER_SLOT) {
    return failed(ncclInvalidArgument,
                  "ncclFfmGetWindowBytes: %d ranks, %d channels, %u lines per slot: there are 1 to %d ranks, 1 to %d "
                  "channels and 1 to %u lines",
                  nRanks, nChannels, linesPerSlot, kMaxRanks, kMaxChannels, NCCLFFM_MAX_LINES_PER_SLOT);
  }
  constexpr uint64_t kHalves = 2;
  *bytes = static_cast<uint64_t>(nChannels) * kHalves * static_cast<uint64_t>(nRanks) * linesPerSlot * sizeof(LLLine);
  return ncclSuccess;
}

int ncclFfmPrime(void *stream) {
  return launched("ncclFfmPrime", prime(stream));
}

int ncclFfmAllReduce(const ncclFfmDevComm *comm, const void *sendbuff, void *recvbuff, size_t count, int datatype,
                     int op, void *stream) {
  if (datatype != ncclFloat32 || op != ncclSum) {
    return failed(
        ncclInvalidArgument,
        "ncclFfmAllReduce: datatype %d, op %d: in a kernel only ncclFloat32 (%d) and ncclSum (%d) are supported",
        datatype, op, ncclFloat32, ncclSum);
  }
  return checkAndLaunch("ncclFfmAllReduce", comm,
                        {ncclFfmFunctionAllReduce,
                         {},
                         0,
                         static_cast<const float *>(sendbuff),
                         static_cast<float *>(recvbuff),
                         count,
                         0,
                         0,
                         stream});
}

int ncclFfmFusedScaleAllReduceSqrt(const ncclFfmDevComm *comm, float *buff, size_t count, float a, float b,
                                   void *stream) {
  return checkAndLaunch("ncclFfmFusedScaleAllReduceSqrt", comm,
                        {ncclFfmFunctionFusedScaleAllReduceSqrt, {}, 0, buff, buff, count, a, b, stream});
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

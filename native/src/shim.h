// The two halves of the shim (include/ncclffm.h). shim.cpp is the C ABI: it checks arguments, chooses the shape of a
// launch and keeps the last error, once for both backends. src/cuda/launch.cu and src/cpu/launch.cpp only launch,
// through the functions declared here.
#ifndef NCCLFFM_SHIM_H_
#define NCCLFFM_SHIM_H_

#include <cstddef>
#include <string>

#include "../include/ncclffm.h"

namespace ncclffm::shim {

/// In place of an element type: the call only moves data.
constexpr int kUnreduced = -1;

/// A launch of ncclFfmLaunch: a checked call with nothing left open.
struct CallLaunch {
  ncclFfmDevComm comm;
  ncclFfmCall call;
  int elementType;  // the ncclDataType_t of a call that reduces, or kUnreduced
  void *stream;
};

/// A launch of a fused kernel with checked arguments, nothing left open and at least one element; function says which.
struct FusedLaunch {
  ncclFfmDevComm comm;
  ncclFfmCall call;
  ncclFfmFunction function;
  float a, b;
  ncclFfmRmsNorm norm;
  ncclFfmOptimizer optimizer;
  void *stream;
};

/// A launch of ncclFfmLsaWritePattern, or of ncclFfmLsaCheckPattern where firstBad is not null, with checked arguments;
/// bytes is at least 1.
struct PatternLaunch {
  ncclLsaWindow window;
  uint64_t offset;
  uint64_t bytes;
  uint64_t seed;
  uint64_t *firstBad;
  int blocks;
  void *stream;
};

/// What is launched for a task queue, with checked arguments. The scheduler's communicator is schedulerComm's.
struct QueueLaunch {
  ncclFfmTaskQueue queue;
  unsigned int firstSequence;
  void *stream;
};

struct SchedulerLaunch {
  ncclFfmDevComm comm;
  ncclFfmTaskQueue queue;
  ncclFfmSchedulerMode mode;
  int blocks;
  void *stream;
};

struct BatchLaunch {
  ncclFfmTaskQueue queue;
  ncclFfmTaskBatch batch;
  void *stream;
};

/// One thread takes numbers for nTasks tasks of the lanes in turn; see reserveInTurn.
struct ReserveLaunch {
  ncclFfmTaskQueue queue;
  uint64_t nTasks;
  ncclFfmTicket *first;
  void *stream;
};

struct BucketsLaunch {
  ncclFfmTaskQueue queue;
  ncclFfmTaskBuckets buckets;
  int blocks;
  void *stream;
};

struct OverlapLaunch {
  ncclFfmTaskQueue queue;
  ncclFfmTaskOverlap overlap;
  int blocks;
  void *stream;
};

struct ProducerEndLaunch {
  ncclFfmTaskQueue queue;
  void *stream;
};

/// What a backend's function reports: "" for success, otherwise why the launch was refused.
using Failure = std::string;

Failure launch(const CallLaunch &launch);
Failure launch(const FusedLaunch &launch);
Failure launch(const PatternLaunch &launch);
Failure launch(const QueueLaunch &launch);
Failure launch(const SchedulerLaunch &launch);
Failure launch(const BatchLaunch &launch);
Failure launch(const ReserveLaunch &launch);
Failure launch(const BucketsLaunch &launch);
Failure launch(const OverlapLaunch &launch);
Failure launch(const ProducerEndLaunch &launch);

/// See ncclFfmPrime.
Failure prime(void *stream);

/// Threads of a block, as its cooperation group counts them.
uint32_t blockThreads();

/// The blocks that surely run side by side on the current device when ranksPerDevice ranks launch as many each. The
/// same on every rank whose device is alike.
Failure maxBlocks(int ranksPerDevice, int *blocks);

/// The same for schedulers, which stay: what they leave is for producers.
Failure maxSchedulerBlocks(int ranksPerDevice, int *blocks);

const char *buildInfo();

/// Layout rows of this backend's own beside those of ncclffm.h.
void backendLayouts(const ncclFfmLayout **layouts, size_t *count);

}  // namespace ncclffm::shim

#endif  // NCCLFFM_SHIM_H_

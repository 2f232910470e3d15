// Streams: a FIFO of host functions and a worker thread each.
//
// Every piece of work gets a ticket. Waiting for an event, for the default stream or for another stream of a
// communicator is all the same: work that starts after (stream, ticket). Tickets only refer to work enqueued before, so
// they form no cycle.
//
// Work that returns an error fails its stream: what follows is skipped, and every later wait reports the error, so that
// garbage is never handed over silently. It is over when the work's communicator is aborted, as on a GPU, where a
// stream outlives an aborted communicator.
#ifndef NCCLFFM_CPU_STREAM_H_
#define NCCLFFM_CPU_STREAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "abi.h"
#include "handles.h"

namespace ncclffm::cpu {

class Capture;
class Stream;

struct Ticket {
  std::shared_ptr<Stream> stream;  // null = no work
  uint64_t number = 0;
};

struct Work {
  std::function<cudaError_t()> run;    // a result other than cudaSuccess fails the stream
  std::function<void()> skipped = {};  // called instead of run when the stream has failed before; may be empty
  std::vector<Ticket> after = {};      // what must be complete first, beside the work before it on the stream
  std::shared_ptr<const std::atomic<bool>> forgiven = {};  // once true, a failure of this work does not count
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// Starts the worker. A blocking stream keeps CUDA's order with its device's default stream.
  static std::shared_ptr<Stream> start(int device, bool blocking);

  int device() const { return device_; }
  bool blocking() const { return blocking_; }

  /// Nothing when the stream has been closed.
  std::optional<Ticket> push(Work work);

  /// The latest ticket given out.
  Ticket last();

  /// Blocks until the work of the ticket is complete; the error of the stream as of that work.
  cudaError_t wait(uint64_t ticket);

  /// cudaErrorNotReady, or as wait().
  cudaError_t query(uint64_t ticket);

  /// No more work is taken; the worker ends after what is queued.
  void close();

  /// The capture that keeps what is called on this stream, or null. While there is one, nothing may be pushed.
  std::shared_ptr<Capture> capture();

  /// False when there is one already.
  bool startCapture(std::shared_ptr<Capture> capture);

  void endCapture();

 private:
  Stream(int device, bool blocking) : device_(device), blocking_(blocking) {}
  void work();
  cudaError_t error() const { return forgiven_ != nullptr && forgiven_->load() ? cudaSuccess : error_; }
  cudaError_t errorAsOf(uint64_t ticket) const { return failedAt_ <= ticket ? error() : cudaSuccess; }

  const int device_;
  const bool blocking_;
  std::mutex mutex_;
  std::condition_variable arrived_;    // for the worker
  std::condition_variable completed_;  // for those who wait
  std::deque<Work> queue_;
  uint64_t submitted_ = 0;
  uint64_t complete_ = 0;
  uint64_t failedAt_ = UINT64_MAX;
  cudaError_t error_ = cudaSuccess;
  std::shared_ptr<const std::atomic<bool>> forgiven_;  // of the work that gave error_
  bool closed_ = false;
  std::shared_ptr<Capture> capture_;
};

/// The open stream of a handle, or null. NULL and cudaStreamLegacy (1) are the default stream of the given device.
std::shared_ptr<Stream> findStream(cudaStream_t handle, int device);

/// Appends work with CUDA's order between the default stream and blocking streams, to a stream that is not being
/// captured. Nothing when the stream has been closed.
std::optional<Ticket> append(const std::shared_ptr<Stream> &stream, Work work);

/// Appends work that may run several times, or keeps it in the capture of the stream. cudaErrorInvalidResourceHandle
/// when the stream has been closed.
cudaError_t enqueue(const std::shared_ptr<Stream> &stream, std::function<cudaError_t()> work);

/// The same for the stream of a handle (NULL = default stream of the current device).
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);

/// Waits for all work on the device's streams; the first error among them.
cudaError_t synchronizeDevice(int device);

/// True on a stream's worker, where CUDA forbids calls that wait (cudaErrorNotPermitted).
bool onStreamWorker();

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_STREAM_H_

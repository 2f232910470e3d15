// The worker, the default streams, and the exported cudaStream* functions.
#include "stream.h"

#include <map>

#include "capture.h"
#include "device.h"
#include "error.h"
#include "thread.h"

namespace ncclffm::cpu {

namespace {

struct StreamTable {
  Handles<cudaStream_t, Stream> open{0x100000000};
  std::mutex mutex;
  std::map<int, std::shared_ptr<Stream>> defaults;  // by device
};

StreamTable &streamTable() {
  static auto *table = new StreamTable;  // leaked: workers run until the process is gone
  return *table;
}

thread_local bool worker = false;

std::shared_ptr<Stream> defaultStreamIfStarted(int device) {
  StreamTable &table = streamTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto found = table.defaults.find(device);
  return found == table.defaults.end() ? nullptr : found->second;
}

std::shared_ptr<Stream> defaultStream(int device) {
  StreamTable &table = streamTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  std::shared_ptr<Stream> &stream = table.defaults[device];
  if (stream == nullptr) {
    stream = Stream::start(device, true);
  }
  return stream;
}

/// The device's streams, the default one included.
std::vector<std::shared_ptr<Stream>> streamsOf(int device) {
  std::vector<std::shared_ptr<Stream>> result;
  for (std::shared_ptr<Stream> &stream : streamTable().open.all()) {
    if (stream->device() == device) {
      result.push_back(std::move(stream));
    }
  }
  if (std::shared_ptr<Stream> stream = defaultStreamIfStarted(device)) {
    result.push_back(std::move(stream));
  }
  return result;
}

}  // namespace

std::shared_ptr<Stream> Stream::start(int device, bool blocking) {
  std::shared_ptr<Stream> stream(new Stream(device, blocking));
  startThread("ncclffm-stream", [stream] { stream->work(); });
  return stream;
}

std::optional<Ticket> Stream::push(Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) {
    return std::nullopt;
  }
  queue_.push_back(std::move(work));
  arrived_.notify_one();
  return Ticket{shared_from_this(), ++submitted_};
}

Ticket Stream::last() {
  std::lock_guard<std::mutex> lock(mutex_);
  return Ticket{shared_from_this(), submitted_};
}

cudaError_t Stream::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  completed_.wait(lock, [&] { return complete_ >= ticket; });
  return errorAsOf(ticket);
}

cudaError_t Stream::query(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return complete_ >= ticket ? errorAsOf(ticket) : cudaErrorNotReady;
}

void Stream::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  arrived_.notify_one();
}

std::shared_ptr<Capture> Stream::capture() {
  std::lock_guard<std::mutex> lock(mutex_);
  return capture_;
}

bool Stream::startCapture(std::shared_ptr<Capture> capture) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) {
    return false;
  }
  capture_ = std::move(capture);
  return true;
}

void Stream::endCapture() {
  std::lock_guard<std::mutex> lock(mutex_);
  capture_ = nullptr;
}

void Stream::work() {
  worker = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    arrived_.wait(lock, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) {
      return;
    }
    cudaError_t error = this->error();
    std::shared_ptr<const std::atomic<bool>> forgiven;
    {
      Work next = std::move(queue_.front());
      queue_.pop_front();
      forgiven = next.forgiven;
      lock.unlock();
      for (const Ticket &ticket : next.after) {
        const cudaError_t before = ticket.stream->wait(ticket.number);
        error = error != cudaSuccess ? error : before;
      }
      try {
        if (error == cudaSuccess) {
          error = next.run();
        } else if (next.skipped) {
          next.skipped();
        }
      } catch (...) {
        error = cudaErrorLaunchFailure;
      }
    }  // what the work owned is gone before anybody hears that it is complete
    lock.lock();
    ++complete_;
    if (error != cudaSuccess && this->error() == cudaSuccess) {
      error_ = error;
      forgiven_ = std::move(forgiven);
      failedAt_ = complete_;
    }
    completed_.notify_all();
  }
}

std::shared_ptr<Stream> findStream(cudaStream_t handle, int device) {
  const auto legacy = reinterpret_cast<cudaStream_t>(1);
  return handle == nullptr || handle == legacy ? defaultStream(device) : streamTable().open.find(handle);
}

std::optional<Ticket> append(const std::shared_ptr<Stream> &stream, Work work) {
  if (stream->blocking()) {
    const std::shared_ptr<Stream> standard = defaultStreamIfStarted(stream->device());
    if (stream == standard) {
      for (const std::shared_ptr<Stream> &other : streamsOf(stream->device())) {
        if (other->blocking() && other != stream) {
          work.after.push_back(other->last());
        }
      }
    } else if (standard != nullptr) {
      work.after.push_back(standard->last());
    }
  }
  return stream->push(std::move(work));
}

cudaError_t enqueue(const std::shared_ptr<Stream> &stream, std::function<cudaError_t()> work) {
  if (const std::shared_ptr<Capture> capture = stream->capture()) {
    return capture->record(
        {stream}, [work = std::move(work)](const std::shared_ptr<Stream> &other) { return enqueue(other, work); });
  }
  return append(stream, Work{std::move(work)}) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t enqueue(cudaStream_t handle, std::function<cudaError_t()> work) {
  const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
  return stream == nullptr ? cudaErrorInvalidResourceHandle : enqueue(stream, std::move(work));
}

cudaError_t synchronizeDevice(int device) {
  if (onStreamWorker()) {
    return cudaErrorNotPermitted;
  }
  cudaError_t result = cudaSuccess;
  for (const std::shared_ptr<Stream> &stream : streamsOf(device)) {
    const cudaError_t error = stream->wait(stream->last().number);
    result = result != cudaSuccess ? result : error;
  }
  return result;
}

bool onStreamWorker() {
  return worker;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
  return guardCuda([&] {
    if (stream == nullptr || (flags != cudaStreamDefault && flags != cudaStreamNonBlocking)) {
      return cudaErrorInvalidValue;
    }
    *stream = streamTable().open.add(Stream::start(currentDevice(), flags == cudaStreamDefault));
    return cudaSuccess;
  });
}

// Priorities are accepted and have no effect, as on a GPU with a single priority.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int) {
  return guardCuda([&] { return cudaStreamCreateWithFlags(stream, flags); });
}

// Returns at once; the worker finishes what is queued.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> removed = streamTable().open.remove(stream);
    if (removed == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (const std::shared_ptr<Capture> capture = removed->capture()) {
      capture->leave(*removed);
    }
    removed->close();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (onStreamWorker()) {
      return cudaErrorNotPermitted;
    }
    const cudaError_t captured = checkNotCaptured(stream);
    return captured != cudaSuccess ? captured : stream->wait(stream->last().number);
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    const cudaError_t captured = checkNotCaptured(stream);
    return captured != cudaSuccess ? captured : stream->query(stream->last().number);
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *userData) {
  return guardCuda([&] {
    if (function == nullptr) {
      return cudaErrorInvalidValue;
    }
    return enqueue(stream, [function, userData] {
      function(userData);
      return cudaSuccess;
    });
  });
}

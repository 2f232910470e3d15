// Captures, and the graphs that come of them.
#include "capture.h"

#include <algorithm>

#include "device.h"
#include "error.h"

namespace ncclffm::cpu {

namespace {

struct Graph {
  std::vector<Replay> calls;
};

struct GraphExec {
  std::shared_ptr<const Graph> graph;
  std::mutex mutex;
  Ticket last;  // the end of its latest launch: one runs at a time, whatever their streams
};

Handles<cudaGraph_t, const Graph> &graphs() {
  static auto *table = new Handles<cudaGraph_t, const Graph>(0x600000000);  // leaked, as every table of the backend
  return *table;
}

Handles<cudaGraphExec_t, GraphExec> &executables() {
  static auto *table = new Handles<cudaGraphExec_t, GraphExec>(0x700000000);  // leaked too
  return *table;
}

thread_local std::vector<std::shared_ptr<Capture>> ownCaptures;  // begun by this thread; those that are over may stay

/// Appends the calls of a graph. The stream may itself be captured: then they become part of that capture.
cudaError_t launchGraph(GraphExec &executable, const std::shared_ptr<Stream> &stream) {
  std::lock_guard<std::mutex> lock(executable.mutex);
  const bool captured = stream->capture() != nullptr;
  const Ticket &last = executable.last;
  if (!captured && last.stream != nullptr && last.stream != stream) {
    if (!append(stream, Work{[] { return cudaSuccess; }, {}, {last}})) {
      return cudaErrorInvalidResourceHandle;
    }
  }
  for (const Replay &call : executable.graph->calls) {
    const cudaError_t error = call(stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (!captured) {
    executable.last = stream->last();
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t Capture::begin(const std::shared_ptr<Stream> &origin) {
  std::shared_ptr<Capture> capture(new Capture(origin));
  if (!origin->startCapture(capture)) {
    return cudaErrorIllegalState;
  }
  {
    std::lock_guard<std::mutex> lock(capture->mutex_);
    capture->members_[origin.get()].stream = origin;
  }
  const auto over = [](const std::shared_ptr<Capture> &other) { return !other->valid(); };
  ownCaptures.erase(std::remove_if(ownCaptures.begin(), ownCaptures.end(), over), ownCaptures.end());
  ownCaptures.push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t Capture::check() const {
  switch (state_) {
    case State::kActive:
      return cudaSuccess;
    case State::kInvalidated:
      return cudaErrorStreamCaptureInvalidated;
    case State::kEnded:
      return cudaErrorCapturedEvent;  // only events still refer to it
  }
  return cudaErrorUnknown;
}

cudaError_t Capture::record(const std::vector<std::shared_ptr<Stream>> &streams, Replay replay) {
  std::lock_guard<std::mutex> lock(mutex_);
  const cudaError_t error = check();
  if (error != cudaSuccess) {
    return error;
  }
  Call call{std::move(replay), {}};
  for (const std::shared_ptr<Stream> &stream : streams) {
    Calls &last = members_[stream.get()].last;
    call.after.insert(call.after.end(), last.begin(), last.end());
    last = {calls_.size()};
  }
  calls_.push_back(std::move(call));
  return cudaSuccess;
}

cudaError_t Capture::mark(const Stream &stream, Calls *calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  const cudaError_t error = check();
  if (error == cudaSuccess) {
    *calls = members_[&stream].last;
  }
  return error;
}

cudaError_t Capture::join(const std::shared_ptr<Stream> &stream, const Calls &calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  const cudaError_t error = check();
  if (error != cudaSuccess) {
    return error;
  }
  if (stream->blocking()) {
    state_ = State::kInvalidated;
    return cudaErrorNotSupported;
  }
  if (members_.find(stream.get()) == members_.end() && !stream->startCapture(shared_from_this())) {
    state_ = State::kInvalidated;
    return cudaErrorStreamCaptureMerge;
  }
  Member &member = members_[stream.get()];
  member.stream = stream;
  member.last.insert(member.last.end(), calls.begin(), calls.end());
  return cudaSuccess;
}

cudaError_t Capture::invalidate(cudaError_t error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kActive) {
    state_ = State::kInvalidated;
  }
  return error;
}

bool Capture::valid() {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kActive;
}

void Capture::release() {
  state_ = State::kEnded;
  for (const auto &member : members_) {
    member.second.stream->endCapture();
  }
  members_.clear();
}

/// Whether every captured call is before the origin's end.
bool Capture::isJoined() const {
  std::vector<bool> before(calls_.size());
  Calls open = members_.at(origin_).last;
  while (!open.empty()) {
    const size_t call = open.back();
    open.pop_back();
    if (!before[call]) {
      before[call] = true;
      open.insert(open.end(), calls_[call].after.begin(), calls_[call].after.end());
    }
  }
  return std::find(before.begin(), before.end(), false) == before.end();
}

cudaError_t Capture::end(const std::shared_ptr<Stream> &origin, std::vector<Replay> *calls) {
  if (origin.get() != origin_) {
    return cudaErrorStreamCaptureUnmatched;
  }
  if (std::this_thread::get_id() != thread_) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const std::shared_ptr<Capture> self = shared_from_this();
  ownCaptures.erase(std::remove(ownCaptures.begin(), ownCaptures.end(), self), ownCaptures.end());
  std::lock_guard<std::mutex> lock(mutex_);
  cudaError_t error = check();
  if (error == cudaSuccess && !isJoined()) {
    error = cudaErrorStreamCaptureUnjoined;
  }
  if (error == cudaSuccess) {
    for (Call &call : calls_) {
      calls->push_back(std::move(call.replay));
    }
  }
  release();
  calls_.clear();
  return error;
}

void Capture::leave(const Stream &stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (&stream == origin_) {
    release();
    calls_.clear();
  } else if (state_ == State::kActive) {
    state_ = State::kInvalidated;
  }
}

cudaError_t checkUnsafeCall() {
  bool captures = false;
  for (const std::shared_ptr<Capture> &capture : ownCaptures) {
    captures = capture->valid() || captures;
    capture->invalidate(cudaSuccess);
  }
  return captures ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t checkNotCaptured(const std::shared_ptr<Stream> &stream) {
  const std::shared_ptr<Capture> capture = stream->capture();
  return capture == nullptr ? cudaSuccess : capture->invalidate(cudaErrorStreamCaptureUnsupported);
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    if (stream == findStream(nullptr, currentDevice())) {
      return cudaErrorStreamCaptureUnsupported;
    }
    if (mode != cudaStreamCaptureModeThreadLocal || stream->blocking()) {
      return cudaErrorNotSupported;
    }
    return Capture::begin(stream);
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  return guardCuda([&] {
    if (graph == nullptr) {
      return cudaErrorInvalidValue;
    }
    *graph = nullptr;
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    const std::shared_ptr<Capture> capture = stream->capture();
    if (capture == nullptr) {
      return cudaErrorIllegalState;
    }
    auto made = std::make_shared<Graph>();
    const cudaError_t error = capture->end(stream, &made->calls);
    if (error == cudaSuccess) {
      *graph = graphs().add(std::move(made));
    }
    return error;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  return guardCuda([&] {
    const std::shared_ptr<Stream> stream = findStream(handle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (status == nullptr) {
      return cudaErrorInvalidValue;
    }
    const std::shared_ptr<Capture> capture = stream->capture();
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->valid() ? cudaStreamCaptureStatusActive
                                 : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t handle, unsigned long long flags) {
  return guardCuda([&] {
    const std::shared_ptr<const Graph> graph = graphs().find(handle);
    if (executable == nullptr || graph == nullptr || flags != 0) {
      return cudaErrorInvalidValue;
    }
    auto made = std::make_shared<GraphExec>();
    made->graph = graph;
    *executable = executables().add(std::move(made));
    return cudaSuccess;
  });
}

// There is nothing to prepare.
cudaError_t cudaGraphUpload(cudaGraphExec_t handle, cudaStream_t streamHandle) {
  return guardCuda([&] {
    if (executables().find(handle) == nullptr) {
      return cudaErrorInvalidValue;
    }
    return findStream(streamHandle, currentDevice()) != nullptr ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t streamHandle) {
  return guardCuda([&] {
    const std::shared_ptr<GraphExec> executable = executables().find(handle);
    if (executable == nullptr) {
      return cudaErrorInvalidValue;
    }
    const std::shared_ptr<Stream> stream = findStream(streamHandle, currentDevice());
    if (stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    const cudaError_t captured = checkNotCaptured(stream);
    return captured == cudaSuccess ? launchGraph(*executable, stream) : captured;
  });
}

// What is launched goes on as it was. Of the shape only the number of calls is compared.
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t handle, cudaGraph_t graphHandle, cudaGraphExecUpdateResultInfo *info) {
  return guardCuda([&] {
    const std::shared_ptr<GraphExec> executable = executables().find(handle);
    const std::shared_ptr<const Graph> graph = graphs().find(graphHandle);
    if (executable == nullptr || graph == nullptr || info == nullptr) {
      return cudaErrorInvalidValue;
    }
    std::lock_guard<std::mutex> lock(executable->mutex);
    *info = {};
    if (executable->graph->calls.size() != graph->calls.size()) {
      info->result = cudaGraphExecUpdateErrorTopologyChanged;
      return cudaErrorGraphExecUpdateFailure;
    }
    executable->graph = graph;
    return cudaSuccess;
  });
}

// What is launched goes on.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return guardCuda([&] { return executables().remove(handle) ? cudaSuccess : cudaErrorInvalidValue; });
}

// An executable graph is a copy and stays.
cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  return guardCuda([&] { return graphs().remove(handle) ? cudaSuccess : cudaErrorInvalidValue; });
}

// Events: markers in a stream, with the time at which the worker reached them.
#include <chrono>

#include "abi.h"
#include "capture.h"
#include "device.h"
#include "error.h"
#include "stream.h"

namespace ncclffm::cpu {

namespace {

using Clock = std::chrono::steady_clock;

/// One cudaEventRecord. The worker writes reached before the ticket is complete; readers wait for the ticket first.
struct Record {
  Ticket ticket;
  Clock::time_point reached;
  std::shared_ptr<Capture> capture = {};  // of the stream; then calls are marked instead, which only it understands
  Capture::Calls calls = {};
};

class Event {
 public:
  explicit Event(bool timed) : timed_(timed) {}

  bool timed() const { return timed_; }

  std::shared_ptr<Record> record() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return record_;
  }

  void set(std::shared_ptr<Record> record) {
    std::lock_guard<std::mutex> lock(mutex_);
    record_ = std::move(record);
  }

 private:
  const bool timed_;
  mutable std::mutex mutex_;
  std::shared_ptr<Record> record_;
};

Handles<cudaEvent_t, Event> &events() {
  static auto *table = new Handles<cudaEvent_t, Event>(0x200000000);  // leaked, as every table of the backend
  return *table;
}

/// For calls about an event's work: there is none when it was recorded in a capture, which is spoilt.
cudaError_t checkNotCaptured(const Record &record) {
  return record.capture == nullptr ? cudaSuccess : record.capture->invalidate(cudaErrorCapturedEvent);
}

/// cudaStreamWaitEvent where the stream or the event's record is captured.
cudaError_t waitInCapture(const std::shared_ptr<Stream> &stream, const Record &record) {
  const std::shared_ptr<Capture> capture = stream->capture();
  if (record.capture == nullptr) {
    return capture->invalidate(cudaErrorStreamCaptureIsolation);
  }
  if (capture != nullptr && capture != record.capture) {
    (void)record.capture->invalidate(cudaErrorStreamCaptureMerge);
    return capture->invalidate(cudaErrorStreamCaptureMerge);
  }
  return record.capture->join(stream, record.calls);
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  return guardCuda([&] {
    if (event == nullptr || (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) != 0) {
      return cudaErrorInvalidValue;
    }
    *event = events().add(std::make_shared<Event>((flags & cudaEventDisableTiming) == 0));
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return guardCuda([&] { return events().remove(event) ? cudaSuccess : cudaErrorInvalidResourceHandle; });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t streamHandle) {
  return guardCuda([&] {
    const std::shared_ptr<Event> event = events().find(handle);
    const std::shared_ptr<Stream> stream = findStream(streamHandle, currentDevice());
    if (event == nullptr || stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    auto record = std::make_shared<Record>();
    record->capture = stream->capture();
    if (record->capture != nullptr) {
      const cudaError_t error = record->capture->mark(*stream, &record->calls);
      if (error == cudaSuccess) {
        event->set(std::move(record));
      }
      return error;
    }
    std::optional<Ticket> ticket = append(stream, Work{[record] {
                                            record->reached = Clock::now();
                                            return cudaSuccess;
                                          }});
    if (!ticket) {
      return cudaErrorInvalidResourceHandle;
    }
    record->ticket = std::move(*ticket);
    event->set(std::move(record));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t streamHandle, cudaEvent_t handle, unsigned int flags) {
  return guardCuda([&] {
    const std::shared_ptr<Event> event = events().find(handle);
    const std::shared_ptr<Stream> stream = findStream(streamHandle, currentDevice());
    if (event == nullptr || stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (flags != 0) {
      return cudaErrorInvalidValue;
    }
    const std::shared_ptr<Record> record = event->record();
    if (record == nullptr) {
      return cudaSuccess;
    }
    if (record->capture != nullptr || stream->capture() != nullptr) {
      return waitInCapture(stream, *record);
    }
    const Work wait{[] { return cudaSuccess; }, {}, {record->ticket}};
    return append(stream, wait) ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}

// As in CUDA, an event that was never recorded counts as complete.
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    const std::shared_ptr<Record> record = event->record();
    if (record == nullptr) {
      return cudaSuccess;
    }
    const cudaError_t captured = checkNotCaptured(*record);
    return captured != cudaSuccess ? captured : record->ticket.stream->query(record->ticket.number);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return guardCuda([&] {
    const std::shared_ptr<Event> event = events().find(handle);
    if (event == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (onStreamWorker()) {
      return cudaErrorNotPermitted;
    }
    const std::shared_ptr<Record> record = event->record();
    if (record == nullptr) {
      return cudaSuccess;
    }
    const cudaError_t captured = checkNotCaptured(*record);
    return captured != cudaSuccess ? captured : record->ticket.stream->wait(record->ticket.number);
  });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return guardCuda([&] {
    if (milliseconds == nullptr) {
      return cudaErrorInvalidValue;
    }
    Clock::time_point times[2];
    for (int i = 0; i < 2; ++i) {
      const std::shared_ptr<Event> event = events().find(i == 0 ? start : end);
      const std::shared_ptr<Record> record = event == nullptr ? nullptr : event->record();
      if (record == nullptr || !event->timed()) {
        return cudaErrorInvalidResourceHandle;
      }
      const cudaError_t captured = checkNotCaptured(*record);
      const cudaError_t state =
          captured != cudaSuccess ? captured : record->ticket.stream->query(record->ticket.number);
      if (state != cudaSuccess) {
        return state;
      }
      times[i] = record->reached;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
    return cudaSuccess;
  });
}

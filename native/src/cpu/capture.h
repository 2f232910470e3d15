// Stream capture: calls on a stream that is being captured are kept instead of run.
//
// Of each call a capture keeps what enqueues it again, in the order of the calls. That order obeys everything that a
// captured stream waited for, so a launch may put all of them on one stream: branches are right, but do not run side by
// side. Supported is what Java uses: thread-local captures of non-blocking streams.
#ifndef NCCLFFM_CPU_CAPTURE_H_
#define NCCLFFM_CPU_CAPTURE_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "stream.h"

namespace ncclffm::cpu {

/// Makes a captured call again, on another stream.
using Replay = std::function<cudaError_t(const std::shared_ptr<Stream> &)>;

class Capture : public std::enable_shared_from_this<Capture> {
 public:
  /// Indices of calls after which something comes.
  using Calls = std::vector<size_t>;

  /// Starts one of the calling thread.
  static cudaError_t begin(const std::shared_ptr<Stream> &origin);

  /// Keeps a call on some of the captured streams: after what they have, and before what they get next.
  cudaError_t record(const std::vector<std::shared_ptr<Stream>> &streams, Replay replay);

  /// What the stream has to wait for at present, for an event.
  cudaError_t mark(const Stream &stream, Calls *calls);

  /// Lets a stream wait for calls of this capture; it takes part from then on.
  cudaError_t join(const std::shared_ptr<Stream> &stream, const Calls &calls);

  /// Spoils the capture; hands the error back.
  cudaError_t invalidate(cudaError_t error);

  bool valid();

  /// Ends it: its streams run their calls again. Gives the calls unless the capture is not whole.
  cudaError_t end(const std::shared_ptr<Stream> &origin, std::vector<Replay> *calls);

  /// The stream is being destroyed: a capture that began on it is over, any other is spoilt.
  void leave(const Stream &stream);

 private:
  enum class State { kActive, kInvalidated, kEnded };

  struct Call {
    Replay replay;
    Calls after;
  };

  struct Member {
    std::shared_ptr<Stream> stream;
    Calls last;  // what the stream's next call comes after
  };

  explicit Capture(const std::shared_ptr<Stream> &origin) : origin_(origin.get()) {}
  cudaError_t check() const;
  void release();
  bool isJoined() const;

  const Stream *const origin_;
  const std::thread::id thread_ = std::this_thread::get_id();
  std::mutex mutex_;
  State state_ = State::kActive;
  std::vector<Call> calls_;
  std::map<const Stream *, Member> members_;
};

/// For calls that no capture would see, as an allocation: spoils a capture of the calling thread and returns
/// cudaErrorStreamCaptureUnsupported. cudaSuccess where there is none.
cudaError_t checkUnsafeCall();

/// For calls that wait for a stream or ask how far it is: as checkUnsafeCall(), for a capture of the stream.
cudaError_t checkNotCaptured(const std::shared_ptr<Stream> &stream);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_CAPTURE_H_

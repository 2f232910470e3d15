// What an ncclComm_t stands for: a communicator that exists or is being made, its configuration, and whether a call on
// a non-blocking one is still under way.
#ifndef NCCLFFM_CPU_OPEN_COMM_H_
#define NCCLFFM_CPU_OPEN_COMM_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "abi.h"
#include "communicator.h"
#include "handles.h"

namespace ncclffm::cpu {

/// A configuration in which every field is undefined.
ncclConfig_t undefinedConfig();

/// Throws NcclFailure(ncclInvalidArgument) for a struct that was not initialised or a value that NCCL refuses. NULL is
/// the default. Fields that the caller's older struct lacks are undefined.
ncclConfig_t checkedConfig(const char *function, const ncclConfig_t *config);

class OpenComm {
 public:
  explicit OpenComm(const ncclConfig_t &config);

  bool blocking() const { return config_.blocking != 0; }
  const ncclConfig_t &config() const { return config_; }

  /// Null until it has been made.
  std::shared_ptr<Communicator> comm() const;
  void made(std::shared_ptr<Communicator> comm);

  /// A call on a non-blocking communicator goes on in the background, and ends. Its failure stays.
  void begin();
  void end(ncclResult_t result, const std::string &text);

  /// ncclSuccess, ncclInProgress, or why a call in the background has failed.
  ncclResult_t state() const;
  std::string text() const;

  /// Ends waits for ranks that have not come yet, and waits for the call in the background.
  void abandon();
  const std::atomic<bool> &abandoned() const { return abandoned_; }

  /// Reads config.commName through the caller's pointer, as NCCL does until the communicator is destroyed. Empty, or
  /// what is wrong with it.
  std::string checkName() const;

 private:
  const ncclConfig_t config_;
  const std::string name_;  // as it was
  std::atomic<bool> abandoned_{false};
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<Communicator> comm_;
  bool running_ = false;
  ncclResult_t result_ = ncclSuccess;
  std::string text_;
};

/// The open communicators of this process.
Handles<ncclComm_t, OpenComm> &communicators();

/// The object of a handle; throws NcclFailure(ncclInvalidArgument) when it is NULL or not open.
std::shared_ptr<OpenComm> openHandle(const char *function, ncclComm_t handle);

/// openHandle() that can be used: as NCCL, refuses while a call is in progress (ncclInvalidArgument) and after a call
/// in the background has failed (its result).
std::shared_ptr<OpenComm> readyHandle(const char *function, ncclComm_t handle);

/// The communicator of readyHandle().
std::shared_ptr<Communicator> openCommunicator(const char *function, ncclComm_t handle);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_OPEN_COMM_H_

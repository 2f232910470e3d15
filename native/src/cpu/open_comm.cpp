// Configurations, handles, and the state of calls in the background.
#include "open_comm.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "error.h"

namespace ncclffm::cpu {

ncclConfig_t undefinedConfig() {
  ncclConfig_t config = {};
  config.size = sizeof(config);
  config.magic = NCCL_API_MAGIC;
  for (int *field : {&config.blocking, &config.cgaClusterSize, &config.minCTAs, &config.maxCTAs, &config.splitShare,
                     &config.trafficClass, &config.collnetEnable, &config.CTAPolicy, &config.shrinkShare,
                     &config.nvlsCTAs, &config.nChannelsPerNetPeer, &config.nvlinkCentricSched, &config.graphUsageMode,
                     &config.numRmaCtx, &config.maxP2pPeers, &config.graphStreamOrdering}) {
    *field = NCCL_CONFIG_UNDEF_INT;
  }
  return config;
}

ncclConfig_t checkedConfig(const char *function, const ncclConfig_t *config) {
  ncclConfig_t result = undefinedConfig();
  if (config == nullptr) {
    return result;
  }
  if (config->magic != NCCL_API_MAGIC || config->size < offsetof(ncclConfig_t, cgaClusterSize)) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: config was not initialised with NCCL_CONFIG_INITIALIZER", function));
  }
  std::memcpy(static_cast<void *>(&result), config, std::min(config->size, sizeof(result)));
  if (result.blocking != NCCL_CONFIG_UNDEF_INT && result.blocking != 0 && result.blocking != 1) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: config.blocking is %d, must be 0 or 1", function, result.blocking));
  }
  return result;
}

OpenComm::OpenComm(const ncclConfig_t &config)
    : config_(config), name_(config.commName == nullptr ? "" : config.commName) {}

std::shared_ptr<Communicator> OpenComm::comm() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return comm_;
}

void OpenComm::made(std::shared_ptr<Communicator> comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  comm_ = std::move(comm);
}

void OpenComm::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = true;
}

void OpenComm::end(ncclResult_t result, const std::string &text) {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = false;
  if (result_ == ncclSuccess) {
    result_ = result;
    text_ = text;
  }
  ended_.notify_all();
}

ncclResult_t OpenComm::state() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_ ? ncclInProgress : result_;
}

std::string OpenComm::text() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

void OpenComm::abandon() {
  abandoned_.store(true);
  std::unique_lock<std::mutex> lock(mutex_);
  // What runs looks at the flag every few milliseconds; the bound is for a stopped machine only.
  ended_.wait_for(lock, std::chrono::seconds(10), [&] { return !running_; });
}

std::string OpenComm::checkName() const {
  if (config_.commName == nullptr || name_ == config_.commName) {
    return "";
  }
  return format(
      "config.commName was \"%s\" and is \"%.64s\" now: its memory must live and stay unchanged until the "
      "communicator is destroyed",
      name_.c_str(), config_.commName);
}

Handles<ncclComm_t, OpenComm> &communicators() {
  static auto *table = new Handles<ncclComm_t, OpenComm>(0x300000000);  // leaked, as every table of the backend
  return *table;
}

std::shared_ptr<OpenComm> openHandle(const char *function, ncclComm_t handle) {
  if (handle == nullptr) {
    throw NcclFailure(ncclInvalidArgument, format("%s: comm is NULL", function));
  }
  std::shared_ptr<OpenComm> open = communicators().find(handle);
  if (open == nullptr) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: communicator %p is not open (destroyed, aborted or never created)", function,
                             static_cast<void *>(handle)));
  }
  return open;
}

std::shared_ptr<OpenComm> readyHandle(const char *function, ncclComm_t handle) {
  std::shared_ptr<OpenComm> open = openHandle(function, handle);
  const ncclResult_t state = open->state();
  if (state == ncclInProgress) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: an earlier call on this communicator is still in progress; wait until "
                             "ncclCommGetAsyncError stops saying ncclInProgress",
                             function));
  }
  if (state != ncclSuccess) {
    throw NcclFailure(state, open->text());
  }
  return open;
}

std::shared_ptr<Communicator> openCommunicator(const char *function, ncclComm_t handle) {
  return readyHandle(function, handle)->comm();
}

}  // namespace ncclffm::cpu

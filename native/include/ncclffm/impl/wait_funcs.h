// Bodies of wait.h.
#ifndef NCCLFFM_IMPL_WAIT_FUNCS_H_
#define NCCLFFM_IMPL_WAIT_FUNCS_H_

namespace ncclffm {

// A poll takes about 0.3 us on a GPU. The clock, the failure word and above all the abort word, which is a read over
// PCIe, are looked at only once in so many polls.
#ifdef __CUDACC__
constexpr uint32_t kPollsPerCheck = 256;
#else
constexpr uint32_t kPollsPerCheck = 64;
#endif

// A wait that has lasted this long (about 1 ms) is not a matter of latency any more: it leaves the processor to others.
constexpr uint32_t kPollsBeforePause = 4096;
#ifdef __CUDACC__
constexpr uint32_t kPauseNs = 200;
constexpr bool kYieldBetweenPolls = false;
#else
constexpr uint32_t kPauseNs = 50000;
constexpr bool kYieldBetweenPolls = true;  // the peer may need this very processor
#endif

NCCLFFM_DEVICE int laneOf(const DevComm &comm, int channel) {
  return comm.lanes == nullptr ? 0 : channel / comm.laneChannels;
}

NCCLFFM_DEVICE uint32_t *failedWord(const DevComm &comm, int channel) {
  return comm.lanes == nullptr ? &comm.channels[0].failed : &comm.lanes[laneOf(comm, channel)].failed;
}

NCCLFFM_DEVICE ncclResult_t failureOf(const DevComm &comm, int channel) {
  return static_cast<ncclResult_t>(loadRelaxedGpu(failedWord(comm, channel)));
}

// Names the task that failed, and what the peer came to instead; see impl/task_record.h.
NCCLFFM_DEVICE_CALL void recordTasks(const DevComm &comm, Site site, ncclResult_t code, int peer, Status *status);

NCCLFFM_DEVICE_CALL ncclResult_t fail(const DevComm &comm, Site site, ncclResult_t code, int peer, uint64_t waitedNs) {
  // The claim is a word in device memory: few PCs have atomics over PCIe, which one in the status record would need.
  uint32_t first = compareAndSwapRelaxedGpu(failedWord(comm, site.channel), ncclSuccess, code);
  if (first != ncclSuccess) return static_cast<ncclResult_t>(first);
  Status *status = comm.status + laneOf(comm, site.channel);
  storeRelaxedSys(&status->code, static_cast<uint32_t>(code));
  storeRelaxedSys(&status->function, static_cast<uint32_t>(site.function));
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&status->rank), static_cast<uint32_t>(comm.rank));
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&status->peer), static_cast<uint32_t>(peer));
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&status->channel), static_cast<uint32_t>(site.channel));
  storeRelaxedSys(&status->epoch, site.epoch);
  storeRelaxedSys(&status->waitedNs, waitedNs);
  if (comm.lanes != nullptr) recordTasks(comm, site, code, peer, status);
  storeReleaseSys(&status->ready, 1);
  return code;
}

// What ends a wait before it is over. letter: of the peer, or null.
NCCLFFM_DEVICE_CALL ncclResult_t reasonToStop(const DevComm &comm, Site site, const uint64_t *letter, int peer,
                                              uint64_t waitedNs) {
  ncclResult_t failure = failureOf(comm, site.channel);
  if (failure != ncclSuccess) return failure;
  if (comm.lanes != nullptr && comm.channels != nullptr) {  // a lane ends with its communicator
    failure = static_cast<ncclResult_t>(loadRelaxedGpu(&comm.channels[0].failed));
    if (failure != ncclSuccess) return fail(comm, site, failure, peer, waitedNs);
  }
  if (holds(Rule::kCompareHash) && letter != nullptr) {
    uint64_t epochAndHash = loadRelaxedSys(letter);
    if (static_cast<uint32_t>(epochAndHash) == site.epoch && static_cast<uint32_t>(epochAndHash >> 32) != site.hash) {
      return fail(comm, site, ncclInvalidUsage, peer, waitedNs);
    }
  }
  if (loadRelaxedSys(&comm.status[laneOf(comm, site.channel)].abort) != 0)
    return fail(comm, site, ncclRemoteError, peer, waitedNs);
  const uint64_t timeoutNs = site.function == ncclFfmFunctionGridSync ? 2 * comm.timeoutNs : comm.timeoutNs;
  if (timeoutNs != 0 && waitedNs >= timeoutNs) return fail(comm, site, ncclTimeout, peer, waitedNs);
  return ncclSuccess;
}

template <class Lanes, class LetterOf, class Missing>
NCCLFFM_DEVICE ncclResult_t waitFor(Lanes lanes, const DevComm &comm, const Site &site, LetterOf letterOf,
                                    Missing missing) {
  uint64_t startNs = 0;
  for (uint32_t polls = 1;; ++polls) {
    int peer = missing();
    if (lanes.all(peer == kNobody)) return ncclSuccess;
    if (polls % kPollsPerCheck == 0) {
      ncclResult_t reason = ncclSuccess;
      if (peer != kNobody) {
        uint64_t now = nowNs();
        if (startNs == 0) startNs = now;
        reason = reasonToStop(comm, site, letterOf(peer), peer, now - startNs);
      }
      reason = static_cast<ncclResult_t>(lanes.max(reason));
      if (reason != ncclSuccess) return reason;
    }
    if (polls >= kPollsBeforePause) {
      pauseNs(kPauseNs);
    } else if (kYieldBetweenPolls) {
      pauseNs(0);
    }
  }
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_WAIT_FUNCS_H_

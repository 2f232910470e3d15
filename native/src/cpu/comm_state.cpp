// Revoking, suspending and resuming communicators, and their memory.
#include "comm_making.h"
#include "communicator.h"
#include "error.h"
#include "group.h"
#include "open_comm.h"

namespace ncclffm::cpu {

namespace {

/// Suspends or resumes on all ranks together.
ncclResult_t changeSuspension(const char *function, ncclComm_t handle, Function meeting, bool suspend) {
  notOnWorker(function);
  const std::shared_ptr<OpenComm> open = readyHandle(function, handle);
  const std::shared_ptr<Communicator> comm = open->comm();
  if (comm->suspended() == suspend) {
    throw NcclFailure(ncclInvalidUsage, format("%s: the communicator is %ssuspended", function, suspend ? "" : "not "));
  }
  if (suspend) {
    comm->checkUsable(function);
  }
  Descriptor descriptor;
  descriptor.function = meeting;
  return submit(Task{function,
                     open,
                     {[=] {
                        comm->flush();
                        comm->arrive(comm->hostCursor(), descriptor);
                      },
                      [=] {
                        comm->meetAll(function);
                        comm->setSuspended(suspend);
                      }}});
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

// Other ranks fail with ncclRemoteError until they revoke the communicator too.
ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  return inGroup(guardNccl("ncclCommRevoke", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    notOnWorker("ncclCommRevoke");
    const std::shared_ptr<OpenComm> open = readyHandle("ncclCommRevoke", handle);
    const std::shared_ptr<Communicator> comm = open->comm();
    if (flags != NCCL_REVOKE_DEFAULT || comm->finalized()) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclCommRevoke: revokeFlags is 0x%x, must be 0, or the communicator has been revoked "
                               "or finalized before",
                               flags));
    }
    comm->finalize();
    return submit(Task{"ncclCommRevoke", open, {[comm] {
                         comm->terminate("has revoked");
                         comm->flush();
                         comm->forgiveStreams();
                         comm->revoke();
                       }}});
  }));
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  return inGroup(guardNccl("ncclCommSuspend", [&] {
    if ((flags & NCCL_SUSPEND_MEM) == 0) {
      (void)openCommunicator("ncclCommSuspend", comm);
      return ncclSuccess;  // nothing to release
    }
    return changeSuspension("ncclCommSuspend", comm, Function::kSuspend, true);
  }));
}

ncclResult_t ncclCommResume(ncclComm_t comm) {
  return inGroup(
      guardNccl("ncclCommResume", [&] { return changeSuspension("ncclCommResume", comm, Function::kResume, false); }));
}

// What the ranks share is needed to resume, so it stays; nothing else is allocated for a communicator.
ncclResult_t ncclCommMemStats(ncclComm_t handle, ncclCommMemStat_t stat, uint64_t *value) {
  return guardNccl("ncclCommMemStats", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommMemStats", handle);
    if (value == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommMemStats: value is NULL");
    }
    switch (stat) {
      case ncclStatGpuMemSuspend:
        *value = 0;
        return ncclSuccess;
      case ncclStatGpuMemSuspended:
        *value = comm->suspended() ? 1 : 0;
        return ncclSuccess;
      case ncclStatGpuMemPersist:
      case ncclStatGpuMemTotal:
        *value = comm->memoryBytes();
        return ncclSuccess;
    }
    throw NcclFailure(ncclInvalidArgument, format("ncclCommMemStats: stat %d is not an ncclCommMemStat_t", stat));
  });
}

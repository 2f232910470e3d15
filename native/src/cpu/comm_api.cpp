// The exported functions that create, ask and end communicators.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <vector>

#include "comm_making.h"
#include "communicator.h"
#include "device.h"
#include "error.h"
#include "group.h"
#include "red_op.h"
#include "registration.h"
#include "rendezvous.h"
#include "window.h"

namespace ncclffm::cpu {

Task makeCommunicator(const char *function, std::shared_ptr<OpenComm> open, ncclComm_t *comm, const JoinPlan &plan) {
  auto join = std::make_shared<std::optional<Join>>();
  const auto publish = [open, comm] { *comm = communicators().add(open); };
  Task task{function, open};
  task.stages.push_back([join, plan] { join->emplace(plan.id, plan.nRanks, plan.rank, plan.device); });
  task.stages.push_back([join, plan, open] {
    open->made(std::make_shared<Communicator>(plan.rank, plan.device, (*join)->finish(open->abandoned())));
    join->reset();
  });
  if (open->blocking()) {
    task.stages.push_back(publish);
  } else {
    task.inAdvance = publish;
  }
  return task;
}

void notOnWorker(const char *function) {
  if (onStreamWorker()) {
    throw NcclFailure(ncclInvalidUsage, format("%s: not allowed in a host function", function));
  }
}

namespace {

void closeResources(const Communicator &comm) {
  closeWindows(comm);
  closeRedOps(comm);
  closeRegistrations(comm);
}

ncclResult_t initRank(const char *function, ncclComm_t *comm, int nRanks, const ncclUniqueId *ids, int nIds, int rank,
                      const ncclConfig_t *config) {
  return inGroup(guardNccl(function, [&] {
    notOnWorker(function);
    const ncclConfig_t checked = checkedConfig(function, config);
    if (comm == nullptr) {
      throw NcclFailure(ncclInvalidArgument, format("%s: comm is NULL", function));
    }
    *comm = nullptr;
    if (nRanks < 1 || nRanks > kMaxRanks) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: nranks is %d; the CPU backend takes 1 to %d", function, nRanks, kMaxRanks));
    }
    if (rank < 0 || rank >= nRanks) {
      throw NcclFailure(ncclInvalidArgument, format("%s: rank %d is not in [0, %d)", function, rank, nRanks));
    }
    if (ids == nullptr || nIds < 1 || nIds > nRanks) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: commIds is NULL or nId (%d) is not in [1, %d]", function, nIds, nRanks));
    }
    const JoinPlan plan = {ids[0], nRanks, rank, currentDevice()};
    Task task = makeCommunicator(function, std::make_shared<OpenComm>(checked), comm, plan);
    if (rank == 0 && nIds > 1) {
      // All ranks meet at the first id. The others are used up here, as they are by NCCL: each by a world of one rank.
      task.stages[0] = [plan, first = task.stages[0], others = std::vector<ncclUniqueId>(ids + 1, ids + nIds)] {
        const std::atomic<bool> never{false};
        for (const ncclUniqueId &id : others) {
          (void)Join(id, 1, 0, plan.device).finish(never);
        }
        first();
      };
    }
    return submit(std::move(task));
  }));
}

/// For functions that store one number about a communicator.
template <class Get>
ncclResult_t query(const char *function, ncclComm_t handle, int *result, Get get) {
  return guardNccl(function, [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator(function, handle);
    if (result == nullptr) {
      throw NcclFailure(ncclInvalidArgument, format("%s: the result pointer is NULL", function));
    }
    *result = get(*comm);
    return ncclSuccess;
  });
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  return guardNccl("ncclGetUniqueId", [&] {
    if (id == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
    }
    *id = openRendezvous();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nRanks, ncclUniqueId id, int rank) {
  return initRank("ncclCommInitRank", comm, nRanks, &id, 1, rank, nullptr);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nRanks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return initRank("ncclCommInitRankConfig", comm, nRanks, &id, 1, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nRanks, int rank, int nIds, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return initRank("ncclCommInitRankScalable", comm, nRanks, ids, nIds, rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int nDevices, const int *devices) {
  return guardNccl("ncclCommInitAll", [&] {
    if (comms == nullptr || nDevices < 1 || nDevices > kMaxRanks) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclCommInitAll: comm is NULL or ndev (%d) is not in [1, %d]", nDevices, kMaxRanks));
    }
    std::vector<int> of;
    for (int rank = 0; rank < nDevices; ++rank) {
      const int device = devices == nullptr ? rank : devices[rank];
      if (device < 0 || device >= deviceCount()) {
        throw NcclFailure(
            ncclInvalidArgument,
            format("ncclCommInitAll: device %d of rank %d is not one of the %d devices", device, rank, deviceCount()));
      }
      of.push_back(device);
    }
    const ncclUniqueId id = openRendezvous();
    std::vector<Task> tasks;
    for (int rank = 0; rank < nDevices; ++rank) {
      tasks.push_back(makeCommunicator("ncclCommInitAll", std::make_shared<OpenComm>(undefinedConfig()), &comms[rank],
                                       {id, nDevices, rank, of[static_cast<size_t>(rank)]}));
    }
    runTasks(std::move(tasks));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  return inGroup(guardNccl("ncclCommFinalize", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    const std::shared_ptr<OpenComm> open = readyHandle("ncclCommFinalize", handle);
    notOnWorker("ncclCommFinalize");
    const std::shared_ptr<Communicator> comm = open->comm();
    if (comm->finalized()) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommFinalize: the communicator has been finalized or revoked before");
    }
    comm->finalize();
    return submit(Task{"ncclCommFinalize", open, {[comm] {
                         comm->flush();
                         if (comm->error() != ncclSuccess) {
                           throw NcclFailure(comm->error(), comm->errorText());
                         }
                       }}});
  }));
}

// The name is read when all is over, as NCCL does: memory that the caller freed too early is noticed here.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  return guardNccl("ncclCommDestroy", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    notOnWorker("ncclCommDestroy");
    const std::shared_ptr<OpenComm> open = readyHandle("ncclCommDestroy", handle);
    const std::shared_ptr<Communicator> comm = open->comm();
    comm->leave();  // the handle stays valid meanwhile, so that another thread can abort
    closeResources(*comm);
    if (communicators().remove(handle) == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommDestroy: another thread closed the communicator meanwhile");
    }
    const std::string wrong = open->checkName();
    return wrong.empty() ? ncclSuccess : failNccl(ncclInternalError, "ncclCommDestroy: " + wrong);
  });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  return guardNccl("ncclCommAbort", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    notOnWorker("ncclCommAbort");
    const std::shared_ptr<OpenComm> open = openHandle("ncclCommAbort", handle);
    (void)communicators().remove(handle);
    if (open->comm() != nullptr) {
      open->comm()->abort();
    }
    open->abandon();
    if (const std::shared_ptr<Communicator> comm = open->comm()) {
      comm->abort();  // made meanwhile
      comm->forgiveStreams();
      closeResources(*comm);
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
  return guardNccl("ncclCommGetAsyncError", [&] {
    const std::shared_ptr<OpenComm> open = openHandle("ncclCommGetAsyncError", handle);
    if (error == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
    }
    *error = open->state();
    if (*error == ncclSuccess) {
      const std::shared_ptr<Communicator> comm = open->comm();
      *error = comm->revoked() ? ncclSuccess : comm->checkPeers();
      if (*error != ncclSuccess) {
        (void)failNccl(*error, comm->errorText());
      }
    } else if (*error != ncclInProgress) {
      (void)failNccl(*error, open->text());
    }
    return ncclSuccess;
  });
}

// A failed communicator tells why, also to a thread that has only met the failure as an error of the stream.
const char *ncclGetLastError(ncclComm_t handle) {
  (void)guardNccl("ncclGetLastError", [&] {
    const std::shared_ptr<OpenComm> open = communicators().find(handle);
    const std::shared_ptr<Communicator> comm = open == nullptr ? nullptr : open->comm();
    if (open != nullptr && open->state() != ncclSuccess && open->state() != ncclInProgress) {
      return failNccl(open->state(), open->text());
    }
    return comm == nullptr || comm->error() == ncclSuccess ? ncclSuccess : failNccl(comm->error(), comm->errorText());
  });
  return lastNcclText();
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
  return query("ncclCommCount", comm, count, [](const Communicator &c) { return c.nRanks(); });
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) {
  return query("ncclCommCuDevice", comm, device, [](const Communicator &c) { return c.device(); });
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
  return query("ncclCommUserRank", comm, rank, [](const Communicator &c) { return c.rank(); });
}

// The struct of an older NCCL ends earlier: only what fits into props->size is written.
ncclResult_t ncclCommQueryProperties(ncclComm_t handle, ncclCommProperties_t *properties) {
  return guardNccl("ncclCommQueryProperties", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommQueryProperties", handle);
    if (properties == nullptr || properties->magic != NCCL_API_MAGIC ||
        properties->size < offsetof(ncclCommProperties_t, ginType)) {
      throw NcclFailure(ncclInvalidArgument,
                        "ncclCommQueryProperties: props is NULL or was not initialised with "
                        "NCCL_COMM_PROPERTIES_INITIALIZER");
    }
    ncclCommProperties_t filled = {};
    filled.size = properties->size;
    filled.magic = properties->magic;
    filled.version = properties->version;
    filled.rank = comm->rank();
    filled.nRanks = comm->nRanks();
    filled.cudaDev = comm->device();
    filled.nvmlDev = comm->device();
    filled.deviceApiSupport = true;
    filled.nLsaTeams = 1;
    filled.hostRmaSupport = true;
    std::memcpy(static_cast<void *>(properties), &filled, std::min(properties->size, sizeof(filled)));
    return ncclSuccess;
  });
}

// All ranks are on one host and reach each other's memory: one team. A communicator that is not open has an empty one.
ncclTeam_t ncclTeamWorld(ncclComm_t handle) {
  const std::shared_ptr<OpenComm> open = communicators().find(handle);
  const std::shared_ptr<Communicator> comm = open == nullptr ? nullptr : open->comm();
  return comm == nullptr ? ncclTeam_t{0, 0, 0} : ncclTeam_t{comm->nRanks(), comm->rank(), 1};
}

ncclTeam_t ncclTeamLsa(ncclComm_t handle) {
  return ncclTeamWorld(handle);
}

ncclTeam_t ncclTeamRail(ncclComm_t handle) {
  const ncclTeam_t lsa = ncclTeamLsa(handle);
  return lsa.nRanks == 0 ? lsa : ncclTeam_t{1, 0, lsa.nRanks};
}

int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  return ncclTeamWorld(comm).rank + (rank - team.rank) * team.stride;
}

int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  return ncclTeamLsa(comm).rank + (rank - team.rank) * team.stride;
}

// There is no log whose settings could be read again.
void ncclResetDebugInit() {}

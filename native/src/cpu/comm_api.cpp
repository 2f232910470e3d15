// The exported functions that create, ask and end communicators.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "communicator.h"
#include "device.h"
#include "error.h"
#include "group.h"
#include "rendezvous.h"
#include "window.h"

namespace ncclffm::cpu {

void joinAll(const std::vector<JoinRequest> &requests) {
  std::vector<Join> joins;
  for (const JoinRequest &request : requests) {
    joins.emplace_back(request.id, request.nRanks, request.rank, request.device);
  }
  std::vector<std::shared_ptr<Communicator>> comms;
  for (size_t i = 0; i < requests.size(); ++i) {
    comms.push_back(std::make_shared<Communicator>(requests[i].rank, requests[i].device, joins[i].finish()));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    *requests[i].comm = communicators().add(comms[i]);
  }
}

namespace {

/// Only what this backend can honour or may ignore; a struct that was not initialised is told apart by its magic
/// number.
void checkConfig(const ncclConfig_t *config) {
  if (config == nullptr) {
    return;
  }
  if (config->magic != NCCL_API_MAGIC || config->size < offsetof(ncclConfig_t, cgaClusterSize)) {
    throw NcclFailure(ncclInvalidArgument,
                      "ncclCommInitRankConfig: config was not initialised with NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1) {
    throw NcclFailure(ncclInvalidArgument,
                      format("ncclCommInitRankConfig: config.blocking is %d, must be 0 or 1", config->blocking));
  }
}

ncclResult_t initRank(ncclComm_t *comm, int nRanks, const ncclUniqueId &id, int rank, int device) {
  if (comm == nullptr) {
    throw NcclFailure(ncclInvalidArgument, "ncclCommInitRank: comm is NULL");
  }
  *comm = nullptr;
  if (nRanks < 1 || nRanks > kMaxRanks) {
    throw NcclFailure(ncclInvalidArgument,
                      format("ncclCommInitRank: nranks is %d; the CPU backend takes 1 to %d", nRanks, kMaxRanks));
  }
  if (rank < 0 || rank >= nRanks) {
    throw NcclFailure(ncclInvalidArgument, format("ncclCommInitRank: rank %d is not in [0, %d)", rank, nRanks));
  }
  return submit(JoinRequest{comm, nRanks, id, rank, device});
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

void notOnWorker(const char *function) {
  if (onStreamWorker()) {
    throw NcclFailure(ncclInvalidUsage, format("%s: not allowed in a host function", function));
  }
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
  return ncclCommInitRankConfig(comm, nRanks, id, rank, nullptr);
}

// A non-blocking communicator (config.blocking = 0) is ready when the call returns, which NCCL's contract allows.
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nRanks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return inGroup(guardNccl("ncclCommInitRank", [&] {
    notOnWorker("ncclCommInitRank");
    checkConfig(config);
    return initRank(comm, nRanks, id, rank, currentDevice());
  }));
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int nDevices, const int *devices) {
  return guardNccl("ncclCommInitAll", [&] {
    if (comms == nullptr || nDevices < 1 || nDevices > kMaxRanks) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclCommInitAll: comm is NULL or ndev (%d) is not in [1, %d]", nDevices, kMaxRanks));
    }
    std::vector<JoinRequest> requests;
    for (int rank = 0; rank < nDevices; ++rank) {
      const int device = devices == nullptr ? rank : devices[rank];
      if (device < 0 || device >= deviceCount()) {
        throw NcclFailure(
            ncclInvalidArgument,
            format("ncclCommInitAll: device %d of rank %d is not one of the %d devices", device, rank, deviceCount()));
      }
      requests.push_back({&comms[rank], nDevices, {}, rank, device});
    }
    const ncclUniqueId id = openRendezvous();
    for (JoinRequest &request : requests) {
      request.id = id;
    }
    joinAll(requests);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  return guardNccl("ncclCommFinalize", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommFinalize", handle);
    notOnWorker("ncclCommFinalize");
    if (comm->finalized()) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommFinalize: the communicator has been finalized before");
    }
    comm->finalize();
    comm->flush();
    return comm->error() == ncclSuccess ? ncclSuccess : failNccl(comm->error(), comm->errorText());
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  return guardNccl("ncclCommDestroy", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    notOnWorker("ncclCommDestroy");
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommDestroy", handle);
    comm->leave();  // the handle stays valid meanwhile, so that another thread can abort
    closeWindows(*comm);
    if (communicators().remove(handle) == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommDestroy: another thread closed the communicator meanwhile");
    }
    return ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  return guardNccl("ncclCommAbort", [&] {
    if (handle == nullptr) {
      return ncclSuccess;
    }
    notOnWorker("ncclCommAbort");
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommAbort", handle);
    (void)communicators().remove(handle);
    comm->abort();
    comm->forgiveStreams();
    closeWindows(*comm);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *error) {
  return guardNccl("ncclCommGetAsyncError", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommGetAsyncError", handle);
    if (error == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
    }
    *error = comm->checkPeers();
    if (*error != ncclSuccess) {
      (void)failNccl(*error, comm->errorText());
    }
    return ncclSuccess;
  });
}

// A failed communicator tells why, also to a thread that has only met the failure as an error of the stream.
const char *ncclGetLastError(ncclComm_t handle) {
  (void)guardNccl("ncclGetLastError", [&] {
    const std::shared_ptr<Communicator> comm = communicators().find(handle);
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
    std::memcpy(static_cast<void *>(properties), &filled, std::min(properties->size, sizeof(filled)));
    return ncclSuccess;
  });
}

// All ranks are on one host and reach each other's memory: one team. A communicator that is not open has an empty one.
ncclTeam_t ncclTeamWorld(ncclComm_t handle) {
  const std::shared_ptr<Communicator> comm = communicators().find(handle);
  return comm == nullptr ? ncclTeam_t{0, 0, 0} : ncclTeam_t{comm->nRanks(), comm->rank(), 1};
}

ncclTeam_t ncclTeamLsa(ncclComm_t handle) {
  return ncclTeamWorld(handle);
}

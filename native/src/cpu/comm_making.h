// How communicators come into being, whichever function asks for them.
#ifndef NCCLFFM_CPU_COMM_MAKING_H_
#define NCCLFFM_CPU_COMM_MAKING_H_

#include <memory>

#include "abi.h"
#include "group.h"
#include "open_comm.h"

namespace ncclffm::cpu {

struct JoinPlan {
  ncclUniqueId id;
  int nRanks;
  int rank;
  int device;
};

/// Meets the other ranks at the id. Writes *comm when all have come or, for a non-blocking communicator, in advance.
Task makeCommunicator(const char *function, std::shared_ptr<OpenComm> open, ncclComm_t *comm, const JoinPlan &plan);

/// Throws NcclFailure in a host function of a stream, where CUDA forbids calls that wait.
void notOnWorker(const char *function);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_COMM_MAKING_H_

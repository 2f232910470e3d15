// Group semantics: what a thread asks for between ncclGroupStart and ncclGroupEnd is carried out together at the end.
#ifndef NCCLFFM_CPU_GROUP_H_
#define NCCLFFM_CPU_GROUP_H_

#include "abi.h"
#include "operation.h"

namespace ncclffm::cpu {

struct JoinRequest {
  ncclComm_t *comm;  // written when the join has succeeded
  int nRanks;
  ncclUniqueId id;
  int rank;
  int device;
};

struct WindowRequest {
  std::shared_ptr<Communicator> comm;
  Descriptor descriptor;
  ncclWindow_t *window;  // written when all ranks have registered
};

/// Carries a request out now or, inside a group, at its end. All may throw NcclFailure.
ncclResult_t submit(Operation operation);
ncclResult_t submit(const JoinRequest &request);
ncclResult_t submit(WindowRequest request);

/// Hands a result through; an error inside a group also fails the group, whose end returns it and starts nothing.
ncclResult_t inGroup(ncclResult_t result);

/// Introduces all the ranks, then waits for their communicators. All or none.
void joinAll(const std::vector<JoinRequest> &requests);

/// Registers windows; those of one communicator in order, those of several side by side.
void registerAll(std::vector<WindowRequest> requests);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_GROUP_H_

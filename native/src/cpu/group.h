// Group semantics: what a thread asks for between ncclGroupStart and ncclGroupEnd is carried out together at the end;
// in the background for non-blocking communicators.
#ifndef NCCLFFM_CPU_GROUP_H_
#define NCCLFFM_CPU_GROUP_H_

#include <functional>
#include <vector>

#include "abi.h"
#include "open_comm.h"
#include "operation.h"

namespace ncclffm::cpu {

/// A call that must meet other ranks before it is complete: creation, registration, finalization. Stage n of all tasks
/// of a group runs before stage n + 1 of any, so that one thread can speak for several ranks: a stage may only wait for
/// what other ranks do in earlier stages.
struct Task {
  const char *function;
  std::shared_ptr<OpenComm> open;  // in progress meanwhile if it is non-blocking; its tasks run one after the other
  std::vector<std::function<void()>> stages = {};  // may throw NcclFailure
  std::function<void()> inAdvance = {};  // on the caller's thread before a non-blocking call returns; may be empty
};

/// Carries a request out now or, inside a group, at its end. Throws NcclFailure. ncclInProgress for a non-blocking
/// communicator outside a group.
ncclResult_t submit(Operation operation);
ncclResult_t submit(Task task);

/// For functions that return ncclSuccess also where they go on in the background, as NCCL's split, shrink, grow and
/// window registration do: only ncclCommGetAsyncError says so.
ncclResult_t submitUntold(Task task);

/// Hands a result through; an error inside a group also fails the group, whose end returns it and starts nothing.
ncclResult_t inGroup(ncclResult_t result);

/// Runs tasks on this thread.
void runTasks(std::vector<Task> tasks);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_GROUP_H_

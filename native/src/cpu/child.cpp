// Communicators made from communicators: split, shrink and grow. The ranks of the new one find each other by a unique
// id that one of them offers in the control segment of the old one; after that it is a communicator like any other.
#include <algorithm>
#include <optional>
#include <vector>

#include "comm_making.h"
#include "communicator.h"
#include "device.h"
#include "error.h"
#include "group.h"
#include "open_comm.h"
#include "operation.h"
#include "rendezvous.h"

namespace ncclffm::cpu {

namespace {

constexpr const char *kSplit = "ncclCommSplit";
constexpr const char *kShrink = "ncclCommShrink";
constexpr const char *kGrow = "ncclCommGrow";

std::shared_ptr<OpenComm> newChild(const char *function, const OpenComm &parent, const ncclConfig_t *config) {
  return std::make_shared<OpenComm>(config == nullptr ? parent.config() : checkedConfig(function, config));
}

/// Ranks of the parent in the child's order; empty = this rank has no part.
using Members = std::vector<int>;

/// The stages after which the members have a communicator. members is filled by an earlier stage.
void appendMaking(Task *task, const std::shared_ptr<OpenComm> &child, ncclComm_t *newComm,
                  const std::shared_ptr<Members> &members) {
  const char *function = task->function;
  const std::shared_ptr<OpenComm> parent = task->open;
  const std::shared_ptr<Communicator> comm = parent->comm();
  const auto set = [members] {
    uint64_t bits = 0;
    for (int rank : *members) {
      bits |= uint64_t{1} << rank;
    }
    return bits;
  };
  auto id = std::make_shared<ncclUniqueId>();
  auto join = std::make_shared<std::optional<Join>>();
  task->stages.push_back([=] {
    if (!members->empty() && *std::min_element(members->begin(), members->end()) == comm->rank()) {
      *id = openRendezvous();
      comm->offer(set(), *id);
    }
  });
  task->stages.push_back([=] {
    if (members->empty()) {
      return;
    }
    if (*std::min_element(members->begin(), members->end()) != comm->rank()) {
      *id = comm->awaitOffer(set(), function);
    }
    const auto place = std::find(members->begin(), members->end(), comm->rank()) - members->begin();
    join->emplace(*id, static_cast<int>(members->size()), static_cast<int>(place), comm->device());
  });
  task->stages.push_back([=] {
    if (join->has_value()) {
      const auto place = std::find(members->begin(), members->end(), comm->rank()) - members->begin();
      child->made(std::make_shared<Communicator>(static_cast<int>(place), comm->device(),
                                                 (*join)->finish(parent->abandoned())));
      join->reset();
    }
  });
  task->stages.push_back([=] {
    if (child->comm() != nullptr) {
      *newComm = communicators().add(child);
    }
  });
}

/// A parent of which something is made: healthy, or revoked.
std::shared_ptr<OpenComm> parentOf(const char *function, ncclComm_t handle, const ncclComm_t *newComm) {
  const std::shared_ptr<OpenComm> parent = readyHandle(function, handle);
  notOnWorker(function);
  if (newComm == nullptr) {
    throw NcclFailure(ncclInvalidArgument, format("%s: newcomm is NULL", function));
  }
  return parent;
}

void checkParent(const char *function, Communicator &comm) {
  if (!comm.revoked()) {
    comm.checkUsable(function);
  }
}

Members membersOfColor(Communicator &comm, int color) {
  struct Entry {
    int key;
    int rank;
  };
  std::vector<Entry> entries;
  for (int rank = 0; rank < comm.nRanks(); ++rank) {
    const Descriptor &d = comm.descriptorOf(comm.hostCursor(), rank);
    if (d.root == color) {
      entries.push_back({d.key, rank});
    }
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry &a, const Entry &b) { return a.key < b.key; });
  Members members;
  for (const Entry &entry : entries) {
    members.push_back(entry.rank);
  }
  return members;
}

Members remaining(const Communicator &comm, const int *excluded, int excludedCount) {
  if (excluded == nullptr || excludedCount < 1) {
    throw NcclFailure(
        ncclInvalidArgument,
        format("%s: excludeRanksList is NULL or excludeRanksCount (%d) is not positive", kShrink, excludedCount));
  }
  std::vector<int> sorted(excluded, excluded + excludedCount);
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= comm.nRanks() ||
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw NcclFailure(ncclInvalidArgument, format("%s: excludeRanksList has ranks that are not in [0, %d) or twice the "
                                                  "same",
                                                  kShrink, comm.nRanks()));
  }
  Members members;
  for (int rank = 0; rank < comm.nRanks(); ++rank) {
    if (!std::binary_search(sorted.begin(), sorted.end(), rank)) {
      members.push_back(rank);
    }
  }
  if (std::find(members.begin(), members.end(), comm.rank()) == members.end()) {
    throw NcclFailure(ncclInvalidArgument, format("%s: rank %d is excluded itself; only the ranks that remain call it",
                                                  kShrink, comm.rank()));
  }
  return members;
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t *newComm, ncclConfig_t *config) {
  return inGroup(guardNccl(kSplit, [&] {
    const std::shared_ptr<OpenComm> parent = parentOf(kSplit, handle, newComm);
    const std::shared_ptr<Communicator> comm = parent->comm();
    checkParent(kSplit, *comm);
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: color %d is negative and not NCCL_SPLIT_NOCOLOR", kSplit, color));
    }
    *newComm = nullptr;
    const std::shared_ptr<OpenComm> child = newChild(kSplit, *parent, config);
    Descriptor descriptor;
    descriptor.function = Function::kSplit;
    descriptor.root = color;
    descriptor.key = key;
    auto members = std::make_shared<Members>();
    Task task{kSplit, parent};
    task.stages.push_back([=] { comm->arrive(comm->hostCursor(), descriptor); });
    task.stages.push_back([=] {
      comm->meetAll(kSplit);
      if (color != NCCL_SPLIT_NOCOLOR) {
        *members = membersOfColor(*comm, color);
      }
    });
    appendMaking(&task, child, newComm, members);
    return submitUntold(std::move(task));
  }));
}

// Only the remaining ranks take part. With NCCL_SHRINK_ABORT also when the communicator has failed, for example because
// an excluded rank has ended; what still runs on it is terminated first.
ncclResult_t ncclCommShrink(ncclComm_t handle, int *excluded, int excludedCount, ncclComm_t *newComm,
                            ncclConfig_t *config, int flags) {
  return inGroup(guardNccl(kShrink, [&] {
    const std::shared_ptr<OpenComm> parent = parentOf(kShrink, handle, newComm);
    const std::shared_ptr<Communicator> comm = parent->comm();
    if ((flags & ~NCCL_SHRINK_ABORT) != 0) {
      throw NcclFailure(ncclInvalidArgument, format("%s: unknown bits in shrinkFlags 0x%x", kShrink, flags));
    }
    auto members = std::make_shared<Members>(remaining(*comm, excluded, excludedCount));
    if (flags == NCCL_SHRINK_DEFAULT) {
      checkParent(kShrink, *comm);
    }
    *newComm = nullptr;
    const std::shared_ptr<OpenComm> child = newChild(kShrink, *parent, config);
    if (flags == NCCL_SHRINK_ABORT) {
      comm->terminate("has shrunk (NCCL_SHRINK_ABORT)");
      comm->forgiveStreams();
    }
    Task task{kShrink, parent};
    appendMaking(&task, child, newComm, members);
    return submitUntold(std::move(task));
  }));
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t handle, ncclUniqueId *id) {
  return guardNccl("ncclCommGetUniqueId", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommGetUniqueId", handle);
    comm->checkUsable("ncclCommGetUniqueId");
    if (id == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommGetUniqueId: uniqueId is NULL");
    }
    *id = comm->offerGrowth();
    return ncclSuccess;
  });
}

// Ranks of the communicator keep their numbers; new ones (comm NULL) say theirs. The new communicator of a non-blocking
// rank is in progress, not the old one.
ncclResult_t ncclCommGrow(ncclComm_t handle, int nRanks, const ncclUniqueId *id, int rank, ncclComm_t *newComm,
                          ncclConfig_t *config) {
  return inGroup(guardNccl(kGrow, [&] {
    notOnWorker(kGrow);
    if (newComm == nullptr || nRanks < 1 || nRanks > kMaxRanks) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: newcomm is NULL or nRanks (%d) is not in [1, %d]", kGrow, nRanks, kMaxRanks));
    }
    *newComm = nullptr;
    if (handle == nullptr) {
      if (id == nullptr || rank < 0 || rank >= nRanks) {
        throw NcclFailure(ncclInvalidArgument,
                          format("%s: a new rank needs a uniqueId and a rank in [0, %d), not %d", kGrow, nRanks, rank));
      }
      const auto child = std::make_shared<OpenComm>(checkedConfig(kGrow, config));
      return submitUntold(makeCommunicator(kGrow, child, newComm, {*id, nRanks, rank, currentDevice()}));
    }
    const std::shared_ptr<OpenComm> parent = readyHandle(kGrow, handle);
    const std::shared_ptr<Communicator> comm = parent->comm();
    comm->checkUsable(kGrow);
    if (rank != -1 || nRanks <= comm->nRanks()) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: an existing rank passes rank -1, not %d, and nRanks above %d, not %d", kGrow, rank,
                               comm->nRanks(), nRanks));
    }
    // The id is known only when the task runs.
    const std::shared_ptr<OpenComm> child = newChild(kGrow, *parent, config);
    auto making = std::make_shared<Task>(Task{kGrow, child});
    Task task = makeCommunicator(kGrow, child, newComm, {{}, nRanks, comm->rank(), comm->device()});
    const bool isRoot = id != nullptr;
    const ncclUniqueId given = isRoot ? *id : ncclUniqueId{};
    task.stages[0] = [=] {
      const ncclUniqueId offered = comm->awaitGrowth();
      if (isRoot && tokenOf(offered) != tokenOf(given)) {
        throw NcclFailure(
            ncclInvalidArgument,
            format("%s: the unique id is not the latest of ncclCommGetUniqueId on this communicator", kGrow));
      }
      *making = makeCommunicator(kGrow, child, newComm, {offered, nRanks, comm->rank(), comm->device()});
      making->stages[0]();
    };
    task.stages[1] = [=] { making->stages[1](); };
    return submitUntold(std::move(task));
  }));
}

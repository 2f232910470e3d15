// How ranks find each other. ncclGetUniqueId opens an abstract-namespace Unix socket in this process (it vanishes with
// the process and leaves no file); ranks introduce themselves there and get the table of all ranks, the descriptors of
// all heaps and lifelines, and the communicator's control segment. After that the socket is gone and no process is
// special.
#ifndef NCCLFFM_CPU_RENDEZVOUS_H_
#define NCCLFFM_CPU_RENDEZVOUS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "abi.h"
#include "control.h"
#include "fd.h"
#include "process.h"

namespace ncclffm::cpu {

/// The bound of every wait for other ranks: 60 s; tests shorten it with NCCLFFM_CPU_TIMEOUT_MS.
std::chrono::milliseconds waitLimit();

/// Opens a meeting point. Throws NcclFailure.
ncclUniqueId openRendezvous();

/// What distinguishes an id from all others, in two numbers.
using IdToken = std::array<uint64_t, 2>;
IdToken tokenOf(const ncclUniqueId &id);
ncclUniqueId idOf(const IdToken &token);

/// What a rank knows when all have come.
struct Membership {
  std::shared_ptr<Mapping> control;  // holds a Control
  std::vector<PeerProcess> processes;
  struct Rank {
    int process;  // index into processes
    int device;
  };
  std::vector<Rank> ranks;
};

/// A rank on its way in. The two halves are separate so that one thread can introduce several ranks before it waits.
class Join {
 public:
  /// Introduces the rank; does not wait for others. Throws NcclFailure.
  Join(const ncclUniqueId &id, int nRanks, int rank, int device);

  /// Waits until all ranks have come. Throws NcclFailure: ncclInvalidUsage for ranks that contradict each other or an
  /// id that was used before, ncclSystemError for ranks that did not come in time, ncclRemoteError for one that ended,
  /// ncclInternalError soon after abandoned has become true.
  Membership finish(const std::atomic<bool> &abandoned);

 private:
  int nRanks_;
  int rank_;
  Fd socket_;
};

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_RENDEZVOUS_H_

// The only spin loop of the library, and how a communicator fails. Every wait ends: when what it waits for has come, at
// the deadline, when Java sets the abort word, or when the communicator has failed elsewhere on this rank. The first
// failure is written to the status record and is final: every later call on this communicator returns it at once.
#ifndef NCCLFFM_WAIT_H_
#define NCCLFFM_WAIT_H_

#include "atomics.h"
#include "types.h"

namespace ncclffm {

// Where a call stands, for the status record.
struct Site {
  ncclFfmFunction function;
  int channel;
  uint32_t epoch;
};

constexpr int kNobody = -1;

// What this rank's communicator has failed with, ncclSuccess if it has not.
NCCLFFM_DEVICE ncclResult_t failureOf(const DevComm &comm);

// Fails the communicator, for good. Returns what it has failed with: code, or that of the thread that was first, which
// alone writes the status record.
NCCLFFM_DEVICE ncclResult_t fail(const DevComm &comm, const Site &site, ncclResult_t code, int peer, uint64_t waitedNs);

// Calls missing() until it returns kNobody; before that it returns the rank of a peer that has not come yet. Called by
// one thread. Returns ncclSuccess or what the communicator has failed with (ncclTimeout, ncclRemoteError after an abort
// ...).
template <class Missing>
NCCLFFM_DEVICE ncclResult_t waitFor(const DevComm &comm, const Site &site, Missing missing);

}  // namespace ncclffm

#include "impl/wait_funcs.h"

#endif  // NCCLFFM_WAIT_H_

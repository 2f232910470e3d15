// The only spin loop of the library, and how a communicator fails. Every wait ends: when what it waits for has come, at
// the deadline, when Java sets the abort word, or when the communicator has failed elsewhere on this rank. The first
// failure is written to the status record and is final: every later call on this communicator returns it at once (on a
// channel that is held, at the next wait that is not over at once).
#ifndef NCCLFFM_WAIT_H_
#define NCCLFFM_WAIT_H_

#include "atomics.h"
#include "types.h"

namespace ncclffm {

// Where a call stands, for the status record; and what it is, for the peers to compare.
struct Site {
  ncclFfmFunction function;
  int channel;
  uint32_t epoch;  // of the exchange, or number of the step of a send or a receive
  uint32_t hash;   // of the call's arguments that must be equal on all ranks
};

constexpr int kNobody = -1;

// What this rank's communicator has failed with, ncclSuccess if it has not. In the scheduler of a task queue every lane
// fails by itself: that of the channel.
NCCLFFM_DEVICE ncclResult_t failureOf(const DevComm &comm, int channel);

// Fails the communicator, or the lane, for good. Returns what it has failed with: code, or that of the thread that was
// first, which alone writes the status record.
NCCLFFM_DEVICE_CALL ncclResult_t fail(const DevComm &comm, Site site, ncclResult_t code, int peer, uint64_t waitedNs);

// Calls missing() until it returns kNobody; before that it returns the rank of a peer that has not come yet. Returns
// ncclSuccess or what the communicator has failed with: ncclTimeout, ncclRemoteError after an abort, ncclInvalidUsage
// when the peer has come with something else: its letter (protocol.h), *letterOf(peer), is of this epoch and has
// another hash. letterOf may return null.
//
// Lanes are the threads that wait together and call this with the same missing(): Alone, or Octet.
template <class Lanes, class LetterOf, class Missing>
NCCLFFM_DEVICE ncclResult_t waitFor(Lanes lanes, const DevComm &comm, const Site &site, LetterOf letterOf,
                                    Missing missing);

// One thread that waits for itself.
struct Alone {
  NCCLFFM_DEVICE bool all(bool flag) const { return flag; }
  NCCLFFM_DEVICE uint32_t max(uint32_t value) const { return value; }
};

}  // namespace ncclffm

#include "impl/wait_funcs.h"

#endif  // NCCLFFM_WAIT_H_

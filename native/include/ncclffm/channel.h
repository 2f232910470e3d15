// A channel: the epochs of one stream of exchanges between the ranks, and the right to use it. The channel with number
// c on one rank talks to the channels with number c on the others, and serves one collective at a time.
#ifndef NCCLFFM_CHANNEL_H_
#define NCCLFFM_CHANNEL_H_

#include "coop.h"
#include "wait.h"

namespace ncclffm {

// Holds a channel for a group of threads while it lives; several collectives may be called on it one after the other,
// which saves each the price of taking the channel (about 0.5 us on an H200).
//
// Constructed and destroyed by all threads of the group, with equal arguments. What is wrong is in result(), and every
// collective on such a session returns that at once:
//   ncclInvalidArgument  the communicator is not one, or the channel is not one of its channels; memory was not touched
//   ncclInvalidUsage     somebody holds this channel; the communicator has failed (status record)
//   any other            what the communicator had failed with before
template <class Coop>
class ChannelSession {
 public:
  NCCLFFM_DEVICE ChannelSession(Coop coop, const DevComm &comm, int channel, ncclFfmFunction function);
  NCCLFFM_DEVICE ~ChannelSession();
  ChannelSession(const ChannelSession &) = delete;
  ChannelSession &operator=(const ChannelSession &) = delete;

  NCCLFFM_DEVICE ncclResult_t result() const { return result_; }
  NCCLFFM_DEVICE const Coop &coop() const { return coop_; }
  NCCLFFM_DEVICE const DevComm &comm() const { return comm_; }
  // Of the exchange under way, or of the last one.
  NCCLFFM_DEVICE const Site &site() const { return site_; }

  // For protocols: starts the next exchange. Called by all threads, who agree on how many exchanges there are.
  NCCLFFM_DEVICE void beginExchange();
  // For protocols: ends it, with this thread's result. All threads have then read what came in, so that the next
  // exchange may start, and all know whether one of them failed.
  NCCLFFM_DEVICE ncclResult_t endExchange(ncclResult_t ofThisThread);

 private:
  Coop coop_;
  const DevComm &comm_;
  Site site_;
  ncclResult_t result_;
  bool held_ = false;
};

}  // namespace ncclffm

#include "impl/channel_funcs.h"

#endif  // NCCLFFM_CHANNEL_H_

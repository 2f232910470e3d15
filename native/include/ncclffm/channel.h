// A channel: the epochs of one stream of exchanges between the ranks, and the right to use it. The channel with number
// c on one rank talks to the channels with number c on the others, and serves one collective at a time.
#ifndef NCCLFFM_CHANNEL_H_
#define NCCLFFM_CHANNEL_H_

#include "coop.h"
#include "impl/choose.h"
#include "protocol.h"

namespace ncclffm {

// Where a rank writes its lines of LL on a channel, and where it finds those of the others: in the first half of the
// window; the second half is secondHalf bytes further on. And where it tells that it has begun. `out` and `begun` are
// offsets in the window of every peer; of a communicator of two ranks, which has but one, they are addresses.
struct SmallSlots {
  uint64_t out;
  const char *in;  // of rank 0, the others' after it; of two ranks, the other's
  uint64_t secondHalf;
  uint64_t begun;  // two letters
};

// Holds a channel for a group of threads while it lives; several collectives may be called on it one after the other,
// which saves each the price of taking the channel (about 0.5 us on an H200).
//
// Constructed and destroyed by all threads of the group, with equal arguments. What is wrong is in result(), and every
// collective on such a session returns that at once:
//   ncclInvalidArgument  the communicator is not one, or the channel is not one of its channels; memory was not touched
//   ncclInvalidUsage     somebody holds this channel; the communicator has failed (status record)
//   any other            what the communicator had failed with before
// A session that is held learns of a failure elsewhere at its next wait that is not over at once.
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
  // For status records: the function that the session is used for now.
  NCCLFFM_DEVICE void setFunction(ncclFfmFunction function) { site_.function = function; }
  // For the scheduler of a task queue: what the hashes of the exchanges from now on also tell apart, 31 bits.
  NCCLFFM_DEVICE void setTask(uint32_t taskHash) { taskHash_ = taskHash; }
  // The longest all-reduce, in bytes, that the library makes by LL and one-shot, in one exchange.
  NCCLFFM_DEVICE uint32_t smallBytes() const { return smallBytes_; }
  NCCLFFM_DEVICE const SmallSlots &smallSlots() const { return smallSlots_; }

  // For protocols: starts the next exchange of a call with this hash. Called by all threads, who agree on how many
  // exchanges there are.
  NCCLFFM_DEVICE void beginExchange(uint32_t hash);
  // For protocols: tells every peer that the exchange has begun. Data that may go first, goes before.
  NCCLFFM_DEVICE void tellBegun() const;
  // For protocols: the same, once all that the group has stored is at the peers.
  NCCLFFM_DEVICE void tellReady() const;
  // For protocols: waits for every peer's letter about this exchange; returns this thread's result. What came before a
  // tellReady may be read after the next sync of the group.
  NCCLFFM_DEVICE ncclResult_t awaitReady() const;
  // For protocols: ends it, with this thread's result. All threads have then read what came in, so that the next
  // exchange may start, and all know whether one of them failed.
  NCCLFFM_DEVICE ncclResult_t endExchange(ncclResult_t ofThisThread);

  // For calls that do more than exchanges: what they ended with is what the session, too, has failed with.
  NCCLFFM_DEVICE ncclResult_t endCall(ncclResult_t result) {
    if (result != ncclSuccess) result_ = result;
    return result;
  }

  // The same session for a call that is not inlined, and back again: so that this one may stay in registers.
  NCCLFFM_DEVICE ChannelSession lend() const { return ChannelSession(coop_, comm_, site_, result_, taskHash_); }
  NCCLFFM_DEVICE void takeBack(const ChannelSession &lent) {
    site_ = lent.site_;
    result_ = lent.result_;
  }

  // The letter of peer about this exchange.
  NCCLFFM_DEVICE const Letter *begun(int peer) const;

 private:
  NCCLFFM_DEVICE ChannelSession(Coop coop, const DevComm &comm, const Site &site, ncclResult_t result,
                                uint32_t taskHash)
      : coop_(coop), comm_(comm), site_(site), result_(result), taskHash_(taskHash) {}

  Coop coop_;
  const DevComm &comm_;
  Site site_;
  ncclResult_t result_;
  uint32_t taskHash_ = 0;
  uint32_t smallBytes_ = 0;
  SmallSlots smallSlots_ = {};
  bool held_ = false;
};

// Holds one direction of a pair of ranks on a channel: the sends to a peer, or the receives from it. Beside it, and
// beside a collective on the same channel, the other direction and other peers may be in use. Otherwise like
// ChannelSession; the peer is another rank, or kNobody, with whom there are no steps.
enum class Direction { kSend, kRecv };

template <class Coop>
class PairSession {
 public:
  NCCLFFM_DEVICE PairSession(Coop coop, const DevComm &comm, int channel, int peer, Direction direction,
                             ncclFfmFunction function);
  NCCLFFM_DEVICE ~PairSession();
  PairSession(const PairSession &) = delete;
  PairSession &operator=(const PairSession &) = delete;

  NCCLFFM_DEVICE ncclResult_t result() const { return result_; }
  NCCLFFM_DEVICE const Coop &coop() const { return coop_; }
  NCCLFFM_DEVICE const DevComm &comm() const { return comm_; }
  NCCLFFM_DEVICE const Site &site() const { return site_; }
  NCCLFFM_DEVICE int peer() const { return peer_; }

  // For protocols: the next step. A send waits until its slot has been read.
  NCCLFFM_DEVICE ncclResult_t beginStep(uint32_t hash);
  // For protocols of a send, as in ChannelSession.
  NCCLFFM_DEVICE void tellBegun() const;
  NCCLFFM_DEVICE void tellReady() const;
  // For protocols of a receive, likewise; and the letter of the peer.
  NCCLFFM_DEVICE ncclResult_t awaitReady() const;
  NCCLFFM_DEVICE const Letter *begun() const;
  // For protocols: ends a step, as endExchange does.
  NCCLFFM_DEVICE ncclResult_t endStep(ncclResult_t ofThisThread);

 private:
  // The letters between the two: what this rank writes at the peer, and what the peer has written here.
  NCCLFFM_DEVICE Mailbox *outbox() const;
  NCCLFFM_DEVICE const Mailbox *inbox() const;
  NCCLFFM_DEVICE uint64_t *state() const;

  Coop coop_;
  const DevComm &comm_;
  int peer_;
  Direction direction_;
  Site site_;
  ncclResult_t result_;
  uint32_t taken_ = 0;  // the last step that the peer is known to have read; of a send
  bool held_ = false;
};

// All blocks of a launch, each a group of its own. index is this block's. Every block is running: a cooperative launch,
// or one that is known to fit.
template <class Coop>
struct Grid {
  Coop block;
  int index;
  int nBlocks;
};

// Waits until all blocks have called this; what they wrote before is visible to all after it. One grid at a time on a
// channel. All blocks must come within twice the time that a wait for a peer may take: so a status names the peer that
// did not come to one of the blocks, unless the blocks' waits add up to more.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t syncGrid(const Grid<Coop> &grid, const DevComm &comm, int channel = 0);

// Tells the host that this kernel has finished, if the communicator has a word for that (hostSignal; else it does
// nothing): the last that every thread of every block does with the communicator and with what the host, or work that
// it then enqueues, will look at. All that the kernel has written is visible to whoever reads the count with acquire.
// Failed or not, every kernel that the host counts calls this once. Kernels of a communicator that run side by side may
// end in any order; the word reaches their number when all of them have finished, and not before.
template <class Coop>
NCCLFFM_DEVICE void signalHost(const Grid<Coop> &grid, const DevComm &comm);

using CoopGrid = Grid<CoopBlock>;

#ifdef __CUDACC__
NCCLFFM_DEVICE CoopGrid thisGrid();
#endif

}  // namespace ncclffm

#include "impl/channel_funcs.h"

#endif  // NCCLFFM_CHANNEL_H_

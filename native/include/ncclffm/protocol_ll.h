// The LL protocol: data travels together with a flag, the epoch of the exchange, in one store; who polls a line and
// sees the flag has the data. No fence, half the bandwidth, the lowest latency.
//
// Every rank owns a window, which its peers write and it reads: [channel][half][source rank][line]. The half is the
// parity of the epoch. A peer that sends exchange e + 2 has finished e + 1, so has received what this rank sends in e +
// 1, which it does only after all of its threads have read exchange e: the half is free again. That is why every
// exchange sends at least one line from every rank to every rank, and ends with a sync of the group
// (ChannelSession::endExchange).
//
// A flag is compared with ==, so lines must not carry an epoch of the previous lap. After the last exchange of a lap on
// a half, whoever read its lines clears that half.
#ifndef NCCLFFM_PROTOCOL_LL_H_
#define NCCLFFM_PROTOCOL_LL_H_

#include "channel.h"

namespace ncclffm {

// 8 bytes of payload: one line.
struct LLPayload {
  uint32_t data[2];
};

NCCLFFM_DEVICE LLLine packLine(LLPayload payload, uint32_t epoch);
NCCLFFM_DEVICE LLPayload unpackLine(const LLLine &line);
// Whether both halves of the line are of this epoch.
NCCLFFM_DEVICE bool isComplete(const LLLine &line, uint32_t epoch);

// The slots of one exchange: where this rank's lines go in the windows of the others, and where theirs arrive in its
// own.
class LLSlots {
 public:
  NCCLFFM_DEVICE LLSlots(const DevComm &comm, const Site &site);
  // Stores line number index into the window of a peer.
  NCCLFFM_DEVICE void put(int peer, uint32_t index, LLLine line) const;
  // Loads line number index as it is now, from this rank's own window; it comes from the peer.
  NCCLFFM_DEVICE LLLine poll(int peer, uint32_t index) const;
  // Clears, in the slots of all peers, the lines that the thread of this rank in its group reads: rank, rank + size ...
  NCCLFFM_DEVICE void clear(uint32_t threadRank, uint32_t groupSize) const;

 private:
  const DevComm &comm_;
  LLLine *inbox_;      // of rank 0's slot in the own window
  uint64_t outIndex_;  // of this rank's slot in every window, in lines
};

}  // namespace ncclffm

#include "impl/protocol_ll_funcs.h"

#endif  // NCCLFFM_PROTOCOL_LL_H_

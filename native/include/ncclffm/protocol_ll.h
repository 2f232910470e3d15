// The LL protocol: 4 bytes of data travel together with a flag, in one element of a store; who polls a line and sees
// its two flags has the data. No fence, half the bandwidth, the lowest latency.
#ifndef NCCLFFM_PROTOCOL_LL_H_
#define NCCLFFM_PROTOCOL_LL_H_

#include "protocol.h"

namespace ncclffm {

// What the two protocols with flags have in common, as the movers in impl/exchange.h ask for it. The payload of a slot
// is words of 8 bytes. A unit is what one thread moves in one access: kWords words from firstWord(unit) on, of which
// the unit holds wordsOf(unit); Line is the unit with its flags.
struct LL {
  static constexpr ncclFfmProtocol kProtocol = ncclFfmProtocolLL;
  static constexpr int kWords = 1;
  static constexpr int kPeersAtOnce = 4;  // polled together: their loads are in flight at the same time
  using Lanes = Alone;

  // Data (bits 0-31) and flag (bits 32-63), twice.
  struct Line {
    Vec16 vec;
  };

  NCCLFFM_DEVICE static constexpr uint64_t payloadBytes(uint64_t slotBytes) { return slotBytes / 2; }
  NCCLFFM_DEVICE static constexpr uint32_t unitsOf(uint32_t words) { return words; }
  NCCLFFM_DEVICE static constexpr uint32_t firstWord(uint32_t unit) { return unit; }
  NCCLFFM_DEVICE static constexpr int wordsOf(uint32_t) { return 1; }

  NCCLFFM_DEVICE static void put(char *slot, uint32_t unit, const uint64_t (&words)[kWords], uint32_t flag);
  NCCLFFM_DEVICE static Line poll(const char *slot, uint32_t unit);
  NCCLFFM_DEVICE static bool isComplete(const Line &line, uint32_t unit, uint32_t flag);
  // The line again, after isComplete was true for all threads of Lanes.
  NCCLFFM_DEVICE static Line reload(const char *slot, uint32_t unit, const Line &complete);
  NCCLFFM_DEVICE static void unpack(const Line &line, uint64_t (&words)[kWords]);
};

}  // namespace ncclffm

#include "impl/protocol_ll_funcs.h"

#endif  // NCCLFFM_PROTOCOL_LL_H_

// The LL128 protocol: lines of 128 bytes, of which the last 8 are a flag, stored by 8 threads of a warp at once. Where
// a path keeps such a store whole (the same GPU, NVLink), whoever sees the flag finds the data: 15/16 of the bandwidth,
// and no fence. Elsewhere it is refused (isAllowed in impl/choose.h).
//
// PTX promises no such thing; hardware of these paths keeps it, and NCCL builds on it too. The data is loaded again
// after the flag was seen, so that only the store need be whole.
#ifndef NCCLFFM_PROTOCOL_LL128_H_
#define NCCLFFM_PROTOCOL_LL128_H_

#include "coop.h"
#include "protocol.h"

namespace ncclffm {

constexpr uint32_t kLL128LineBytes = 128;
constexpr uint32_t kLL128LineWords = 15;

#ifdef __CUDACC__

// The 8 threads of a warp that share a line.
struct Octet {
  NCCLFFM_DEVICE static uint32_t mask() { return 0xffu << (CoopWarp().rank() & 24); }
  NCCLFFM_DEVICE bool all(bool flag) const { return __all_sync(mask(), flag) != 0; }
  NCCLFFM_DEVICE uint32_t max(uint32_t value) const { return __reduce_max_sync(mask(), value); }
};

constexpr uint32_t kLL128Lanes = 8;
using LL128Lanes = Octet;

#else

// A thread of the host moves a whole line.
constexpr uint32_t kLL128Lanes = 1;
using LL128Lanes = Alone;

#endif

// As LL in protocol_ll.h. Threads of a group take units in turn, so a group has a multiple of kLL128Lanes threads.
struct LL128 {
  static constexpr ncclFfmProtocol kProtocol = ncclFfmProtocolLL128;
  static constexpr int kVectors = kLL128LineBytes / sizeof(Vec16) / kLL128Lanes;
  static constexpr int kWords = 2 * kVectors;
  static constexpr int kPeersAtOnce = 4;
  using Lanes = LL128Lanes;

  struct Line {
    Vec16 vec[kVectors];
  };

  NCCLFFM_DEVICE static constexpr uint64_t payloadBytes(uint64_t slotBytes) {
    return slotBytes / kLL128LineBytes * kLL128LineWords * 8;
  }
  NCCLFFM_DEVICE static constexpr uint32_t unitsOf(uint32_t words) {
    return (words + kLL128LineWords - 1) / kLL128LineWords * kLL128Lanes;
  }
  NCCLFFM_DEVICE static constexpr uint32_t firstWord(uint32_t unit) {
    return unit / kLL128Lanes * kLL128LineWords + unit % kLL128Lanes * kWords;
  }
  // The last word of the last unit of a line is the flag.
  NCCLFFM_DEVICE static constexpr int wordsOf(uint32_t unit) {
    return unit % kLL128Lanes == kLL128Lanes - 1 ? kWords - 1 : kWords;
  }

  NCCLFFM_DEVICE static void put(char *slot, uint32_t unit, const uint64_t (&words)[kWords], uint32_t flag);
  NCCLFFM_DEVICE static Line poll(const char *slot, uint32_t unit);
  NCCLFFM_DEVICE static bool isComplete(const Line &line, uint32_t unit, uint32_t flag);
  NCCLFFM_DEVICE static Line reload(const char *slot, uint32_t unit, const Line &complete);
  NCCLFFM_DEVICE static void unpack(const Line &line, uint64_t (&words)[kWords]);
};

}  // namespace ncclffm

#include "impl/protocol_ll128_funcs.h"

#endif  // NCCLFFM_PROTOCOL_LL128_H_

// What the protocols share: how a rank's window is divided, flags, and letters.
//
// Every rank owns a window, which its peers write and it reads:
//   letters    [channel][source rank], 128 bytes each
//   slots      [LL, LL128, Simple] of collectives, then [LL, LL128, Simple] of sends, each
//              [channel][half][source rank], slotBytes each
// so that no bytes of one protocol are ever taken for a flag of another. The half is the parity of the epoch.
//
// Collectives go in exchanges, in which every rank tells every other that it has begun, and does not end before all
// have. So a peer that sends exchange e + 2 has finished e + 1, hence has heard that this rank began e + 1, which it
// does only after all of its threads have read exchange e: the half is free again, and no credit is needed.
#ifndef NCCLFFM_PROTOCOL_H_
#define NCCLFFM_PROTOCOL_H_

#include "impl/task_record.h"
#include "wait.h"

namespace ncclffm {

// A word of 32 bits of epoch and, above them, the hash of a call, which is never 0.
using Letter = uint64_t;

NCCLFFM_DEVICE Letter makeLetter(const Site &site);
// Whether a letter is of this epoch; its hash may be another one.
NCCLFFM_DEVICE bool isOf(Letter letter, uint32_t epoch);
// Whether a letter is of this epoch or a later one, on the circle of 2^32.
NCCLFFM_DEVICE bool hasReached(Letter letter, uint32_t epoch);

// What one peer writes for this rank on one channel, a word at a time. Of letters that are waited for there are two, by
// the parity of the epoch: the peer is one ahead at most, so the one that is waited for stays, and no old one is taken
// for it, however long ago it came.
struct alignas(128) Mailbox {
  Letter begun[2];       // the exchange that it has begun; by Simple, whose data has arrived
  Letter pairBegun[2];   // the step of a send that it has begun; by Simple, whose data has arrived
  Letter pairTaken;      // the step of this rank's sends that it has read: credit
  PackedRecord task[2];  // of a task queue: what the peer begins the exchange of, to name it where letters differ
};

// The mailbox that `from` writes at rank `to`.
NCCLFFM_DEVICE Mailbox *mailboxOf(const DevComm &comm, int to, int channel, int from);

// Collectives and sends have slots of their own.
enum class Traffic { kCollective, kPair };

// The slot that `from` writes at rank `to` in the half of an epoch.
NCCLFFM_DEVICE char *slotOf(const DevComm &comm, Traffic traffic, ncclFfmProtocol protocol, int to, int channel,
                            uint32_t epoch, int from);

NCCLFFM_DEVICE constexpr uint64_t windowBytes(uint64_t nRanks, uint64_t nChannels, uint64_t slotBytes) {
  return nChannels * nRanks * (sizeof(Mailbox) + 2 * 3 * 2 * slotBytes);
}

// The flag of a line: bit 31 set, so that memory which was never written is none; 15 bits of hash, so that a line of a
// call with other arguments is none; the low NCCLFFM_EPOCH_BITS bits of the epoch.
NCCLFFM_DEVICE uint32_t flagOf(const Site &site);

// Whether the flags of the lap that this epoch is in end with it on its half: lines must then be cleared before the
// next lap comes round to the same flags.
NCCLFFM_DEVICE constexpr bool isLastOfItsHalf(uint32_t epoch) {
  return (epoch & ((1u << NCCLFFM_EPOCH_BITS) - 1)) >= (1u << NCCLFFM_EPOCH_BITS) - 2;
}

}  // namespace ncclffm

#include "impl/protocol_funcs.h"
#include "impl/task_record_funcs.h"

#endif  // NCCLFFM_PROTOCOL_H_

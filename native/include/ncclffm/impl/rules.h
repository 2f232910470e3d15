// What a test build may change in the protocols: it can shrink the epoch, so that wraps are reached, break one rule on
// purpose, to show that the tests notice (NCCLFFM_BROKEN_RULE, or NCCLFFM_RULES_AT_RUN_TIME), stall between two steps,
// and look at the addresses of what is accessed at GPU scope. A normal build defines none of these macros.
#ifndef NCCLFFM_IMPL_RULES_H_
#define NCCLFFM_IMPL_RULES_H_

#include "config.h"

// Of an epoch, the bits in the flag of a line (LL, LL128): the rest of the flag is a hash.
#ifndef NCCLFFM_EPOCH_BITS
#define NCCLFFM_EPOCH_BITS 16
#endif

#ifndef NCCLFFM_BROKEN_RULE
#define NCCLFFM_BROKEN_RULE kNone
#endif

#ifndef NCCLFFM_STALL
#define NCCLFFM_STALL() ((void)0)
#endif

#ifndef NCCLFFM_AT_GPU_SCOPE
#define NCCLFFM_AT_GPU_SCOPE(address) ((void)0)
#endif

namespace ncclffm {

enum class Rule {
  kNone,
  kAdvanceEpoch,    // the kernel stores the epoch that it reached
  kOnTheCircle,     // epochs in letters are compared on the circle
  kDoubleBuffer,    // consecutive exchanges use different halves of the window
  kClearOnWrap,     // lines of the previous lap of the epoch are cleared before it starts again
  kBothFlags,       // an LL line is complete when both of its flags are
  kWholeLine,       // an LL128 line is read after its flag was seen
  kDataBeforeFlag,  // Simple's flag is stored after the data of the whole group
  kCredits,         // a send waits until its slot has been read
  kBusyChannel,     // a channel serves one collective at a time
  kCompareHash,     // ranks that call different things are told so
  kSystemScope,     // what peers see is accessed at system scope
  kReadBeforeEnd,   // an exchange ends when all threads have read what came in
  kCheckOverlap,    // buffers that overlap are refused
  kTaskRoom,        // a task is not written over one that is not done
  kTaskWhole,       // a task is taken when its number is in every word of its slot
  kTaskGeneration,  // a task is taken when its own number is in the slot
  kLaunchBound,     // a task is taken when it has been launched
  kTaskOrder,       // a task starts when all blocks of the lane have finished the one before
  kTaskAgreement,   // hashes tell tasks apart that only differ in name or number
  kLanesPark,       // a scheduler ends when no lane can take a task any more
  kIdleRecheck,     // a scheduler looks for work once more after it has announced its end
  kSignalLast,      // the host is told of a kernel by the last of its blocks
  kSignalAgain,     // who tells the host looks whether another kernel has finished since
  kScalarTail,      // what is left of a buffer after its last whole word is moved element by element
};

#ifdef NCCLFFM_RULES_AT_RUN_TIME
// One build of a test that breaks one rule after the other.
inline Rule brokenRule = Rule::kNone;
inline bool holds(Rule rule) {
  return rule != brokenRule;
}
#else
NCCLFFM_DEVICE constexpr bool holds(Rule rule) {
  return rule != Rule::NCCLFFM_BROKEN_RULE;
}
#endif

static_assert(NCCLFFM_EPOCH_BITS >= 3 && NCCLFFM_EPOCH_BITS <= 16, "a flag has 3 to 16 bits of epoch");

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_RULES_H_

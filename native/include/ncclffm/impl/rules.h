// What a test build may change in the protocols: it can shrink the epoch, so that wraps are reached, break one rule on
// purpose, to show that the tests notice, and stall between two steps. A normal build defines none of these macros.
#ifndef NCCLFFM_IMPL_RULES_H_
#define NCCLFFM_IMPL_RULES_H_

#include "config.h"

#ifndef NCCLFFM_EPOCH_BITS
#define NCCLFFM_EPOCH_BITS 32
#endif

#ifndef NCCLFFM_BROKEN_RULE
#define NCCLFFM_BROKEN_RULE kNone
#endif

#ifndef NCCLFFM_STALL
#define NCCLFFM_STALL() ((void)0)
#endif

namespace ncclffm {

enum class Rule {
  kNone,
  kDoubleBuffer,  // consecutive exchanges use different halves of the window
  kClearOnWrap,   // lines of the previous lap of the epoch are cleared before it starts again
  kAdvanceEpoch,  // the kernel stores the epoch that it reached
  kBothFlags,     // an LL line is complete when both of its flags are
  kBusyChannel,   // a channel serves one collective at a time
};

NCCLFFM_DEVICE constexpr bool holds(Rule rule) {
  return rule != Rule::NCCLFFM_BROKEN_RULE;
}

static_assert(NCCLFFM_EPOCH_BITS >= 3 && NCCLFFM_EPOCH_BITS <= 32, "an epoch has 3 to 32 bits");
constexpr uint32_t kMaxEpoch = 0xffffffffu >> (32 - NCCLFFM_EPOCH_BITS);

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_RULES_H_

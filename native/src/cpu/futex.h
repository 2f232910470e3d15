// Futexes on words that several processes share.
#ifndef NCCLFFM_CPU_FUTEX_H_
#define NCCLFFM_CPU_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ncclffm::cpu {

/// Sleeps while *word == expected, at most for the given time. Returns early for any reason: callers check again.
inline void futexWait(std::atomic<uint32_t> *word, uint32_t expected, long milliseconds) {
  const timespec limit = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futexWakeAll(std::atomic<uint32_t> *word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_FUTEX_H_

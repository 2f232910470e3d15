// What processes know of each other: the heap of a peer process as mapped here, and a lifeline that breaks when it
// ends.
#ifndef NCCLFFM_CPU_PROCESS_H_
#define NCCLFFM_CPU_PROCESS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fd.h"

namespace ncclffm::cpu {

/// A shared mapping of a whole file. The ranks of one process share one mapping of each file, so that one word has one
/// address in a process (ThreadSanitizer sees the synchronisation, and device pointers of threads compare).
class Mapping {
 public:
  /// Maps the file, or finds it mapped already. Takes the descriptor; throws NcclFailure(ncclSystemError).
  static std::shared_ptr<Mapping> of(Fd fd);

  /// True when the range lies in a live mapping made by of().
  static bool anyContains(const void *pointer, uint64_t bytes);

  ~Mapping();
  char *base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Mapping(char *base, uint64_t bytes) : base_(base), bytes_(bytes) {}
  char *base_;
  uint64_t bytes_;
};

/// The process of a rank: this one, or another one on the host.
struct PeerProcess {
  char *heapBase = nullptr;
  uint64_t heapBytes = 0;
  std::shared_ptr<Mapping> heap;  // null for this process
  Fd lifeline;                    // not open for this process
  int pid = 0;                    // as the rank itself sees it; for texts only

  /// Takes the descriptors of a peer's heap and lifeline and maps the heap unless it is this process's own.
  static PeerProcess open(Fd heap, Fd lifeline, int pid);

  bool dead() const;
};

/// The read end of a pipe whose write end this process alone holds and never closes: it reports a hang-up when the
/// process is gone, however it ended. Throws NcclFailure(ncclSystemError).
int lifelineFd();

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_PROCESS_H_

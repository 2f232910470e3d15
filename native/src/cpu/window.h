// Symmetric windows: memory of every rank that every rank can load from and store to.
#ifndef NCCLFFM_CPU_WINDOW_H_
#define NCCLFFM_CPU_WINDOW_H_

#include "communicator.h"

namespace ncclffm::cpu {

/// Whether this rank's memory lies in an open window with NCCL_WIN_COLL_SYMMETRIC.
bool isInSymmetricWindow(const Communicator &comm, const void *pointer, uint64_t bytes);

/// Where bytes at an offset of a rank's window lie in that rank's heap. Throws NcclFailure when they are not all in it.
uint64_t offsetInWindow(const char *function, const Communicator &comm, ncclWindow_t window, int rank, uint64_t offset,
                        uint64_t bytes);

/// Forgets the windows of a communicator that ends.
void closeWindows(const Communicator &comm);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_WINDOW_H_

// Symmetric windows: memory of every rank that every rank can load from and store to.
#ifndef NCCLFFM_CPU_WINDOW_H_
#define NCCLFFM_CPU_WINDOW_H_

#include "communicator.h"

namespace ncclffm::cpu {

/// Forgets the windows of a communicator that ends.
void closeWindows(const Communicator &comm);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_WINDOW_H_

// Buffers registered with a communicator.
#ifndef NCCLFFM_CPU_REGISTRATION_H_
#define NCCLFFM_CPU_REGISTRATION_H_

#include "communicator.h"

namespace ncclffm::cpu {

/// Forgets the registrations of a communicator that ends.
void closeRegistrations(const Communicator &comm);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_REGISTRATION_H_

// Operations of ncclRedOpCreatePreMulSum. Their handles are numbers from ncclNumOps + 1 up that are never reused.
#ifndef NCCLFFM_CPU_RED_OP_H_
#define NCCLFFM_CPU_RED_OP_H_

#include <cstdint>
#include <optional>

#include "abi.h"
#include "communicator.h"

namespace ncclffm::cpu {

struct PreMulSum {
  ncclDataType_t datatype;
  uint64_t scalar;           // its first bytes, for an immediate one
  const void *deviceScalar;  // else where it lies
};

/// The operation of a handle, or nothing when it is not open on this communicator.
std::optional<PreMulSum> findRedOp(const Communicator &comm, int op);

/// Forgets the operations of a communicator that ends.
void closeRedOps(const Communicator &comm);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_RED_OP_H_

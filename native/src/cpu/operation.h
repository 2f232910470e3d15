// An operation between its exported function and its execution on a stream.
#ifndef NCCLFFM_CPU_OPERATION_H_
#define NCCLFFM_CPU_OPERATION_H_

#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "control.h"
#include "open_comm.h"
#include "stream.h"

namespace ncclffm::cpu {

struct Operation {
  std::shared_ptr<OpenComm> open;
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<Stream> stream;
  Descriptor descriptor;
  const void *deviceScalar = nullptr;              // of ncclRedOpCreatePreMulSum: read when the collective runs
  std::vector<ncclWaitSignalDesc_t> signals = {};  // of ncclWaitSignal
};

const char *functionName(Function function);

/// "ncclAllReduce(count 4, ncclFloat32, ncclSum)", for texts.
std::string describe(const Descriptor &descriptor);

/// Executes one collective on the stream's worker.
ncclResult_t runCollective(Communicator &comm, const Descriptor &own);

/// Executes the sends and receives of one group, all making progress together.
ncclResult_t runMessages(Communicator &comm, const std::vector<Descriptor> &messages);

/// Executes one put, signal or wait for signals.
ncclResult_t runOneSided(Communicator &comm, const Descriptor &own, const std::vector<ncclWaitSignalDesc_t> &signals);

/// The checks that all communication functions share, in NCCL's order: the communicator and its state, the stream, the
/// data type. Fills operation and throws NcclFailure for what is wrong.
void prepare(const char *function, ncclComm_t comm, cudaStream_t stream, ncclDataType_t datatype, Operation *operation);

/// The offset of a buffer in this process's heap. Throws NcclFailure when [buffer, buffer + bytes) is not within one
/// allocation of the communicator's device.
uint64_t checkedBuffer(const char *function, const char *name, const void *buffer, uint64_t bytes,
                       const Communicator &comm);

/// count * blocks elements in bytes; throws NcclFailure when that exceeds any device's memory.
uint64_t checkedBytes(const char *function, size_t count, int blocks, int datatype);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_OPERATION_H_

// Argument checks and texts of communication functions.
#include "operation.h"

#include "error.h"
#include "heap.h"
#include "reduce.h"

namespace ncclffm::cpu {

const char *functionName(Function function) {
  switch (function) {
    case Function::kAllReduce:
      return "ncclAllReduce";
    case Function::kBroadcast:
      return "ncclBroadcast";
    case Function::kReduce:
      return "ncclReduce";
    case Function::kAllGather:
      return "ncclAllGather";
    case Function::kReduceScatter:
      return "ncclReduceScatter";
    case Function::kAlltoAll:
      return "ncclAlltoAll";
    case Function::kGather:
      return "ncclGather";
    case Function::kScatter:
      return "ncclScatter";
    case Function::kSend:
      return "ncclSend";
    case Function::kRecv:
      return "ncclRecv";
    case Function::kPutSignal:
      return "ncclPutSignal";
    case Function::kSignal:
      return "ncclSignal";
    case Function::kWaitSignal:
      return "ncclWaitSignal";
    case Function::kWindowRegister:
      return "ncclCommWindowRegister";
    case Function::kSplit:
      return "ncclCommSplit";
    case Function::kSuspend:
      return "ncclCommSuspend";
    case Function::kResume:
      return "ncclCommResume";
  }
  return "unknown function";
}

std::string describe(const Descriptor &d) {
  std::string text = format("%s(count %llu, %s", functionName(d.function), static_cast<unsigned long long>(d.count),
                            datatypeName(d.datatype));
  switch (d.function) {
    case Function::kAllReduce:
    case Function::kReduceScatter:
      text += format(", %s", opName(d.op));
      break;
    case Function::kReduce:
      text += format(", %s, root %d", opName(d.op), d.root);
      break;
    case Function::kBroadcast:
    case Function::kGather:
    case Function::kScatter:
      text += format(", root %d", d.root);
      break;
    case Function::kSend:
    case Function::kRecv:
    case Function::kPutSignal:
    case Function::kSignal:
      text += format(", peer %d", d.root);
      break;
    case Function::kAllGather:
    case Function::kAlltoAll:
    case Function::kWaitSignal:
    case Function::kWindowRegister:
    case Function::kSplit:
    case Function::kSuspend:
    case Function::kResume:
      break;
  }
  return text + ")";
}

void prepare(const char *function, ncclComm_t commHandle, cudaStream_t streamHandle, ncclDataType_t datatype,
             Operation *operation) {
  operation->open = readyHandle(function, commHandle);
  operation->comm = operation->open->comm();
  Communicator &comm = *operation->comm;
  comm.checkUsable(function);
  if (elementBytes(datatype) == 0) {
    throw NcclFailure(ncclInvalidArgument, format("%s: datatype %d is not an ncclDataType_t", function, datatype));
  }
  operation->stream = findStream(streamHandle, comm.device());
  if (operation->stream == nullptr) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: stream %p is not open", function, static_cast<void *>(streamHandle)));
  }
  if (operation->stream->device() != comm.device()) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: the stream belongs to device %d, the communicator (rank %d) to device %d; create the "
                             "stream after cudaSetDevice(%d)",
                             function, operation->stream->device(), comm.rank(), comm.device(), comm.device()));
  }
}

uint64_t checkedBuffer(const char *function, const char *name, const void *buffer, uint64_t bytes,
                       const Communicator &comm) {
  if (buffer == nullptr) {
    throw NcclFailure(ncclInvalidArgument, format("%s: %s is NULL", function, name));
  }
  const std::optional<Allocation> allocation = Heap::instance().find(buffer);
  if (!allocation) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: %s %p is not device memory of this process (use cudaMalloc or ncclMemAlloc)",
                             function, name, buffer));
  }
  const auto offset = static_cast<uint64_t>(static_cast<const char *>(buffer) - Heap::instance().base());
  const uint64_t left = allocation->offset + allocation->bytes - offset;
  if (bytes > left) {
    throw NcclFailure(
        ncclInvalidArgument,
        format("%s: %s %p needs %llu bytes, but only %llu are left in its allocation of %llu", function, name, buffer,
               static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(left),
               static_cast<unsigned long long>(allocation->bytes)));
  }
  if (allocation->device != comm.device()) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: %s %p is allocated on device %d, the communicator (rank %d) is on device %d",
                             function, name, buffer, allocation->device, comm.rank(), comm.device()));
  }
  return offset;
}

uint64_t checkedBytes(const char *function, size_t count, int blocks, int datatype) {
  const uint64_t unit = elementBytes(datatype) * static_cast<uint64_t>(blocks);
  if (unit != 0 && count > Heap::instance().bytes() / unit) {
    throw NcclFailure(
        ncclInvalidArgument,
        format("%s: count %zu (%d blocks of %s) is more than any device's memory of %llu bytes", function, count,
               blocks, datatypeName(datatype), static_cast<unsigned long long>(Heap::instance().bytes())));
  }
  return count * unit;
}

}  // namespace ncclffm::cpu

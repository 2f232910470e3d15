// ncclPutSignal, ncclSignal and ncclWaitSignal. A signal is a count in the control segment, raised with release order
// after the data has been written and read with acquire order, so that the data is there when the wait is over.
#include <algorithm>
#include <optional>

#include "error.h"
#include "group.h"
#include "operation.h"
#include "reduce.h"
#include "window.h"

namespace ncclffm::cpu {

namespace {

void checkReserved(const char *name, int sigIdx, int context, unsigned int flags) {
  if (sigIdx != 0 || context != 0 || flags != 0) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: sigIdx (%d), ctx (%d) and flags (0x%x) must be 0", name, sigIdx, context, flags));
  }
}

void checkPeer(const char *name, int peer, const Communicator &comm) {
  if (peer < 0 || peer >= comm.nRanks()) {
    throw NcclFailure(ncclInvalidArgument, format("%s: peer %d is not one of the %d ranks", name, peer, comm.nRanks()));
  }
}

ncclResult_t put(Communicator &comm, const Descriptor &d) {
  const uint64_t bytes = d.count * elementBytes(d.datatype);
  if (bytes > 0) {
    const Communicator::PeerAccess access(comm);
    comm.copy(comm.at(d.root, d.recv, bytes), comm.at(comm.rank(), d.send, bytes), bytes);
    if (comm.error() != ncclSuccess) {
      return comm.error();
    }
  }
  comm.control().pairs[comm.rank()][d.root].signals.fetch_add(1, kRelease);
  comm.ring(d.root);
  return ncclSuccess;
}

ncclResult_t awaitSignals(Communicator &comm, const std::vector<ncclWaitSignalDesc_t> &signals) {
  for (const ncclWaitSignalDesc_t &signal : signals) {
    const std::atomic<uint64_t> &arrived = comm.control().pairs[signal.peer][comm.rank()].signals;
    const uint64_t wanted = comm.consumed()[static_cast<size_t>(signal.peer)] + static_cast<uint64_t>(signal.opCnt);
    const ncclResult_t result =
        comm.wait("ncclWaitSignal", [&] { return arrived.load(kAcquire) >= wanted ? -1 : signal.peer; });
    if (result != ncclSuccess) {
      return result;
    }
    comm.consumed()[static_cast<size_t>(signal.peer)] = wanted;
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t runOneSided(Communicator &comm, const Descriptor &own, const std::vector<ncclWaitSignalDesc_t> &signals) {
  return own.function == Function::kWaitSignal ? awaitSignals(comm, signals) : put(comm, own);
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

// As in NCCL, the data must come from a window with NCCL_WIN_COLL_SYMMETRIC.
ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin,
                           size_t peerWinOffset, int sigIdx, int context, unsigned int flags, ncclComm_t comm,
                           cudaStream_t stream) {
  constexpr const char *kName = "ncclPutSignal";
  return inGroup(guardNccl(kName, [&] {
    Operation operation;
    prepare(kName, comm, stream, datatype, &operation);
    checkReserved(kName, sigIdx, context, flags);
    checkPeer(kName, peer, *operation.comm);
    Descriptor &d = operation.descriptor;
    d.function = Function::kPutSignal;
    d.datatype = datatype;
    d.root = peer;
    d.count = count;
    const uint64_t bytes = checkedBytes(kName, count, 1, datatype);
    d.send = checkedBuffer(kName, "localbuff", localbuff, bytes, *operation.comm);
    if (!isInSymmetricWindow(*operation.comm, localbuff, bytes)) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: localbuff %p is not in a window of this communicator with NCCL_WIN_COLL_SYMMETRIC",
                               kName, localbuff));
    }
    d.recv = offsetInWindow(kName, *operation.comm, peerWin, peer, peerWinOffset, bytes);
    return submit(std::move(operation));
  }));
}

ncclResult_t ncclSignal(int peer, int sigIdx, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  constexpr const char *kName = "ncclSignal";
  return inGroup(guardNccl(kName, [&] {
    Operation operation;
    prepare(kName, comm, stream, ncclInt8, &operation);
    checkReserved(kName, sigIdx, context, flags);
    checkPeer(kName, peer, *operation.comm);
    operation.descriptor.function = Function::kSignal;
    operation.descriptor.root = peer;
    return submit(std::move(operation));
  }));
}

ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream) {
  constexpr const char *kName = "ncclWaitSignal";
  return inGroup(guardNccl(kName, [&] {
    Operation operation;
    prepare(kName, comm, stream, ncclInt8, &operation);
    if (signalDescs == nullptr || nDesc < 1) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: signalDescs is NULL or nDesc (%d) is not positive", kName, nDesc));
    }
    operation.signals.assign(signalDescs, signalDescs + nDesc);
    for (const ncclWaitSignalDesc_t &signal : operation.signals) {
      checkReserved(kName, signal.sigIdx, signal.ctx, 0);
      checkPeer(kName, signal.peer, *operation.comm);
      if (signal.opCnt < 1) {
        throw NcclFailure(ncclInvalidArgument, format("%s: opCnt %d is not positive", kName, signal.opCnt));
      }
    }
    operation.descriptor.function = Function::kWaitSignal;
    return submit(std::move(operation));
  }));
}

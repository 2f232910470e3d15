// The collectives: their exported functions, and their execution on the stream's worker.
//
// All ranks meet, compare what they were asked for, do their share directly in each other's buffers, and meet again.
// Every element is computed by one rank only, in rank order, so the results are bit-identical everywhere.
#include <algorithm>
#include <cstring>

#include "error.h"
#include "group.h"
#include "operation.h"
#include "red_op.h"
#include "reduce.h"

namespace ncclffm::cpu {

namespace {

/// Blocks of count elements that a rank reads and writes (0 = the buffer is not used), and the block at which the other
/// buffer may lie for an operation in place (-1: never in place).
struct Shape {
  int sendBlocks;
  int recvBlocks;
  int inPlaceSendBlock;  // recv == send + this many blocks
  int inPlaceRecvBlock;  // send == recv + this many blocks
};

Shape shapeOf(Function function, int rank, int nRanks, int root) {
  const bool isRoot = rank == root;
  switch (function) {
    case Function::kBroadcast:
      return {isRoot ? 1 : 0, 1, 0, 0};
    case Function::kReduce:
      return {1, isRoot ? 1 : 0, 0, 0};
    case Function::kAllGather:
      return {1, nRanks, -1, rank};
    case Function::kReduceScatter:
      return {nRanks, 1, rank, -1};
    case Function::kAlltoAll:
      return {nRanks, nRanks, -1, -1};
    case Function::kGather:
      return {1, isRoot ? nRanks : 0, -1, rank};
    case Function::kScatter:
      return {isRoot ? nRanks : 0, 1, rank, -1};
    default:
      return {1, 1, 0, 0};
  }
}

bool hasOp(Function function) {
  return function == Function::kAllReduce || function == Function::kReduce || function == Function::kReduceScatter;
}

bool hasRoot(Function function) {
  return function == Function::kBroadcast || function == Function::kReduce || function == Function::kGather ||
         function == Function::kScatter;
}

void checkOverlap(const Descriptor &d, const Shape &shape, uint64_t blockBytes) {
  if (d.send == kNoBuffer || d.recv == kNoBuffer) {
    return;
  }
  const uint64_t sendEnd = d.send + blockBytes * static_cast<uint64_t>(shape.sendBlocks);
  const uint64_t recvEnd = d.recv + blockBytes * static_cast<uint64_t>(shape.recvBlocks);
  const bool apart = sendEnd <= d.recv || recvEnd <= d.send;
  const bool inPlace =
      (shape.inPlaceSendBlock >= 0 && d.recv == d.send + blockBytes * static_cast<uint64_t>(shape.inPlaceSendBlock)) ||
      (shape.inPlaceRecvBlock >= 0 && d.send == d.recv + blockBytes * static_cast<uint64_t>(shape.inPlaceRecvBlock));
  if (!apart && !inPlace) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: sendbuff and recvbuff overlap, and not in the form of an operation in place",
                             functionName(d.function)));
  }
}

void setOp(const char *name, ncclRedOp_t op, ncclDataType_t datatype, Operation *operation) {
  if (op >= 0 && op < ncclNumOps) {
    operation->descriptor.op = op;
    return;
  }
  const std::optional<PreMulSum> made = findRedOp(*operation->comm, op);
  if (!made) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: op %d is not built in and was not made on this communicator", name, op));
  }
  if (made->datatype != datatype) {
    throw NcclFailure(ncclInvalidArgument, format("%s: op %d was made for %s, not for %s", name, op,
                                                  datatypeName(made->datatype), datatypeName(datatype)));
  }
  operation->descriptor.op = kPreMulSum;
  operation->descriptor.scalar = made->scalar;
  operation->deviceScalar = made->deviceScalar;
}

ncclResult_t collective(Function function, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t commHandle, cudaStream_t stream) {
  const char *name = functionName(function);
  return inGroup(guardNccl(name, [&] {
    Operation operation;
    prepare(name, commHandle, stream, datatype, &operation);
    const Communicator &comm = *operation.comm;
    if (hasOp(function)) {
      setOp(name, op, datatype, &operation);
    }
    if (hasRoot(function) && (root < 0 || root >= comm.nRanks())) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: root %d is not one of the %d ranks", name, root, comm.nRanks()));
    }
    Descriptor &d = operation.descriptor;
    d.function = function;
    d.datatype = datatype;
    d.root = hasRoot(function) ? root : 0;
    d.count = count;
    const Shape shape = shapeOf(function, comm.rank(), comm.nRanks(), root);
    const uint64_t sendBytes = checkedBytes(name, count, shape.sendBlocks, datatype);
    const uint64_t recvBytes = checkedBytes(name, count, shape.recvBlocks, datatype);
    if (sendBytes > 0) {
      d.send = checkedBuffer(name, "sendbuff", sendbuff, sendBytes, comm);
    }
    if (recvBytes > 0) {
      d.recv = checkedBuffer(name, "recvbuff", recvbuff, recvBytes, comm);
    }
    checkOverlap(d, shape, checkedBytes(name, count, 1, datatype));
    return submit(std::move(operation));
  }));
}

// ---- Execution ----

/// One rank's view of a collective whose ranks agree.
class Execution {
 public:
  Execution(Communicator &comm, const Communicator::Cursor &cursor, const Descriptor &own)
      : comm_(comm),
        cursor_(cursor),
        own_(own),
        rank_(comm.rank()),
        nRanks_(comm.nRanks()),
        element_(elementBytes(own.datatype)) {}

  ncclResult_t run() {
    switch (own_.function) {
      case Function::kAllReduce:
        return reduceShare(0, nRanks_);
      case Function::kReduce:
        return reduceShare(own_.root, own_.root + 1);
      case Function::kReduceScatter:
        return reduceRange(static_cast<uint64_t>(rank_) * own_.count, own_.count, rank_, rank_ + 1, 0);
      case Function::kBroadcast:
        return pull(own_.root, 0, 0);
      case Function::kScatter:
        return pull(own_.root, rank_, 0);
      case Function::kGather:
        return push(own_.root, rank_);
      case Function::kAllGather:
        return pullFromAll(false);
      case Function::kAlltoAll:
        return pullFromAll(true);
      default:
        return comm_.fail(ncclInternalError, "not a collective");
    }
  }

 private:
  /// Elements [from, from + count) of a rank's buffer; throws when a peer describes memory that it does not have.
  char *rangeOf(int rank, bool send, uint64_t from, uint64_t count) const {
    const Descriptor &d = comm_.descriptorOf(cursor_, rank);
    char *address = comm_.at(rank, (send ? d.send : d.recv) + from * element_, count * element_);
    if (address == nullptr) {
      throw NcclFailure(ncclInternalError, format("%s: rank %d names memory outside its heap", name(), rank));
    }
    return address;
  }

  char *blockOf(int rank, bool send, int block) const {
    return rangeOf(rank, send, static_cast<uint64_t>(block) * own_.count, own_.count);
  }

  const char *name() const { return functionName(own_.function); }

  ncclResult_t pull(int from, int sendBlock, int recvBlock) {
    return move(blockOf(rank_, false, recvBlock), blockOf(from, true, sendBlock));
  }

  ncclResult_t push(int to, int recvBlock) { return move(blockOf(to, false, recvBlock), blockOf(rank_, true, 0)); }

  ncclResult_t pullFromAll(bool ownBlock) {
    // Starting with the own rank spreads the ranks over their peers.
    for (int i = 0; i < nRanks_; ++i) {
      const int from = (rank_ + i) % nRanks_;
      const ncclResult_t result = pull(from, ownBlock ? rank_ : 0, from);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  }

  ncclResult_t move(char *to, const char *from) {
    if (to != from) {
      comm_.copy(to, from, own_.count * element_);
    }
    return comm_.error();
  }

  /// Reduces this rank's part of the elements into the recvbuff of ranks [firstTarget, endTarget).
  ncclResult_t reduceShare(int firstTarget, int endTarget) {
    // Parts start at cache lines, relative to the buffer: ranks never write to the same line of an aligned buffer.
    const uint64_t line = 64 / element_;
    const uint64_t even = (own_.count + static_cast<uint64_t>(nRanks_) - 1) / static_cast<uint64_t>(nRanks_);
    const uint64_t part = (even + line - 1) / line * line;
    const uint64_t from = std::min(own_.count, part * static_cast<uint64_t>(rank_));
    const uint64_t to = std::min(own_.count, from + part);
    return reduceRange(from, to - from, firstTarget, endTarget, from);
  }

  /// Reduces elements [from, from + count) of all sendbuffs to where they belong in the targets' recvbuffs.
  ncclResult_t reduceRange(uint64_t from, uint64_t count, int firstTarget, int endTarget, uint64_t targetFrom) {
    const auto datatype = static_cast<ncclDataType_t>(own_.datatype);
    const bool scaled = own_.op == kPreMulSum;
    const ReduceBlock reduce = scaled ? nullptr : reduceBlock(datatype, static_cast<ncclRedOp_t>(own_.op));
    const char *starts[kMaxRanks];
    uint64_t scalars[kMaxRanks];
    for (int rank = 0; rank < nRanks_; ++rank) {
      starts[rank] = rangeOf(rank, true, from, count);
      scalars[rank] = comm_.descriptorOf(cursor_, rank).scalar;
    }
    char *targets[kMaxRanks];
    for (int rank = firstTarget; rank < endTarget; ++rank) {
      targets[rank] = rangeOf(rank, false, targetFrom, count);
    }
    alignas(64) char result[kReduceBlock * sizeof(uint64_t)];
    for (uint64_t done = 0; done < count && !comm_.stopped(); done += kReduceBlock) {
      const uint64_t elements = std::min(kReduceBlock, count - done);
      const void *sources[kMaxRanks];
      for (int rank = 0; rank < nRanks_; ++rank) {
        sources[rank] = starts[rank] + done * element_;
      }
      if (scaled) {
        scaledSumBlock(datatype)(sources, scalars, nRanks_, elements, result);
      } else {
        reduce(sources, nRanks_, elements, result);
      }
      for (int rank = firstTarget; rank < endTarget; ++rank) {
        std::memcpy(targets[rank] + done * element_, result, elements * element_);
      }
    }
    return comm_.error();
  }

  Communicator &comm_;
  const Communicator::Cursor &cursor_;
  const Descriptor &own_;
  const int rank_;
  const int nRanks_;
  const uint64_t element_;  // bytes
};

bool agree(const Descriptor &a, const Descriptor &b) {
  return a.function == b.function && a.datatype == b.datatype && a.op == b.op && a.root == b.root && a.count == b.count;
}

}  // namespace

ncclResult_t runCollective(Communicator &comm, const Descriptor &own) {
  Communicator::Cursor &cursor = comm.streamCursor();
  const char *name = functionName(own.function);
  comm.arrive(cursor, own);
  ncclResult_t result = comm.awaitAll(cursor, name);
  if (result != ncclSuccess) {
    return result;
  }
  const Descriptor &first = comm.descriptorOf(cursor, 0);
  for (int rank = 1; rank < comm.nRanks(); ++rank) {
    const Descriptor &other = comm.descriptorOf(cursor, rank);
    if (!agree(first, other)) {
      return comm.fail(ncclInvalidUsage, format("ranks disagree: rank 0 called %s, rank %d called %s",
                                                describe(first).c_str(), rank, describe(other).c_str()));
    }
  }
  if (own.count > 0) {
    Communicator::PeerAccess access(comm);
    try {
      result = comm.stopped() ? comm.error() : Execution(comm, cursor, own).run();
    } catch (const NcclFailure &failure) {
      result = comm.fail(failure.code, failure.what());
    }
    if (result != ncclSuccess) {
      return result;
    }
  }
  comm.arrive(cursor, own);
  return comm.awaitAll(cursor, name);
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kAllReduce, sendbuff, recvbuff, count, datatype, op, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kBroadcast, sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}

ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return inGroup(
      guardNccl("ncclBcast", [&] { return ncclBroadcast(buff, buff, count, datatype, root, comm, stream); }));
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kReduce, sendbuff, recvbuff, count, datatype, op, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kAllGather, sendbuff, recvbuff, sendcount, datatype, ncclSum, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kReduceScatter, sendbuff, recvbuff, recvcount, datatype, op, 0, comm, stream);
}

ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream) {
  return collective(Function::kAlltoAll, sendbuff, recvbuff, count, datatype, ncclSum, 0, comm, stream);
}

ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kGather, sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}

ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return collective(Function::kScatter, sendbuff, recvbuff, count, datatype, ncclSum, root, comm, stream);
}

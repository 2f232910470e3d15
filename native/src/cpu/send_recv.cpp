// ncclSend and ncclRecv. The sender describes its buffer in the pair's slot, the receiver copies out of it and says so;
// the messages of a group advance side by side, those between the same two ranks in order.
#include <deque>
#include <map>
#include <set>

#include "error.h"
#include "group.h"
#include "operation.h"
#include "reduce.h"

namespace ncclffm::cpu {

namespace {

ncclResult_t message(Function function, const void *buffer, size_t count, ncclDataType_t datatype, int peer,
                     ncclComm_t commHandle, cudaStream_t stream) {
  const char *name = functionName(function);
  return inGroup(guardNccl(name, [&] {
    Operation operation;
    prepare(name, commHandle, stream, datatype, &operation);
    const Communicator &comm = *operation.comm;
    if (peer < 0 || peer >= comm.nRanks()) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: peer %d is not one of the %d ranks", name, peer, comm.nRanks()));
    }
    Descriptor &d = operation.descriptor;
    d.function = function;
    d.datatype = datatype;
    d.root = peer;
    d.count = count;
    const uint64_t bytes = checkedBytes(name, count, 1, datatype);
    if (bytes > 0) {
      const bool isSend = function == Function::kSend;
      (isSend ? d.send : d.recv) = checkedBuffer(name, isSend ? "sendbuff" : "recvbuff", buffer, bytes, comm);
    }
    return submit(std::move(operation));
  }));
}

/// The messages of one group of one rank.
class Exchange {
 public:
  Exchange(Communicator &comm, const std::vector<Descriptor> &messages) : comm_(comm) {
    for (const Descriptor &message : messages) {
      (message.function == Function::kSend ? sends_ : recvs_)[message.root].push_back(message);
    }
  }

  ncclResult_t run() {
    while (result_ == ncclSuccess && !(sends_.empty() && recvs_.empty())) {
      const Descriptor &next = (sends_.empty() ? recvs_ : sends_).begin()->second.front();
      const int peer = next.root;
      const ncclResult_t waited =
          comm_.wait(functionName(next.function), [&] { return advance() ? -1 : absentPeer(peer); });
      if (waited != ncclSuccess) {
        return waited;
      }
    }
    return result_;
  }

 private:
  using Queues = std::map<int, std::deque<Descriptor>>;  // by peer; never an empty queue

  /// A peer that has left, so that nobody waits for it in vain; else the given one.
  int absentPeer(int first) const {
    for (const Queues *queues : {&sends_, &recvs_}) {
      for (const auto &[peer, messages] : *queues) {
        if (comm_.hasLeft(peer)) {
          return peer;
        }
      }
    }
    return first;
  }

  /// True when something happened.
  bool advance() {
    bool moved = false;
    for (auto entry = sends_.begin(); entry != sends_.end();) {
      moved |= advanceSend(entry->first, entry->second);
      entry = entry->second.empty() ? sends_.erase(entry) : std::next(entry);
    }
    for (auto entry = recvs_.begin(); entry != recvs_.end();) {
      moved |= advanceRecv(entry->first, entry->second);
      entry = entry->second.empty() ? recvs_.erase(entry) : std::next(entry);
    }
    return moved;
  }

  bool advanceSend(int peer, std::deque<Descriptor> &queue) {
    Pair &pair = comm_.control().pairs[comm_.rank()][peer];
    uint64_t &posted = comm_.sent()[static_cast<size_t>(peer)];
    const uint64_t done = pair.done.load(kAcquire);
    if (done < posted) {
      return false;  // the receiver has not taken the posted one yet
    }
    if (posted_.count(peer) != 0) {
      posted_.erase(peer);
      queue.pop_front();
      if (queue.empty()) {
        return true;
      }
    }
    pair.message = queue.front();
    pair.posted.store(++posted, kRelease);
    posted_.insert(peer);
    comm_.ring(peer);
    return true;
  }

  bool advanceRecv(int peer, std::deque<Descriptor> &queue) {
    Pair &pair = comm_.control().pairs[peer][comm_.rank()];
    uint64_t &taken = comm_.received()[static_cast<size_t>(peer)];
    if (pair.posted.load(kAcquire) == taken) {
      return false;
    }
    take(peer, pair.message, queue.front());
    if (result_ == ncclSuccess) {
      queue.pop_front();
      pair.done.store(++taken, kRelease);
      comm_.ring(peer);
    }
    return true;
  }

  void take(int peer, const Descriptor &sent, const Descriptor &wanted) {
    if (sent.count != wanted.count || sent.datatype != wanted.datatype) {
      result_ =
          comm_.fail(ncclInvalidUsage, format("send and receive disagree: rank %d called %s, rank %d called %s", peer,
                                              describe(sent).c_str(), comm_.rank(), describe(wanted).c_str()));
      return;
    }
    const uint64_t bytes = wanted.count * elementBytes(wanted.datatype);
    if (bytes == 0) {
      return;
    }
    const Communicator::PeerAccess access(comm_);
    const char *from = comm_.at(peer, sent.send, bytes);
    if (from == nullptr) {
      result_ = comm_.fail(ncclInternalError, format("ncclRecv: rank %d names memory outside its heap", peer));
      return;
    }
    comm_.copy(comm_.at(comm_.rank(), wanted.recv, bytes), from, bytes);
    result_ = comm_.error();
  }

  Communicator &comm_;
  Queues sends_;
  Queues recvs_;
  std::set<int> posted_;  // peers to whom the first message of the queue is posted
  ncclResult_t result_ = ncclSuccess;
};

}  // namespace

ncclResult_t runMessages(Communicator &comm, const std::vector<Descriptor> &messages) {
  return Exchange(comm, messages).run();
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return message(Function::kSend, sendbuff, count, datatype, peer, comm, stream);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return message(Function::kRecv, recvbuff, count, datatype, peer, comm, stream);
}

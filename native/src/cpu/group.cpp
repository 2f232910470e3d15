// The group of a thread, and the order in which its operations reach the streams.
#include "group.h"

#include <algorithm>

#include "error.h"

namespace ncclffm::cpu {

namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<JoinRequest> joins;
  std::vector<WindowRequest> windows;
  std::vector<Operation> operations;
};

thread_local Group group;

bool isMessage(const Operation &operation) {
  return operation.descriptor.function == Function::kSend || operation.descriptor.function == Function::kRecv;
}

void mustBeOpen(bool appended) {
  if (!appended) {
    throw NcclFailure(ncclInvalidArgument, "the stream was destroyed before the operation could be enqueued");
  }
}

/// A message to oneself needs its counterpart in the same group: nobody else can ever provide it.
void checkSelfMessages(const Communicator &comm, const std::vector<Descriptor> &messages) {
  long balance = 0;
  for (const Descriptor &message : messages) {
    if (message.root == comm.rank()) {
      balance += message.function == Function::kSend ? 1 : -1;
    }
  }
  if (balance != 0) {
    throw NcclFailure(ncclInvalidUsage,
                      format("rank %d %s itself without the matching %s in the same group", comm.rank(),
                             balance > 0 ? "sends to" : "receives from", balance > 0 ? "ncclRecv" : "ncclSend"));
  }
}

/// The sends and receives of one communicator become one piece of work, on the first one's stream. The other streams
/// stand still meanwhile, as if each had a part of it.
void launchMessages(const std::vector<Operation> &operations) {
  const std::shared_ptr<Communicator> comm = operations[0].comm;
  const std::shared_ptr<Stream> stream = operations[0].stream;
  std::vector<Descriptor> messages;
  std::vector<std::shared_ptr<Stream>> others;
  std::vector<Ticket> after;
  for (const Operation &operation : operations) {
    messages.push_back(operation.descriptor);
    if (operation.stream != stream && std::find(others.begin(), others.end(), operation.stream) == others.end()) {
      others.push_back(operation.stream);
      after.push_back(operation.stream->last());
    }
  }
  checkSelfMessages(*comm, messages);
  Communicator *raw = comm.get();  // alive while its work is queued
  const std::optional<Ticket> ticket = comm->enqueue(
      stream, std::move(after), [raw, messages = std::move(messages)] { return runMessages(*raw, messages); });
  mustBeOpen(ticket.has_value());
  for (const std::shared_ptr<Stream> &other : others) {
    mustBeOpen(append(other, Work{[] { return cudaSuccess; }, {}, {*ticket}}).has_value());
  }
}

/// Collectives first, in the order of the calls, then the messages: the same on every rank, however the calls were
/// mixed.
void launch(const std::vector<Operation> &operations) {
  std::vector<std::shared_ptr<Communicator>> comms;
  for (const Operation &operation : operations) {
    if (std::find(comms.begin(), comms.end(), operation.comm) == comms.end()) {
      comms.push_back(operation.comm);
    }
    if (!isMessage(operation)) {
      Communicator *comm = operation.comm.get();
      const Descriptor descriptor = operation.descriptor;
      mustBeOpen(comm->enqueue(operation.stream, {}, [comm, descriptor] { return runCollective(*comm, descriptor); })
                     .has_value());
    }
  }
  for (const std::shared_ptr<Communicator> &comm : comms) {
    std::vector<Operation> messages;
    std::copy_if(operations.begin(), operations.end(), std::back_inserter(messages),
                 [&](const Operation &operation) { return operation.comm == comm && isMessage(operation); });
    if (!messages.empty()) {
      launchMessages(messages);
    }
  }
}

}  // namespace

ncclResult_t submit(Operation operation) {
  if (group.depth > 0) {
    group.operations.push_back(std::move(operation));
  } else {
    launch({std::move(operation)});
  }
  return ncclSuccess;
}

ncclResult_t submit(const JoinRequest &request) {
  if (group.depth > 0) {
    group.joins.push_back(request);
  } else {
    joinAll({request});
  }
  return ncclSuccess;
}

ncclResult_t submit(WindowRequest request) {
  if (group.depth > 0) {
    group.windows.push_back(std::move(request));
  } else {
    registerAll({std::move(request)});
  }
  return ncclSuccess;
}

ncclResult_t inGroup(ncclResult_t result) {
  if (group.depth > 0 && result != ncclSuccess && group.error == ncclSuccess) {
    group.error = result;
  }
  return result;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclGroupStart(void) {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  return guardNccl("ncclGroupEnd", [] {
    if (group.depth == 0) {
      throw NcclFailure(ncclInvalidUsage, "ncclGroupEnd: not in a group; call ncclGroupStart first");
    }
    if (--group.depth > 0) {
      return ncclSuccess;
    }
    const Group ended = std::exchange(group, Group());
    if (ended.error != ncclSuccess) {
      return ended.error;  // its text was set by the call that failed
    }
    joinAll(ended.joins);
    registerAll(ended.windows);
    launch(ended.operations);
    return ncclSuccess;
  });
}

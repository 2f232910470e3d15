// The group of a thread, and the order in which its operations reach the streams.
#include "group.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "capture.h"
#include "error.h"
#include "reduce.h"
#include "thread.h"

namespace ncclffm::cpu {

namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Task> tasks;
  std::vector<Operation> operations;
};

thread_local Group group;

constexpr unsigned int kSimInfoMagic = 0x74685283;

bool isMessage(const Operation &operation) {
  return operation.descriptor.function == Function::kSend || operation.descriptor.function == Function::kRecv;
}

bool isWait(const Operation &operation) {
  return operation.descriptor.function == Function::kWaitSignal;
}

bool isOneSided(const Operation &operation) {
  return operation.descriptor.function == Function::kPutSignal || operation.descriptor.function == Function::kSignal ||
         isWait(operation);
}

void mustBeOpen(bool appended) {
  if (!appended) {
    throw NcclFailure(ncclInvalidArgument, "the stream was destroyed before the operation could be enqueued");
  }
}

/// The capture that the streams of some operations share, or null where none is captured.
std::shared_ptr<Capture> commonCapture(const std::vector<Operation> &operations) {
  std::shared_ptr<Capture> capture = operations[0].stream->capture();
  for (const Operation &operation : operations) {
    if (operation.stream->capture() != capture) {
      throw NcclFailure(ncclInvalidUsage,
                        "the streams of a group's messages must all be captured in one graph, or none of them");
    }
  }
  return capture;
}

void launchMessages(const std::vector<Operation> &operations);
void launchOne(const Operation &operation);

/// Keeps operations whose streams are captured. A launch of the graph puts them on its one stream.
void record(Capture &capture, const std::vector<Operation> &operations) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (const Operation &operation : operations) {
    streams.push_back(operation.stream);
  }
  const cudaError_t error = capture.record(streams, [operations](const std::shared_ptr<Stream> &stream) {
    std::vector<Operation> again = operations;
    for (Operation &operation : again) {
      operation.stream = stream;
    }
    try {
      isMessage(again[0]) ? launchMessages(again) : launchOne(again[0]);
      return cudaSuccess;
    } catch (const NcclFailure &) {
      return cudaErrorInvalidResourceHandle;  // the stream was destroyed
    }
  });
  if (error != cudaSuccess) {
    throw NcclFailure(ncclUnhandledCudaError, format("the operation cannot be captured: %s (%s)",
                                                     cudaGetErrorName(error), cudaGetErrorString(error)));
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
  if (const std::shared_ptr<Capture> capture = commonCapture(operations)) {
    record(*capture, operations);
    return;
  }
  Communicator *raw = comm.get();  // alive while its work is queued
  const std::optional<Ticket> ticket = comm->enqueue(
      stream, std::move(after), [raw, messages = std::move(messages)] { return runMessages(*raw, messages); });
  mustBeOpen(ticket.has_value());
  for (const std::shared_ptr<Stream> &other : others) {
    mustBeOpen(append(other, Work{[] { return cudaSuccess; }, {}, {*ticket}}).has_value());
  }
}

void launchOne(const Operation &operation) {
  if (const std::shared_ptr<Capture> capture = operation.stream->capture()) {
    record(*capture, {operation});
    return;
  }
  Communicator *comm = operation.comm.get();  // alive while its work is queued
  std::function<ncclResult_t()> work;
  if (isOneSided(operation)) {
    work = [comm, descriptor = operation.descriptor, signals = operation.signals] {
      return runOneSided(*comm, descriptor, signals);
    };
  } else {
    work = [comm, descriptor = operation.descriptor, scalar = operation.deviceScalar]() mutable {
      if (scalar != nullptr) {
        std::memcpy(&descriptor.scalar, scalar, elementBytes(descriptor.datatype));
      }
      return runCollective(*comm, descriptor);
    };
  }
  mustBeOpen(comm->enqueue(operation.stream, {}, std::move(work)).has_value());
}

/// Collectives and what sends signals first, in the order of the calls, then the messages, then the waits for signals:
/// the same on every rank, however the calls were mixed, and nothing waits for what comes after it.
void launch(const std::vector<Operation> &operations) {
  std::vector<std::shared_ptr<Communicator>> comms;
  for (const Operation &operation : operations) {
    if (std::find(comms.begin(), comms.end(), operation.comm) == comms.end()) {
      comms.push_back(operation.comm);
    }
    if (!isMessage(operation) && !isWait(operation)) {
      launchOne(operation);
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
  for (const Operation &operation : operations) {
    if (isWait(operation)) {
      launchOne(operation);
    }
  }
}

}  // namespace

void runTasks(std::vector<Task> tasks) {
  while (!tasks.empty()) {
    // One task per communicator and round: their ranks take part in the same order everywhere.
    std::vector<Task> round;
    std::vector<Task> later;
    size_t stages = 0;
    for (Task &task : tasks) {
      const bool taken =
          std::any_of(round.begin(), round.end(), [&](const Task &other) { return other.open == task.open; });
      stages = taken ? stages : std::max(stages, task.stages.size());
      (taken ? later : round).push_back(std::move(task));
    }
    for (size_t stage = 0; stage < stages; ++stage) {
      for (const Task &task : round) {
        if (stage < task.stages.size()) {
          task.stages[stage]();
        }
      }
    }
    tasks = std::move(later);
  }
}

namespace {

void carryOut(std::vector<Task> tasks, const std::vector<Operation> &operations) {
  runTasks(std::move(tasks));
  launch(operations);
}

std::vector<std::shared_ptr<OpenComm>> commsOf(const Group &ended) {
  std::vector<std::shared_ptr<OpenComm>> result;
  const auto add = [&](const std::shared_ptr<OpenComm> &open) {
    if (std::find(result.begin(), result.end(), open) == result.end()) {
      result.push_back(open);
    }
  };
  for (const Task &task : ended.tasks) {
    add(task.open);
  }
  for (const Operation &operation : ended.operations) {
    add(operation.open);
  }
  return result;
}

/// Waits as long as fault injection wants, unless the communicator is aborted.
void beLate(const Group &ended, const std::vector<std::shared_ptr<OpenComm>> &comms) {
  int milliseconds = 0;
  for (const Task &task : ended.tasks) {
    milliseconds = std::max(milliseconds, injectedLateness(task.function));
  }
  for (const Operation &operation : ended.operations) {
    milliseconds = std::max(milliseconds, injectedLateness(functionName(operation.descriptor.function)));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (std::chrono::steady_clock::now() < end &&
         std::none_of(comms.begin(), comms.end(), [](const auto &open) { return open->abandoned().load(); })) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void carryOutInBackground(Group ended, const std::vector<std::shared_ptr<OpenComm>> &comms) {
  for (const std::shared_ptr<OpenComm> &open : comms) {
    open->begin();
  }
  try {
    for (const Task &task : ended.tasks) {
      if (task.inAdvance) {
        task.inAdvance();
      }
    }
    startThread("ncclffm-job", [comms, ended = std::move(ended)]() mutable {
      const ncclResult_t result = guardNccl("a call in the background", [&] {
        beLate(ended, comms);
        carryOut(std::move(ended.tasks), ended.operations);
        return ncclSuccess;
      });
      ended = Group();  // what the work owned is gone before anybody hears that it is complete
      const std::string text = result == ncclSuccess ? "" : lastNcclText();
      for (const std::shared_ptr<OpenComm> &open : comms) {
        open->end(result, text);
      }
    });
  } catch (const std::exception &failure) {
    for (const std::shared_ptr<OpenComm> &open : comms) {
      open->end(ncclSystemError, failure.what());
    }
    throw;
  }
}

/// What a group collected, now.
ncclResult_t finish(Group ended) {
  const std::vector<std::shared_ptr<OpenComm>> comms = commsOf(ended);
  const auto blocking = std::count_if(comms.begin(), comms.end(), [](const auto &open) { return open->blocking(); });
  if (blocking == static_cast<std::ptrdiff_t>(comms.size())) {
    carryOut(std::move(ended.tasks), ended.operations);
    return ncclSuccess;
  }
  if (blocking != 0) {
    throw NcclFailure(ncclInvalidArgument, "ncclGroupEnd: blocking and non-blocking communicators in one group");
  }
  carryOutInBackground(std::move(ended), comms);
  return ncclInProgress;
}

/// What NCCL's tuning models would say: 10 us an operation and 10 GB/s.
float estimatedMicroseconds(const std::vector<Operation> &operations) {
  double time = 0;
  for (const Operation &operation : operations) {
    const Descriptor &d = operation.descriptor;
    time += 10 + static_cast<double>(d.count * elementBytes(d.datatype)) / 1e4;
  }
  return static_cast<float>(time);
}

/// The end of a group, whose operations are started unless simulated is given.
ncclResult_t endGroup(const char *function, ncclSimInfo_t *simulated) {
  return guardNccl(function, [&] {
    if (group.depth == 0) {
      throw NcclFailure(ncclInvalidUsage, format("%s: not in a group; call ncclGroupStart first", function));
    }
    if (--group.depth > 0) {
      return ncclSuccess;
    }
    Group ended = std::exchange(group, Group());
    if (ended.error != ncclSuccess) {
      return ended.error;  // its text was set by the call that failed
    }
    if (simulated != nullptr) {
      if (simulated->magic != kSimInfoMagic || simulated->size < sizeof(ncclSimInfo_t)) {
        throw NcclFailure(ncclInvalidArgument,
                          format("%s: simInfo was not initialised with NCCL_SIM_INFO_INITIALIZER", function));
      }
      simulated->estimatedTime = estimatedMicroseconds(ended.operations);
      ended.operations.clear();
    }
    return finish(std::move(ended));
  });
}

}  // namespace

ncclResult_t submit(Operation operation) {
  if (group.depth > 0) {
    group.operations.push_back(std::move(operation));
    return ncclSuccess;
  }
  Group single;
  single.operations.push_back(std::move(operation));
  return finish(std::move(single));
}

ncclResult_t submit(Task task) {
  if (group.depth > 0) {
    group.tasks.push_back(std::move(task));
    return ncclSuccess;
  }
  Group single;
  single.tasks.push_back(std::move(task));
  return finish(std::move(single));
}

ncclResult_t submitUntold(Task task) {
  const ncclResult_t result = submit(std::move(task));
  return result == ncclInProgress ? ncclSuccess : result;
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
  return guardNccl("ncclGroupStart", [] {
    ++group.depth;
    return ncclSuccess;
  });
}

ncclResult_t ncclGroupEnd(void) {
  return endGroup("ncclGroupEnd", nullptr);
}

// As NCCL, ends the group without starting its operations; communicators and windows are made all the same.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo) {
  return endGroup("ncclGroupSimulateEnd", simInfo);
}

// Bodies of task_queue.h.
#ifndef NCCLFFM_IMPL_TASK_QUEUE_FUNCS_H_
#define NCCLFFM_IMPL_TASK_QUEUE_FUNCS_H_

namespace ncclffm {

// Polls before a wait becomes one of wait.h, which costs more to set up.
#ifdef __CUDACC__
constexpr int kQuickPolls = 64;
#else
constexpr int kQuickPolls = 1;
#endif

NCCLFFM_DEVICE bool isValid(const TaskQueue &queue) {
  return queue.magic == NCCLFFM_QUEUE_MAGIC && queue.version == NCCLFFM_ABI_VERSION && queue.nLanes >= 1 &&
         queue.nLanes <= NCCLFFM_MAX_LANES && queue.lanes != nullptr && queue.tasks != nullptr;
}

// Whether a number is at or beyond another one, on the circle of 2^32.
NCCLFFM_DEVICE bool isAtOrBeyond(uint32_t number, uint32_t other) {
  return static_cast<int32_t>(number - other) >= 0;
}

NCCLFFM_DEVICE TaskSlot *slotOfTask(const TaskQueue &queue, uint32_t lane, uint32_t sequence) {
  return queue.tasks + static_cast<uint64_t>(lane) * queue.depth + (sequence & (queue.depth - 1));
}

NCCLFFM_DEVICE bool hasRoom(const TaskQueue &queue, uint32_t sequence, uint32_t done) {
  return !holds(Rule::kTaskRoom) || static_cast<int32_t>(sequence - done) < static_cast<int32_t>(queue.depth);
}

// Raises a word that counts on the circle to at least `to`. guess: what it probably is now, one less than `to` or so.
NCCLFFM_DEVICE void raiseOnTheCircle(uint32_t *word, uint32_t to, uint32_t guess) {
  for (uint32_t now = guess;;) {
    const uint32_t old = compareAndSwapRelaxedGpu(word, now, to);
    if (old == now || isAtOrBeyond(old, to)) return;
    now = old;
  }
}

// What a queue is to wait.h: a communicator of which only the lanes can fail, one channel each.
NCCLFFM_DEVICE DevComm waitingOn(const TaskQueue &queue) {
  DevComm comm = {};
  comm.rank = queue.rank;
  comm.timeoutNs = queue.timeoutNs;
  comm.status = queue.status;
  comm.lanes = queue.lanes;
  comm.laneChannels = 1;
  return comm;
}

NCCLFFM_DEVICE ncclResult_t failureOfLane(const TaskQueue &queue, uint32_t lane) {
  return static_cast<ncclResult_t>(loadRelaxedGpu(&queue.lanes[lane].failed));
}

// Fails a lane. sequence: what it came to.
NCCLFFM_DEVICE_CALL ncclResult_t failLane(const TaskQueue &queue, uint32_t lane, uint32_t sequence, ncclResult_t code,
                                          uint64_t waitedNs) {
  const Site site = {ncclFfmFunctionNone, static_cast<int>(lane), sequence, 0};
  return fail(waitingOn(queue), site, code, kNobody, waitedNs);
}

// Waits until the lane has done `bound` tasks: those before this number.
NCCLFFM_DEVICE_CALL ncclResult_t waitUntilDone(const TaskQueue &queue, uint32_t lane, uint32_t bound) {
  const DevComm comm = waitingOn(queue);
  const Site site = {ncclFfmFunctionNone, static_cast<int>(lane), bound, 0};
  auto noLetter = [](int) -> const Letter * { return nullptr; };
  const uint32_t *done = &queue.lanes[lane].done;
  const ncclResult_t result = waitFor(Alone(), comm, site, noLetter,
                                      [&] { return isAtOrBeyond(loadAcquireGpu(done), bound) ? kNobody : queue.rank; });
  // A lane that has failed since was not too late for this one.
  return isAtOrBeyond(loadAcquireGpu(done), bound) ? ncclSuccess : result;
}

// A ticket is taken and its place is not free: a full ring is launched, for otherwise it might stay full.
NCCLFFM_DEVICE_CALL ncclResult_t waitForRoom(const TaskQueue &queue, uint32_t lane, uint32_t sequence) {
  raiseOnTheCircle(&queue.lanes[lane].launched, sequence, sequence - 1);
  const ncclResult_t result = waitUntilDone(queue, lane, sequence - queue.depth + 1);
  return result == ncclTimeout ? static_cast<ncclResult_t>(ncclFfmQueueFull) : result;
}

// Takes the next number of a lane if its place is free.
NCCLFFM_DEVICE_CALL bool takeIfRoom(const TaskQueue &queue, uint32_t lane, uint32_t *sequence) {
  uint32_t *head = &queue.lanes[lane].head;
  uint32_t next = loadRelaxedGpu(head);
  for (;;) {
    if (!hasRoom(queue, next, loadAcquireGpu(&queue.lanes[lane].done))) return false;
    const uint32_t old = compareAndSwapRelaxedGpu(head, next, next + 1);
    if (old == next) break;
    next = old;
  }
  *sequence = next;
  return true;
}

// Whether a task can be one at all; what depends on the communicator, the scheduler finds out.
NCCLFFM_DEVICE bool isTask(const TaskQueue &queue, int taskType, int datatype, int op, uint64_t count, uint32_t lane) {
  if (!isValid(queue) || lane >= queue.nLanes || count > kMaxCount) return false;
  if (taskType == ncclFfmFunctionNone || taskType == ncclFfmFunctionBarrier) return true;
  if (taskType < ncclFfmFunctionAllReduce || taskType > ncclFfmFunctionSendRecv) return false;
  return elementBytesOf(datatype) != 0 && (!reduces(static_cast<uint32_t>(taskType)) || isReduction(op));
}

// What of a task is in its slot: the lower halves of the words there.
constexpr int kTaskWords = 12;
struct TaskWords {
  uint32_t word[kTaskWords];
};

NCCLFFM_DEVICE TaskWords wordsOf(const Task &task) {
  const uint64_t send = reinterpret_cast<uintptr_t>(task.sendbuff), recv = reinterpret_cast<uintptr_t>(task.recvbuff);
  return {{task.symbol, task.function, static_cast<uint32_t>(task.datatype), static_cast<uint32_t>(task.op),
           static_cast<uint32_t>(task.root), static_cast<uint32_t>(task.source), static_cast<uint32_t>(task.count),
           static_cast<uint32_t>(task.count >> 32), static_cast<uint32_t>(send), static_cast<uint32_t>(send >> 32),
           static_cast<uint32_t>(recv), static_cast<uint32_t>(recv >> 32)}};
}

NCCLFFM_DEVICE Task taskOf(const TaskWords &words, uint32_t lane, uint32_t sequence) {
  auto pair = [&](int i) { return static_cast<uint64_t>(words.word[i + 1]) << 32 | words.word[i]; };
  Task task;
  task.sequence = sequence;
  task.symbol = words.word[0];
  task.function = words.word[1];
  task.datatype = static_cast<int32_t>(words.word[2]);
  task.op = static_cast<int32_t>(words.word[3]);
  task.root = static_cast<int32_t>(words.word[4]);
  task.source = static_cast<int32_t>(words.word[5]);
  task.lane = lane;
  task.count = pair(6);
  task.sendbuff = reinterpret_cast<const void *>(pair(8));
  task.recvbuff = reinterpret_cast<void *>(pair(10));
  return task;
}

// The number in a word of a slot.
NCCLFFM_DEVICE uint32_t numberIn(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

// After a fence, which is for what was stored before the task. No release of the last word: that would wait for those
// before it on their way to memory.
NCCLFFM_DEVICE void publish(TaskSlot *slot, uint32_t sequence, const Task &task) {
  const TaskWords words = wordsOf(task);
  const uint64_t number = static_cast<uint64_t>(sequence + 1) << 32;
  releaseForSanitizer(slot);
  NCCLFFM_UNROLL
  for (int i = 0; i < kTaskWords; i += 2) {
    NCCLFFM_STALL();
    storeVec16RelaxedSys(reinterpret_cast<Vec16 *>(slot->word + i),
                         {{number | words.word[i], number | words.word[i + 1]}});
  }
}

// Whether all of the slot is of the task with this number. What its producer stored before it, is visible then.
NCCLFFM_DEVICE bool readTask(TaskSlot *slot, uint32_t sequence, TaskWords *words) {
  bool whole = true;
  NCCLFFM_UNROLL
  for (int i = 0; i < kTaskWords; i += 2) {
    const Vec16 two = loadVec16RelaxedSys(reinterpret_cast<const Vec16 *>(slot->word + i));
    whole = whole && numberIn(two.word[0]) == sequence + 1 && numberIn(two.word[1]) == sequence + 1;
    words->word[i] = static_cast<uint32_t>(two.word[0]);
    words->word[i + 1] = static_cast<uint32_t>(two.word[1]);
  }
  // Last, for it keeps what comes after it waiting.
  const bool acquired = numberIn(loadAcquireGpu(&slot->word[0])) == sequence + 1;
  if (acquired) acquireForSanitizer(slot);
  return acquired && (whole || !holds(Rule::kTaskWhole));
}

// Whether a task with the number that is named, or a later one, is in its place already.
NCCLFFM_DEVICE bool isUsed(const TaskQueue &queue, const TaskPlace &place) {
  const uint64_t word = loadRelaxedSys(&slotOfTask(queue, place.lane, place.sequence)->word[0]);
  return isAtOrBeyond(numberIn(word), place.sequence + 1);
}

// One thread appends one task.
NCCLFFM_DEVICE ncclResult_t appendTask(const TaskQueue &queue, const Task &task, const TaskPlace &place,
                                       uint32_t *sequence) {
  TaskLane &lane = queue.lanes[place.lane];
  // All on their way at the same time; then one fence, which acquires what `done` says, and releases what the producer
  // has stored.
  *sequence = place.named || !place.waits ? place.sequence : fetchAddRelaxedGpu(&lane.head, 1);
  const uint32_t failed = loadRelaxedGpu(&lane.failed);
  const uint32_t owned = loadRelaxedGpu(&lane.owned);
  const uint32_t head = place.named ? loadRelaxedGpu(&lane.head) : 0;
  const bool used = place.named && isUsed(queue, place);
  const uint32_t done = loadRelaxedGpu(&lane.done);
  fenceGpu();
  acquireForSanitizer(&lane.done);
  if (failed != ncclSuccess) return static_cast<ncclResult_t>(failed);
  if (owned != 0) return ncclInvalidUsage;
  if (!place.named && !place.waits) {
    if (!takeIfRoom(queue, place.lane, sequence)) return static_cast<ncclResult_t>(ncclFfmQueueFull);
  } else {
    if (place.named && (!isAtOrBeyond(*sequence, done) || used)) return ncclInvalidUsage;
    if (!hasRoom(queue, *sequence, done)) {
      const ncclResult_t result = waitForRoom(queue, place.lane, *sequence);
      if (result != ncclSuccess) return result;
      if (place.named && isUsed(queue, place)) return ncclInvalidUsage;
    }
  }
  if (place.named && !isAtOrBeyond(head, *sequence + 1)) raiseOnTheCircle(&lane.head, *sequence + 1, *sequence);
  publish(slotOfTask(queue, place.lane, *sequence), *sequence, task);
  return ncclSuccess;
}

NCCLFFM_DEVICE Task makeTask(TaskSymbol symbol, int taskType, int datatype, int op, const void *sendbuff,
                             void *recvbuff, uint64_t count, const TaskPlace &place) {
  Task task = {};
  task.symbol = symbol.hash;
  task.function = static_cast<uint32_t>(taskType);
  task.datatype = datatype;
  task.op = op;
  task.root = place.root;
  task.source = place.source;
  task.lane = place.lane;
  task.count = count;
  task.sendbuff = sendbuff;
  task.recvbuff = recvbuff;
  return task;
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(Coop coop, const TaskQueue &queue, TaskSymbol symbol, int taskType,
                                           int datatype, int op, const void *sendbuff, void *recvbuff, size_t count,
                                           const TaskPlace &place, Ticket *ticket) {
  if (!isTask(queue, taskType, datatype, op, count, place.lane)) return ncclInvalidArgument;
  coop.sync();
  uint64_t resultAndSequence = 0;
  if (coop.rank() == 0) {
    uint32_t sequence = 0;
    const ncclResult_t result =
        appendTask(queue, makeTask(symbol, taskType, datatype, op, sendbuff, recvbuff, count, place), place, &sequence);
    resultAndSequence = static_cast<uint64_t>(result) << 32 | sequence;
  }
  resultAndSequence = coop.syncBroadcast(resultAndSequence);
  const ncclResult_t result = static_cast<ncclResult_t>(resultAndSequence >> 32);
  if (ticket != nullptr) {
    *ticket = {place.lane, static_cast<uint32_t>(resultAndSequence), static_cast<uint32_t>(result), 1};
  }
  return result;
}

NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(const TaskQueue &queue, TaskSymbol symbol, int taskType, int datatype,
                                           int op, const void *sendbuff, void *recvbuff, size_t count, uint32_t lane,
                                           Ticket *ticket) {
  TaskPlace place;
  place.lane = lane;
  return ncclTaskAppend(CoopBlock(), queue, symbol, taskType, datatype, op, sendbuff, recvbuff, count, place, ticket);
}

NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(const TaskQueue &queue, TaskSymbol symbol, int taskType, int datatype,
                                           int op, const void *sendbuff, void *recvbuff, size_t count, uint32_t lane,
                                           uint32_t sequence, Ticket *ticket) {
  const TaskPlace place = TaskPlace::at({lane, sequence, 0, 0});
  return ncclTaskAppend(CoopBlock(), queue, symbol, taskType, datatype, op, sendbuff, recvbuff, count, place, ticket);
}

#ifdef __CUDACC__
NCCLFFM_DEVICE ncclResult_t ncclTaskAppendEach(CoopWarp warp, const TaskQueue &queue, TaskSymbol symbol, int taskType,
                                               int datatype, int op, const void *sendbuff, void *recvbuff, size_t count,
                                               const TaskPlace &place, Ticket *ticket) {
  const bool bad = !isTask(queue, taskType, datatype, op, count, place.lane) || place.named || !place.waits;
  if (warp.syncAny(bad)) return ncclInvalidArgument;
  TaskLane &lane = queue.lanes[place.lane];
  uint64_t first = 0;
  if (warp.rank() == 0) first = fetchAddRelaxedGpu(&lane.head, warp.size());
  uint32_t failed = loadRelaxedGpu(&lane.failed);
  if (loadRelaxedGpu(&lane.owned) != 0 && failed == ncclSuccess) failed = ncclInvalidUsage;
  const uint32_t done = loadRelaxedGpu(&lane.done);
  fenceGpu();  // as in appendTask
  const uint32_t sequence = static_cast<uint32_t>(warp.syncBroadcast(first)) + warp.rank();
  const Task task = makeTask(symbol, taskType, datatype, op, sendbuff, recvbuff, count, place);
  ncclResult_t result = static_cast<ncclResult_t>(failed);
  const bool room = hasRoom(queue, sequence, done);
  // Those that find room first, for the others may wait for their tasks.
  if (result == ncclSuccess && room) publish(slotOfTask(queue, place.lane, sequence), sequence, task);
  warp.sync();
  if (result == ncclSuccess && !room) {
    result = waitForRoom(queue, place.lane, sequence);
    if (result == ncclSuccess) publish(slotOfTask(queue, place.lane, sequence), sequence, task);
  }
  if (ticket != nullptr) *ticket = {place.lane, sequence, static_cast<uint32_t>(result), 1};
  warp.sync();
  return result;
}
#endif

NCCLFFM_DEVICE ncclResult_t ncclTaskReserve(const TaskQueue &queue, uint32_t lane, uint32_t n, Ticket *first) {
  if (!isValid(queue) || lane >= queue.nLanes || n > kMostReserved) return ncclInvalidArgument;
  const ncclResult_t result = failureOfLane(queue, lane);
  if (result != ncclSuccess) return result;
  if (loadRelaxedGpu(&queue.lanes[lane].owned) != 0) return ncclInvalidUsage;
  *first = {lane, fetchAddRelaxedGpu(&queue.lanes[lane].head, n), ncclSuccess, 1};
  return ncclSuccess;
}

NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(const TaskQueue &queue, const Ticket &ticket) {
  if (!isValid(queue) || ticket.lane >= queue.nLanes) return ncclInvalidArgument;
  if (ticket.result != ncclSuccess) return static_cast<ncclResult_t>(ticket.result);  // it has no task
  raiseOnTheCircle(&queue.lanes[ticket.lane].launched, ticket.sequence + 1, ticket.sequence);
  return ncclSuccess;
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(Coop coop, const TaskQueue &queue, const Ticket &ticket) {
  if (!isValid(queue) || ticket.lane >= queue.nLanes) return ncclInvalidArgument;
  if (ticket.result != ncclSuccess) return static_cast<ncclResult_t>(ticket.result);
  if (coop.rank() == 0) ncclTaskLaunch(queue, ticket);
  reconverge(coop);
  return ncclSuccess;
}

// All that is numbered on a lane; a LaneProducer launches its tasks itself, and beside them there may be numbers that
// were refused.
NCCLFFM_DEVICE void launchAll(const TaskQueue &queue, uint32_t lane) {
  if (loadRelaxedGpu(&queue.lanes[lane].owned) != 0) return;
  const uint32_t head = loadRelaxedGpu(&queue.lanes[lane].head);
  const uint32_t launched = loadRelaxedGpu(&queue.lanes[lane].launched);
  if (!isAtOrBeyond(launched, head)) raiseOnTheCircle(&queue.lanes[lane].launched, head, launched);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(Coop coop, const TaskQueue &queue) {
  if (!isValid(queue)) return ncclInvalidArgument;
  coop.sync();
  for (uint32_t l = coop.rank(); l < queue.nLanes; l += coop.size()) launchAll(queue, l);
  return ncclSuccess;
}

NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(const TaskQueue &queue) {
  return ncclTaskLaunch(CoopBlock(), queue);
}

NCCLFFM_DEVICE ncclResult_t ncclTaskTest(const TaskQueue &queue, const Ticket &ticket) {
  if (!isValid(queue) || ticket.lane >= queue.nLanes) return ncclInvalidArgument;
  const TaskLane &lane = queue.lanes[ticket.lane];
  const uint32_t failed = loadRelaxedGpu(&lane.failed);  // first: what was done before the failure is done
  if (isAtOrBeyond(loadAcquireGpu(&lane.done), ticket.sequence + 1)) return ncclSuccess;
  return failed != ncclSuccess ? static_cast<ncclResult_t>(failed) : ncclInProgress;
}

// Waits for the task before `bound`, by one thread.
NCCLFFM_DEVICE ncclResult_t awaitDone(const TaskQueue &queue, uint32_t lane, uint32_t bound) {
  const uint32_t *done = &queue.lanes[lane].done;
  for (int polls = 0; polls < kQuickPolls; ++polls) {
    if (isAtOrBeyond(loadAcquireGpu(done), bound)) return ncclSuccess;
  }
  return waitUntilDone(queue, lane, bound);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskWait(Coop coop, const TaskQueue &queue, const Ticket &ticket) {
  if (!isValid(queue) || ticket.lane >= queue.nLanes) return ncclInvalidArgument;
  uint64_t result = ncclSuccess;
  if (coop.rank() == 0) result = awaitDone(queue, ticket.lane, ticket.sequence + 1);
  return static_cast<ncclResult_t>(coop.syncBroadcast(result));
}

NCCLFFM_DEVICE ncclResult_t ncclTaskWait(const TaskQueue &queue, const Ticket &ticket) {
  return ncclTaskWait(CoopBlock(), queue, ticket);
}

template <class Coop>
NCCLFFM_DEVICE LaneProducer<Coop>::LaneProducer(Coop coop, const TaskQueue &queue, uint32_t lane)
    : coop_(coop), queue_(queue), lane_(lane) {
  if (!isValid(queue) || lane >= queue.nLanes) return;
  uint64_t result = ncclSuccess, numbers = 0;
  if (coop_.rank() == 0) {
    TaskLane &l = queue.lanes[lane];
    result = failureOfLane(queue, lane);
    if (result == ncclSuccess && compareAndSwapRelaxedGpu(&l.owned, 0, 1) != 0) result = ncclInvalidUsage;
    fenceGpu();  // what the producer before has stored
    acquireForSanitizer(&l.owned);
    const uint32_t head = loadRelaxedGpu(&l.head);
    numbers = static_cast<uint64_t>(loadAcquireGpu(&l.done)) << 32 | head;
  }
  result_ = static_cast<ncclResult_t>(coop_.syncBroadcast(result));
  numbers = coop_.syncBroadcast(numbers);
  next_ = static_cast<uint32_t>(numbers);
  done_ = static_cast<uint32_t>(numbers >> 32);
}

template <class Coop>
NCCLFFM_DEVICE LaneProducer<Coop>::~LaneProducer() {
  coop_.sync();
  if (result_ != ncclSuccess || coop_.rank() != 0) return;
  storeRelaxedGpu(&queue_.lanes[lane_].head, next_);  // not those that were refused
  storeReleaseGpu(&queue_.lanes[lane_].owned, 0);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t LaneProducer<Coop>::append(TaskSymbol symbol, int taskType, int datatype, int op,
                                                       const void *sendbuff, void *recvbuff, size_t count,
                                                       Ticket *ticket, int root, int source) {
  if (result_ != ncclSuccess) return result_;
  if (!isTask(queue_, taskType, datatype, op, count, lane_)) return ncclInvalidArgument;
  TaskLane &lane = queue_.lanes[lane_];
  if (hasRoom(queue_, next_, done_)) {
    coop_.sync();
  } else {
    uint64_t resultAndDone = 0;
    if (coop_.rank() == 0) {
      const ncclResult_t result =
          hasRoom(queue_, next_, loadAcquireGpu(&lane.done)) ? ncclSuccess : waitForRoom(queue_, lane_, next_);
      resultAndDone = static_cast<uint64_t>(result) << 32 | loadAcquireGpu(&lane.done);
    }
    resultAndDone = coop_.syncBroadcast(resultAndDone);
    if (resultAndDone >> 32 != ncclSuccess) return static_cast<ncclResult_t>(resultAndDone >> 32);
    done_ = static_cast<uint32_t>(resultAndDone);
  }
  if (coop_.rank() == 0) {
    TaskPlace place;
    place.lane = lane_;
    place.root = root;
    place.source = source;
    fenceGpu();
    publish(slotOfTask(queue_, lane_, next_), next_,
            makeTask(symbol, taskType, datatype, op, sendbuff, recvbuff, count, place));
    storeRelaxedGpu(&lane.head, next_ + 1);
    storeRelaxedGpu(&lane.launched, next_ + 1);
  }
  reconverge(coop_);
  if (ticket != nullptr) *ticket = {lane_, next_, ncclSuccess, 1};
  ++next_;
  return ncclSuccess;
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t LaneProducer<Coop>::wait(const Ticket &ticket) {
  if (result_ != ncclSuccess) return result_;
  if (ticket.lane != lane_) return ncclInvalidArgument;
  uint64_t result = ncclSuccess;
  if (coop_.rank() == 0) result = awaitDone(queue_, lane_, ticket.sequence + 1);
  result = coop_.syncBroadcast(result);
  if (result == ncclSuccess && !isAtOrBeyond(done_, ticket.sequence + 1)) done_ = ticket.sequence + 1;
  return static_cast<ncclResult_t>(result);
}

NCCLFFM_DEVICE void ncclTaskProducerEnd(const TaskQueue &queue) {
  fetchAddAcqRelGpu(&queue.shared->finished, 1);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_TASK_QUEUE_FUNCS_H_

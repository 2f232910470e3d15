// Bodies of scheduler.h.
#ifndef NCCLFFM_IMPL_SCHEDULER_FUNCS_H_
#define NCCLFFM_IMPL_SCHEDULER_FUNCS_H_

namespace ncclffm {

// Once a wait has begun to pause, a poll is slow anyway on the host.
#ifdef __CUDACC__
constexpr uint32_t kPausedPollsPerCheck = kPollsPerCheck;
#else
constexpr uint32_t kPausedPollsPerCheck = 1;
#endif

// In TaskLane.go, above the number.
constexpr uint64_t kLeaveBit = uint64_t{1} << 32;

NCCLFFM_DEVICE DevComm schedulerComm(const DevComm &comm, const TaskQueue &queue) {
  DevComm view = comm;
  view.status = queue.status;
  view.lanes = queue.lanes;
  view.laneChannels = static_cast<int>(queue.blocksPerLane);
  if (view.protocol == ncclFfmProtocolLL128) view.protocol = ncclFfmProtocolAuto;
  if (view.algorithm == ncclFfmAlgorithmRing) view.algorithm = ncclFfmAlgorithmAuto;
  return view;
}

NCCLFFM_DEVICE void clearQueue(const TaskQueue &queue, uint32_t firstSequence, uint64_t thread, uint64_t nThreads) {
  if (thread == 0) *queue.shared = {};
  for (uint64_t l = thread; l < queue.nLanes; l += nThreads) {
    TaskLane &lane = queue.lanes[l];
    lane = {};
    lane.head = lane.launched = lane.done = firstSequence;
    lane.go = firstSequence;
    storeRelaxedSys(queue.progress + l, firstSequence);
  }
  for (uint64_t i = thread; i < uint64_t{queue.nLanes} * queue.depth; i += nThreads) {
    // Of the lap before: never the number of the task that comes first, nor beyond it.
    const uint32_t place = static_cast<uint32_t>(i) & (queue.depth - 1);
    const uint32_t ahead = (place - firstSequence) & (queue.depth - 1);
    queue.tasks[i] = {};
    for (int w = 0; w < kTaskWords; ++w) {
      queue.tasks[i].word[w] = static_cast<uint64_t>(firstSequence + ahead + 1 - queue.depth) << 32;
    }
  }
}

// What the first block of a lane does next.
enum class Next : uint32_t { kRun, kLeave };

// What the thread that takes tasks for a lane knows from one to the next.
struct LaneState {
  uint32_t polls;      // counts to the next look at what is seldom or slow to look at
  uint64_t quietNs;    // since when nothing has happened; of lane 0
  uint32_t quietDone;  // what had been done then: the sum of all lanes
  uint32_t closing;    // the last attempt to end that it has seen the verdict of
};

NCCLFFM_DEVICE bool isQuiet(const TaskQueue &queue, uint32_t *sumOfDone) {
  bool quiet = true;
  *sumOfDone = 0;
  for (uint32_t l = 0; l < queue.nLanes; ++l) {
    const TaskLane &lane = queue.lanes[l];
    const uint32_t done = loadRelaxedGpu(&lane.done);
    *sumOfDone += done;
    quiet =
        quiet && (isAtOrBeyond(done, loadRelaxedGpu(&lane.launched)) || loadRelaxedGpu(&lane.failed) != ncclSuccess);
  }
  return quiet;
}

NCCLFFM_DEVICE bool haveAllFailed(const TaskQueue &queue) {
  for (uint32_t l = 0; l < queue.nLanes; ++l) {
    if (loadRelaxedGpu(&queue.lanes[l].failed) == ncclSuccess) return false;
  }
  return true;
}

// Producers that the host has launched, and that have not finished.
NCCLFFM_DEVICE bool hasProducers(const TaskQueue &queue) {
  const uint32_t finished = loadAcquireGpu(&queue.shared->finished);  // what they launched is seen after this
  return static_cast<int32_t>(loadRelaxedSys(&queue.control->producers) - finished) > 0;
}

// No lane takes a task from now on, until there is a verdict: all or none leave. A lane that left alone, while another
// one has begun a task, would keep the next scheduler from starting until that task is done, which its peers may not
// run either before their next scheduler starts.
NCCLFFM_DEVICE bool haveAllParked(const TaskQueue &queue, uint32_t attempt) {
  for (uint32_t l = 1; l < queue.nLanes; ++l) {
    const TaskLane &lane = queue.lanes[l];
    for (uint32_t polls = 0; loadAcquireGpu(&lane.parked) != attempt; ++polls) {
      if (loadRelaxedGpu(&lane.failed) != ncclSuccess) break;  // it takes none any more
      // Busy, or a block that has not started: later.
      if (polls == kPollsPerCheck || !isAtOrBeyond(loadRelaxedGpu(&lane.done), loadRelaxedGpu(&lane.launched))) {
        return false;
      }
      pauseNs(kYieldBetweenPolls ? 0 : kPauseNs);
    }
  }
  return true;
}

NCCLFFM_DEVICE bool mayEndAtOnce(const TaskQueue &queue, ncclFfmSchedulerMode mode) {
  return mode == ncclFfmSchedulerDrain || loadRelaxedSys(&queue.control->stop) != 0 || haveAllFailed(queue);
}

// For lane 0: ends the scheduler if it may end now.
NCCLFFM_DEVICE_CALL bool endIfQuiet(const TaskQueue &queue, ncclFfmSchedulerMode mode, LaneState *state) {
  uint32_t done = 0;
  if (!isQuiet(queue, &done)) {
    state->quietNs = 0;
    return false;
  }
  const uint64_t now = nowNs();
  if (state->quietNs == 0 || done != state->quietDone) {
    state->quietNs = now;
    state->quietDone = done;
  }
  if (!mayEndAtOnce(queue, mode) && (now - state->quietNs < queue.idleNs || hasProducers(queue))) return false;
  NCCLFFM_STALL();
  const uint32_t said = loadRelaxedSys(&queue.control->state);
  storeRelaxedSys(&queue.control->state, said + 1);
  fenceBothWaysSys();
  NCCLFFM_STALL();
  const uint32_t attempt = (state->closing + 1) & 0x7fffffffu;
  state->closing = attempt;
  storeReleaseGpu(&queue.shared->closing, attempt);
  const bool parked = !holds(Rule::kLanesPark) || haveAllParked(queue, attempt);
  NCCLFFM_STALL();
  const bool ends = parked && (!holds(Rule::kIdleRecheck) ||
                               ((mayEndAtOnce(queue, mode) || !hasProducers(queue)) && isQuiet(queue, &done)));
  if (!ends) {
    storeRelaxedSys(&queue.control->state, said);
    state->quietNs = 0;
  }
  storeReleaseGpu(&queue.shared->verdict, attempt << 1 | (ends ? 1u : 0u));
  return ends;
}

// For the other lanes: takes part in an attempt to end. Whether the scheduler ends.
NCCLFFM_DEVICE bool endWithLane0(const TaskQueue &queue, TaskLane &lane, uint32_t polls, LaneState *state) {
  if (!holds(Rule::kLanesPark) && polls % kPollsPerCheck != 0) return false;
  const uint32_t attempt = loadAcquireGpu(&queue.shared->closing);
  state->closing = attempt;
  NCCLFFM_STALL();
  storeReleaseGpu(&lane.parked, attempt);
  NCCLFFM_STALL();
  for (;;) {
    // Lane 0 never waits long for a verdict, so neither does this one.
    const uint32_t verdict = loadAcquireGpu(&queue.shared->verdict);
    if (verdict >> 1 == attempt) return (verdict & 1) != 0;
    // A later attempt is there only if this one was refused, because this lane came too late to it.
    if (loadAcquireGpu(&queue.shared->closing) != attempt) return false;
    pauseNs(kYieldBetweenPolls ? 0 : kPauseNs);
  }
}

// What one look at a lane shows.
struct Look {
  bool failed;
  bool launched;     // the next task
  bool written;      // the next task, all of it
  bool done;         // the one before, by all blocks
  uint32_t closing;  // of all lanes but 0

  NCCLFFM_DEVICE bool isReady() const {
    return !failed && done && (launched || !holds(Rule::kLaunchBound)) &&
           (written || (!holds(Rule::kTaskGeneration) && launched));
  }
};

// Who takes tasks for a lane: one thread, or on a GPU a warp, whose threads look at all that a task waits for at once,
// so that a look takes one round trip and little else. What changes memory is the first thread's. Words: what a thread
// has of a task.
struct TakingThread {
  using Words = TaskWords;

  NCCLFFM_DEVICE bool isFirst() const { return true; }
  NCCLFFM_DEVICE uint32_t ofFirst(uint32_t value) const { return value; }
  NCCLFFM_DEVICE void read(const TaskQueue &queue, uint32_t l, uint32_t position, TaskWords *words) const {
    readTask(slotOfTask(queue, l, position), position, words);
  }

  // Looks at one task. The loads of a look are on their way together: a question after the other would cost a round
  // trip each.
  struct Looks {
    const TaskQueue &queue;
    uint32_t l;
    uint32_t position;

    NCCLFFM_DEVICE Look operator()(TaskWords *words) const {
      const TaskLane &lane = queue.lanes[l];
      Look seen;
      seen.failed = loadRelaxedGpu(&lane.failed) != ncclSuccess;
      seen.closing = l == 0 ? 0 : loadRelaxedGpu(&queue.shared->closing);
      seen.launched = isAtOrBeyond(loadRelaxedGpu(&lane.launched), position + 1);
      seen.written = readTask(slotOfTask(queue, l, position), position, words);
      seen.done = queue.blocksPerLane == 1 || !holds(Rule::kTaskOrder) || loadAcquireGpu(&lane.done) == position;
      return seen;
    }
  };
};

#ifdef __CUDACC__
struct TakingWarp {
  using Words = uint32_t;  // word number i of the task on thread i

  NCCLFFM_DEVICE bool isFirst() const { return CoopWarp().rank() == 0; }
  NCCLFFM_DEVICE uint32_t ofFirst(uint32_t value) const {
    __syncwarp();  // what the first thread has acquired, all have
    return of(value, 0);
  }
  NCCLFFM_DEVICE static uint32_t of(uint32_t value, uint32_t thread) {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(thread));
  }
  NCCLFFM_DEVICE void read(const TaskQueue &queue, uint32_t l, uint32_t position, uint32_t *word) const {
    const uint32_t thread = CoopWarp().rank();
    if (thread < kTaskWords) {
      *word = static_cast<uint32_t>(loadRelaxedSys(slotOfTask(queue, l, position)->word + thread));
    }
  }

  class Looks {
   public:
    NCCLFFM_DEVICE Looks(const TaskQueue &queue, uint32_t l, uint32_t position)
        : thread_(CoopWarp().rank()), position_(position), hasClosing_(l != 0) {
      const TaskLane &lane = queue.lanes[l];
      slot_ = slotOfTask(queue, l, position)->word;
      ofLane_ = thread_ == kLaunched ? &lane.launched : thread_ == kFailed ? &lane.failed : &queue.shared->closing;
      done_ = queue.blocksPerLane > 1 && holds(Rule::kTaskOrder) ? &lane.done : nullptr;
    }

    NCCLFFM_DEVICE Look operator()(uint32_t *word) const {
      uint64_t ofSlot = 0;
      uint32_t ofLane = 0;
      if (thread_ < kTaskWords) ofSlot = loadRelaxedSys(slot_ + thread_);
      if (thread_ >= kLaunched && thread_ <= kClosing) ofLane = loadRelaxedGpu(ofLane_);
      uint32_t acquired = 1, done = 1;
      // Last, for they keep what comes after them waiting.
      if (thread_ == 0) {
        acquired = numberIn(loadAcquireGpu(slot_)) == position_ + 1;
        if (done_ != nullptr) done = loadAcquireGpu(done_) == position_;
      }
      *word = static_cast<uint32_t>(ofSlot);
      const bool whole = thread_ >= kTaskWords || numberIn(ofSlot) == position_ + 1 || !holds(Rule::kTaskWhole);
      Look seen;
      seen.failed = of(ofLane, kFailed) != ncclSuccess;
      seen.closing = hasClosing_ ? of(ofLane, kClosing) : 0;
      seen.launched = isAtOrBeyond(of(ofLane, kLaunched), position_ + 1);
      seen.written = __all_sync(0xffffffffu, whole && acquired != 0) != 0;
      seen.done = of(done, 0) != 0;
      return seen;
    }

   private:
    // Which threads look at the words of the lane.
    static constexpr uint32_t kLaunched = kTaskWords, kFailed = kTaskWords + 1, kClosing = kTaskWords + 2;

    uint32_t thread_;
    uint32_t position_;
    bool hasClosing_;
    const uint64_t *slot_;
    const uint32_t *ofLane_;
    const uint32_t *done_;
  };
};
#endif

enum class Seldom : uint32_t { kGoOn, kLookAgain, kLeave };

// What is seldom looked at, or slow to look at; by the first thread. missingNs: since when a task that was launched is
// not written.
NCCLFFM_DEVICE_CALL Seldom lookSeldom(const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l, uint32_t position,
                                      Look seen, LaneState *state, uint64_t *missingNs) {
  if (!seen.failed && loadRelaxedSys(&queue.status[l].abort) != 0) {
    failLane(queue, l, position, ncclRemoteError, 0);
    return Seldom::kLookAgain;
  }
  if (!seen.failed && seen.launched && !seen.written) {
    const uint64_t now = nowNs();
    if (*missingNs == 0) *missingNs = now;
    if (queue.timeoutNs != 0 && now - *missingNs >= queue.timeoutNs) {
      failLane(queue, l, position, static_cast<ncclResult_t>(ncclFfmQueueBroken), now - *missingNs);
    }
  }
  return l == 0 && endIfQuiet(queue, mode, state) ? Seldom::kLeave : Seldom::kGoOn;
}

// Waits for the next task, *words, for as long as the scheduler lives. This one has no deadline of its own; it sees an
// abort, a stop and a failure all the same. All that a look needs is in registers: an acquire empties the cache that
// the stack is in, too.
template <class Taker>
NCCLFFM_DEVICE Next awaitTask(const Taker &taker, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                              uint32_t position, LaneState *state, typename Taker::Words *words) {
  const typename Taker::Looks looks{queue, l, position};
  const uint32_t pollsBefore = state->polls;
  uint32_t closing = taker.ofFirst(state->closing);
  uint64_t missingNs = 0;
  for (uint32_t polls = 1;; ++polls) {
    const Look seen = looks(words);
    // Not only while there is nothing to do: an abort ends a lane that never stands still.
    if ((pollsBefore + polls) % (polls < kPollsBeforePause ? kPollsPerCheck : kPausedPollsPerCheck) == 0) {
      if (seen.failed && l != 0) return Next::kLeave;  // lane 0 outlives its failure, to end the others
      Seldom next = Seldom::kGoOn;
      if (taker.isFirst()) {
        uint64_t missing = missingNs;
        next = lookSeldom(queue, mode, l, position, seen, state, &missing);
        missingNs = missing;
      }
      next = static_cast<Seldom>(taker.ofFirst(static_cast<uint32_t>(next)));
      if (next == Seldom::kLeave) return Next::kLeave;
      if (next == Seldom::kLookAgain) continue;
    }
    if (l != 0 && seen.closing != closing) {
      bool ends = false;
      if (taker.isFirst()) ends = endWithLane0(queue, queue.lanes[l], pollsBefore + polls, state);
      closing = taker.ofFirst(state->closing);
      state->closing = closing;
      if (taker.ofFirst(ends) != 0) return Next::kLeave;
    }
    if (seen.isReady()) {
      state->polls = pollsBefore + polls;
      return Next::kRun;
    }
    if (polls >= kPollsBeforePause) {
      pauseNs(kPauseNs);
    } else if (kYieldBetweenPolls) {
      pauseNs(0);
    }
  }
}

// Waits for the first block of the lane to take the next task, and takes it, too.
template <class Taker>
NCCLFFM_DEVICE Next awaitFirstBlock(const Taker &taker, const TaskQueue &queue, uint32_t l, uint32_t position,
                                    typename Taker::Words *words) {
  const TaskLane &lane = queue.lanes[l];
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t go = loadAcquireGpu(&lane.go);
    const bool goes = isAtOrBeyond(static_cast<uint32_t>(go), position + 1);
    if (taker.ofFirst(goes) != 0) {
      taker.read(queue, l, position, words);  // it is there
      return Next::kRun;
    }
    if (taker.ofFirst((go & kLeaveBit) != 0) != 0) return Next::kLeave;
    if (polls >= kPollsBeforePause) {
      pauseNs(kPauseNs);
    } else if (kYieldBetweenPolls) {
      pauseNs(0);
    }
  }
}

// For block number b of lane l: what comes next, told to the other blocks by the first.
template <class Taker>
NCCLFFM_DEVICE Next nextOfBlock(const Taker &taker, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                                uint32_t b, uint32_t position, LaneState *state, typename Taker::Words *words) {
  if (b != 0) return awaitFirstBlock(taker, queue, l, position, words);
  const Next next = awaitTask(taker, queue, mode, l, position, state, words);
  if (queue.blocksPerLane > 1) {
    const bool runs = taker.ofFirst(next == Next::kRun) != 0;  // what any thread has read, is before what follows
    if (taker.isFirst()) storeReleaseGpu(&queue.lanes[l].go, runs ? position + 1 : position | kLeaveBit);
  }
  return next;
}

// The task for all threads of a group, and what to do.
template <class Coop>
NCCLFFM_DEVICE Next nextTask(const Coop &coop, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                             uint32_t b, uint32_t position, LaneState *state, Task *task) {
  Next next = Next::kLeave;
  TaskWords words = {};
  if (coop.rank() == 0) next = nextOfBlock(TakingThread(), queue, mode, l, b, position, state, &words);
  next = static_cast<Next>(coop.syncBroadcast(static_cast<uint64_t>(next)));
  const uint64_t address = coop.syncBroadcast(reinterpret_cast<uintptr_t>(&words));
  if (next == Next::kRun) *task = taskOf(*reinterpret_cast<const TaskWords *>(address), l, position);
  coop.sync();  // the words stay until all have them
  return next;
}

#ifdef __CUDACC__
NCCLFFM_DEVICE Next nextTask(const CoopBlock &coop, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                             uint32_t b, uint32_t position, LaneState *state, Task *task) {
  __shared__ TaskWords words;
  __shared__ uint32_t sequence;  // what is needed after the wait is not on the stack: see awaitTask
  __shared__ Next next;
  if (coop.rank() == 0) {
    sequence = position;
    next = Next::kRun;
  }
  if (coop.rank() < 32) {
    uint32_t word = 0;
    if (nextOfBlock(TakingWarp(), queue, mode, l, b, position, state, &word) == Next::kRun) {
      const uint32_t thread = CoopWarp().rank();
      if (thread < kTaskWords) words.word[thread] = word;
    } else if (coop.rank() == 0) {
      next = Next::kLeave;
    }
  }
  coop.sync();
  *task = taskOf(words, l, sequence);
  return next;
}
#endif

// All ranks have begun a task that moves nothing on this channel.
template <class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t agree(ChannelSession<Coop> &session, uint32_t hash) {
  session.beginExchange(hash);
  session.tellBegun();
  return session.endExchange(session.awaitReady());
}

// A task with bad arguments fails the lane, on all ranks: they come to something that this rank does not.
template <class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t refuse(ChannelSession<Coop> &session, bool pair) {
  ncclResult_t result = ncclSuccess;
  if (!pair) {
    session.beginExchange(0x80000000u);
    session.tellBegun();
  }
  if (session.coop().rank() == 0) result = fail(session.comm(), session.site(), ncclInvalidArgument, kNobody, 0);
  if (!pair) return session.endExchange(result);
  session.coop().sync();
  return failureOf(session.comm(), session.site().channel);
}

NCCLFFM_DEVICE Call callOf(const Task &task) {
  return makeCall(static_cast<ncclFfmFunction>(task.function), task.sendbuff, task.recvbuff, task.count, task.datatype,
                  task.op, task.root, task.source);
}

template <class Coop>
struct CallShare {
  ChannelSession<Coop> &session;
  const Call &call;
  const BlockShare &share;

  template <class T>
  NCCLFFM_DEVICE ncclResult_t operator()(TypeTag<T>) const {
    return runShareApart<T, Ways::kTasks>(session, call, share);
  }
};

// Any task on a block's share of it.
template <class Coop>
NCCLFFM_DEVICE_CALL ncclResult_t runTaskShare(ChannelSession<Coop> &session, Call call, uint32_t taskHash, uint32_t b,
                                              uint32_t nBlocks) {
  const DevComm &comm = session.comm();
  const bool pair = isPair(call.function);
  chooseFor(comm, call, session.coop().size(), static_cast<int>(nBlocks));
  if (problemOf(comm, call, session.coop().size()) != Problem::kNone) return refuse(session, pair);
  const bool isBarrier = call.function == ncclFfmFunctionBarrier;
  const BlockShare share =
      isBarrier ? BlockShare{0, 0}
                : shareOf(call.count, elementBytesOf(call.datatype), static_cast<int>(b), static_cast<int>(nBlocks));
  if (pair) return runPairShare(session.coop(), comm, call, session.site().channel, share, taskHash);
  if (share.count == 0 && !isBarrier) return agree(session, hashOf(call, 0));
  return withElementType(call, CallShare<Coop>{session, call, share});
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t runTask(ChannelSession<Coop> &session, const TaskQueue &queue, const Task &task, uint32_t l,
                                    uint32_t b) {
  if (task.function == ncclFfmFunctionNone) return ncclSuccess;
  const uint32_t position = task.sequence;
  const DevComm &comm = session.comm();
  const bool pair = isPair(task.function);
  const PackedRecord record = packRecord(
      task, position, pair ? static_cast<uint32_t>(ncclFfmFunctionSendRecv) : task.function, pair ? 0 : task.root);
  const uint32_t taskHash = holds(Rule::kTaskAgreement) ? mixOfRecord(record, 0) & 0x7fffffffu : 0;
  session.setTask(taskHash);
  session.setFunction(static_cast<ncclFfmFunction>(task.function));
  // For status records: to the peers, and here what runs. By threads that have least to do with what comes now.
  const uint32_t size = session.coop().size(), thread = size - 1 - session.coop().rank();
  auto tell = [&](uint32_t epoch) {
    if (thread == size / 2) {  // every block the same, for whichever fails first
      storeRecord(queue.lanes[l].running, sealed(packRecord(task, position, task.function, task.root), position));
    }
    for (int peer = static_cast<int>(thread); !pair && peer < comm.nRanks; peer += static_cast<int>(size)) {
      if (peer == comm.rank) continue;
      storeRecord(mailboxOf(comm, peer, session.site().channel, comm.rank)->task[epoch % 2].word,
                  sealed(record, epoch));
    }
    reconverge(session.coop());
  };
  Call call = callOf(task);
  // What is most about latency is inlined; all else is a call, on a copy, so that what is here may stay in registers.
  const uint32_t elementBytes = sizeof(float);
  if (task.function == ncclFfmFunctionAllReduce && task.datatype == ncclFloat32 && queue.blocksPerLane == 1 &&
      isReduction(task.op) && task.count - 1 < session.smallBytes() &&
      task.count * elementBytes - 1 < session.smallBytes() &&
      problemOfBuffers(comm, call, elementBytes) == Problem::kNone) {
    call.protocol = ncclFfmProtocolLL;
    call.algorithm = ncclFfmAlgorithmOneShot;
    return smallAllReduce<float>(session, call, tell);
  }
  tell(session.site().epoch + 1);
  ChannelSession<Coop> lent = session.lend();
  const ncclResult_t result = runTaskShare(lent, call, taskHash, b, queue.blocksPerLane);
  session.takeBack(lent);
  return result;
}

// The thread that tells the host, in the second warp.
constexpr uint32_t kTellingThread = 32;

// The second warp goes on once the first has come here, which does not wait for it.
template <class Coop>
NCCLFFM_DEVICE void secondWarpAfterFirst(const Coop &) {}
#ifdef __CUDACC__
NCCLFFM_DEVICE void secondWarpAfterFirst(const CoopBlock &coop) {
  if (coop.rank() < 32) {
    asm volatile("barrier.cta.arrive 1, 64;" ::: "memory");
  } else if (coop.rank() < 64) {
    asm volatile("barrier.cta.sync 1, 64;" ::: "memory");
  }
}
#endif

// The block has run its share, which its threads have synced after: the last one of the lane says so. To the host by
// the second warp, which takes longer, while the first takes the next task; not at the same time, for two fences of a
// block keep each other waiting.
template <class Coop>
NCCLFFM_DEVICE void finishTask(const Coop &coop, const TaskQueue &queue, uint32_t l, uint32_t position) {
  TaskLane &lane = queue.lanes[l];
  if (queue.blocksPerLane > 1) {
    if (coop.rank() != 0) return;
    if (fetchAddAcqRelGpu(&lane.arrived, 1) != queue.blocksPerLane - 1) return;
    storeRelaxedGpu(&lane.arrived, 0);
    storeReleaseGpu(&lane.done, position + 1);
    storeReleaseSys(queue.progress + l, position + 1);
    return;
  }
  const uint32_t teller = coop.size() > kTellingThread ? kTellingThread : 0;
  if (coop.rank() == 0) storeReleaseGpu(&lane.done, position + 1);
  if (teller != 0) secondWarpAfterFirst(coop);
  if (coop.rank() == teller) storeReleaseSys(queue.progress + l, position + 1);
}

// The last block that leaves makes way for the next scheduler.
NCCLFFM_DEVICE void leaveScheduler(const TaskQueue &queue) {
  TaskShared *shared = queue.shared;
  if (fetchAddAcqRelGpu(&shared->left, 1) != queue.nLanes * queue.blocksPerLane - 1) return;
  storeRelaxedGpu(&shared->left, 0);
  for (uint32_t l = 0; l < queue.nLanes; ++l) {
    TaskLane &lane = queue.lanes[l];
    storeRelaxedGpu(&lane.arrived, 0);  // a lane that failed may have left it half-way
    storeRelaxedGpu(&lane.go, loadAcquireGpu(&lane.go) & ~kLeaveBit);
  }
  // It had announced its end.
  storeReleaseSys(&queue.control->state, loadRelaxedSys(&queue.control->state) + 1);
}

template <class Coop>
NCCLFFM_DEVICE void runScheduler(Coop coop, const DevComm &comm, const TaskQueue &queue, ncclFfmSchedulerMode mode,
                                 int block) {
  const uint32_t l = static_cast<uint32_t>(block) / queue.blocksPerLane;
  const uint32_t b = static_cast<uint32_t>(block) % queue.blocksPerLane;
  {
    ChannelSession<Coop> session(coop, comm, block, ncclFfmFunctionNone);
    // No verdict on a new attempt to end comes before this lane has parked: this is the last one of the scheduler
    // before.
    LaneState state = {0, 0, 0, loadRelaxedGpu(&queue.shared->verdict) >> 1};
    uint32_t position = loadRelaxedGpu(&queue.lanes[l].done);
    coop.sync();  // all threads know where the lane is, before it goes on
    for (;;) {
      Task task;
      if (nextTask(coop, queue, mode, l, b, position, &state, &task) == Next::kLeave) break;
      const ncclResult_t result =
          session.result() != ncclSuccess ? session.result() : runTask(session, queue, task, l, b);
      coop.sync();
      ++position;
      if (result != ncclSuccess) continue;  // the lane has failed: there is no next task
      finishTask(coop, queue, l, position - 1);
    }
  }
  coop.sync();
  if (coop.rank() == 0) leaveScheduler(queue);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_SCHEDULER_FUNCS_H_

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
  uint32_t position;   // the next task
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
NCCLFFM_DEVICE bool endWithLane0(const TaskQueue &queue, TaskLane &lane, LaneState *state) {
  if (!holds(Rule::kLanesPark) && state->polls % kPollsPerCheck != 0) return false;
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

// Whether the lane's next task can be run now.
NCCLFFM_DEVICE bool isReady(const TaskQueue &queue, const TaskLane &lane, TaskSlot *slot, uint32_t position,
                            TaskWords *words) {
  const uint32_t launched = loadRelaxedGpu(&lane.launched);
  const bool written = readTask(slot, position, words);
  const bool all = queue.blocksPerLane == 1 || !holds(Rule::kTaskOrder) || loadAcquireGpu(&lane.done) == position;
  const bool bound = isAtOrBeyond(launched, position + 1);
  return all && (bound || !holds(Rule::kLaunchBound)) && (written || (!holds(Rule::kTaskGeneration) && bound));
}

// Waits for the next task, *words, for as long as the scheduler lives. This one has no deadline of its own; it sees an
// abort, a stop and a failure all the same.
NCCLFFM_DEVICE Next awaitTask(const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l, LaneState *state,
                              TaskWords *words) {
  TaskLane &lane = queue.lanes[l];
  TaskSlot *slot = slotOfTask(queue, l, state->position);
  uint64_t missingNs = 0;
  for (uint32_t polls = 1;; ++polls) {
    // What is looked at each time is on its way together: a question after the other would cost a round trip each.
    const bool failed = loadRelaxedGpu(&lane.failed) != ncclSuccess;
    const uint32_t closing = l == 0 ? 0 : loadRelaxedGpu(&queue.shared->closing);
    const bool ready = isReady(queue, lane, slot, state->position, words);
    // Not only while there is nothing to do: an abort ends a lane that never stands still.
    if (++state->polls % (polls < kPollsBeforePause ? kPollsPerCheck : kPausedPollsPerCheck) == 0) {
      if (failed && l != 0) return Next::kLeave;  // lane 0 outlives its failure, to end the others
      if (!failed && loadRelaxedSys(&queue.status[l].abort) != 0) {
        failLane(queue, l, state->position, ncclRemoteError, 0);
        continue;
      }
      const bool launched = isAtOrBeyond(loadRelaxedGpu(&lane.launched), state->position + 1);
      if (!failed && launched && !readTask(slot, state->position, words)) {
        const uint64_t now = nowNs();
        if (missingNs == 0) missingNs = now;
        if (queue.timeoutNs != 0 && now - missingNs >= queue.timeoutNs) {
          failLane(queue, l, state->position, static_cast<ncclResult_t>(ncclFfmQueueBroken), now - missingNs);
        }
      }
      if (l == 0 && endIfQuiet(queue, mode, state)) return Next::kLeave;
    }
    if (l != 0 && closing != state->closing && endWithLane0(queue, lane, state)) return Next::kLeave;
    if (!failed && ready) return Next::kRun;
    if (polls >= kPollsBeforePause) {
      pauseNs(kPauseNs);
    } else if (kYieldBetweenPolls) {
      pauseNs(0);
    }
  }
}

// Waits for the first block of the lane to take the next task, and takes it, too.
NCCLFFM_DEVICE Next awaitFirstBlock(const TaskQueue &queue, uint32_t l, const LaneState &state, TaskWords *words) {
  const TaskLane &lane = queue.lanes[l];
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t go = loadAcquireGpu(&lane.go);
    if (isAtOrBeyond(static_cast<uint32_t>(go), state.position + 1)) {
      readTask(slotOfTask(queue, l, state.position), state.position, words);  // it is there
      return Next::kRun;
    }
    if ((go & kLeaveBit) != 0) return Next::kLeave;
    if (polls >= kPollsBeforePause) {
      pauseNs(kPauseNs);
    } else if (kYieldBetweenPolls) {
      pauseNs(0);
    }
  }
}

// For one thread of block number b of lane l: what comes next, told to the other blocks by the first.
NCCLFFM_DEVICE Next nextOfBlock(const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l, uint32_t b,
                                LaneState *state, TaskWords *words) {
  if (b != 0) return awaitFirstBlock(queue, l, *state, words);
  const Next next = awaitTask(queue, mode, l, state, words);
  if (queue.blocksPerLane > 1) {
    storeReleaseGpu(&queue.lanes[l].go, next == Next::kRun ? state->position + 1 : state->position | kLeaveBit);
  }
  return next;
}

// The task for all threads of a group, and what to do.
template <class Coop>
NCCLFFM_DEVICE Next nextTask(const Coop &coop, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                             uint32_t b, LaneState *state, Task *task) {
  Next next = Next::kLeave;
  TaskWords words = {};
  if (coop.rank() == 0) next = nextOfBlock(queue, mode, l, b, state, &words);
  next = static_cast<Next>(coop.syncBroadcast(static_cast<uint64_t>(next)));
  const uint64_t address = coop.syncBroadcast(reinterpret_cast<uintptr_t>(&words));
  if (next == Next::kRun) *task = taskOf(*reinterpret_cast<const TaskWords *>(address), l, state->position);
  coop.sync();  // the words stay until all have them
  return next;
}

#ifdef __CUDACC__
NCCLFFM_DEVICE Next nextTask(const CoopBlock &coop, const TaskQueue &queue, ncclFfmSchedulerMode mode, uint32_t l,
                             uint32_t b, LaneState *state, Task *task) {
  __shared__ TaskWords shared;
  __shared__ Next next;
  if (coop.rank() == 0) {
    TaskWords words = {};
    next = nextOfBlock(queue, mode, l, b, state, &words);
    shared = words;
  }
  if (coop.rank() < 32) __syncwarp();
  coop.sync();
  *task = taskOf(shared, l, state->position);
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
NCCLFFM_DEVICE ncclResult_t runTask(ChannelSession<Coop> &session, const TaskQueue &queue, const Task &task,
                                    uint32_t position, uint32_t l, uint32_t b) {
  if (task.function == ncclFfmFunctionNone) return ncclSuccess;
  const DevComm &comm = session.comm();
  const bool pair = isPair(task.function);
  const PackedRecord record = packRecord(
      task, position, pair ? static_cast<uint32_t>(ncclFfmFunctionSendRecv) : task.function, pair ? 0 : task.root);
  const uint32_t taskHash = holds(Rule::kTaskAgreement) ? mixOfRecord(record, 0) & 0x7fffffffu : 0;
  session.setTask(taskHash);
  session.setFunction(static_cast<ncclFfmFunction>(task.function));
  // By threads that have least to do with what comes now.
  const uint32_t size = session.coop().size(), thread = size - 1 - session.coop().rank();
  if (thread == size / 2) {  // every block the same, for whichever fails first
    storeRecord(queue.lanes[l].running, sealed(packRecord(task, position, task.function, task.root), position));
  }
  if (!pair) {
    const uint32_t epoch = session.site().epoch + 1;
    for (int peer = static_cast<int>(thread); peer < comm.nRanks; peer += static_cast<int>(size)) {
      if (peer == comm.rank) continue;
      storeRecord(mailboxOf(comm, peer, session.site().channel, comm.rank)->task[epoch % 2].word,
                  sealed(record, epoch));
    }
  }
  reconverge(session.coop());
  Call call = callOf(task);
  // What is most about latency is inlined; all else is a call, on a copy, so that what is here may stay in registers.
  const uint32_t elementBytes = sizeof(float);
  if (task.function == ncclFfmFunctionAllReduce && task.datatype == ncclFloat32 && queue.blocksPerLane == 1 &&
      isReduction(task.op) && task.count - 1 < session.smallBytes() &&
      task.count * elementBytes - 1 < session.smallBytes() &&
      problemOfBuffers(comm, call, elementBytes) == Problem::kNone) {
    call.protocol = ncclFfmProtocolLL;
    call.algorithm = ncclFfmAlgorithmOneShot;
    return smallAllReduce<float>(session, call);
  }
  ChannelSession<Coop> lent = session.lend();
  const ncclResult_t result = runTaskShare(lent, call, taskHash, b, queue.blocksPerLane);
  session.takeBack(lent);
  return result;
}

// The thread that tells the host, while the first warp takes the next task.
constexpr uint32_t kTellingThread = 32;

// The block has run its share, which its threads have synced after: the last one of the lane says so.
template <class Coop>
NCCLFFM_DEVICE void finishTask(const Coop &coop, const TaskQueue &queue, uint32_t l, uint32_t position) {
  TaskLane &lane = queue.lanes[l];
  const bool oneBlock = queue.blocksPerLane == 1;
  const uint32_t teller = oneBlock && coop.size() > kTellingThread ? kTellingThread : 0;
  if (coop.rank() != 0 && coop.rank() != teller) return;
  if (!oneBlock) {
    if (fetchAddAcqRelGpu(&lane.arrived, 1) != queue.blocksPerLane - 1) return;
    storeRelaxedGpu(&lane.arrived, 0);
  }
  if (coop.rank() == 0) storeReleaseGpu(&lane.done, position + 1);
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
    LaneState state = {loadRelaxedGpu(&queue.lanes[l].done), 0, 0, 0, loadRelaxedGpu(&queue.shared->verdict) >> 1};
    coop.sync();  // all threads know where the lane is, before it goes on
    for (;;) {
      Task task;
      if (nextTask(coop, queue, mode, l, b, &state, &task) == Next::kLeave) break;
      const ncclResult_t result =
          session.result() != ncclSuccess ? session.result() : runTask(session, queue, task, state.position, l, b);
      coop.sync();
      ++state.position;
      if (result != ncclSuccess) continue;  // the lane has failed: there is no next task
      finishTask(coop, queue, l, state.position - 1);
    }
  }
  coop.sync();
  if (coop.rank() == 0) leaveScheduler(queue);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_SCHEDULER_FUNCS_H_

// The scheduler of a task queue: a kernel of nLanes * blocksPerLane blocks that runs tasks (task_queue.h) until it is
// told to end, or has had nothing to do for a while.
//
// The blocks of a lane run a task together, each its share, on a channel of its own, which it holds for as long as it
// lives. The first one takes the task; the last one that has finished its share says that it is done, and only then the
// next task is taken. Before the first exchange of a task every rank gives the others a record of it, and all hashes of
// the task cover that record: ranks that come to different tasks all fail that lane with ncclInvalidUsage, naming both,
// before any data is taken. The hash in a line of LL has 15 bits (protocol.h), so one such mistake in 2^15 stays
// unnoticed until the next task. All blocks of a lane have then begun the same exchange on every rank, so that the
// channels may serve a new queue.
//
// The end. The first block of lane 0 decides for all, when every lane has run what was launched (or has failed), and
// the mode allows: Drain, and a stop of the host, at once; Persistent when nothing has happened for idleNs and no
// producer that the host launched is queued or running. It announces the end (ncclFfmTaskControl.state) and looks once
// more; see there for the host's side.
#ifndef NCCLFFM_SCHEDULER_H_
#define NCCLFFM_SCHEDULER_H_

#include "task_queue.h"

namespace ncclffm {

// What the scheduler's blocks take for the communicator: as `comm`, but every lane fails by itself, into its own status
// record.
NCCLFFM_DEVICE DevComm schedulerComm(const DevComm &comm, const TaskQueue &queue);

// The body of the kernel: block number `block` of nLanes * blocksPerLane, with schedulerComm's communicator.
template <class Coop>
NCCLFFM_DEVICE void runScheduler(Coop coop, const DevComm &comm, const TaskQueue &queue, ncclFfmSchedulerMode mode,
                                 int block);

// Makes the memory of a queue what an empty one is: the share of one thread. The queue has its addresses.
NCCLFFM_DEVICE void clearQueue(const TaskQueue &queue, uint32_t firstSequence, uint64_t thread, uint64_t nThreads);

}  // namespace ncclffm

#include "impl/scheduler_funcs.h"

#endif  // NCCLFFM_SCHEDULER_H_

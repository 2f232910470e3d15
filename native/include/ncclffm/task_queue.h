// Tasks: a kernel hands communication to the scheduler (scheduler.h), goes on computing, and waits for it later.
//
// A queue has lanes. A lane runs its tasks one after the other, in the order of their numbers; lanes do not wait for
// each other. All ranks hand the same tasks to a lane, in the same order: a task is collective over the ranks as the
// function of the same name in collectives.h is (AllReduce to SendRecv, of ncclFfmFunction). A rank that has no part in
// a Send and its Recv hands in a task of function None instead, which only holds the place.
//
// A lane has a ring. A task gets a ticket, its number in the lane; its place in the ring is the number modulo the
// depth.
//   append   takes a ticket, waits until the place is free, and writes the task, with its number in every word
//   launch   lets the scheduler run the lane up to a bound: what was appended in between is a batch
//   wait     for a ticket: the task is complete, recvbuff is visible, sendbuff may be overwritten
// A place is free when its task is done. (Not as soon as the scheduler has read the task: that would cost every task a
// fence, and gain one place.) A launch may come before another producer has written its task: the scheduler waits for
// it, but not beyond the deadline, for then its producer has died and the lane is broken.
//
// What a producer stored before it appends, is visible to the task: of the group that appends, or of whoever synced
// with it. Buffers are device memory, unchanged until the task is complete.
//
// Where several groups append to one lane, who is first differs from rank to rank: then the producer names the numbers
// itself (TaskPlace::at), out of a stretch that was reserved for it (ncclTaskReserve), or all of them.
//
// A lane fails by itself, for good; see ncclFfmStatus. What fails on one lane does not touch the others, nor the
// communicator. Every function returns ncclSuccess, ncclInvalidArgument (nothing happened) or
//   ncclFfmQueueFull  no place came free: at once, where the append does not wait (it took no ticket); or until the
//                     deadline (the lane has failed, since a ticket is missing now)
//   ncclInvalidUsage  from append: the number has been used before
//   any other         what the lane has failed with
#ifndef NCCLFFM_TASK_QUEUE_H_
#define NCCLFFM_TASK_QUEUE_H_

#include "collectives.h"

namespace ncclffm {

// The name of a task, as a hash: FNV-1a of its bytes. Java knows the names, for messages. A constexpr variable is
// hashed at compile time.
struct TaskSymbol {
  uint32_t hash;

  constexpr NCCLFFM_DEVICE explicit TaskSymbol(uint32_t ofHash) : hash(ofHash) {}
  template <size_t kSize>
  constexpr NCCLFFM_DEVICE TaskSymbol(const char (&name)[kSize]) : hash(2166136261u) {  // NOLINT: as a string is given
    for (size_t i = 0; i + 1 < kSize; ++i) hash = (hash ^ static_cast<unsigned char>(name[i])) * 16777619u;
  }
};

// Where a task goes, and what few functions need.
struct TaskPlace {
  uint32_t lane = 0;
  int root = 0;        // as in ncclFfmCall: of Broadcast, Reduce; the peer of Send; to whom SendRecv sends
  int source = 0;      // the peer of Recv; from whom SendRecv receives
  bool named = false;  // sequence is the task's number; else the lane numbers it
  uint32_t sequence = 0;
  bool waits = true;  // for a place to come free, up to the deadline; only false where the lane numbers

  NCCLFFM_DEVICE static TaskPlace at(const Ticket &ticket) {
    TaskPlace place;
    place.lane = ticket.lane;
    place.named = true;
    place.sequence = ticket.sequence;
    return place;
  }
};

// Appends one task for a group; called by all of its threads with the same arguments. *ticket, if there is one, is
// filled in for every thread.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(Coop coop, const TaskQueue &queue, TaskSymbol symbol, int taskType,
                                           int datatype, int op, const void *sendbuff, void *recvbuff, size_t count,
                                           const TaskPlace &place, Ticket *ticket = nullptr);
// By all threads of a block.
NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(const TaskQueue &queue, TaskSymbol symbol, int taskType, int datatype,
                                           int op, const void *sendbuff, void *recvbuff, size_t count,
                                           uint32_t lane = 0, Ticket *ticket = nullptr);
NCCLFFM_DEVICE ncclResult_t ncclTaskAppend(const TaskQueue &queue, TaskSymbol symbol, int taskType, int datatype,
                                           int op, const void *sendbuff, void *recvbuff, size_t count, uint32_t lane,
                                           uint32_t sequence, Ticket *ticket = nullptr);

#ifdef __CUDACC__
// Appends a task for every thread of a warp, each with arguments of its own but for the lane, which numbers them in the
// order of the threads. One ticket for all, which saves most of the price.
NCCLFFM_DEVICE ncclResult_t ncclTaskAppendEach(CoopWarp warp, const TaskQueue &queue, TaskSymbol symbol, int taskType,
                                               int datatype, int op, const void *sendbuff, void *recvbuff, size_t count,
                                               const TaskPlace &place, Ticket *ticket = nullptr);
#endif

// Of numbers that a lane has given away and not done yet: half of those that can be told to be ahead, on the circle.
constexpr uint32_t kMostReserved = 1u << 30;

// Takes n numbers of a lane, at most kMostReserved, first->sequence and those after it, for tasks that name them. They
// must all be appended. By one thread.
NCCLFFM_DEVICE ncclResult_t ncclTaskReserve(const TaskQueue &queue, uint32_t lane, uint32_t n, Ticket *first);

// Lets the scheduler run the lane up to this task. A ticket whose append has failed has none: nothing happens, and what
// the append ended with is returned. By one thread.
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(const TaskQueue &queue, const Ticket &ticket);
// The same by a group, whose warps then go on as one (an `if` around the call above may leave a warp in two parts).
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(Coop coop, const TaskQueue &queue, const Ticket &ticket);
// Lets it run all that has been numbered, on all lanes. By a group, after all appends of its threads.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(Coop coop, const TaskQueue &queue);
NCCLFFM_DEVICE ncclResult_t ncclTaskLaunch(const TaskQueue &queue);

// Whether a task is complete: ncclInProgress if it is not. By one thread.
NCCLFFM_DEVICE ncclResult_t ncclTaskTest(const TaskQueue &queue, const Ticket &ticket);

// Waits for a task that has been launched. By a group; by all threads of a block.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t ncclTaskWait(Coop coop, const TaskQueue &queue, const Ticket &ticket);
NCCLFFM_DEVICE ncclResult_t ncclTaskWait(const TaskQueue &queue, const Ticket &ticket);

// The only producer of a lane on this rank, where latency counts: it numbers its tasks itself and remembers what it has
// waited for, so that an append is a fence and a few stores, and asks memory for nothing unless the ring is full of
// what nobody waited for. It launches what it appends, and with it what was appended to the lane before. While it
// lives, nobody else appends to the lane or reserves numbers there: who tries is told ncclInvalidUsage, and nothing has
// happened, and so is a second producer in result(). (Not who tries at the moment at which a producer begins or ends:
// the program keeps these apart.) By a group; every function, the destructor too, is called by all of its threads with
// the same arguments. The queue must outlive it.
template <class Coop>
class LaneProducer {
 public:
  NCCLFFM_DEVICE LaneProducer(Coop coop, const TaskQueue &queue, uint32_t lane);
  LaneProducer(const LaneProducer &) = delete;
  // Others may append from now on. Does not wait for tasks.
  NCCLFFM_DEVICE ~LaneProducer();

  // ncclSuccess, or why it cannot append anything.
  NCCLFFM_DEVICE ncclResult_t result() const { return result_; }

  // Appends a task and launches it. ncclSuccess; ncclInvalidArgument, and nothing has happened; where the ring is full,
  // what a wait for its oldest task ends with: ncclFfmQueueFull at the queue's deadline (the lane has failed), or what
  // the lane has failed with. Else it is a later wait that tells what the lane has failed with.
  NCCLFFM_DEVICE ncclResult_t append(TaskSymbol symbol, int taskType, int datatype, int op, const void *sendbuff,
                                     void *recvbuff, size_t count, Ticket *ticket = nullptr, int root = 0,
                                     int source = 0);

  // Waits for one of its tasks, as ncclTaskWait does.
  NCCLFFM_DEVICE ncclResult_t wait(const Ticket &ticket);

 private:
  Coop coop_;
  const TaskQueue &queue_;
  uint32_t lane_;
  uint32_t next_ = 0;
  uint32_t done_ = 0;  // at least so far
  ncclResult_t result_ = ncclInvalidArgument;
};

// Says that one producer that the host counted (ncclFfmTaskControl.producers) has finished: the last thing it does, by
// one thread. Where a kernel does not say so itself, ncclFfmTaskProducerEnd does.
NCCLFFM_DEVICE void ncclTaskProducerEnd(const TaskQueue &queue);

}  // namespace ncclffm

#include "impl/task_queue_funcs.h"

#endif  // NCCLFFM_TASK_QUEUE_H_

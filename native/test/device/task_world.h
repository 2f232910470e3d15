// What the tests of the task route share: the queues of all ranks in plain memory, their schedulers on host threads,
// and what Java does to keep a scheduler running.
#ifndef NCCLFFM_TEST_DEVICE_TASK_WORLD_H_
#define NCCLFFM_TEST_DEVICE_TASK_WORLD_H_

#include "cases.h"

namespace ncclffm::test {

struct QueueShape {
  uint32_t nLanes, blocksPerLane, depth, firstSequence;
  uint64_t timeoutNs, idleNs;
};

/// The queue of one rank.
class Queue {
 public:
  Queue(const DevComm &comm, const QueueShape &shape)
      : lanes_(shape.nLanes),
        tasks_(static_cast<size_t>(shape.nLanes) * shape.depth),
        status_(shape.nLanes),
        progress_(shape.nLanes) {
    queue.magic = NCCLFFM_QUEUE_MAGIC;
    queue.version = NCCLFFM_ABI_VERSION;
    queue.rank = comm.rank;
    queue.nLanes = shape.nLanes;
    queue.depth = shape.depth;
    queue.blocksPerLane = shape.blocksPerLane;
    queue.timeoutNs = shape.timeoutNs;
    queue.idleNs = shape.idleNs;
    queue.shared = &shared_;
    queue.lanes = lanes_.data();
    queue.tasks = tasks_.data();
    queue.status = status_.data();
    queue.progress = progress_.data();
    queue.control = &control_;
    clearQueue(queue, shape.firstSequence, 0, 1);
    view = schedulerComm(comm, queue);
  }
  ~Queue() { joinScheduler(); }

  /// Launches a scheduler, after the one before has ended: launches are on one stream. threads: of a block.
  void launchScheduler(ncclFfmSchedulerMode mode, uint32_t threads = 1) {
    joinScheduler();
    ++launches;
    const uint32_t blocks = queue.nLanes * queue.blocksPerLane;
    groups_.clear();
    for (uint32_t b = 0; b < blocks; ++b) groups_.push_back(std::make_unique<Group>(threads));
    for (uint32_t b = 0; b < blocks; ++b) {
      for (uint32_t t = 0; t < threads; ++t) {
        scheduler_.emplace_back([this, mode, threads, b, t] {
          if (threads == 1) {
            runScheduler(CoopThread(), view, queue, mode, static_cast<int>(b));
          } else {
            runScheduler(CoopGroup{groups_[b].get(), t}, view, queue, mode, static_cast<int>(b));
          }
          ended_.arrive();
        });
      }
    }
  }

  /// Waits for a scheduler that ends.
  void joinScheduler() {
    if (!ended_.await(scheduler_.size(), 3 * timeoutNs())) {
      check(false, "a scheduler did not end");
      std::_Exit(report("a scheduler"));
    }
    for (std::thread &thread : scheduler_) thread.join();
    scheduler_.clear();
  }

  /// What the host does after it launched a producer; see ncclFfmTaskControl.
  void producerLaunched() { __atomic_fetch_add(&control_.producers, 1, __ATOMIC_SEQ_CST); }
  void ensureRunning() {
    fenceBothWaysSys();
    if (!hasScheduler()) launchScheduler(ncclFfmSchedulerPersistent);
  }
  /// Whether the last one that was launched sees what comes, and has not ended.
  bool hasScheduler() { return static_cast<int32_t>(said() - (2 * launches - 1)) < 0; }
  bool hasStopped() { return said() == 2 * launches; }

  void stop() { __atomic_store_n(&control_.stop, 1, __ATOMIC_RELAXED); }
  void abort() {
    for (Status &status : status_) __atomic_store_n(&status.abort, 1, __ATOMIC_RELAXED);
  }

  /// Empty if the lane has not failed. Who fails it says so first and writes the record then.
  Status status(uint32_t lane) {
    const Status &s = status_[lane];
    const uint64_t start = nowNs();
    while (__atomic_load_n(&s.ready, __ATOMIC_ACQUIRE) == 0) {
      if (__atomic_load_n(&lanes_[lane].failed, __ATOMIC_RELAXED) == 0) return {};
      if (nowNs() - start > timeoutNs()) {
        check(false, "a lane that has failed has no record");
        return {};
      }
      std::this_thread::yield();
    }
    return {s.code, s.function, s.rank, s.peer, s.channel, s.epoch, s.waitedNs, 0, 1, s.task, s.peerTask};
  }
  uint32_t done(uint32_t lane) { return __atomic_load_n(&lanes_[lane].done, __ATOMIC_ACQUIRE); }

  TaskQueue queue = {};
  DevComm view = {};
  uint32_t launches = 0;

 private:
  uint32_t said() { return __atomic_load_n(&control_.state, __ATOMIC_ACQUIRE); }

  std::vector<TaskLane> lanes_;
  std::vector<TaskSlot> tasks_;
  std::vector<Status> status_;
  std::vector<uint32_t> progress_;
  TaskShared shared_ = {};
  TaskControl control_ = {};
  const SharedMemory statusOfHost_{status_.data(), status_.size() * sizeof(Status)};
  const SharedMemory progressOfHost_{progress_.data(), progress_.size() * sizeof(uint32_t)};
  const SharedMemory controlOfHost_{&control_, sizeof control_};
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::thread> scheduler_;
  Arrivals ended_;
};

/// The queues of all ranks.
class Queues {
 public:
  Queues(World &world, const QueueShape &shape) {
    for (int r = 0; r < world.nRanks(); ++r) queues_.push_back(std::make_unique<Queue>(world.comm(r), shape));
  }
  ~Queues() { stop(); }
  Queue &operator[](int rank) { return *queues_[static_cast<size_t>(rank)]; }
  void launchSchedulers(ncclFfmSchedulerMode mode, uint32_t threads = 1) {
    for (auto &queue : queues_) queue->launchScheduler(mode, threads);
  }
  void stop() {
    for (auto &queue : queues_) queue->stop();
    for (auto &queue : queues_) queue->joinScheduler();
  }
  void abort() {
    for (auto &queue : queues_) queue->abort();
  }

 private:
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace ncclffm::test

#endif  // NCCLFFM_TEST_DEVICE_TASK_WORLD_H_

// Task queues on the CPU backend through the C ABI, as Java uses them: schedulers and producers on streams, schedulers
// that end when idle and are launched again, batches of the host, the prebuilt producers.
#include "../../src/cpu/abi.h"
#include "task_world.h"

namespace ncclffm::test {
namespace {

constexpr int kRanks = 3;
constexpr uint64_t kSeed = 20250120;

void cuda(cudaError_t error, const char *what) {
  check(error == cudaSuccess, "%s: %s", what, cudaGetErrorString(error));
}

void shim(int code, const char *what) {
  check(code == ncclSuccess, "%s: %d: %s", what, code, ncclFfmGetLastError());
}

/// The queue of a rank in memory that Init fills, with its two streams.
class StreamQueue {
 public:
  StreamQueue(const DevComm &comm, uint32_t nLanes, uint32_t blocksPerLane, uint32_t depth) : comm_(comm) {
    uint64_t bytes = 0;
    shim(ncclFfmTaskQueueBytes(nLanes, depth, &bytes), "ncclFfmTaskQueueBytes");
    memory_.resize(bytes / sizeof(Line));
    status.resize(nLanes);
    progress.resize(nLanes);
    first.resize(nLanes);
    queue.magic = NCCLFFM_QUEUE_MAGIC;
    queue.version = NCCLFFM_ABI_VERSION;
    queue.rank = comm.rank;
    queue.nLanes = nLanes;
    queue.depth = depth;
    queue.blocksPerLane = blocksPerLane;
    queue.timeoutNs = timeoutNs();
    queue.idleNs = kMs;
    queue.status = status.data();
    queue.progress = progress.data();
    queue.control = &control;
    cuda(cudaStreamCreateWithFlags(&scheduler, 1), "cudaStreamCreateWithFlags");
    cuda(cudaStreamCreateWithFlags(&producers, 1), "cudaStreamCreateWithFlags");
    shim(ncclFfmTaskQueueInit(&queue, memory_.data(), 0xfffffff8u, scheduler), "ncclFfmTaskQueueInit");
    cuda(cudaStreamSynchronize(scheduler), "cudaStreamSynchronize");
  }
  ~StreamQueue() {
    synchronize();
    cuda(cudaStreamDestroy(producers), "cudaStreamDestroy");
    cuda(cudaStreamDestroy(scheduler), "cudaStreamDestroy");
  }

  void launchScheduler(unsigned mode) {
    shim(ncclFfmLaunchScheduler(&comm_, &queue, mode, scheduler), "ncclFfmLaunchScheduler");
    ++launches;
  }

  /// After a producer has been launched; see ncclFfmTaskControl.
  void launched(unsigned mode = ncclFfmSchedulerPersistent) {
    __atomic_fetch_add(&control.producers, 1, __ATOMIC_SEQ_CST);
    fenceBothWaysSys();
    if (isAtOrBeyond(said(), 2 * launches - 1)) launchScheduler(mode);
  }

  /// What the schedulers say; see ncclFfmTaskControl.
  uint32_t said() { return __atomic_load_n(&control.state, __ATOMIC_ACQUIRE); }

  void synchronize() {
    cuda(cudaStreamSynchronize(producers), "cudaStreamSynchronize");
    cuda(cudaStreamSynchronize(scheduler), "cudaStreamSynchronize");
  }

  TaskQueue queue = {};
  TaskControl control = {};
  std::vector<Status> status;
  std::vector<uint32_t> progress;
  std::vector<Ticket> first;
  cudaStream_t scheduler = nullptr, producers = nullptr;
  uint32_t launches = 0;

 private:
  const DevComm &comm_;
  struct alignas(128) Line {
    char bytes[128];
  };
  std::vector<Line> memory_;
};

struct StreamQueues {
  StreamQueues(int nChannels, uint32_t nLanes, uint32_t blocksPerLane, uint32_t depth)
      : world(kRanks, nChannels, 512, timeoutNs()) {
    for (int r = 0; r < kRanks; ++r) {
      queues.push_back(std::make_unique<StreamQueue>(world.comm(r), nLanes, blocksPerLane, depth));
    }
  }

  template <class Launch>
  void produce(Launch launch, unsigned mode = ncclFfmSchedulerPersistent) {
    for (int r = 0; r < kRanks; ++r) {
      launch(r, *queues[static_cast<size_t>(r)]);
      queues[static_cast<size_t>(r)]->launched(mode);
    }
  }

  void synchronize() {
    for (auto &queue : queues) queue->synchronize();
  }

  World world;
  std::vector<std::unique_ptr<StreamQueue>> queues;
};

Task sumTask(const float *in, float *out, uint64_t count, uint32_t lane) {
  Task task = {};
  task.function = ncclFfmFunctionAllReduce;
  task.symbol = TaskSymbol("sum").hash;
  task.datatype = ncclFloat32;
  task.op = ncclSum;
  task.count = count;
  task.sendbuff = in;
  task.recvbuff = out;
  task.lane = lane;
  return task;
}

// Batch after batch, now and then after the schedulers have ended; tickets say where the tasks are.
void batchesAreRunWhetherTheSchedulerHasEndedOrNot(unsigned mode, uint32_t nLanes, uint32_t blocksPerLane,
                                                   uint32_t depth, bool named) {
  constexpr uint64_t kCount = 211;
  constexpr uint32_t kTasks = 6;
  StreamQueues all(static_cast<int>(nLanes * blocksPerLane), nLanes, blocksPerLane, depth);
  std::vector<uint32_t> next(nLanes, 0xfffffff8u);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::vector<float>> in(kRanks), out(kRanks);
    std::vector<std::vector<Ticket>> tickets(kRanks, std::vector<Ticket>(kTasks));
    for (int r = 0; r < kRanks; ++r) {
      out[r].resize(kTasks * kCount);
      for (uint64_t i = 0; i < kCount; ++i) in[r].push_back(contribution(kSeed, r, round, i));
    }
    all.produce(
        [&](int r, StreamQueue &queue) {
          ncclFfmTaskBatch batch = {};
          batch.nTasks = kTasks;
          batch.named = named ? 1 : 0;
          batch.tickets = tickets[r].data();
          std::vector<uint32_t> sequences = next;
          for (uint32_t t = 0; t < kTasks; ++t) {
            batch.tasks[t] = sumTask(in[r].data(), out[r].data() + t * kCount, kCount, t % nLanes);
            batch.tasks[t].sequence = sequences[t % nLanes]++;
          }
          shim(ncclFfmTaskAppendOnStream(&queue.queue, &batch, queue.producers), "ncclFfmTaskAppendOnStream");
        },
        mode);
    std::vector<uint32_t> expected = next;
    for (int r = 0; r < kRanks; ++r) {
      StreamQueue &queue = *all.queues[static_cast<size_t>(r)];
      cuda(cudaStreamSynchronize(queue.producers), "cudaStreamSynchronize");
      expected = next;
      for (const Ticket &ticket : tickets[r]) {
        check(ticket.ready == 1 && ticket.result == ncclSuccess && ticket.sequence == expected[ticket.lane]++,
              "round %d, rank %d: a ticket: ready %u, result %u, sequence %u", round, r, ticket.ready, ticket.result,
              ticket.sequence);
        // A drain may have ended before the batch came, on any rank: no rank's task is done without the others.
        const uint64_t deadline = nowNs() + timeoutNs();
        while (!isAtOrBeyond(__atomic_load_n(&queue.progress[ticket.lane], __ATOMIC_ACQUIRE), ticket.sequence + 1) &&
               nowNs() < deadline && failures.load() == 0) {
          for (auto &each : all.queues) {
            if (each->said() == 2 * each->launches) each->launchScheduler(mode);
          }
          std::this_thread::yield();
        }
        check(nowNs() < deadline, "mode %u, round %d, rank %d: a task was not done in time", mode, round, r);
      }
    }
    if (failures.load() != 0) return all.synchronize();  // before what the tasks read is gone
    next = expected;
    if (round % 3 == 0) all.synchronize();  // the schedulers end
    for (int r = 0; r < kRanks; ++r) {
      for (uint64_t i = 0; i < kTasks * kCount; ++i) {
        float sum = in[0][i % kCount];
        for (int p = 1; p < kRanks; ++p) sum += in[p][i % kCount];
        check(out[r][i] == sum, "mode %u, round %d, rank %d, element %llu: %g, not %g", mode, round, r,
              static_cast<unsigned long long>(i), static_cast<double>(out[r][i]), static_cast<double>(sum));
      }
    }
  }
  check(all.queues[0]->launches > 5, "the scheduler never ended");
}

void bucketsAreReduced(uint32_t nLanes, uint32_t depth, int blocks) {
  constexpr uint64_t kCount = 2003, kBucket = 97;
  StreamQueues all(static_cast<int>(nLanes), nLanes, 1, depth);
  for (uint64_t round = 1; round <= 3; ++round) {
    std::vector<std::vector<float>> x(kRanks);
    for (int r = 0; r < kRanks; ++r) {
      for (uint64_t i = 0; i < kCount; ++i) x[r].push_back(contribution(kSeed, r, round, i));
    }
    all.produce([&](int r, StreamQueue &queue) {
      const ncclFfmTaskBuckets buckets = {x[r].data(), kCount, kBucket, 1.5f, -0.25f, 7, blocks, queue.first.data()};
      shim(ncclFfmTaskAppendBuckets(&queue.queue, &buckets, queue.producers), "ncclFfmTaskAppendBuckets");
    });
    all.synchronize();
    for (uint64_t i = 0; i < kCount; ++i) {
      float sum = 0;
      for (int r = 0; r < kRanks; ++r) {
        const float y = std::fmaf(1.5f, contribution(kSeed, r, round, i), -0.25f);
        sum = r == 0 ? y : sum + y;
      }
      for (int r = 0; r < kRanks; ++r) {
        check(x[r][i] == sum, "buckets, round %llu, rank %d, element %llu: %g, not %g",
              static_cast<unsigned long long>(round), r, static_cast<unsigned long long>(i),
              static_cast<double>(x[r][i]), static_cast<double>(sum));
      }
    }
  }
}

// parts as in ncclFfmTaskOverlap; compares where it computes.
void iterationsAddUp(uint32_t parts, uint32_t nLanes, uint32_t depth, int blocks, uint64_t count) {
  constexpr uint32_t kIterations = 7, kRounds = 3;
  StreamQueues all(static_cast<int>(nLanes), nLanes, 1, depth);
  std::vector<std::vector<float>> in(kRanks), out(kRanks), work(kRanks);
  std::vector<std::vector<uint32_t>> results(kRanks, std::vector<uint32_t>(static_cast<size_t>(blocks), 99));
  for (int r = 0; r < kRanks; ++r) {
    for (uint64_t i = 0; i < count; ++i) in[r].push_back(contribution(kSeed, r, 5, i));
    out[r].resize(count);
    work[r].resize(4 * count);
  }
  all.produce([&](int r, StreamQueue &queue) {
    const ncclFfmTaskOverlap o = {in[r].data(),
                                  out[r].data(),
                                  work[r].data(),
                                  count,
                                  kIterations,
                                  kRounds,
                                  0.75f,
                                  0.5f,
                                  7,
                                  blocks,
                                  parts,
                                  0,
                                  queue.first.data(),
                                  results[r].data()};
    shim(ncclFfmTaskIterate(&queue.queue, &o, queue.producers), "ncclFfmTaskIterate");
  });
  all.synchronize();
  for (int r = 0; r < kRanks; ++r) {
    for (uint32_t result : results[r]) check(result == ncclSuccess, "iterations, rank %d: result %u", r, result);
    for (uint64_t i = 0; i < count && parts != 2; ++i) {
      float sum = 0;
      for (uint32_t k = 0; k < kIterations; ++k) {
        float ofAll = 0;
        for (int p = parts == 1 ? r : 0; p < (parts == 1 ? r + 1 : kRanks); ++p) {
          float y = in[p][i] + static_cast<float>(k);
          for (uint32_t round = 0; round < kRounds; ++round) y = std::fmaf(0.75f, y, 0.5f);
          ofAll = p == 0 || parts == 1 ? y : ofAll + y;
        }
        sum = k == 0 ? ofAll : sum + ofAll;
      }
      check(out[r][i] == sum, "parts %u, rank %d, element %llu: %g, not %g", parts, r,
            static_cast<unsigned long long>(i), static_cast<double>(out[r][i]), static_cast<double>(sum));
    }
  }
}

// A ring that is full of tasks which nobody runs: the host is told, and nothing is lost.
void fullRingIsToldToTheHost() {
  World world(1, 1, 512, timeoutNs());
  StreamQueue queue(world.comm(0), 1, 1, 2);
  queue.queue.timeoutNs = 100 * kMs;
  float in = 1, out = 0;
  Ticket tickets[4] = {};
  ncclFfmTaskBatch batch = {};
  batch.nTasks = 4;
  batch.tickets = tickets;
  for (Task &task : batch.tasks) task = sumTask(&in, &out, 1, 0);
  shim(ncclFfmTaskAppendOnStream(&queue.queue, &batch, queue.producers), "ncclFfmTaskAppendOnStream");
  cuda(cudaStreamSynchronize(queue.producers), "cudaStreamSynchronize");
  for (int i = 0; i < 4; ++i) {
    check(tickets[i].ready == 1 && tickets[i].result == (i < 2 ? 0u : static_cast<uint32_t>(ncclFfmQueueFull)),
          "append %d to a ring of 2: result %u", i, tickets[i].result);
  }
  queue.launchScheduler(ncclFfmSchedulerDrain);
  queue.synchronize();
  check(queue.progress[0] == 0xfffffffau && queue.status[0].ready == 0, "the two tasks: done up to %x",
        queue.progress[0]);
}

void run() {
  batchesAreRunWhetherTheSchedulerHasEndedOrNot(ncclFfmSchedulerPersistent, 2, 2, 4, false);
  batchesAreRunWhetherTheSchedulerHasEndedOrNot(ncclFfmSchedulerPersistent, 3, 1, 16, true);
  batchesAreRunWhetherTheSchedulerHasEndedOrNot(ncclFfmSchedulerDrain, 2, 1, 8, false);
  batchesAreRunWhetherTheSchedulerHasEndedOrNot(ncclFfmSchedulerDebug, 1, 1, 1, false);
  bucketsAreReduced(1, 4, 2);
  bucketsAreReduced(3, 8, 4);
  iterationsAddUp(3, 2, 4, 3, 1000);
  iterationsAddUp(3, 1, 1, 1, 50);
  iterationsAddUp(1, 2, 4, 2, 50);
  iterationsAddUp(2, 2, 4, 2, 50);
  iterationsAddUp(3, 2, 8, 4, 3);  // fewer elements than blocks
  fullRingIsToldToTheHost();
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  run();
  return report("task_cpu_test");
}

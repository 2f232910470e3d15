// The task route on a real GPU: results, speed, overlap, a soak, and what other threads may do meanwhile.
//
// task_cuda_test [GPUS [SOAK_TASKS [PART]]]: ranks 2, 4 and 8 on so many GPUs; a soak of so many tasks (default 100000)
// by two ranks. PART: c for correctness only, s for speed, k for the soak, l for what other threads do; default all.
// The figures for the documentation: task_cuda_test 1 10000000, with NCCLFFM_NCCL for those of ncclAllReduce beside
// them.
#include "../../../benchmarks/src/main/cuda/route.h"

#include <memory>
#include <mutex>

namespace {

constexpr size_t kElements = 1 << 22;  // of a buffer
constexpr uint64_t kTimeoutNs = 20000 * kMs;

// How a kernel below appends.
enum Mode { kByBlock, kByWarpEach, kToDone, kByProducer, kToDoneByProducer };

struct Times {
  uint64_t cyclesOfAppends, cycles, ns, tasks;
  uint32_t result, wrong;
};

// One block of one warp appends `rounds` times, and waits each time. kToDone: an all-reduce of `count` floats.
// kByProducer: the same two by a LaneProducer.
__global__ void appendKernel(const __grid_constant__ TaskQueue queue, const float *in, float *out, size_t count,
                             int rounds, Mode mode, Times *times) {
  if (rounds == 0) return;
  Times t = {};
  ncclResult_t result = ncclSuccess;
  const uint64_t startNs = nowNs();
  const long long start = clock64();
  if (mode == kByProducer || mode == kToDoneByProducer) {
    LaneProducer<CoopBlock> producer(CoopBlock(), queue, 0);
    result = producer.result();
    for (int i = 0; i < rounds && result == ncclSuccess; ++i) {
      Ticket ticket = {};
      const long long before = clock64();
      result = producer.append("speed", mode == kToDoneByProducer ? ncclFfmFunctionAllReduce : ncclFfmFunctionNone,
                               ncclFloat32, ncclSum, in, out, count, &ticket);
      t.cyclesOfAppends += static_cast<uint64_t>(clock64() - before);
      if (result == ncclSuccess) result = producer.wait(ticket);
    }
  }
  const int others = mode == kByProducer || mode == kToDoneByProducer ? 0 : rounds;
  for (int i = 0; i < others && result == ncclSuccess; ++i) {
    Ticket ticket = {};
    const long long before = clock64();
    if (mode == kByWarpEach) {
      result = ncclTaskAppendEach(CoopWarp(), queue, "speed", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0,
                                  TaskPlace(), &ticket);
      ticket.sequence += 31 - threadIdx.x;
    } else {
      result = ncclTaskAppend(queue, "speed", mode == kToDone ? ncclFfmFunctionAllReduce : ncclFfmFunctionNone,
                              ncclFloat32, ncclSum, in, out, count, 0u, &ticket);
    }
    t.cyclesOfAppends += static_cast<uint64_t>(clock64() - before);
    if (result == ncclSuccess && threadIdx.x == 0) result = ncclTaskLaunch(queue, ticket);
    result = ncclTaskWait(queue, ticket);
  }
  if (threadIdx.x == 0) {
    t.cycles = static_cast<uint64_t>(clock64() - start);
    t.ns = nowNs() - startNs;
    t.tasks = static_cast<uint64_t>(rounds) * (mode == kByWarpEach ? 32 : 1);
    t.result = result;
    *times = t;
    ncclTaskProducerEnd(queue);
  }
}

// Batches of 32 small all-reduces of other values each time, each in place on a place of its own, `rounds` times.
__global__ void soakKernel(const __grid_constant__ TaskQueue queue, int nRanks, float *x, size_t count, int rounds,
                           Times *times) {
  if (rounds == 0) return;
  ncclResult_t result = ncclSuccess;
  uint32_t wrong = 0;
  float *mine = x + threadIdx.x * count;
  for (int i = 0; i < rounds && result == ncclSuccess; ++i) {
    const int value = i % 1000 + static_cast<int>(threadIdx.x);
    const float sum = static_cast<float>(nRanks * value + nRanks * (nRanks - 1) / 2);
    for (size_t k = 0; k < count; ++k) mine[k] = static_cast<float>(value + queue.rank);
    Ticket ticket = {};
    result = ncclTaskAppendEach(CoopWarp(), queue, "soak", ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, mine, mine,
                                count, TaskPlace(), &ticket);
    ticket.sequence += 31 - threadIdx.x;
    if (result == ncclSuccess && threadIdx.x == 0) result = ncclTaskLaunch(queue, ticket);
    result = ncclTaskWait(queue, ticket);
    for (size_t k = 0; k < count; ++k) wrong += mine[k] != sum;
  }
  wrong = __reduce_add_sync(0xffffffffu, wrong);
  if (threadIdx.x == 0) {
    times->result = result;
    times->wrong = wrong;
    ncclTaskProducerEnd(queue);
  }
}

template <class T>
T *mapped(size_t n) {
  void *p = nullptr;
  CUDA(cudaHostAlloc(&p, n * sizeof(T), cudaHostAllocMapped));
  memset(p, 0, n * sizeof(T));
  return static_cast<T *>(p);
}

template <class T>
T *onDevice(T *host) {
  void *p = nullptr;
  CUDA(cudaHostGetDevicePointer(&p, host, 0));
  return static_cast<T *>(p);
}

// The queue of a rank, and what Java does for it.
class Queue {
 public:
  Queue(Rank &rank, uint32_t nLanes, uint32_t blocksPerLane, uint32_t depth, uint64_t idleNs) : rank_(rank) {
    uint64_t bytes = 0;
    SHIM(ncclFfmTaskQueueBytes(nLanes, depth, &bytes));
    CUDA(cudaMalloc(&memory_, bytes));
    CUDA(cudaStreamCreateWithFlags(&producers, cudaStreamNonBlocking));
    status = mapped<Status>(nLanes);
    progress = mapped<uint32_t>(nLanes);
    control = mapped<TaskControl>(1);
    first = mapped<Ticket>(nLanes);
    times = mapped<Times>(1);
    results = mapped<uint32_t>(1024);
    tickets = mapped<Ticket>(NCCLFFM_MAX_BATCH);
    queue.magic = NCCLFFM_QUEUE_MAGIC;
    queue.version = NCCLFFM_ABI_VERSION;
    queue.rank = rank.comm.rank;
    queue.nLanes = nLanes;
    queue.depth = depth;
    queue.blocksPerLane = blocksPerLane;
    queue.timeoutNs = kTimeoutNs;
    queue.idleNs = idleNs;
    queue.status = onDevice(status);
    queue.progress = onDevice(progress);
    queue.control = onDevice(control);
    SHIM(ncclFfmTaskQueueInit(&queue, memory_, 0xfffffff0u, rank.stream));
    CUDA(cudaStreamSynchronize(rank.stream));
  }
  ~Queue() {
    for (void *p : {static_cast<void *>(status), static_cast<void *>(progress), static_cast<void *>(control),
                    static_cast<void *>(first), static_cast<void *>(times), static_cast<void *>(results),
                    static_cast<void *>(tickets)}) {
      CUDA(cudaFreeHost(p));
    }
    CUDA(cudaStreamDestroy(producers));
    CUDA(cudaFree(memory_));
  }

  // After a producer has been launched. See ncclFfmTaskControl.
  void launched(unsigned mode = ncclFfmSchedulerPersistent) {
    __atomic_fetch_add(&control->producers, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const uint32_t ofTheLast = 2 * static_cast<uint32_t>(launches) - 1;  // what it says when it announces its end
    if (static_cast<int32_t>(__atomic_load_n(&control->state, __ATOMIC_ACQUIRE) - ofTheLast) < 0) return;
    SHIM(ncclFfmLaunchScheduler(&rank_.comm, &queue, mode, rank_.stream));
    ++launches;
  }

  TaskQueue queue = {};
  cudaStream_t producers = nullptr;
  Status *status = nullptr;
  uint32_t *progress = nullptr;
  TaskControl *control = nullptr;
  Ticket *first = nullptr, *tickets = nullptr;
  Times *times = nullptr;
  uint32_t *results = nullptr;
  int launches = 0;

 private:
  Rank &rank_;
  void *memory_ = nullptr;
};

// A world and its queues.
struct Tasks {
  Tasks(int nRanks, uint32_t nLanes, uint32_t blocksPerLane, uint32_t depth, uint64_t idleNs)
      : world(nRanks, kTimeoutNs, kElements, [](Rank &rank) {
          appendKernel<<<1, 32, 0, rank.stream>>>(TaskQueue{}, nullptr, nullptr, 0, 0, kByBlock, nullptr);
          soakKernel<<<1, 32, 0, rank.stream>>>(TaskQueue{}, 0, nullptr, 0, 0, nullptr);
        }) {
    world.onEach([&](Rank &rank, int) {
      queues.push_back(std::make_unique<Queue>(rank, nLanes, blocksPerLane, depth, idleNs));
    });
  }
  ~Tasks() {
    synchronize();
    for (size_t r = 0; r < queues.size(); ++r) {
      World::use(static_cast<int>(r));
      queues[r].reset();
    }
  }

  // A producer on every rank, by launch(rank, queue).
  template <class Launch>
  void produce(Launch launch) {
    world.onEach([&](Rank &rank, int r) {
      launch(rank, *queues[static_cast<size_t>(r)]);
      CUDA(cudaGetLastError());
      queues[static_cast<size_t>(r)]->launched();
    });
  }

  void waitForProducers() {
    world.onEach([&](Rank &, int r) { CUDA(cudaStreamSynchronize(queues[static_cast<size_t>(r)]->producers)); });
  }

  // Producers, then schedulers, which end when idle.
  void synchronize() {
    waitForProducers();
    world.synchronize();
    for (auto &queue : queues) {
      for (uint32_t l = 0; l < queue->queue.nLanes; ++l) {
        const Status &s = queue->status[l];
        check(s.ready == 0, "status of a lane: code, peer, epoch", s.code, s.peer, s.epoch);
      }
    }
  }

  World world;
  std::vector<std::unique_ptr<Queue>> queues;
};

void bucketsAreReduced(int nRanks, uint32_t nLanes, uint32_t blocksPerLane) {
  Tasks tasks(nRanks, nLanes, blocksPerLane, 64, kMs);
  const size_t count = 300001, bucket = 7001;
  for (uint64_t call = 1; call <= 3; ++call) {
    tasks.world.fill(call, 0, count);
    tasks.produce([&](Rank &rank, Queue &queue) {
      const ncclFfmTaskBuckets buckets = {rank.send, count, bucket, kScale, kOffset, 77, 6, onDevice(queue.first)};
      SHIM(ncclFfmTaskAppendBuckets(&queue.queue, &buckets, queue.producers));
    });
    tasks.synchronize();
    tasks.world.onEach([&](Rank &rank, int) {
      CUDA(cudaMemcpy(rank.hostRecv, rank.send, count * sizeof(float), cudaMemcpyDeviceToHost));
    });
    for (int r = 0; r < nRanks; ++r) {
      size_t wrong = 0;
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int p = 0; p < nRanks; ++p) {
          const float x = std::fmaf(kScale, contribution(p, call, i), kOffset);
          sum = p == 0 ? x : sum + x;
        }
        wrong += memcmp(&sum, &tasks.world.ranks[r].hostRecv[i], sizeof sum) != 0;
      }
      check(wrong == 0, "buckets: ranks, rank, wrong elements", nRanks, r, static_cast<long long>(wrong));
    }
    for (auto &queue : tasks.queues) {
      const uint32_t nBuckets = static_cast<uint32_t>((count + bucket - 1) / bucket);
      for (uint32_t l = 0; l < nLanes; ++l) {
        const uint32_t done = queue->first[l].sequence + (nBuckets + nLanes - 1 - l) / nLanes;
        check(queue->progress[l] == done, "buckets: progress of a lane", l, queue->progress[l], done);
      }
    }
  }
}

// Every function once or so, in batches from the host.
void batchesFromTheHostAreRun(int nRanks) {
  Tasks tasks(nRanks, 2, 2, 8, kMs);
  const size_t count = 5000, n = static_cast<size_t>(nRanks);
  tasks.world.fill(9, 0, count * n);
  tasks.produce([&](Rank &rank, Queue &queue) {
    ncclFfmTaskBatch batch = {};
    batch.tickets = onDevice(queue.tickets);
    auto add = [&](uint32_t function, uint32_t lane, size_t out, int root, int source) {
      Task &task = batch.tasks[batch.nTasks++];
      task.function = function;
      task.symbol = 100;  // the two ends of a send have one name
      task.datatype = ncclFloat32;
      task.lane = lane;
      task.root = root;
      task.source = source;
      task.count = count;
      task.sendbuff = rank.send;
      task.recvbuff = rank.recv + out * count;
    };
    const int r = rank.comm.rank;
    add(ncclFfmFunctionAllReduce, 0, 0, 0, 0);
    add(ncclFfmFunctionBroadcast, 1, 1, nRanks - 1, 0);
    add(ncclFfmFunctionAllGather, 0, 2, 0, 0);
    add(ncclFfmFunctionReduceScatter, 1, 2 + n, 0, 0);
    add(ncclFfmFunctionSendRecv, 0, 3 + n, (r + 1) % nRanks, (r + nRanks - 1) % nRanks);
    add(ncclFfmFunctionBarrier, 1, 0, 0, 0);
    add(ncclFfmFunctionAllToAll, 0, 4 + n, 0, 0);
    add(r == 0 ? ncclFfmFunctionSend : r == 1 ? ncclFfmFunctionRecv : ncclFfmFunctionNone, 1, 4 + 2 * n, 1, 0);
    SHIM(ncclFfmTaskAppendOnStream(&queue.queue, &batch, queue.producers));
  });
  tasks.synchronize();
  tasks.world.onEach([&](Rank &rank, int r) {
    CUDA(cudaMemcpy(rank.hostRecv, rank.recv, (5 + 2 * n) * count * sizeof(float), cudaMemcpyDeviceToHost));
    const uint64_t ofRank = static_cast<uint64_t>(r);
    auto expect = [&](const char *what, size_t out, size_t i, float expected) {
      const float got = rank.hostRecv[out * count + i];
      check(memcmp(&got, &expected, sizeof got) == 0, what, nRanks, r, static_cast<long long>(i));
    };
    auto sumAt = [&](size_t i) {
      float sum = contribution(0, 9, i);
      for (int p = 1; p < nRanks; ++p) sum += contribution(p, 9, i);
      return sum;
    };
    for (size_t i = 0; i < count; ++i) {
      expect("all-reduce", 0, i, sumAt(i));
      expect("broadcast", 1, i, contribution(nRanks - 1, 9, i));
      for (size_t p = 0; p < n; ++p) {
        expect("all-gather", 2 + p, i, contribution(static_cast<int>(p), 9, i));
        expect("all-to-all", 4 + n + p, i, contribution(static_cast<int>(p), 9, ofRank * count + i));
      }
      expect("reduce-scatter", 2 + n, i, sumAt(ofRank * count + i));
      expect("send and receive", 3 + n, i, contribution((r + nRanks - 1) % nRanks, 9, i));
      if (r == 1) expect("receive", 4 + 2 * n, i, contribution(0, 9, i));
    }
    for (int t = 0; t < 8; ++t) {
      const Ticket &ticket = tasks.queues[static_cast<size_t>(r)]->tickets[t];
      check(ticket.ready == 1 && ticket.result == ncclSuccess, "ticket", t, ticket.result);
    }
  });
}

// Of 4 KiB, back to back, as an application calls it; 0 without NCCL.
double hostAllReduce(int nRanks) {
  if (nccl.allReduce == nullptr) return 0;
  World world(nRanks, kTimeoutNs, kElements, [](const Rank &) {});
  Communicators communicators(world);
  const double us = backToBack(world, 200, 15, [&](int r) {
    const Rank &rank = world.ranks[static_cast<size_t>(r)];
    NCCL(nccl.allReduce(rank.send, rank.recv, 1024, ncclFloat32, ncclSum, communicators.comms[r], rank.stream));
  });
  communicators.abort();
  return us;
}

double usOf(const Times &t, uint64_t cycles) {
  return static_cast<double>(cycles) / static_cast<double>(t.cycles) * static_cast<double>(t.ns) / 1000 /
         static_cast<double>(t.tasks);
}

// hostUs: what ncclAllReduce takes for 4 KiB; 0: it was not measured.
void speed(int nRanks, double hostUs) {
  Tasks tasks(nRanks, 1, 1, 256, 20 * kMs);
  auto run = [&](Mode mode, size_t count, int rounds) {
    double worst = 0;
    tasks.produce([&](Rank &rank, Queue &queue) {
      appendKernel<<<1, 32, 0, queue.producers>>>(queue.queue, rank.send, rank.recv, count, rounds, mode,
                                                  onDevice(queue.times));
    });
    tasks.waitForProducers();
    for (auto &queue : tasks.queues) {
      const Times &t = *queue->times;
      check(t.result == ncclSuccess, "speed: result", t.result);
      worst = std::max(worst, usOf(t, mode == kToDone || mode == kToDoneByProducer ? t.cycles : t.cyclesOfAppends));
    }
    return worst;
  };
  run(kToDone, 1024, 200);
  const double byBlock = run(kByBlock, 0, 5000), byWarp = run(kByWarpEach, 0, 2000);
  const double byProducer = run(kByProducer, 0, 5000);
  double toDone[2][3];
  const size_t bytes[] = {512, 4096, 65536};
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 2; ++k) {
      std::vector<double> us;
      const Mode mode = k == 0 ? kToDone : kToDoneByProducer;
      for (int repeat = 0; repeat < 5; ++repeat) us.push_back(run(mode, bytes[i] / 4, 2000));
      toDone[k][i] = median(us);
    }
  }
  printf(
      "%d ranks: append by a block %.2f us; by a warp, 32 tasks, %.3f us each; append to done of an all-reduce of 512 "
      "B %.2f us, 4 KiB %.2f us, 64 KiB %.2f us (1 block a lane)\n",
      nRanks, byBlock, byWarp, toDone[0][0], toDone[0][1], toDone[0][2]);
  printf("%d ranks, LaneProducer: append %.2f us; append to done 512 B %.2f us, 4 KiB %.2f us, 64 KiB %.2f us\n",
         nRanks, byProducer, toDone[1][0], toDone[1][1], toDone[1][2]);
  if (hostUs != 0) {
    printf(
        "%d ranks: ncclAllReduce of 4 KiB, back to back, %.2f us: the task takes 1/%.2f of it, by a LaneProducer "
        "1/%.2f\n",
        nRanks, hostUs, hostUs / toDone[0][1], hostUs / toDone[1][1]);
  }
  tasks.synchronize();
}

void overlap(int nRanks) {
  const int blocks = 8;
  const size_t count = 1 << 17;
  Tasks tasks(nRanks, 8, 1, 64, 20 * kMs);
  auto run = [&](uint32_t parts, uint32_t rounds, uint32_t iterations) {
    const auto start = std::chrono::steady_clock::now();
    tasks.produce([&](Rank &rank, Queue &queue) {
      const ncclFfmTaskOverlap o = {rank.send,
                                    rank.recv,
                                    rank.recv + count,
                                    count,
                                    iterations,
                                    rounds,
                                    0.75f,
                                    0.5f,
                                    5,
                                    blocks,
                                    parts,
                                    0,
                                    onDevice(queue.first),
                                    onDevice(queue.results)};
      SHIM(ncclFfmTaskIterate(&queue.queue, &o, queue.producers));
    });
    tasks.waitForProducers();
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    for (auto &queue : tasks.queues) {
      for (int b = 0; b < blocks; ++b) check(queue->results[b] == ncclSuccess, "overlap: result", queue->results[b]);
    }
    return us / iterations;
  };
  tasks.world.fill(4, 0, count);
  run(3, 3, 4);
  tasks.world.onEach([&](Rank &rank, int r) {
    CUDA(cudaMemcpy(rank.hostRecv, rank.recv, count * sizeof(float), cudaMemcpyDeviceToHost));
    size_t wrong = 0;
    for (size_t j = 0; j < count; j += 37) {
      float out = 0;
      for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int p = 0; p < nRanks; ++p) {
          float x = contribution(p, 4, j) + static_cast<float>(i);
          for (int k = 0; k < 3; ++k) x = std::fmaf(0.75f, x, 0.5f);
          sum = p == 0 ? x : sum + x;
        }
        out = i == 0 ? sum : out + sum;
      }
      wrong += memcmp(&out, &rank.hostRecv[j], sizeof out) != 0;
    }
    check(wrong == 0, "overlap: ranks, rank, wrong elements", nRanks, r, static_cast<long long>(wrong));
  });
  const uint32_t iterations = 400;
  auto medianOf = [&](uint32_t parts, uint32_t ofRounds) {
    std::vector<double> us;
    for (int repeat = 0; repeat < 5; ++repeat) us.push_back(run(parts, ofRounds, iterations));
    return median(us);
  };
  const double communicates = medianOf(2, 0);
  uint32_t rounds = 64;
  while (run(1, rounds, 100) < communicates * 1.2 && rounds < 1 << 20) rounds *= 2;
  const double computes = medianOf(1, rounds), both = medianOf(3, rounds);
  printf(
      "%d ranks, overlap, %zu KiB, us an iteration: computes %.1f, communicates %.1f, both %.1f: %.0f %% of the "
      "communication is hidden\n",
      nRanks, count * sizeof(float) >> 10, computes, communicates, both, 100 * (1 - (both - computes) / communicates));
  tasks.synchronize();
}

void soak(uint64_t nTasks) {
  Tasks tasks(2, 1, 1, 64, kMs);
  const int rounds = 20000;
  size_t before = 0, after = 0, total = 0;
  const auto start = std::chrono::steady_clock::now();
  tasks.world.fill(1, 0, 32 * 16);
  uint64_t n = 0;
  for (int i = 0; n < nTasks; ++i) {
    tasks.produce([&](Rank &rank, Queue &queue) {
      soakKernel<<<1, 32, 0, queue.producers>>>(queue.queue, 2, rank.send, 16, rounds, onDevice(queue.times));
    });
    tasks.waitForProducers();
    for (auto &queue : tasks.queues) {
      check(queue->times->result == ncclSuccess, "soak: result", queue->times->result);
      check(queue->times->wrong == 0, "soak: wrong elements", queue->times->wrong);
    }
    n += rounds * 32;
    if (i == 0) CUDA(cudaMemGetInfo(&before, &total));
    if (failures != 0) break;
  }
  tasks.synchronize();
  CUDA(cudaMemGetInfo(&after, &total));
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("soak: %llu tasks a rank in %.1f s (%.2f us each); free memory %zu MiB, at the start %zu MiB\n",
         static_cast<unsigned long long>(n), s, 1e6 * s / static_cast<double>(n), after >> 20, before >> 20);
  check(before <= after + (1 << 20), "soak: memory", static_cast<long long>(before), static_cast<long long>(after));
}

constexpr char kModule[] = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";

// Another thread does all that waits for the device, while schedulers are up and the host goes on appending. Not
// between the launches for one rank and for the next: the device would not go idle before the second, which would have
// to wait.
void othersMayWaitForTheDevice(int nRanks) {
  Tasks tasks(nRanks, 2, 1, 16, kMs);
  std::atomic<bool> over{false};
  std::atomic<int> calls{0};
  std::mutex launching;
  std::thread other([&] {
    auto call = [&](auto f) {
      std::lock_guard<std::mutex> lock(launching);
      f();
    };
    World::use(0);
    cudaStream_t stream;
    cudaEvent_t event;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&event));
    while (!over.load()) {
      void *p = nullptr;
      cudaLibrary_t library;
      call([&] { CUDA(cudaMalloc(&p, 1 << 20)); });
      call([&] { CUDA(cudaMemset(p, 0, 1 << 20)); });
      call([&] { CUDA(cudaEventRecord(event, stream)); });
      call([&] { CUDA(cudaEventSynchronize(event)); });
      call([&] { CUDA(cudaDeviceSynchronize()); });
      call([&] { CUDA(cudaFree(p)); });
      call([&] { CUDA(cudaLibraryLoadData(&library, kModule, nullptr, nullptr, 0, nullptr, nullptr, 0)); });
      call([&] { CUDA(cudaLibraryUnload(library)); });
      ++calls;
    }
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaEventDestroy(event));
  });
  const auto start = std::chrono::steady_clock::now();
  double longest = 0;
  int rounds = 0;
  for (; (rounds < 300 || calls.load() < 100) && failures == 0; ++rounds) {
    const auto before = std::chrono::steady_clock::now();
    std::unique_lock<std::mutex> lock(launching);
    tasks.produce([&](Rank &rank, Queue &queue) {
      ncclFfmTaskBatch batch = {};
      batch.nTasks = 2;
      batch.tickets = onDevice(queue.tickets);
      for (uint32_t i = 0; i < 2; ++i) {
        batch.tasks[i].function = ncclFfmFunctionAllReduce;
        batch.tasks[i].datatype = ncclFloat32;
        batch.tasks[i].lane = i;
        batch.tasks[i].count = 1000;
        batch.tasks[i].sendbuff = rank.send;
        batch.tasks[i].recvbuff = rank.recv + 1000 * i;
      }
      SHIM(ncclFfmTaskAppendOnStream(&queue.queue, &batch, queue.producers));
    });
    lock.unlock();
    for (auto &queue : tasks.queues) {
      for (uint32_t l = 0; l < 2; ++l) {
        while (static_cast<int32_t>(__atomic_load_n(&queue->progress[l], __ATOMIC_ACQUIRE) -
                                    (0xfffffff0u + static_cast<uint32_t>(rounds) + 1)) < 0) {
          if (__atomic_load_n(&queue->status[l].ready, __ATOMIC_ACQUIRE) != 0) {
            check(false, "others: code, peer, round", queue->status[l].code, queue->status[l].peer, rounds);
            break;
          }
          if (std::chrono::steady_clock::now() - before > std::chrono::nanoseconds(2 * kTimeoutNs)) {
            check(false, "others: nobody runs a task: lane, round", l, rounds);
            exit(1);
          }
        }
      }
    }
    longest = std::max(longest, std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count());
  }
  over.store(true);
  other.join();
  tasks.synchronize();
  printf(
      "%d ranks, %d rounds beside %d times cudaMalloc, cudaMemset, cudaEventSynchronize, cudaDeviceSynchronize, "
      "cudaFree, module load: %.2f s, the longest round %.1f ms, %d launches of rank 0's scheduler\n",
      nRanks, rounds, calls.load(), std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
      1000 * longest, tasks.queues[0]->launches);
}

}  // namespace

int main(int argc, char **argv) {
  begin(argc, argv);
  const uint64_t nTasks = argc > 2 ? strtoull(argv[2], nullptr, 10) : 100000;
  const char *parts = argc > 3 ? argv[3] : "cslk";
  constexpr int kRanks[] = {2, 4, 8};
  double hostUs[std::size(kRanks)] = {};
  if (strchr(parts, 's') != nullptr) {  // NCCL first, while its kernels have the GPU's queues to themselves
    loadNccl();
    for (size_t i = 0; i < std::size(kRanks); ++i) hostUs[i] = hostAllReduce(kRanks[i]);
  }
  if (strchr(parts, 'c') != nullptr) {
    for (int nRanks : kRanks) {
      bucketsAreReduced(nRanks, 1, 1);
      bucketsAreReduced(nRanks, 4, 2);
      batchesFromTheHostAreRun(nRanks);
      printf("%d ranks: %s\n", nRanks, failures == 0 ? "right" : "WRONG");
    }
  }
  if (strchr(parts, 's') != nullptr) {
    for (size_t i = 0; i < std::size(kRanks); ++i) speed(kRanks[i], hostUs[i]);
    for (int nRanks : kRanks) overlap(nRanks);
  }
  if (strchr(parts, 'l') != nullptr) {
    for (int nRanks : {2, 4}) othersMayWaitForTheDevice(nRanks);
  }
  if (strchr(parts, 'k') != nullptr) soak(nTasks);
  printf("task_cuda_test: %s, %d failures\n", failures == 0 ? "PASS" : "FAIL", failures);
  return failures == 0 ? 0 : 1;
}

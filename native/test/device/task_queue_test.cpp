// Tasks of all functions and types, from several producers on every rank, with nothing but the queue to keep them in
// step: each has its result, lanes keep their order, whatever the depth, and where numbers wrap. With --million a
// million tasks in all; with --break RULE it passes only if the checks notice that the rule is broken.
#include "task_world.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250119;

struct Config {
  int nRanks, nProducers;
  QueueShape shape;
  uint32_t threads;  // of a block of the scheduler
  uint32_t tasks;    // of each rank
};

std::vector<Case> randomTasks(uint64_t &h, const Config &config, uint64_t partBytes) {
  constexpr uint32_t kFunctions[] = {ncclFfmFunctionAllReduce, ncclFfmFunctionReduceScatter,
                                     ncclFfmFunctionAllGather, ncclFfmFunctionBroadcast,
                                     ncclFfmFunctionReduce,    ncclFfmFunctionAllToAll,
                                     ncclFfmFunctionBarrier,   ncclFfmFunctionHierarchicalAllReduce,
                                     ncclFfmFunctionSend,      ncclFfmFunctionSendRecv,
                                     ncclFfmFunctionAllReduce, ncclFfmFunctionAllReduce};
  std::vector<Case> cases;
  while (cases.size() < config.tasks) {
    Case c = {};
    do {
      c.function = kFunctions[pick(h, std::size(kFunctions))];
    } while (config.nRanks == 1 && c.function >= ncclFfmFunctionSend);
    c.datatype = static_cast<int>(pick(h, 10));
    c.op = reduces(c.function) ? static_cast<int>(pick(h, 5)) : ncclSum;
    c.algorithm = ncclFfmAlgorithmTwoShot;  // any but the ring: sums are taken in the order of ranks
    c.named = true;
    chooseRest(c, h, config.nRanks, partBytes);
    c.number = h % (uint64_t{1} << 40) << 20 | cases.size();
    cases.push_back(c);
  }
  return cases;
}

ncclResult_t append(const TaskQueue &queue, const Call &call, uint32_t lane, const uint32_t *sequence, Ticket *ticket) {
  TaskPlace place;
  place.lane = lane;
  place.root = call.root;
  place.source = call.source;
  place.named = sequence != nullptr;
  if (sequence != nullptr) place.sequence = *sequence;
  const bool nothing = call.function == ncclFfmFunctionNone;
  return ncclTaskAppend(CoopThread(), queue, "a random task", static_cast<int>(call.function), call.datatype, call.op,
                        nothing ? nullptr : call.sendbuff, nothing ? nullptr : call.recvbuff, call.count, place,
                        ticket);
}

ncclResult_t append(LaneProducer<CoopThread> &producer, const Call &call, Ticket *ticket) {
  const bool nothing = call.function == ncclFfmFunctionNone;
  return producer.append("a random task", static_cast<int>(call.function), call.datatype, call.op,
                         nothing ? nullptr : call.sendbuff, nothing ? nullptr : call.recvbuff, call.count, ticket,
                         call.root, call.source);
}

void run(const Config &config) {
  const uint64_t partBytes = 600;
  uint64_t h = kSeed + static_cast<uint64_t>(config.nRanks * 100 + config.nProducers * 10) + config.shape.depth;
  char where[160];
  snprintf(where, sizeof where, "%d producers, %u lanes of %u blocks of %u threads, depth %u, from %u",
           config.nProducers, config.shape.nLanes, config.shape.blocksPerLane, config.threads, config.shape.depth,
           config.shape.firstSequence);
  const std::vector<Case> cases = randomTasks(h, config, partBytes);
  const uint32_t nLanes = config.shape.nLanes, nProducers = static_cast<uint32_t>(config.nProducers);
  World world(config.nRanks, static_cast<int>(nLanes * config.shape.blocksPerLane), 512, timeoutNs());
  // Of each thread. They outlive the queues: after a failure schedulers may be at work in them until they have ended.
  std::vector<std::vector<std::unique_ptr<Arena>>> arenas(static_cast<size_t>(config.nRanks * config.nProducers));
  Queues queues(world, config.shape);
  queues.launchSchedulers(ncclFfmSchedulerPersistent, config.threads);
  // Odd lanes have one producer: numbered by the queue, or by a LaneProducer; even ones are numbered by the racing
  // producers.
  auto producerOf = [&](uint32_t t) {
    const uint32_t lane = t % nLanes;
    return lane % 2 == 1 ? lane / 2 % nProducers : static_cast<uint32_t>(mix(t) % nProducers);
  };
  auto isOwned = [&](uint32_t lane) { return lane % 2 == 1 && (lane / 2 + nProducers) % 2 == 0; };
  inThreads(config.nRanks * config.nProducers, [&](int thread) {
    const int rank = thread / config.nProducers;
    const uint32_t producer = static_cast<uint32_t>(thread % config.nProducers);
    const TaskQueue &queue = queues[rank].queue;
    struct Pending {
      uint32_t t;
      Ticket ticket;
      Arena *arena;
    };
    std::vector<std::unique_ptr<LaneProducer<CoopThread>>> owners(nLanes);
    for (uint32_t lane = 1; lane < nLanes; lane += 2) {
      if (isOwned(lane) && producerOf(lane) == producer) {
        owners[lane] = std::make_unique<LaneProducer<CoopThread>>(CoopThread(), queue, lane);
        check(owners[lane]->result() == ncclSuccess, "%s: producer of lane %u: %d", where, lane,
              owners[lane]->result());
      }
    }
    std::vector<Pending> pending;
    std::vector<Arena *> spare;
    uint64_t g = mix(kSeed + static_cast<uint64_t>(thread));
    auto failed = [&](const char *what, uint32_t t, ncclResult_t result) {
      const Status s = queues[rank].status(t % nLanes);
      check(result == ncclSuccess,
            "%s: rank %d of %d, %s task %u: result %d; status: code %u, function %u, peer %d, channel %d, epoch %u",
            where, rank, config.nRanks, what, t, result, s.code, s.function, s.peer, s.channel, s.epoch);
      if (failures.load() != 0) queues.abort();
      return failures.load() != 0;
    };
    auto finishOldest = [&] {
      const Pending oldest = pending.front();
      pending.erase(pending.begin());
      if (owners[oldest.ticket.lane] != nullptr) {
        if (failed("wait for", oldest.t, owners[oldest.ticket.lane]->wait(oldest.ticket))) return false;
      } else {
        if (failed("launch of", oldest.t, ncclTaskLaunch(queue, oldest.ticket))) return false;
        if (failed("wait for", oldest.t, ncclTaskWait(CoopThread(), queue, oldest.ticket))) return false;
      }
      check(ncclTaskTest(queue, oldest.ticket) == ncclSuccess, "%s: a task that was waited for is not complete", where);
      oldest.arena->verify(cases[oldest.t], where);
      spare.push_back(oldest.arena);
      return !failed("result of", oldest.t, ncclSuccess);
    };
    for (uint32_t t = 0; t < cases.size(); ++t) {
      if (producerOf(t) != producer) continue;
      // So that tasks which stand before it in their lanes do not stay unlaunched for long.
      if (pending.size() >= 4 || (!pending.empty() && config.shape.depth < 8)) {
        if (!finishOldest()) return;
      }
      if (spare.empty()) {
        arenas[thread].push_back(std::make_unique<Arena>(areaBytesFor(config.nRanks, partBytes)));
        spare.push_back(arenas[thread].back().get());
      }
      Pending task = {t, {}, spare.back()};
      spare.pop_back();
      task.arena->prepare(cases[t], rank, config.nRanks, 1);
      const Call call = callOf(cases[t], *task.arena, rank, config.nRanks, nullptr);
      const uint32_t lane = t % nLanes, sequence = config.shape.firstSequence + t / nLanes;
      const bool named = lane % 2 == 0;
      const ncclResult_t appended = owners[lane] != nullptr
                                        ? append(*owners[lane], call, &task.ticket)
                                        : append(queue, call, lane, named ? &sequence : nullptr, &task.ticket);
      if (failed("append of", t, appended)) return;
      check(task.ticket.lane == lane && task.ticket.sequence == sequence, "%s: task %u has ticket %u of lane %u", where,
            t, task.ticket.sequence, task.ticket.lane);
      if (pick(g, 2) == 0 && failed("launch of", t, ncclTaskLaunch(queue, task.ticket))) return;
      pending.push_back(task);
    }
    while (!pending.empty()) {
      if (!finishOldest()) return;
    }
  });
  queues.stop();
  for (int rank = 0; rank < config.nRanks && failures.load() == 0; ++rank) {
    for (uint32_t lane = 0; lane < nLanes; ++lane) {
      const uint32_t expected = config.shape.firstSequence + (config.tasks + nLanes - 1 - lane) / nLanes;
      check(queues[rank].done(lane) == expected, "%s: rank %d, lane %u has done up to %u, not %u", where, rank, lane,
            queues[rank].done(lane), expected);
    }
    check(queues[rank].hasStopped(), "%s: the scheduler has not stopped", where);
  }
}

// Sums and products of equal odd numbers do not commute, and remain odd where the ranks are: what comes out says in
// which order the lane ran them, and how often. Of three producers that name the numbers, or of one LaneProducer.
void laneKeepsItsOrder(int nRanks, uint32_t blocksPerLane, uint32_t depth, bool owned) {
  constexpr int kTasks = 900, kCount = 40;
  const int nProducers = owned ? 1 : 3;
  World world(nRanks, static_cast<int>(2 * blocksPerLane), 512, timeoutNs());
  Queues queues(world, {2, blocksPerLane, depth, 0xffffff00u, timeoutNs(), 3600000 * kMs});
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  std::vector<std::vector<uint64_t>> buffers(static_cast<size_t>(nRanks));
  for (int r = 0; r < nRanks; ++r) buffers[r].assign(kCount, 3 + 2 * static_cast<uint64_t>(r));
  inThreads(nRanks * nProducers, [&](int thread) {
    const int rank = thread / nProducers;
    const TaskQueue &queue = queues[rank].queue;
    uint64_t *x = buffers[rank].data();
    if (owned) {
      LaneProducer<CoopThread> producer(CoopThread(), queue, 1);
      ncclResult_t result = producer.result();
      Ticket ticket = {};
      for (int t = 0; t < kTasks && result == ncclSuccess; ++t) {
        result = producer.append("order", ncclFfmFunctionAllReduce, ncclUint64, mix(t) % 2 == 0 ? ncclSum : ncclProd, x,
                                 x, kCount, &ticket);
      }
      if (result == ncclSuccess) result = producer.wait(ticket);
      check(result == ncclSuccess, "order, rank %d: result %d", rank, result);
      if (failures.load() != 0) queues.abort();
      return;
    }
    for (int t = thread % nProducers; t < kTasks; t += nProducers) {
      TaskPlace place = TaskPlace::at({1, 0xffffff00u + static_cast<uint32_t>(t), 0, 0});
      Ticket ticket;
      ncclResult_t result = ncclTaskAppend(CoopThread(), queue, "order", ncclFfmFunctionAllReduce, ncclUint64,
                                           mix(t) % 2 == 0 ? ncclSum : ncclProd, x, x, kCount, place, &ticket);
      if (result == ncclSuccess) result = ncclTaskLaunch(queue, ticket);
      if (result == ncclSuccess && t + nProducers >= kTasks) result = ncclTaskWait(CoopThread(), queue, ticket);
      check(result == ncclSuccess, "order, rank %d, task %d: result %d", rank, t, result);
      if (failures.load() != 0) return queues.abort();
    }
  });
  queues.stop();
  uint64_t expected = 0;
  std::vector<uint64_t> of(static_cast<size_t>(nRanks));
  for (int r = 0; r < nRanks; ++r) of[r] = 3 + 2 * static_cast<uint64_t>(r);
  for (int t = 0; t < kTasks; ++t) {
    expected = mix(t) % 2 == 0 ? 0 : 1;
    for (uint64_t x : of) expected = mix(t) % 2 == 0 ? expected + x : expected * x;
    for (uint64_t &x : of) x = expected;
  }
  for (int r = 0; r < nRanks; ++r) {
    for (uint64_t x : buffers[r]) {
      check(x == expected, "order, depth %u, %u blocks a lane, %d producers, rank %d of %d: %llx, not %llx", depth,
            blocksPerLane, nProducers, r, nRanks, static_cast<unsigned long long>(x),
            static_cast<unsigned long long>(expected));
    }
  }
}

void nothingRunsBeforeItIsLaunched() {
  World world(1, 1, 512, timeoutNs());
  Queues queues(world, {1, 1, 8, 5, timeoutNs(), kMs});
  const TaskQueue &queue = queues[0].queue;
  float in = 7, out = 0;
  Ticket tickets[3];
  for (Ticket &ticket : tickets) {
    const ncclResult_t result =
        ncclTaskAppend(queue, "bound", ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, &in, &out, 1, 0, &ticket);
    check(result == ncclSuccess, "append: %d", result);
  }
  queues[0].launchScheduler(ncclFfmSchedulerDrain);
  queues[0].joinScheduler();  // a drain runs what is launched: nothing
  check(out == 0 && ncclTaskTest(queue, tickets[0]) == ncclInProgress, "a task ran before it was launched");
  ncclTaskLaunch(queue, tickets[1]);
  queues[0].launchScheduler(ncclFfmSchedulerDrain);
  queues[0].joinScheduler();
  check(out == 7 && queues[0].done(0) == 7, "a drain did up to %u, not 7", queues[0].done(0));
  check(ncclTaskTest(queue, tickets[1]) == ncclSuccess && ncclTaskTest(queue, tickets[2]) == ncclInProgress,
        "the bound of a launch");
  ncclTaskLaunch(queue);
  queues[0].launchScheduler(ncclFfmSchedulerDrain);
  queues[0].joinScheduler();
  check(ncclTaskTest(queue, tickets[2]) == ncclSuccess, "a launch of everything");
}

void runAll(uint32_t million) {
  // 1 to 8 producers, 1 to 8 ranks, depths 1 to 1024, the wrap of numbers within reach.
  constexpr uint32_t kWrap = 0xffffffffu - 40;
  const uint64_t t = timeoutNs(), idle = 3600000 * kMs;
  const Config configs[] = {
      {1, 1, {1, 1, 1, kWrap, t, idle}, 1, 4},   {2, 1, {1, 1, 2, kWrap, t, idle}, 1, 4},
      {2, 4, {4, 1, 1, kWrap, t, idle}, 1, 4},   {2, 8, {3, 1, 16, kWrap, t, idle}, 1, 4},
      {3, 2, {2, 2, 4, kWrap, t, idle}, 1, 4},   {4, 3, {2, 1, 1024, kWrap, t, idle}, 1, 4},
      {2, 2, {2, 1, 64, kWrap, t, idle}, 3, 1},  {8, 2, {1, 1, 32, 0, t, idle}, 1, 2},
      {8, 8, {2, 1, 256, kWrap, t, idle}, 1, 2}, {1, 8, {8, 1, 8, kWrap, t, idle}, 1, 8},
      {2, 1, {1, 3, 8, kWrap, t, idle}, 1, 2},   {5, 1, {1, 1, 4, 0x7fffffffu - 20, t, idle}, 1, 2},
  };
  uint64_t total = 0, weight = 0;
  for (const Config &config : configs) weight += config.tasks * static_cast<uint64_t>(config.nRanks);
  for (Config config : configs) {
    // Ranks times tasks make a million, or as many as fit a test.
    const uint64_t all = million != 0 ? 1000000 : (expectFailure ? 8000 : 80000) / (kSlowdown * kSlowdown);
    config.tasks = static_cast<uint32_t>(1 + config.tasks * all / weight);
    total += static_cast<uint64_t>(config.tasks) * static_cast<uint64_t>(config.nRanks);
    const auto start = std::chrono::steady_clock::now();
    run(config);
    if (million != 0) {
      fprintf(stderr, "%d ranks, %d producers, depth %u: %u tasks each, %.1f s\n", config.nRanks, config.nProducers,
              config.shape.depth, config.tasks,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    if (failures.load() != 0) return;
  }
  fprintf(stderr, "task_queue_test: %llu tasks\n", static_cast<unsigned long long>(total));
  for (uint32_t depth : {1u, 4u, 64u}) {
    for (bool owned : {false, true}) {
      laneKeepsItsOrder(3, 1, depth, owned);
      laneKeepsItsOrder(5, 3, depth, owned);
    }
    if (failures.load() != 0) return;
  }
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
  if (argc == 3 && strcmp(argv[1], "--break") == 0) breakRule(argv[2]);
  nothingRunsBeforeItIsLaunched();
  if (failures.load() == 0) runAll(argc == 2 && strcmp(argv[1], "--million") == 0);
  return report("task_queue_test");
}

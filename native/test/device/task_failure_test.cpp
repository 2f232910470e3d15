// What happens to a queue when something goes wrong: ranks that hand in different tasks, bad arguments, a full ring, a
// producer that dies, an abort, a stop; and when its scheduler ends just as work comes. Nobody waits for ever, and what
// failed is told. With --break RULE it passes only if the checks notice that the rule is broken.
#include "task_world.h"

#include <functional>

#include "../../include/ncclffm/impl/producers.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kShortNs = 300 * kMs;  // where a deadline is what must come
constexpr uint64_t kForever = 3600000 * kMs;

struct Given {
  TaskSymbol symbol;
  uint32_t function;
  int datatype, op, root;
  uint64_t count;
};

ncclResult_t appendAndLaunch(const TaskQueue &queue, const Given &g, uint32_t lane, const float *in, float *out,
                             Ticket *ticket) {
  TaskPlace place;
  place.lane = lane;
  place.root = g.root;
  ncclResult_t result = ncclTaskAppend(CoopThread(), queue, g.symbol, static_cast<int>(g.function), g.datatype, g.op,
                                       in, out, g.count, place, ticket);
  return result == ncclSuccess ? ncclTaskLaunch(queue, *ticket) : result;
}

// The buffers of several ranks or threads. Of a lane that has failed they are in use until the scheduler has ended, so
// they are made before the queues.
using Buffers = std::vector<std::vector<float>>;

const Given kUsual = {TaskSymbol("usual"), ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, 0, 70};

// Every rank hands in one good task on a lane.
void checkThatLaneWorks(const char *what, Queues &queues, int nRanks, uint32_t lane) {
  inThreads(nRanks, [&](int rank) {
    TaskQueue queue = queues[rank].queue;
    queue.timeoutNs = timeoutNs();  // the test's own may be one that is to pass
    std::vector<float> in(70, 1.0f + static_cast<float>(rank)), out(70);
    for (int i = 0; i < 3; ++i) {
      Ticket ticket;
      ncclResult_t result = appendAndLaunch(queue, kUsual, lane, in.data(), out.data(), &ticket);
      if (result == ncclSuccess) result = ncclTaskWait(CoopThread(), queue, ticket);
      check(result == ncclSuccess && out[69] == static_cast<float>(nRanks * (nRanks + 1) / 2),
            "after %s, lane %u of rank %d: result %d, %g", what, lane, rank, result, static_cast<double>(out[69]));
    }
  });
}

void checkRecord(const char *what, int rank, const char *whose, const TaskRecord &record, const Given &g,
                 uint32_t sequence) {
  check(
      record.present == 1 && record.symbol == g.symbol.hash && record.lane == 0 && record.sequence == sequence &&
          record.function == g.function && record.datatype == g.datatype && record.op == g.op &&
          record.root == g.root && record.count == g.count,
      "another %s, status of rank %d, %s: present %u, symbol %08x, lane %u, sequence %u, function %u, type %d, op %d, "
      "root %d, count %llu",
      what, rank, whose, record.present, record.symbol, record.lane, record.sequence, record.function, record.datatype,
      record.op, record.root, static_cast<unsigned long long>(record.count));
}

// One rank's lane comes to another task: all ranks learn of both, before any data is taken.
void ranksThatDisagreeAreToldSo(uint32_t blocksPerLane) {
  struct Difference {
    const char *what;
    std::function<void(Given &)> change;
  };
  const Difference differences[] = {
      {"name", [](Given &g) { g.symbol = TaskSymbol("another"); }},
      {"count", [](Given &g) { ++g.count; }},
      {"much smaller count", [](Given &g) { g.count = 1; }},
      {"count of 0", [](Given &g) { g.count = 0; }},
      {"type", [](Given &g) { g.datatype = ncclInt32; }},
      {"op", [](Given &g) { g.op = ncclMax; }},
      {"function", [](Given &g) { g.function = ncclFfmFunctionReduce; }},
      {"barrier", [](Given &g) { g.function = ncclFfmFunctionBarrier; }},
      {"root", [](Given &g) { g.function = ncclFfmFunctionBroadcast, g.root = 1; }},
  };
  constexpr int kRanks = 3, kOdd = 2;
  constexpr uint32_t kFirst = 0xfffffffeu;
  for (const Difference &difference : differences) {
    World world(kRanks, static_cast<int>(2 * blocksPerLane), 512, expectFailure ? kShortNs : 20000 * kMs);
    const QueueShape shape = {2, blocksPerLane, 16, kFirst, expectFailure ? kShortNs : 20000 * kMs, kForever};
    Given usual = kUsual;
    if (strcmp(difference.what, "root") == 0) usual.function = ncclFfmFunctionBroadcast;
    Given odd = usual;
    difference.change(odd);
    {
      Buffers ins(kRanks, std::vector<float>(71, 1.0f)), outs(kRanks, std::vector<float>(71, 9.0f)), goods(outs);
      Queues queues(world, shape);
      queues.launchSchedulers(ncclFfmSchedulerPersistent);
      inThreads(kRanks, [&](int rank) {
        const TaskQueue &queue = queues[rank].queue;
        std::vector<float> &in = ins[rank], &out = outs[rank], &good = goods[rank];
        Ticket first, ticket;
        ncclResult_t result = appendAndLaunch(queue, kUsual, 0, in.data(), good.data(), &first);
        check(result == ncclSuccess, "append: %d", result);
        result = appendAndLaunch(queue, rank == kOdd ? odd : usual, 0, in.data(), out.data(), &ticket);
        check(result == ncclSuccess, "append: %d", result);
        check(ncclTaskWait(CoopThread(), queue, ticket) == ncclInvalidUsage, "another %s: rank %d was not told",
              difference.what, rank);
        check(ncclTaskTest(queue, ticket) == ncclInvalidUsage, "a test after the failure");
        check(ncclTaskWait(CoopThread(), queue, first) == ncclSuccess && good[3] == 3, "what was done before it");
        const ncclResult_t later = appendAndLaunch(queue, usual, 0, in.data(), out.data(), &ticket);
        check(later == ncclInvalidUsage, "an append after the failure: %d", later);
      });
      for (int rank = 0; rank < kRanks; ++rank) {
        const Status s = queues[rank].status(0);
        const bool named = rank == kOdd ? s.peer == 0 || s.peer == 1 : s.peer == kOdd;
        check(s.code == ncclInvalidUsage && s.rank == rank && named,
              "another %s, status of rank %d: code %u, rank %d, peer %d", difference.what, rank, s.code, s.rank,
              s.peer);
        checkRecord(difference.what, rank, "own", s.task, rank == kOdd ? odd : usual, kFirst + 1);
        checkRecord(difference.what, rank, "the peer's", s.peerTask, rank == kOdd ? usual : odd, kFirst + 1);
      }
      checkThatLaneWorks(difference.what, queues, kRanks, 1);
      for (int rank = 0; rank < kRanks; ++rank) {
        check(world.status(rank).ready == 0, "another %s failed the communicator", difference.what);
      }
    }
    Queues fresh(world, shape);
    fresh.launchSchedulers(ncclFfmSchedulerPersistent);
    checkThatLaneWorks("a new queue", fresh, kRanks, 0);
    checkThatLaneWorks("a new queue", fresh, kRanks, 1);
    if (expectFailure && failures.load() != 0) return;
  }
}

// The same two tasks, the other way round on one rank.
void ranksThatDisagreeOnTheOrderAreToldSo() {
  constexpr int kRanks = 4, kOdd = 1;
  World world(kRanks, 1, 512, expectFailure ? kShortNs : 20000 * kMs);
  Buffers ins(kRanks, std::vector<float>(70, 1.0f)), outs(ins);
  Queues queues(world, {1, 1, 16, 0, expectFailure ? kShortNs : 20000 * kMs, kForever});
  const Given a = kUsual, b = {TaskSymbol("the other"), ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, 0, 70};
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  inThreads(kRanks, [&](int rank) {
    std::vector<float> &in = ins[rank], &out = outs[rank];
    Ticket tickets[2];
    for (int i = 0; i < 2; ++i) {
      appendAndLaunch(queues[rank].queue, (i == 0) == (rank == kOdd) ? b : a, 0, in.data(), out.data(), &tickets[i]);
    }
    for (const Ticket &ticket : tickets) {
      const ncclResult_t result = ncclTaskWait(CoopThread(), queues[rank].queue, ticket);
      check(result == ncclInvalidUsage, "another order, rank %d: result %d", rank, result);
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const Status s = queues[rank].status(0);
    checkRecord("order", rank, "own", s.task, rank == kOdd ? b : a, 0);
    checkRecord("order", rank, "the peer's", s.peerTask, rank == kOdd ? a : b, 0);
  }
}

void badTaskIsToldToAll(bool onlyOne) {
  constexpr int kRanks = 3;
  World world(kRanks, 1, 512, 20000 * kMs);
  Buffers ins(kRanks, std::vector<float>(70, 1.0f)), outs(ins);
  Queues queues(world, {1, 1, 4, 9, 20000 * kMs, kForever});
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  inThreads(kRanks, [&](int rank) {
    std::vector<float> &in = ins[rank], &out = outs[rank];
    Ticket ticket;
    const bool bad = !onlyOne || rank == 1;
    Given g = kUsual;
    g.function = ncclFfmFunctionBroadcast;
    if (bad) g.root = kRanks;
    const ncclResult_t appended = appendAndLaunch(queues[rank].queue, g, 0, in.data(), out.data(), &ticket);
    check(appended == ncclSuccess, "append: %d", appended);
    const ncclResult_t result = ncclTaskWait(CoopThread(), queues[rank].queue, ticket);
    check(result == (bad ? ncclInvalidArgument : ncclInvalidUsage), "a bad root, rank %d: result %d", rank, result);
    check(queues[rank].status(0).task.root == g.root, "a bad root is not named");
  });
  // What no task can be is refused at once.
  const TaskQueue &queue = queues[0].queue;
  Ticket first;
  check(ncclTaskReserve(queue, 0, kMostReserved + 1, &first) == ncclInvalidArgument, "too many numbers at a time");
  float x = 0;
  const struct {
    int type, datatype, op;
    uint64_t count;
    uint32_t lane;
  } rows[] = {{ncclFfmFunctionFusedScaleAllReduceSqrt, ncclFloat32, ncclSum, 1, 0},
              {-1, ncclFloat32, ncclSum, 1, 0},
              {ncclFfmFunctionAllReduce, 10, ncclSum, 1, 0},
              {ncclFfmFunctionAllReduce, ncclFloat32, 5, 1, 0},
              {ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, kMaxCount + 1, 0},
              {ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, 1, 1}};
  for (const auto &row : rows) {
    const ncclResult_t result =
        ncclTaskAppend(queue, "bad", row.type, row.datatype, row.op, &x, &x, row.count, row.lane);
    check(result == ncclInvalidArgument, "type %d, datatype %d, op %d, lane %u: %d", row.type, row.datatype, row.op,
          row.lane, result);
  }
}

// A task that is the same on all ranks, and that one of them cannot run, for its buffers overlap.
void refusalIsToldToAll() {
  constexpr int kRanks = 3, kOdd = 1;
  World world(kRanks, 1, 512, 20000 * kMs);
  Buffers buffers(kRanks, std::vector<float>(200, 1.0f));
  Queues queues(world, {1, 1, 4, 9, 20000 * kMs, kForever});
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  inThreads(kRanks, [&](int rank) {
    float *in = buffers[rank].data();
    Ticket ticket;
    const ncclResult_t appended =
        appendAndLaunch(queues[rank].queue, kUsual, 0, in, in + (rank == kOdd ? 1 : 100), &ticket);
    check(appended == ncclSuccess, "append: %d", appended);
    const ncclResult_t result = ncclTaskWait(CoopThread(), queues[rank].queue, ticket);
    check(result == (rank == kOdd ? ncclInvalidArgument : ncclInvalidUsage), "buffers that overlap, rank %d: result %d",
          rank, result);
    const Status s = queues[rank].status(0);
    checkRecord("refused", rank, "own", s.task, kUsual, 9);
    if (rank != kOdd) {
      checkRecord("refused", rank, "the peer's", s.peerTask, kUsual, 9);
      check(s.peer == kOdd, "who refused is told to be rank %d", s.peer);
    }
  });
}

void fullRingIsToldAtOnceOrAtTheDeadline() {
  World world(1, 2, 512, kShortNs);
  Queues queues(world, {2, 1, 4, 0xfffffffdu, kShortNs, kForever});
  const TaskQueue &queue = queues[0].queue;
  float in = 2, out = 0;
  auto append = [&](uint32_t lane, bool waits, Ticket *ticket) {
    TaskPlace place;
    place.lane = lane;
    place.waits = waits;
    return ncclTaskAppend(CoopThread(), queue, "full", ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, &in, &out, 1,
                          place, ticket);
  };
  Ticket ticket;
  for (uint32_t lane = 0; lane < 2; ++lane) {
    for (int i = 0; i < 4; ++i) check(append(lane, i % 2 == 0, &ticket) == ncclSuccess, "append %d", i);
  }
  for (int i = 0; i < 3; ++i) {
    check(append(0, false, &ticket) == static_cast<ncclResult_t>(ncclFfmQueueFull), "a full ring was not told");
  }
  const uint64_t start = nowNs();
  check(append(1, true, &ticket) == static_cast<ncclResult_t>(ncclFfmQueueFull), "a full ring was not told in the end");
  check(nowNs() - start >= kShortNs, "a full ring was not waited for");
  check(append(1, true, &ticket) == ncclTimeout && append(1, false, &ticket) == ncclTimeout, "the lane has not failed");
  check(queues[0].status(1).code == ncclTimeout && queues[0].status(0).ready == 0, "status of the full lane");
  // No ticket was taken on lane 0: nothing is missing there.
  queues[0].launchScheduler(ncclFfmSchedulerPersistent);
  ncclTaskLaunch(queue);
  check(ncclTaskWait(CoopThread(), queue, {0, 0, 0, 0}) == ncclSuccess, "the tasks of a full lane");
  check(append(0, false, &ticket) == ncclSuccess && ticket.sequence == 1, "the next ticket is %u", ticket.sequence);
  ncclTaskLaunch(queue, ticket);
  check(ncclTaskWait(CoopThread(), queue, ticket) == ncclSuccess, "a task after the full ring");
  check(ncclTaskAppend(queue, "twice", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, 0u, 1u) == ncclInvalidUsage,
        "a number that has been used");
}

// A producer of rank 0 takes a ticket and dies.
void laneWithAProducerHasNoOther() {
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 2, 0xffffffffu, kShortNs, 3600000 * kMs});
  const TaskQueue &queue = queues[0].queue;
  auto append = [&](uint32_t lane, const TaskPlace *at) {
    TaskPlace place = at == nullptr ? TaskPlace() : *at;
    place.lane = lane;
    return ncclTaskAppend(CoopThread(), queue, "other", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, place);
  };
  check(LaneProducer<CoopThread>(CoopThread(), queue, 2).result() == ncclInvalidArgument, "a lane that is not there");
  TaskQueue noQueue = queue;
  noQueue.magic = 0;
  check(LaneProducer<CoopThread>(CoopThread(), noQueue, 0).result() == ncclInvalidArgument, "no queue");
  Ticket ticket = {};
  {
    LaneProducer<CoopThread> producer(CoopThread(), queue, 0);
    check(producer.result() == ncclSuccess, "a producer: %d", producer.result());
    {
      LaneProducer<CoopThread> second(CoopThread(), queue, 0);
      check(second.result() == ncclInvalidUsage, "a second producer: %d", second.result());
      check(second.append("second", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0) == ncclInvalidUsage &&
                second.wait(ticket) == ncclInvalidUsage,
            "a second producer's tasks");
    }
    TaskPlace named = TaskPlace::at({0, 5, 0, 0}), hurried;
    hurried.waits = false;
    check(append(0, &named) == ncclInvalidUsage && append(0, &hurried) == ncclInvalidUsage &&
              append(0, nullptr) == ncclInvalidUsage && ncclTaskReserve(queue, 0, 3, &ticket) == ncclInvalidUsage,
          "an append beside it");
    check(append(1, nullptr) == ncclSuccess, "an append on another lane");
    ncclTaskLaunch(queue, {1, 0xffffffffu, 0, 0});
    check(producer.append("bad", 99, 0, 0, nullptr, nullptr, 0) == ncclInvalidArgument, "no task");
    check(producer.wait({1, 0, 0, 0}) == ncclInvalidArgument, "a wait for another lane");
    // Without a scheduler the ring of two fills up.
    for (uint32_t i = 0; i < 2; ++i) {
      check(producer.append("fills", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, &ticket) == ncclSuccess &&
                ticket.sequence == 0xffffffffu + i && ticket.lane == 0,
            "task %u has ticket %u", i, ticket.sequence);
    }
    const uint64_t start = nowNs();
    check(producer.append("full", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, &ticket) ==
                  static_cast<ncclResult_t>(ncclFfmQueueFull) &&
              nowNs() - start >= kShortNs,
          "a full ring");
    check(producer.wait(ticket) == ncclTimeout, "a wait on a lane that has failed");
  }
  {
    LaneProducer<CoopThread> producer(CoopThread(), queue, 0);
    check(producer.result() == ncclTimeout, "a producer of a lane that has failed: %d", producer.result());
  }
  // Others go on where a producer has stopped.
  queues[0].launchScheduler(ncclFfmSchedulerPersistent);
  {
    LaneProducer<CoopThread> producer(CoopThread(), queue, 1);
    check(producer.append("own", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, &ticket) == ncclSuccess &&
              ticket.sequence == 0 && producer.wait(ticket) == ncclSuccess,
          "a producer's own task, ticket %u", ticket.sequence);
    // What is refused leaves no hole in the lane, even if it is launched.
    Ticket refused = {};
    check(ncclTaskAppend(queue, "other", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, 1, &refused) ==
                  ncclInvalidUsage &&
              ncclTaskLaunch(queue, refused) == ncclInvalidUsage && ncclTaskLaunch(queue) == ncclSuccess,
          "a launch of a refused task");
  }
  {
    LaneProducer<CoopThread> next(CoopThread(), queue, 1);
    check(next.append("next", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, &ticket) == ncclSuccess &&
              ticket.sequence == 1 && next.wait(ticket) == ncclSuccess,
          "the next producer's task, ticket %u", ticket.sequence);
    check(append(1, nullptr) == ncclInvalidUsage, "an append beside the next producer");
  }
  check(ncclTaskAppend(queue, "after", ncclFfmFunctionNone, 0, 0, nullptr, nullptr, 0, 1, &ticket) == ncclSuccess &&
            ticket.sequence == 2,
        "a task after the producer's, ticket %u", ticket.sequence);
  ncclTaskLaunch(queue, ticket);
  check(ncclTaskWait(CoopThread(), queue, ticket) == ncclSuccess, "a task after the producer's");
}

void producerThatDiesBreaksItsLane() {
  constexpr int kRanks = 2;
  World world(kRanks, 2, 512, 20000 * kMs);
  Buffers ins(kRanks * 3, std::vector<float>(70, 1.0f)), outs(ins);
  Queues queues(world, {2, 1, 8, 0xffffffffu, kShortNs, kForever});
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  std::atomic<bool> reserved{false};
  inThreads(kRanks * 3, [&](int thread) {
    const int rank = thread / 3, waiter = thread % 3;
    const TaskQueue &queue = queues[rank].queue;
    std::vector<float> &in = ins[thread], &out = outs[thread];
    Ticket ticket;
    if (rank == 0 && waiter == 0) {
      check(ncclTaskReserve(queue, 0, 1, &ticket) == ncclSuccess, "reserve");
      reserved = true;
      return;
    }
    // A last ticket would never be launched, and so not be missing.
    while (rank == 0 && waiter == 2 && !reserved) std::this_thread::yield();
    ncclResult_t result = appendAndLaunch(queue, kUsual, 0, in.data(), out.data(), &ticket);
    if (result == ncclSuccess) result = ncclTaskWait(CoopThread(), queue, ticket);
    // Whichever deadline comes first: that of the scheduler, or that of a waiter. Before the one who died, all is well.
    check(result == static_cast<ncclResult_t>(ncclFfmQueueBroken) || result == ncclTimeout ||
              (result == ncclSuccess && out[0] == 2),
          "a lane with a hole, rank %d: result %d", rank, result);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const Status s = queues[rank].status(0);
    check(s.code == static_cast<uint32_t>(ncclFfmQueueBroken) || s.code == ncclTimeout, "rank %d: code %u", rank,
          s.code);
  }
  check(world.status(0).ready == 0 && queues[0].status(1).ready == 0, "a dead producer failed more than its lane");
  checkThatLaneWorks("a producer that died", queues, kRanks, 1);
}

// With nobody but the scheduler to notice.
void holeIsNoticedByTheScheduler() {
  World world(1, 1, 512, kShortNs);
  Queues queues(world, {1, 1, 8, 6, kShortNs, kForever});
  const TaskQueue &queue = queues[0].queue;
  Ticket ticket;
  check(ncclTaskReserve(queue, 0, 1, &ticket) == ncclSuccess, "reserve");
  ncclTaskLaunch(queue, ticket);
  queues[0].launchScheduler(ncclFfmSchedulerPersistent);
  queues[0].joinScheduler();  // all lanes have failed
  const Status s = queues[0].status(0);
  check(s.code == static_cast<uint32_t>(ncclFfmQueueBroken) && s.epoch == 6 && s.waitedNs >= kShortNs,
        "a hole: code %u, task %u, waited %llu", s.code, s.epoch, static_cast<unsigned long long>(s.waitedNs));
  check(ncclTaskWait(CoopThread(), queue, ticket) == static_cast<ncclResult_t>(ncclFfmQueueBroken), "a waiter");
}

void abortEndsEverything(uint32_t blocksPerLane) {
  constexpr int kRanks = 2;
  World world(kRanks, static_cast<int>(2 * blocksPerLane), 512, 0);  // no deadlines
  Queues queues(world, {2, blocksPerLane, 4, 0, 0, kForever});
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  std::vector<float> in(70, 1.0f), out(70);
  Ticket ticket;
  appendAndLaunch(queues[0].queue, kUsual, 0, in.data(), out.data(), &ticket);  // rank 1 does not come
  std::thread waiter([&] {
    const ncclResult_t result = ncclTaskWait(CoopThread(), queues[0].queue, ticket);
    check(result == ncclRemoteError, "a wait that was aborted: result %d", result);
  });
  while (world.isUntouched(1)) std::this_thread::yield();
  queues.abort();
  waiter.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    queues[rank].joinScheduler();
    for (uint32_t lane = 0; lane < 2; ++lane) {
      check(queues[rank].status(lane).code == ncclRemoteError, "lane %u of rank %d after an abort: code %u", lane, rank,
            queues[rank].status(lane).code);
    }
    check(queues[rank].hasStopped(), "the scheduler of rank %d is not stopped", rank);
  }
}

void stopRunsWhatIsLaunched() {
  constexpr int kRanks = 2, kTasks = 6;
  World world(kRanks, 1, 512, timeoutNs());
  Queues queues(world, {1, 1, 16, 0, timeoutNs(), kForever});
  std::vector<float> in(70, 1.0f), out(70);
  for (int rank = 0; rank < kRanks; ++rank) {
    Ticket ticket;
    for (int i = 0; i < kTasks; ++i) {
      ncclTaskAppend(queues[rank].queue, "stop", ncclFfmFunctionAllReduce, ncclFloat32, ncclSum, in.data(), out.data(),
                     0, 0, &ticket);
      if (i == kTasks - 3) ncclTaskLaunch(queues[rank].queue, ticket);
    }
  }
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  queues.stop();
  for (int rank = 0; rank < kRanks; ++rank) {
    check(queues[rank].done(0) == kTasks - 2 && queues[rank].hasStopped(),
          "a stopped scheduler of rank %d did %u tasks", rank, queues[rank].done(0));
  }
}

// The scheduler ends whenever it has had nothing to do for a moment, just as producers come: whatever the host launched
// is run. Every other producer waits for its own task.
void idleExitLosesNothing(int rounds) {
  stallRarity = 1;  // so that much happens between the scheduler's steps to its end
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 8, 0xfffffff0u, expectFailure ? kShortNs : timeoutNs(), 0});
  Queue &rank = queues[0];
  std::atomic<int> launched{0}, ended{0};
  std::atomic<bool> over{false};
  std::thread producer([&] {
    float in = 1, out[2] = {};  // not the same for two lanes
    for (int i = 1; i <= rounds; ++i) {
      while (launched.load() < i && !over.load()) std::this_thread::yield();
      if (over.load()) return;
      Ticket ticket = {};
      Given g = kUsual;
      g.count = 1;
      ncclResult_t result = appendAndLaunch(rank.queue, g, static_cast<uint32_t>(i % 2), &in, &out[i % 2], &ticket);
      if (result == ncclSuccess && i % 4 < 2) result = ncclTaskWait(CoopThread(), rank.queue, ticket);
      check(result == ncclSuccess, "round %d of the idle exit: result %d", i, result);
      ncclTaskProducerEnd(rank.queue);
      ended.store(i);
    }
  });
  uint64_t h = kMs;
  for (int i = 1; i <= rounds && failures.load() == 0; ++i) {
    launched.store(i);  // the producer may start at once
    rank.producerLaunched();
    rank.ensureRunning();
    while (ended.load() < i && failures.load() == 0) std::this_thread::yield();
    for (uint64_t wait = nowNs() + pick(h, 500000); nowNs() < wait;) {
    }
    while (i % 64 == 0 && !rank.hasStopped() && failures.load() == 0) {
      std::this_thread::yield();
    }
  }
  over.store(true);
  producer.join();
  if (failures.load() == 0) {
    rank.joinScheduler();
    const uint32_t done = rank.done(0) + rank.done(1) - 2 * 0xfffffff0u;
    check(done == static_cast<uint32_t>(rounds), "of %d rounds of the idle exit, %u were done", rounds, done);
    check(rank.launches > 1, "the scheduler never ended");
  }
  stallRarity = 64;
  fprintf(stderr, "task_failure_test: %u launches of the scheduler in %d rounds\n", rank.launches, rounds);
}

// The same with several ranks and lanes: a scheduler that ends must not leave a task begun on one lane and not on
// another, for the ranks would then wait for each other's next schedulers, and those for the tasks.
void idleExitOfSeveralRanksAndLanes(int rounds) {
  constexpr int kRanks = 2, kLanes = 4;
  stallRarity = 1;
  World world(kRanks, kLanes, 512, expectFailure ? kShortNs : timeoutNs());
  Queues queues(world, {kLanes, 1, 8, 0, expectFailure ? kShortNs : timeoutNs(), 0});
  std::atomic<int> launched[kRanks] = {}, ended{0};
  std::atomic<bool> over{false};
  std::thread producers([&] {
    inThreads(kRanks, [&](int rank) {
      const TaskQueue &queue = queues[rank].queue;
      for (int i = 1; i <= rounds; ++i) {
        while (launched[rank].load() < i && !over.load()) std::this_thread::yield();
        if (over.load()) return;
        float in = 1, out[kLanes] = {};
        Ticket tickets[kLanes] = {};
        Given g = kUsual;
        g.count = 1;
        ncclResult_t result = ncclSuccess;
        for (uint32_t lane = 0; lane < kLanes && result == ncclSuccess; ++lane) {
          result =
              appendAndLaunch(queue, g, (lane + static_cast<uint32_t>(rank)) % kLanes, &in, &out[lane], &tickets[lane]);
        }
        for (const Ticket &ticket : tickets) {
          if (result == ncclSuccess) result = ncclTaskWait(CoopThread(), queue, ticket);
        }
        check(result == ncclSuccess, "round %d of the idle exit of several, rank %d: result %d", i, rank, result);
        if (result != ncclSuccess) queues.abort(), over.store(true);
        ncclTaskProducerEnd(queue);
        ++ended;
      }
    });
  });
  // A host thread for each rank, so that none keeps the other from launching.
  inThreads(kRanks, [&](int rank) {
    uint64_t h = static_cast<uint64_t>(rank);
    for (int i = 1; i <= rounds && !over.load(); ++i) {
      launched[rank].store(i);
      queues[rank].producerLaunched();
      queues[rank].ensureRunning();
      while (ended.load() < kRanks * i && !over.load()) std::this_thread::yield();
      for (uint64_t wait = nowNs() + pick(h, 200000); nowNs() < wait;) {
      }
    }
    queues[rank].stop();
    queues[rank].joinScheduler();
  });
  over.store(true);
  producers.join();
  stallRarity = 64;
  fprintf(stderr, "task_failure_test: %u launches of a scheduler in %d rounds of %d ranks\n", queues[0].launches,
          rounds, kRanks);
}

// The host launches another scheduler while one is ending: the end of the first says nothing of the second.
void schedulerThatEndsSpeaksForItself() {
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 4, 0, timeoutNs(), kForever});
  Queue &rank = queues[0];
  TaskShared *shared = rank.queue.shared;
  check(rank.hasStopped() && !rank.hasScheduler(), "before the first scheduler");
  rank.launches = 2;  // the first of which has announced its end
  rank.queue.control->state = 1;
  check(rank.hasScheduler(), "the second one sees what comes");
  shared->left = 1;
  leaveScheduler(rank.queue);
  check(rank.hasScheduler() && !rank.hasStopped(), "the second one has not begun, and is said to have stopped");
  rank.queue.control->state = 3;
  check(!rank.hasScheduler() && !rank.hasStopped(), "the second one has announced its end");
  shared->left = 1;
  leaveScheduler(rank.queue);
  check(!rank.hasScheduler() && rank.hasStopped(), "the second one has ended");
}

// A scheduler ends with all of its lanes: one that has not begun keeps it up.
void laneThatHasNotParkedKeepsTheSchedulerUp() {
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 4, 0, timeoutNs(), kForever});
  const TaskQueue &queue = queues[0].queue;
  LaneState state = {};
  check(!endIfQuiet(queue, ncclFfmSchedulerDrain, &state), "a scheduler ended without one of its lanes");
  check(queue.control->state == 0 && queue.shared->verdict == 2, "the attempt was not taken back");
  queue.lanes[1].parked = 2;  // the attempt that comes next
  check(endIfQuiet(queue, ncclFfmSchedulerDrain, &state), "a scheduler did not end");
  check(queue.control->state == 1 && queue.shared->verdict == 5, "the end was not announced");
  queue.control->state = 0;
}

// Producers that the host has counted, and those that have finished: the scheduler stays while the former are more.
void schedulerStaysForProducersThatWereCounted() {
  World world(1, 1, 512, timeoutNs());
  Queues queues(world, {1, 1, 4, 0, timeoutNs(), 0});
  Queue &rank = queues[0];
  ncclTaskProducerEnd(rank.queue);  // before it has been counted
  rank.launchScheduler(ncclFfmSchedulerPersistent);
  rank.joinScheduler();
  check(rank.hasStopped(), "a producer that ended before it was counted keeps a scheduler up");
  rank.producerLaunched();
  check(!hasProducers(rank.queue), "one is counted, and one has finished");
  rank.producerLaunched();
  rank.launchScheduler(ncclFfmSchedulerPersistent);
  for (const uint64_t end = nowNs() + 20 * kMs; nowNs() < end && rank.hasScheduler();) std::this_thread::yield();
  check(rank.hasScheduler(), "a scheduler ended while a producer was running");
  ncclTaskProducerEnd(rank.queue);
  rank.joinScheduler();
  // One whose end is never said, for its kernel was not launched: a stop does not wait for it, nor does an abort.
  rank.producerLaunched();
  rank.launchScheduler(ncclFfmSchedulerPersistent);
  rank.stop();
  rank.joinScheduler();
  rank.queue.control->stop = 0;
  rank.launchScheduler(ncclFfmSchedulerPersistent);
  rank.abort();
  rank.joinScheduler();
  check(rank.hasStopped(), "not stopped");
}

// The host takes results by progress alone, which another thread stores than the one that stores done.
void hostIsToldByProgress(uint32_t blocksPerLane, uint32_t threads) {
  World world(1, static_cast<int>(blocksPerLane), 512, timeoutNs());
  std::vector<float> in(300), out(300);
  Queues queues(world, {1, blocksPerLane, 2, 0xffffffffu, timeoutNs(), kForever});
  const TaskQueue &queue = queues[0].queue;
  queues.launchSchedulers(ncclFfmSchedulerPersistent, threads);
  Given g = kUsual;
  g.count = in.size();
  for (int i = 1; i <= 5; ++i) {
    in.assign(in.size(), static_cast<float>(i));
    Ticket ticket;
    check(appendAndLaunch(queue, g, 0, in.data(), out.data(), &ticket) == ncclSuccess, "append");
    const uint64_t deadline = nowNs() + timeoutNs();
    while (!isAtOrBeyond(__atomic_load_n(queue.progress, __ATOMIC_ACQUIRE), ticket.sequence + 1)) {
      if (nowNs() > deadline) return check(false, "the host was not told");
      std::this_thread::yield();
    }
    check(out == in, "what the host was told is done, is not");
  }
}

// A lane that comes late to an attempt to end, and finds that there has been another since.
void manyLanesEndTogether(int launches) {
  constexpr uint32_t kLanes = 8;
  stallRarity = 1;
  World world(1, kLanes, 512, timeoutNs());
  Queues queues(world, {kLanes, 1, 2, 0, timeoutNs(), 0});
  for (int i = 0; i < launches && failures.load() == 0; ++i) {
    queues[0].launchScheduler(i % 2 == 0 ? ncclFfmSchedulerDrain : ncclFfmSchedulerPersistent);
    queues[0].joinScheduler();
    check(queues[0].hasStopped(), "launch %d: not stopped", i);
  }
  stallRarity = 64;
}

// The host's append to a full lane launches what fills that lane, and no other.
void fullLaneLaunchesNoOther() {
  World world(1, 2, 512, kShortNs);
  Queues queues(world, {2, 1, 1, 0, kShortNs, kForever});
  const TaskQueue &queue = queues[0].queue;
  Ticket ticket;
  check(ncclTaskReserve(queue, 1, 1, &ticket) == ncclSuccess, "reserve");
  ncclFfmTaskBatch batch = {};
  Ticket tickets[2] = {};
  batch.nTasks = 2;
  batch.tickets = tickets;
  appendBatch(queue, batch);
  check(tickets[0].result == ncclSuccess && tickets[1].result == static_cast<uint32_t>(ncclFfmQueueFull),
        "a batch for a lane with one place: %u, %u", tickets[0].result, tickets[1].result);
  check(queue.lanes[0].launched == 1 && queue.lanes[1].launched == 0, "launched: %u and %u", queue.lanes[0].launched,
        queue.lanes[1].launched);
}

// Nor does it keep the tasks of another lane waiting.
void fullLaneKeepsNoOtherWaiting() {
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 1, 0, timeoutNs(), kForever});
  const TaskQueue &queue = queues[0].queue;
  ncclFfmTaskBatch batch = {};
  Ticket tickets[5] = {};
  batch.nTasks = 5;
  batch.tickets = tickets;
  const uint32_t lanes[] = {0, 0, 0, 1, 1};
  for (int i = 0; i < 5; ++i) batch.tasks[i].lane = lanes[i];  // a ring has one place
  std::thread producer([&] { appendBatch(queue, batch); });
  const uint64_t deadline = nowNs() + timeoutNs();
  while (__atomic_load_n(&tickets[3].ready, __ATOMIC_ACQUIRE) == 0 && nowNs() < deadline) std::this_thread::yield();
  check(nowNs() < deadline, "a full lane kept another one waiting");
  check(__atomic_load_n(&tickets[1].ready, __ATOMIC_ACQUIRE) == 0, "a task found room in a full ring");
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  producer.join();
  for (int i = 0; i < 5; ++i) {
    check(tickets[i].result == ncclSuccess && tickets[i].sequence == static_cast<uint32_t>(i < 3 ? i : i - 3),
          "task %d of a batch: result %u, sequence %u", i, tickets[i].result, tickets[i].sequence);
  }
  check(ncclTaskWait(CoopThread(), queue, tickets[2]) == ncclSuccess, "the last task of a lane that was full");
}

// Buckets are dealt out to two lanes, of which one has failed: the other gets all of its own.
void failedLaneLeavesTheOthersTheirBuckets() {
  constexpr int kBlocks = 3;
  constexpr uint64_t kBuckets = 8, kOfBucket = 5;
  World world(1, 2, 512, timeoutNs());
  Queues queues(world, {2, 1, 16, 0, timeoutNs(), kForever});
  const TaskQueue &queue = queues[0].queue;
  std::vector<float> x(kBuckets * kOfBucket, 1.0f);
  Ticket first[2];
  ncclFfmTaskBuckets buckets = {};
  buckets.buff = x.data();
  buckets.count = x.size();
  buckets.bucketCount = kOfBucket;
  buckets.a = 2;
  buckets.first = first;
  reserveInTurn(queue, kBuckets, first);
  failLane(queue, 1, 0, ncclRemoteError, 0);
  inThreads(kBlocks, [&](int block) { produceBuckets(CoopThread(), queue, buckets, block, kBlocks); });
  queues.launchSchedulers(ncclFfmSchedulerPersistent);
  const ncclResult_t result = ncclTaskWait(CoopThread(), queue, {0, kBuckets / 2 - 1, 0, 1});
  check(result == ncclSuccess && queues[0].done(0) == kBuckets / 2, "the lane that had not failed: result %d, %u done",
        result, queues[0].done(0));
}

void run() {
  laneThatHasNotParkedKeepsTheSchedulerUp();
  schedulerThatEndsSpeaksForItself();
  schedulerStaysForProducersThatWereCounted();
  hostIsToldByProgress(1, kTellingThread + 2);
  hostIsToldByProgress(3, 2);
  if (failures.load() != 0) return;
  manyLanesEndTogether((expectFailure ? 0 : 600) / kSlowdown);
  idleExitOfSeveralRanksAndLanes((expectFailure ? 8000 : 3000) / kSlowdown);
  if (failures.load() != 0) return;
  idleExitLosesNothing((expectFailure ? 20000 : 4000) / kSlowdown);
  if (failures.load() != 0) return;
  ranksThatDisagreeOnTheOrderAreToldSo();
  ranksThatDisagreeAreToldSo(1);
  ranksThatDisagreeAreToldSo(3);
  badTaskIsToldToAll(true);
  badTaskIsToldToAll(false);
  refusalIsToldToAll();
  fullRingIsToldAtOnceOrAtTheDeadline();
  fullLaneLaunchesNoOther();
  fullLaneKeepsNoOtherWaiting();
  failedLaneLeavesTheOthersTheirBuckets();
  laneWithAProducerHasNoOther();
  producerThatDiesBreaksItsLane();
  holeIsNoticedByTheScheduler();
  abortEndsEverything(1);
  abortEndsEverything(2);
  stopRunsWhatIsLaunched();
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
  if (argc == 3 && strcmp(argv[1], "--break") == 0) breakRule(argv[2]);
  run();
  return report("task_failure_test");
}

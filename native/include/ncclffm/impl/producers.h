// The bodies of the shim's kernels that append tasks; ncclffm.h says what they do.
#ifndef NCCLFFM_IMPL_PRODUCERS_H_
#define NCCLFFM_IMPL_PRODUCERS_H_

#include "../fused.h"
#include "../task_queue.h"

namespace ncclffm {

NCCLFFM_DEVICE void storeTicket(Ticket *to, const Ticket &ticket) {
  storeRelaxedSys(&to->lane, ticket.lane);
  storeRelaxedSys(&to->sequence, ticket.sequence);
  storeRelaxedSys(&to->result, ticket.result);
  storeReleaseSys(&to->ready, 1);
}

NCCLFFM_DEVICE ncclResult_t appendOfBatch(const TaskQueue &queue, const Task &task, bool named, Ticket *ticket) {
  *ticket = {task.lane, task.sequence, ncclSuccess, 1};
  TaskPlace place = TaskPlace::at(*ticket);
  place.named = named;
  place.waits = named;
  place.root = task.root;
  place.source = task.source;
  return ncclTaskAppend(CoopThread(), queue, TaskSymbol(task.symbol), static_cast<int>(task.function), task.datatype,
                        task.op, task.sendbuff, task.recvbuff, task.count, place, ticket);
}

// By one thread. A lane that is full keeps only its own tasks waiting, unless the batch names the numbers. Full until
// the deadline, a task has taken no ticket, and nothing is missing.
NCCLFFM_DEVICE void appendBatch(const TaskQueue &queue, const ncclFfmTaskBatch &batch) {
  uint32_t pending = (1u << batch.nTasks) - 1;
  uint64_t startNs[NCCLFFM_MAX_BATCH] = {};  // since when a task has been the next of its lane, and found no room
  while (pending != 0) {
    const uint32_t before = pending;
    uint64_t full = 0;  // lanes
    for (uint32_t i = 0; i < batch.nTasks; ++i) {
      const Task &task = batch.tasks[i];
      if ((pending >> i & 1) == 0 || (task.lane < queue.nLanes && (full >> task.lane & 1) != 0)) continue;
      Ticket ticket;
      ncclResult_t result = appendOfBatch(queue, task, batch.named != 0, &ticket);
      if (result == static_cast<ncclResult_t>(ncclFfmQueueFull) && batch.named == 0) {
        launchAll(queue, task.lane);  // what fills the ring, if nobody has launched it
        const uint64_t now = nowNs();
        if (startNs[i] == 0) startNs[i] = now;
        if (loadRelaxedSys(&queue.status[task.lane].abort) != 0) {
          result = failLane(queue, task.lane, ticket.sequence, ncclRemoteError, now - startNs[i]);
        } else if (queue.timeoutNs == 0 || now - startNs[i] < queue.timeoutNs) {
          full |= uint64_t{1} << task.lane;
          continue;
        }
      }
      ticket.result = static_cast<uint32_t>(result);
      if (result == ncclSuccess) ncclTaskLaunch(queue, ticket);
      if (batch.tickets != nullptr) storeTicket(batch.tickets + i, ticket);
      pending &= ~(1u << i);
    }
    if (pending == before) pauseNs(kPauseNs);
  }
  ncclTaskProducerEnd(queue);
}

// Takes numbers for n tasks, dealt out to the lanes in turn. By one thread.
NCCLFFM_DEVICE void reserveInTurn(const TaskQueue &queue, uint64_t n, Ticket *first) {
  for (uint32_t l = 0; l < queue.nLanes; ++l) {
    Ticket ticket = {l, 0, ncclSuccess, 1};
    const uint64_t ofLane = (n + queue.nLanes - 1 - l) / queue.nLanes;
    ticket.result = static_cast<uint32_t>(ncclTaskReserve(queue, l, static_cast<uint32_t>(ofLane), &ticket));
    storeTicket(first + l, ticket);
  }
}

// The tickets of those tasks, one after the other. `first` is memory of the host, so it is read by one thread, and as
// rarely as can be.
template <class Coop>
class TicketsInTurn {
 public:
  NCCLFFM_DEVICE TicketsInTurn(const Coop &coop, const TaskQueue &queue, const Ticket *first)
      : coop_(coop), nLanes_(queue.nLanes), first_(first) {}

  // Of task k. By all threads of the group.
  NCCLFFM_DEVICE Ticket operator()(uint64_t k) {
    const uint32_t lane = static_cast<uint32_t>(k % nLanes_);
    if (lane != lane_) {
      lane_ = lane;
      uint64_t word = 0;
      if (coop_.rank() == 0) {
        word =
            static_cast<uint64_t>(loadRelaxedSys(&first_[lane].result)) << 32 | loadRelaxedSys(&first_[lane].sequence);
      }
      word = coop_.syncBroadcast(word);
      sequence_ = static_cast<uint32_t>(word);
      result_ = static_cast<uint32_t>(word >> 32);
    }
    return {lane, sequence_ + static_cast<uint32_t>(k / nLanes_), result_, 1};
  }

 private:
  Coop coop_;
  uint32_t nLanes_;
  const Ticket *first_;
  uint32_t lane_ = NCCLFFM_MAX_LANES, sequence_ = 0, result_ = 0;
};

// Appends and launches an all-reduce (sum) of floats at a ticket.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t appendSum(const Coop &coop, const TaskQueue &queue, uint32_t symbol, const float *sendbuff,
                                      float *recvbuff, uint64_t count, const Ticket &ticket) {
  if (ticket.result != ncclSuccess) return static_cast<ncclResult_t>(ticket.result);
  const ncclResult_t result = ncclTaskAppend(coop, queue, TaskSymbol(symbol), ncclFfmFunctionAllReduce, ncclFloat32,
                                             ncclSum, sendbuff, recvbuff, count, TaskPlace::at(ticket));
  return result == ncclSuccess ? ncclTaskLaunch(coop, queue, ticket) : result;
}

NCCLFFM_DEVICE uint64_t nBucketsOf(const ncclFfmTaskBuckets &buckets) {
  return buckets.count == 0 ? 0 : (buckets.count - 1) / buckets.bucketCount + 1;
}

// A lane that has failed says so by itself.
template <class Coop>
NCCLFFM_DEVICE void produceBuckets(const Coop &coop, const TaskQueue &queue, const ncclFfmTaskBuckets &buckets,
                                   int block, int nBlocks) {
  const ScaleAdd scaleAdd = {buckets.a, buckets.b};
  TicketsInTurn<Coop> tickets(coop, queue, buckets.first);
  for (uint64_t k = static_cast<uint64_t>(block); k < nBucketsOf(buckets); k += static_cast<uint64_t>(nBlocks)) {
    const uint64_t start = k * buckets.bucketCount, left = buckets.count - start;
    const uint64_t count = left < buckets.bucketCount ? left : buckets.bucketCount;
    float *x = buckets.buff + start;
    for (uint64_t i = coop.rank(); i < count; i += coop.size()) x[i] = scaleAdd(x[i]);
    appendSum(coop, queue, buckets.symbol, x, x, count, tickets(k));  // other lanes wait for their numbers all the same
  }
}

template <int kNumber>
struct Times {
  static constexpr int kTimes = kNumber;
};

// Gives a thread its elements: fours(n, i, stride) n.kTimes times 4 of them from i on, each 4 `stride` after the last,
// where `aligned` says that they may be accessed so; and one(i) the others.
template <class Fours, class One>
NCCLFFM_DEVICE void forFours(const Share &share, uint64_t count, bool aligned, const Fours &fours, const One &one) {
  const uint64_t endOfFours = aligned ? count & ~uint64_t{3} : 0, stride = 4 * share.nThreads;
  uint64_t i = 4 * share.thread;
  NCCLFFM_NO_UNROLL
  for (; i + (kInFlight - 1) * stride < endOfFours; i += kInFlight * stride) fours(Times<kInFlight>(), i, stride);
  NCCLFFM_NO_UNROLL
  for (; i < endOfFours; i += stride) fours(Times<1>(), i, 0);
  NCCLFFM_NO_UNROLL
  for (i = endOfFours + share.thread; i < count; i += share.nThreads) one(i);
}

// The local part of an iteration. A call, so that it is the same code whatever it runs beside, and can be compared.
NCCLFFM_DEVICE_CALL void computePart(const Share &share, const float *in, float *out, uint64_t count, float add,
                                     uint32_t rounds, ScaleAdd scaleAdd) {
  forFours(
      share, count, isAlignedToFour(in) && isAlignedToFour(out),
      [&](auto times, uint64_t i, uint64_t stride) {
        constexpr int kTimes = decltype(times)::kTimes;
        Four<float> four[kTimes];
        NCCLFFM_UNROLL
        for (int t = 0; t < kTimes; ++t) {
          four[t] = loadFour(in + i + t * stride);
          NCCLFFM_UNROLL
          for (float &x : four[t].x) x += add;
        }
        NCCLFFM_NO_UNROLL
        for (uint32_t round = 0; round < rounds; ++round) {
          NCCLFFM_UNROLL
          for (int t = 0; t < kTimes; ++t) {
            NCCLFFM_UNROLL
            for (float &x : four[t].x) x = scaleAdd(x);
          }
        }
        NCCLFFM_UNROLL
        for (int t = 0; t < kTimes; ++t) storeFour(out + i + t * stride, four[t]);
      },
      [&](uint64_t i) {
        float x = in[i] + add;
        for (uint32_t round = 0; round < rounds; ++round) x = scaleAdd(x);
        out[i] = x;
      });
}

// out = x for the first iteration, out += x for the others.
NCCLFFM_DEVICE void addPart(const Share &share, const float *x, float *out, uint64_t count, bool isFirst) {
  forFours(
      share, count, isAlignedToFour(x) && isAlignedToFour(out),
      [&](auto times, uint64_t i, uint64_t stride) {
        constexpr int kTimes = decltype(times)::kTimes;
        Four<float> sum[kTimes], four[kTimes];
        NCCLFFM_UNROLL
        for (int t = 0; t < kTimes; ++t) {
          four[t] = loadFour(x + i + t * stride);
          if (!isFirst) sum[t] = loadFour(out + i + t * stride);
        }
        NCCLFFM_UNROLL
        for (int t = 0; t < kTimes; ++t) {
          NCCLFFM_UNROLL
          for (int k = 0; k < 4; ++k) sum[t].x[k] = isFirst ? four[t].x[k] : sum[t].x[k] + four[t].x[k];
          storeFour(out + i + t * stride, sum[t]);
        }
      },
      [&](uint64_t i) { out[i] = isFirst ? x[i] : out[i] + x[i]; });
}

// Threads of a block that hand over and wait, while the others compute: a warp, of which one does so.
constexpr uint32_t kHandingThreads = 32;

// A block of one thread does both.
template <class Coop>
NCCLFFM_DEVICE void produceIterations(const Coop &coop, const TaskQueue &queue, const ncclFfmTaskOverlap &o, int block,
                                      int nBlocks) {
  const BlockShare share = shareOf(o.count, sizeof(float), block, nBlocks);
  const bool computes = (o.parts & 1) != 0, communicates = (o.parts & 2) != 0;
  const uint32_t handing = coop.size() > kHandingThreads ? kHandingThreads : 0;
  const Share workers = {coop.rank() - handing, coop.size() - handing};
  const bool works = computes && coop.rank() >= handing;
  TicketsInTurn<CoopThread> tickets(CoopThread(), queue, o.first);
  auto sendOf = [&](uint32_t i) { return o.work + (i % 2) * o.count + share.first; };
  auto recvOf = [&](uint32_t i) { return o.work + (2 + i % 2) * o.count + share.first; };
  auto compute = [&](uint32_t i) {
    computePart(workers, o.in + share.first, sendOf(i), share.count, static_cast<float>(i), o.rounds,
                ScaleAdd{o.a, o.b});
  };
  ncclResult_t result = ncclSuccess;
  if (works && o.iterations != 0) compute(0);
  coop.sync();
  // Goes on after a failure: other lanes wait for the numbers that are theirs.
  for (uint32_t i = 0; i < o.iterations; ++i) {
    const bool hands = communicates && coop.rank() == 0;
    Ticket ticket = {};
    ncclResult_t ofTask = ncclSuccess;
    if (hands) {
      ticket = tickets(static_cast<uint64_t>(i) * static_cast<uint64_t>(nBlocks) + static_cast<uint64_t>(block));
      ofTask = appendSum(CoopThread(), queue, o.symbol, sendOf(i), recvOf(i), share.count, ticket);
    }
    if (works && i + 1 < o.iterations) compute(i + 1);
    if (hands && ofTask == ncclSuccess) ofTask = ncclTaskWait(CoopThread(), queue, ticket);
    if (result == ncclSuccess) result = ofTask;
    result = static_cast<ncclResult_t>(coop.syncBroadcast(static_cast<uint64_t>(result)));
    if (works && result == ncclSuccess) {
      addPart(workers, communicates ? recvOf(i) : sendOf(i), o.out + share.first, share.count, i == 0);
    }
    if (!communicates) coop.sync();  // before another thread computes into what this one has added
  }
  if (coop.rank() == 0) storeRelaxedSys(o.results + block, static_cast<uint32_t>(result));
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PRODUCERS_H_

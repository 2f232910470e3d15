// Every collective x element type x operation x number of ranks x count, out of place and in place, against float64 and
// exact integers, with guards around every buffer and other data in every call.
#include <cstring>

#include "reference.h"
#include "world.h"

using namespace test;

namespace {

enum class Kind { kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kAlltoAll, kGather, kScatter };

struct Call {
  Kind kind;
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;
  int root;
  bool inPlace;
  uint64_t number;  // seeds the data

  std::string text(int nRanks) const {
    return "kind " + std::to_string(static_cast<int>(kind)) + " type " + std::to_string(type) + " op " +
           std::to_string(op) + " count " + std::to_string(count) + " root " + std::to_string(root) +
           (inPlace ? " in place" : "") + " ranks " + std::to_string(nRanks) + " call " + std::to_string(number);
  }
};

/// The inputs of all ranks and, filled by rank 0, a result to compare bits with.
struct Shared {
  std::vector<std::vector<char>> inputs;
  std::vector<char> firstResult;
};

constexpr size_t kGuard = 64;
constexpr char kGuardByte = 0x6d;

/// Memory of one rank with a guard on either side, at an element offset that no vector register likes.
class GuardedBuffer {
 public:
  GuardedBuffer(size_t mostBytes) : base_(deviceArray<char>(mostBytes + 3 * kGuard)), most_(mostBytes) {}
  ~GuardedBuffer() { CUDA_OK(cudaFree(base_)); }

  char *place(size_t bytes, size_t elementBytes) {
    CHECK(bytes <= most_);
    CUDA_OK(cudaMemset(base_, kGuardByte, bytes + 2 * kGuard + elementBytes));
    CUDA_OK(cudaStreamSynchronize(nullptr));
    start_ = kGuard + elementBytes;
    bytes_ = bytes;
    return base_ + start_;
  }

  void checkGuards(const std::string &context) const {
    const std::vector<char> all = toHost(base_, start_ + bytes_ + kGuard - 8);
    for (size_t i = 0; i < all.size(); ++i) {
      if (i < start_ || i >= start_ + bytes_) {
        CHECK_EQ_IN(static_cast<int>(all[i]), static_cast<int>(kGuardByte),
                    "guard at " + std::to_string(i) + ", " + context);
      }
    }
  }

 private:
  char *base_;
  size_t most_;
  size_t start_ = 0;
  size_t bytes_ = 0;
};

struct Sizes {
  int sendBlocks;
  int recvBlocks;
  int inPlaceSend;  // block of recvbuff where sendbuff lies
  int inPlaceRecv;  // block of sendbuff where recvbuff lies
};

Sizes sizesOf(const Call &call, int rank, int n) {
  const bool isRoot = rank == call.root;
  switch (call.kind) {
    case Kind::kReduceScatter:
      return {n, 1, 0, rank};
    case Kind::kAllGather:
      return {1, n, rank, 0};
    case Kind::kAlltoAll:
      return {n, n, 0, 0};
    case Kind::kGather:
      return {1, isRoot ? n : 0, isRoot ? rank : 0, 0};
    case Kind::kScatter:
      return {isRoot ? n : 0, 1, 0, isRoot ? rank : 0};
    case Kind::kReduce:
      return {1, isRoot ? 1 : 0, 0, 0};
    case Kind::kBroadcast:
      return {isRoot ? 1 : 0, 1, 0, 0};
    default:
      return {1, 1, 0, 0};
  }
}

ncclResult_t issue(const Call &call, const void *send, void *recv, const Rank &rank) {
  switch (call.kind) {
    case Kind::kAllReduce:
      return ncclAllReduce(send, recv, call.count, call.type, call.op, rank.comm, rank.stream);
    case Kind::kReduce:
      return ncclReduce(send, recv, call.count, call.type, call.op, call.root, rank.comm, rank.stream);
    case Kind::kReduceScatter:
      return ncclReduceScatter(send, recv, call.count, call.type, call.op, rank.comm, rank.stream);
    case Kind::kBroadcast:
      return call.inPlace ? ncclBcast(recv, call.count, call.type, call.root, rank.comm, rank.stream)
                          : ncclBroadcast(send, recv, call.count, call.type, call.root, rank.comm, rank.stream);
    case Kind::kAllGather:
      return ncclAllGather(send, recv, call.count, call.type, rank.comm, rank.stream);
    case Kind::kAlltoAll:
      return ncclAlltoAll(send, recv, call.count, call.type, rank.comm, rank.stream);
    case Kind::kGather:
      return ncclGather(send, recv, call.count, call.type, call.root, rank.comm, rank.stream);
    case Kind::kScatter:
      return ncclScatter(send, recv, call.count, call.type, call.root, rank.comm, rank.stream);
  }
  return ncclInternalError;
}

void checkBytes(const char *got, const char *want, size_t bytes, const std::string &context) {
  if (bytes > 0 && std::memcmp(got, want, bytes) != 0) {
    size_t i = 0;
    while (got[i] == want[i]) {
      ++i;
    }
    CHECK_EQ_IN(static_cast<int>(got[i]), static_cast<int>(want[i]), "byte " + std::to_string(i) + ", " + context);
  }
}

void checkResult(const Call &call, const Rank &rank, Shared &shared, const std::vector<char> &got) {
  const std::string context = call.text(rank.nRanks) + " rank " + std::to_string(rank.rank);
  const size_t block = call.count * bytesOf(call.type);
  const auto self = static_cast<size_t>(rank.rank);
  const auto root = static_cast<size_t>(call.root);
  switch (call.kind) {
    case Kind::kAllReduce:
      if (rank.rank == 0) {
        CHECK_EQ_IN(checkReduced(call.type, call.op, shared.inputs, 0, call.count, got.data()), "", context);
      }
      break;
    case Kind::kReduce:
      if (rank.rank == call.root) {
        CHECK_EQ_IN(checkReduced(call.type, call.op, shared.inputs, 0, call.count, got.data()), "", context);
      }
      break;
    case Kind::kReduceScatter:
      CHECK_EQ_IN(checkReduced(call.type, call.op, shared.inputs, self * call.count, call.count, got.data()), "",
                  context);
      break;
    case Kind::kBroadcast:
      checkBytes(got.data(), shared.inputs[root].data(), block, context);
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      for (size_t i = 0; i * block < got.size(); ++i) {
        checkBytes(got.data() + i * block, shared.inputs[i].data(), block, context);
      }
      break;
    case Kind::kAlltoAll:
      for (size_t i = 0; i * block < got.size(); ++i) {
        checkBytes(got.data() + i * block, shared.inputs[i].data() + self * block, block, context);
      }
      break;
    case Kind::kScatter:
      checkBytes(got.data(), shared.inputs[root].data() + self * block, block, context);
      break;
  }
}

/// One thread per rank through all calls, in step.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t round = round_;
    if (++arrived_ == n_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
  }

 private:
  const int n_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  uint64_t round_ = 0;
};

void runCall(const Call &call, Rank &rank, Shared &shared, Barrier &barrier, GuardedBuffer &first,
             GuardedBuffer &second) {
  const size_t element = bytesOf(call.type);
  const size_t block = call.count * element;
  const Sizes sizes = sizesOf(call, rank.rank, rank.nRanks);
  const auto self = static_cast<size_t>(rank.rank);
  const size_t sendBytes = block * static_cast<size_t>(sizes.sendBlocks);
  const size_t recvBytes = block * static_cast<size_t>(sizes.recvBlocks);
  // Every rank has the input that it would have as the root.
  const size_t inputBlocks = static_cast<size_t>(sizesOf(call, call.root, rank.nRanks).sendBlocks);
  shared.inputs[self] = makeInput(call.type, call.op, call.count * inputBlocks, rank.rank, call.number);
  char *send = nullptr;
  char *recv = nullptr;
  if (call.inPlace) {
    char *both = first.place(std::max(sendBytes, recvBytes), element);
    send = both + block * static_cast<size_t>(sizes.inPlaceSend);
    recv = both + block * static_cast<size_t>(sizes.inPlaceRecv);
  } else {
    send = first.place(sendBytes, element);
    recv = second.place(recvBytes, element);
  }
  CUDA_OK(cudaMemcpyAsync(send, shared.inputs[self].data(), sendBytes, cudaMemcpyHostToDevice, rank.stream));
  barrier.wait();  // all inputs are there to compare with
  NCCL_OK(issue(call, send, recv, rank));
  CUDA_OK(cudaStreamSynchronize(rank.stream));
  const std::vector<char> got = toHost(recv, recvBytes);
  checkResult(call, rank, shared, got);
  first.checkGuards(call.text(rank.nRanks));
  if (!call.inPlace) {
    second.checkGuards(call.text(rank.nRanks));
    checkBytes(toHost(send, sendBytes).data(), shared.inputs[self].data(), sendBytes,
               "input of " + call.text(rank.nRanks));
  }
  if (rank.rank == 0) {
    shared.firstResult = got;
  }
  barrier.wait();
  if (call.kind == Kind::kAllReduce) {
    checkBytes(got.data(), shared.firstResult.data(), recvBytes, "bits of rank 0, " + call.text(rank.nRanks));
  }
  barrier.wait();
}

void checkKind(Kind kind, bool withOps, bool withRoot, bool withInPlace) {
  uint64_t number = static_cast<uint64_t>(kind) * 1000000;
  std::vector<size_t> counts = {0, 1, 7, 1023};
  if (!kSanitized) {
    counts.push_back((1 << 16) + 3);
  }
  for (int n : {1, 2, 4, 8}) {
    std::vector<Call> calls;
    for (ncclDataType_t type : kAllTypes) {
      for (ncclRedOp_t op : kAllOps) {
        if (!withOps && op != ncclSum) {
          continue;
        }
        for (size_t count : counts) {
          for (bool inPlace : {false, true}) {
            if (!inPlace || withInPlace) {
              ++number;
              calls.push_back({kind, type, op, count, withRoot ? static_cast<int>(number) % n : 0, inPlace, number});
            }
          }
        }
      }
    }
    Shared shared;
    shared.inputs.resize(static_cast<size_t>(n));
    Barrier barrier(n);
    onRanks(n, [&](Rank &rank) {
      const size_t most = counts.back() * 8 * static_cast<size_t>(n);
      GuardedBuffer first(most);
      GuardedBuffer second(most);
      for (const Call &call : calls) {
        runCall(call, rank, shared, barrier, first, second);
      }
    });
  }
}

}  // namespace

TEST(allReduceMatchesReference) {
  checkKind(Kind::kAllReduce, true, false, true);
}
TEST(reduceMatchesReference) {
  checkKind(Kind::kReduce, true, true, true);
}
TEST(reduceScatterMatchesReference) {
  checkKind(Kind::kReduceScatter, true, false, true);
}
TEST(broadcastMatchesReference) {
  checkKind(Kind::kBroadcast, false, true, true);
}
TEST(allGatherMatchesReference) {
  checkKind(Kind::kAllGather, false, false, true);
}
TEST(alltoAllMatchesReference) {
  checkKind(Kind::kAlltoAll, false, false, false);
}
TEST(gatherMatchesReference) {
  checkKind(Kind::kGather, false, true, true);
}
TEST(scatterMatchesReference) {
  checkKind(Kind::kScatter, false, true, true);
}

TEST(allReduceOf64MiBIsRightAndTimed) {
  constexpr size_t kCount = kSanitized ? 1 << 18 : 1 << 24;
  constexpr int kRanks = 8;
  onRanks(kRanks, [](Rank &rank) {
    auto *data = deviceArray<float>(kCount);
    toDevice(data, std::vector<float>(kCount, static_cast<float>(rank.rank + 1)));
    cudaEvent_t start = nullptr;
    cudaEvent_t end = nullptr;
    CUDA_OK(cudaEventCreateWithFlags(&start, cudaEventDefault));
    CUDA_OK(cudaEventCreateWithFlags(&end, cudaEventDefault));
    CUDA_OK(cudaEventRecord(start, rank.stream));
    NCCL_OK(ncclAllReduce(data, data, kCount, ncclFloat32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaEventRecord(end, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    float milliseconds = 0;
    CUDA_OK(cudaEventElapsedTime(&milliseconds, start, end));
    if (rank.rank == 0) {
      std::printf("%zu bytes over %d ranks: %.1f ms\n", kCount * sizeof(float), kRanks,
                  static_cast<double>(milliseconds));
    }
    for (float value : toHost(data, kCount)) {
      CHECK_EQ(value, 36.0f);
    }
    CUDA_OK(cudaEventDestroy(start));
    CUDA_OK(cudaEventDestroy(end));
    CUDA_OK(cudaFree(data));
  });
}

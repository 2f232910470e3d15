// Ranks as threads of this process, each with a device, a communicator and a stream.
#ifndef NCCLFFM_TEST_CPU_WORLD_H_
#define NCCLFFM_TEST_CPU_WORLD_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "check.h"

namespace test {

#ifdef NCCLFFM_TEST_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct Rank {
  int rank = 0;
  int nRanks = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
};

inline cudaStream_t newStream() {
  cudaStream_t stream = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

/// Runs body on a thread per number in [0, n).
inline void onThreads(int n, const std::function<void(int)> &body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) {
    threads.emplace_back(body, i);
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
}

/// Runs body as n ranks on n threads. The body may close rank.comm itself and then sets it to null.
inline void onRanks(int n, const std::function<void(Rank &)> &body) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  onThreads(n, [&](int number) {
    Rank rank;
    rank.rank = number;
    rank.nRanks = n;
    CUDA_OK(cudaSetDevice(number));
    NCCL_OK(ncclCommInitRank(&rank.comm, n, id, number));
    rank.stream = newStream();
    body(rank);
    NCCL_OK(ncclCommDestroy(rank.comm));
    CUDA_OK(cudaStreamDestroy(rank.stream));
  });
}

/// Counts this thread and waits until all have been counted.
inline void awaitCount(std::atomic<int> *count, int all) {
  ++*count;
  while (count->load() < all) {
    std::this_thread::yield();
  }
}

/// A gate that one thread opens and others wait at.
class Gate {
 public:
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  /// As a host function: cudaLaunchHostFunc(stream, Gate::waitAt, &gate).
  static void waitAt(void *gate) { static_cast<Gate *>(gate)->wait(); }
  static void openIt(void *gate) { static_cast<Gate *>(gate)->open(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// Whether call, on a thread of its own, waits for work that waits at the gate: it gets 200 ms to return too early
/// before the gate is opened.
inline bool waitsForGate(Gate *gate, const std::function<void()> &call) {
  std::atomic<bool> returned{false};
  std::thread thread([&] {
    call();
    returned = true;
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  while (!returned.load() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  const bool waited = !returned.load();
  gate->open();
  thread.join();
  return waited;
}

template <class T>
T *deviceArray(size_t count) {
  void *pointer = nullptr;
  CUDA_OK(cudaMalloc(&pointer, count * sizeof(T)));
  return static_cast<T *>(pointer);
}

template <class T>
std::vector<T> toHost(const T *device, size_t count) {
  std::vector<T> host(count);
  CUDA_OK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

template <class T>
void toDevice(T *device, const std::vector<T> &host) {
  CUDA_OK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
}

}  // namespace test

#endif  // NCCLFFM_TEST_CPU_WORLD_H_

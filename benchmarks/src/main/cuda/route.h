// What the measurements on a real GPU share: NCCL by dlopen, ranks as threads, and times of what they enqueue.
#ifndef NCCLFFM_BENCHMARKS_ROUTE_H_
#define NCCLFFM_BENCHMARKS_ROUTE_H_

#include <dlfcn.h>

#include <atomic>
#include <functional>
#include <string>

#include "../../../../native/test/device/cuda_world.h"

namespace {

// The subset of nccl.h that is called.
struct UniqueId {
  char bytes[128];
};
struct Nccl {
  int (*getUniqueId)(UniqueId *) = nullptr;
  int (*commInitRank)(void **, int, UniqueId, int) = nullptr;
  int (*allReduce)(const void *, void *, size_t, int, int, void *, cudaStream_t) = nullptr;
  int (*memAlloc)(void **, size_t) = nullptr;
  int (*memFree)(void *) = nullptr;
  int (*windowRegister)(void *, void *, size_t, void **, int) = nullptr;
  int (*windowDeregister)(void *, void *) = nullptr;
  int (*commAbort)(void *) = nullptr;
  int (*getVersion)(int *) = nullptr;
  const char *(*getErrorString)(int) = nullptr;
};
Nccl nccl;

void loadNccl() {
  const char *path = getenv("NCCLFFM_NCCL");
  void *library = path == nullptr ? nullptr : dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    printf("without NCCL: %s\n", path == nullptr ? "NCCLFFM_NCCL is not set" : dlerror());
    return;
  }
  auto find = [&](auto &function, const char *name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
  };
  find(nccl.getUniqueId, "ncclGetUniqueId");
  find(nccl.commInitRank, "ncclCommInitRank");
  find(nccl.allReduce, "ncclAllReduce");
  find(nccl.memAlloc, "ncclMemAlloc");
  find(nccl.memFree, "ncclMemFree");
  find(nccl.windowRegister, "ncclCommWindowRegister");
  find(nccl.windowDeregister, "ncclCommWindowDeregister");
  find(nccl.commAbort, "ncclCommAbort");
  find(nccl.getVersion, "ncclGetVersion");
  find(nccl.getErrorString, "ncclGetErrorString");
  int version = 0;
  nccl.getVersion(&version);
  printf("NCCL %d\n", version);
}

void checked(int code, const char *call) {
  if (code == 0) return;
  fprintf(stderr, "FAILED: %s: %d: %s\n", call, code, nccl.getErrorString(code));
  exit(1);
}
#define NCCL(call) checked(call, #call)

// All ranks' threads meet, and go on at the same moment: they spin.
class Meeting {
 public:
  explicit Meeting(int n) : n_(n) {}
  void wait() {
    const int generation = generation_.load();
    if (arrived_.fetch_add(1) == n_ - 1) {
      arrived_ = 0;
      ++generation_;
    } else {
      while (generation_.load() == generation) {
      }
    }
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0}, generation_{0};
};

double nowUs() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void onThreads(int n, const std::function<void(int)> &body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(body, r);
  for (std::thread &thread : threads) thread.join();
}

// A line that the Java class Bench reads; its class Row says what stands where.
void printSamples(const std::string &route, const std::string &operation, int nRanks, size_t bytes,
                  const std::vector<double> &us) {
  printf("sample\tcuda\tc\t%s\t%s\t%d\t%zu\tus\t", route.c_str(), operation.c_str(), nRanks, bytes);
  for (size_t i = 0; i < us.size(); ++i) printf(i == 0 ? "%.4f" : " %.4f", us[i]);
  printf("\n");
}

void synchronizeStream(const Rank &rank) {
  CUDA(cudaStreamSynchronize(rank.stream));
}

// Launches `times` operations back to back on every rank, then waits; for each repetition, of the slowest rank.
std::vector<double> backToBackSamples(World &world, int times, int repetitions,
                                      const std::function<void(int)> &operation,
                                      const std::function<void(const Rank &)> &wait = synchronizeStream) {
  const int n = world.size();
  Meeting meeting(n);
  std::vector<std::vector<double>> us(n);
  onThreads(n, [&](int r) {
    World::use(r);
    for (int i = 0; i < 3; ++i) operation(r);
    wait(world.ranks[r]);
    for (int k = 0; k < repetitions; ++k) {
      meeting.wait();
      const double start = nowUs();
      for (int i = 0; i < times; ++i) operation(r);
      wait(world.ranks[r]);
      us[r].push_back((nowUs() - start) / times);
    }
  });
  std::vector<double> slowest;
  for (int k = 0; k < repetitions; ++k) {
    double most = 0;
    for (int r = 0; r < n; ++r) most = std::max(most, us[r][k]);
    slowest.push_back(most);
  }
  for (const Rank &rank : world.ranks) {
    if (rank.status->code != 0) {
      fprintf(stderr, "FAILED: status %u, function %u, rank %d, peer %d, channel %d, epoch %u\n", rank.status->code,
              rank.status->function, rank.status->rank, rank.status->peer, rank.status->channel, rank.status->epoch);
      exit(1);
    }
  }
  return slowest;
}

// Their median.
double backToBack(World &world, int times, int repetitions, const std::function<void(int)> &operation) {
  return median(backToBackSamples(world, times, repetitions, operation));
}

// Two shots without copies: every rank loads as many bytes as its buffer has, and stores as many.
double bytesFloor(int nRanks, size_t bytes) {
  int kHz = 0, bits = 0;
  CUDA(cudaDeviceGetAttribute(&kHz, cudaDevAttrMemoryClockRate, 0));
  CUDA(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
  const double bytesPerUs = 2.0 * kHz / 1000 * bits / 8;
  return 2.0 * static_cast<double>(bytes) * ((nRanks + gpus - 1) / gpus) / bytesPerUs;
}

struct Communicators {
  // With windows for twice what a buffer of the world has.
  explicit Communicators(World &world) : comms(world.size()), windows(world.size()), buffers(world.size()) {
    if (nccl.allReduce == nullptr) return;
    UniqueId id;
    NCCL(nccl.getUniqueId(&id));
    onThreads(world.size(), [&](int r) {
      World::use(r);
      NCCL(nccl.commInitRank(&comms[r], world.size(), id, r));
      const size_t bytes = 2 * world.maxCount() * sizeof(float);
      NCCL(nccl.memAlloc(&buffers[r], bytes));
      NCCL(nccl.windowRegister(comms[r], buffers[r], bytes, &windows[r], 1));
    });
    world.synchronize();
  }
  void abort() {
    if (nccl.allReduce == nullptr) return;
    onThreads(static_cast<int>(comms.size()), [&](int r) {
      World::use(r);
      nccl.commAbort(comms[r]);
    });
  }
  std::vector<void *> comms, windows, buffers;
};

}  // namespace

#endif  // NCCLFFM_BENCHMARKS_ROUTE_H_

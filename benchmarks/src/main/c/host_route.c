// The C twin of the Java class Measure, as far as NCCL's host API goes: what it does, as it does it, and prints it in
// the same lines. It opens the two libraries by name, like Java, and so runs on the CPU backend, too.
//
//   NCCLFFM_NCCL=FILE NCCLFFM_CUDART=FILE NCCLFFM_BACKEND=cuda|cpu
//     host_route calls QUICK CALL | world QUICK RANKS | start QUICK STARTED_NS
#define _GNU_SOURCE  // CLOCK_MONOTONIC
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kFloat32 = 7, kSum = 0, kNonBlocking = 1, kCopyDefault = 4, kSymmetric = 1 };
enum { kMaxRanks = 8, kMaxSamples = 200, kPeriod = 7, kChecked = 64 << 10 };

typedef void *Stream;
typedef void *Event;
typedef void *Comm;
typedef struct {
  char bytes[128];
} UniqueId;

// Of nccl.h and cuda_runtime_api.h, what is called here.
#define NCCL_FUNCTIONS(F)                                                      \
  F(ncclGetVersion, (int *))                                                   \
  F(ncclGetUniqueId, (UniqueId *))                                             \
  F(ncclCommInitRank, (Comm *, int, UniqueId, int))                            \
  F(ncclCommDestroy, (Comm))                                                   \
  F(ncclCommCount, (Comm, int *))                                              \
  F(ncclMemAlloc, (void **, size_t))                                           \
  F(ncclMemFree, (void *))                                                     \
  F(ncclCommWindowRegister, (Comm, void *, size_t, void **, int))              \
  F(ncclCommWindowDeregister, (Comm, void *))                                  \
  F(ncclGroupStart, (void))                                                    \
  F(ncclGroupEnd, (void))                                                      \
  F(ncclAllReduce, (const void *, void *, size_t, int, int, Comm, Stream))     \
  F(ncclReduceScatter, (const void *, void *, size_t, int, int, Comm, Stream)) \
  F(ncclAllGather, (const void *, void *, size_t, int, Comm, Stream))          \
  F(ncclBroadcast, (const void *, void *, size_t, int, int, Comm, Stream))     \
  F(ncclReduce, (const void *, void *, size_t, int, int, int, Comm, Stream))   \
  F(ncclAlltoAll, (const void *, void *, size_t, int, Comm, Stream))           \
  F(ncclSend, (const void *, size_t, int, int, Comm, Stream))                  \
  F(ncclRecv, (void *, size_t, int, int, Comm, Stream))
#define CUDA_FUNCTIONS(F)                                         \
  F(cudaGetDeviceCount, (int *))                                  \
  F(cudaGetDevice, (int *))                                       \
  F(cudaSetDevice, (int))                                         \
  F(cudaMalloc, (void **, size_t))                                \
  F(cudaStreamCreateWithFlags, (Stream *, unsigned))              \
  F(cudaStreamSynchronize, (Stream))                              \
  F(cudaMemcpyAsync, (void *, const void *, size_t, int, Stream)) \
  F(cudaMemsetAsync, (void *, int, size_t, Stream))               \
  F(cudaEventCreateWithFlags, (Event *, unsigned))                \
  F(cudaEventDestroy, (Event))                                    \
  F(cudaEventRecord, (Event, Stream))                             \
  F(cudaEventElapsedTime, (float *, Event, Event))

#define DECLARE(name, arguments) static int(*name) arguments;
NCCL_FUNCTIONS(DECLARE)
CUDA_FUNCTIONS(DECLARE)

static void checked(int code, const char *call, int line) {
  if (code == 0) return;
  fprintf(stderr, "FAILED: line %d: %s: %d\n", line, call, code);
  exit(1);
}
#define CHECKED(call) checked(call, #call, __LINE__)

static const char *environment(const char *name) {
  const char *value = getenv(name);
  if (value == NULL) {
    fprintf(stderr, "FAILED: %s is not set\n", name);
    exit(2);
  }
  return value;
}

static void *opened(const char *variable) {
  void *library = dlopen(environment(variable), RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "FAILED: %s: %s\n", variable, dlerror());
    exit(1);
  }
  return library;
}

static void loadLibraries(void) {
  void *cudart = opened("NCCLFFM_CUDART"), *nccl = opened("NCCLFFM_NCCL");
  // Older libraries lack some; what is not there is not measured.
#define FIND(library, name) *(void **)(&name) = dlsym(library, #name);
#define FIND_NCCL(name, arguments) FIND(nccl, name)
#define FIND_CUDA(name, arguments) FIND(cudart, name)
  NCCL_FUNCTIONS(FIND_NCCL)
  CUDA_FUNCTIONS(FIND_CUDA)
}

static double nowNs(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

static void print(const char *route, const char *operation, int ranks, size_t bytes, const char *unit,
                  const double *samples, int n) {
  printf("sample\t%s\tc\t%s\t%s\t%d\t%zu\t%s\t", environment("NCCLFFM_BACKEND"), route, operation, ranks, bytes, unit);
  for (int i = 0; i < n; ++i) printf(i == 0 ? "%.4f" : " %.4f", samples[i]);
  printf("\n");
}

// Ranks are threads; they meet by spinning.
static int ranks;
static bool quick;
static atomic_int arrived, generation;
static double latest[kMaxRanks];

static void meet(void) {
  const int before = atomic_load(&generation);
  if (atomic_fetch_add(&arrived, 1) == ranks - 1) {
    atomic_store(&arrived, 0);
    atomic_fetch_add(&generation, 1);
    return;
  }
  for (int spins = 0; atomic_load(&generation) == before; ++spins) {
    if (spins > 100000) sched_yield();
  }
}

typedef struct {
  int rank;
  Comm comm;
  Stream stream;
  float *send, *recv;
} Rank;

// For each sample that of the rank which has most.
static void printSlowest(const Rank *r, const char *route, const char *operation, size_t bytes, const char *unit,
                         const double *mine, int n) {
  double most[kMaxSamples];
  for (int i = 0; i < n; ++i) {
    latest[r->rank] = mine[i];
    meet();
    most[i] = 0;
    for (int p = 0; p < ranks; ++p) most[i] = fmax(most[i], latest[p]);
    meet();
  }
  if (r->rank == 0) print(route, operation, ranks, bytes, unit, most, n);
}

typedef enum { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kAllToAll, kSendRecv, kFunctions } Function;
static const char *const kNames[] = {"allReduce", "reduceScatter", "allGather", "broadcast",
                                     "reduce",    "allToAll",      "sendRecv"};

static void enqueue(const Rank *r, Function function, size_t n) {
  const size_t part = n / (size_t)ranks;
  switch (function) {
    case kAllReduce:
      CHECKED(ncclAllReduce(r->send, r->recv, n, kFloat32, kSum, r->comm, r->stream));
      break;
    case kReduceScatter:
      CHECKED(ncclReduceScatter(r->send, r->recv, part, kFloat32, kSum, r->comm, r->stream));
      break;
    case kAllGather:
      CHECKED(ncclAllGather(r->send, r->recv, part, kFloat32, r->comm, r->stream));
      break;
    case kBroadcast:
      CHECKED(ncclBroadcast(r->send, r->recv, n, kFloat32, 0, r->comm, r->stream));
      break;
    case kReduce:
      CHECKED(ncclReduce(r->send, r->recv, n, kFloat32, kSum, 0, r->comm, r->stream));
      break;
    case kAllToAll:
      CHECKED(ncclAlltoAll(r->send, r->recv, part, kFloat32, r->comm, r->stream));
      break;
    default:
      CHECKED(ncclGroupStart());
      CHECKED(ncclSend(r->send, n, kFloat32, (r->rank + 1) % ranks, r->comm, r->stream));
      CHECKED(ncclRecv(r->recv, n, kFloat32, (r->rank + ranks - 1) % ranks, r->comm, r->stream));
      CHECKED(ncclGroupEnd());
  }
}

static double input(int of, size_t i) {
  return (double)(i % kPeriod) + of + 1;
}

static double sum(size_t i) {
  return ranks * (double)(i % kPeriod) + ranks * (ranks + 1) / 2.0;
}

// Element i of what rank r receives when the larger buffer has n.
static double expected(int r, Function function, size_t n, size_t i) {
  const size_t part = n / (size_t)ranks;
  switch (function) {
    case kReduceScatter:
      return sum((size_t)r * part + i);
    case kAllGather:
      return input((int)(i / part), i % part);
    case kBroadcast:
      return input(0, i);
    case kAllToAll:
      return input((int)(i / part), (size_t)r * part + i % part);
    case kSendRecv:
      return input((r + ranks - 1) % ranks, i);
    default:
      return sum(i);
  }
}

// Runs it once on memory of NaNs and looks at both ends of what it leaves.
static void check(const Rank *r, Function function, size_t n) {
  CHECKED(cudaMemsetAsync(r->recv, 0xff, n * sizeof(float), r->stream));
  CHECKED(cudaStreamSynchronize(r->stream));
  meet();
  enqueue(r, function, n);
  CHECKED(cudaStreamSynchronize(r->stream));
  const size_t written = function == kReduceScatter ? n / (size_t)ranks : function == kReduce && r->rank != 0 ? 0 : n;
  const size_t count = written < kChecked ? written : kChecked;
  float *got = malloc(kChecked * sizeof(float));
  for (int end = 0; end < 2 && count > 0; ++end) {
    const size_t from = end == 0 ? 0 : written - count;
    CHECKED(cudaMemcpyAsync(got, r->recv + from, count * sizeof(float), kCopyDefault, r->stream));
    CHECKED(cudaStreamSynchronize(r->stream));
    for (size_t i = 0; i < count; ++i) {
      const double want = expected(r->rank, function, n, from + i);
      if (fabs(got[i] - want) <= 1e-6 * want) continue;
      fprintf(stderr, "FAILED: %s, rank %d of %d, %zu elements: element %zu is %g, not %g\n", kNames[function], r->rank,
              ranks, n, from + i, (double)got[i], want);
      exit(1);
    }
  }
  free(got);
  meet();
}

static void measure(const Rank *r, const char *route, Function function, size_t bytes) {
  const size_t n = bytes / sizeof(float);
  check(r, function, n);
  const bool large = bytes >= 16 << 20;
  const int times = quick || large ? 3 : 40, repetitions = quick ? 3 : large ? 5 : 15;
  double wall[kMaxSamples], device[kMaxSamples];
  Event start, end;
  CHECKED(cudaEventCreateWithFlags(&start, 0));
  CHECKED(cudaEventCreateWithFlags(&end, 0));
  for (int i = -2; i < repetitions; ++i) {
    meet();
    const double from = nowNs();
    CHECKED(cudaEventRecord(start, r->stream));
    for (int k = 0; k < times; ++k) enqueue(r, function, n);
    CHECKED(cudaEventRecord(end, r->stream));
    CHECKED(cudaStreamSynchronize(r->stream));
    if (i < 0) continue;
    wall[i] = (nowNs() - from) / 1e3 / times;
    float ms = 0;
    CHECKED(cudaEventElapsedTime(&ms, start, end));
    device[i] = ms * 1e3 / times;
  }
  meet();
  CHECKED(cudaEventDestroy(start));
  CHECKED(cudaEventDestroy(end));
  printSlowest(r, route, kNames[function], bytes, "us", wall, repetitions);
  printSlowest(r, route, kNames[function], bytes, "us by events", device, repetitions);
}

// What the call takes until it returns.
static void launch(const Rank *r, const char *route) {
  const int times = 20, repetitions = quick ? 3 : 100;
  double us[kMaxSamples];
  for (int i = -repetitions; i < repetitions; ++i) {
    meet();
    const double from = nowNs();
    for (int k = 0; k < times; ++k) enqueue(r, kAllReduce, 16);
    const double took = (nowNs() - from) / 1e3 / times;
    CHECKED(cudaStreamSynchronize(r->stream));
    if (i >= 0) us[i] = took;
  }
  printSlowest(r, route, "launch allReduce", 64, "us", us, repetitions);
}

// Launch and wait.
static void single(const Rank *r, const char *route) {
  const int repetitions = quick ? 5 : kMaxSamples, warmUp = quick ? 5 : 20;
  double us[kMaxSamples];
  for (int i = -warmUp; i < repetitions; ++i) {
    meet();
    const double from = nowNs();
    enqueue(r, kAllReduce, 1024);
    CHECKED(cudaStreamSynchronize(r->stream));
    if (i >= 0) us[i] = (nowNs() - from) / 1e3;
  }
  printSlowest(r, route, "single allReduce", 4 << 10, "us", us, repetitions);
}

static const size_t kQuickSizes[] = {64, 4 << 10};
static const size_t kSizes[] = {8, 64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20};
static UniqueId id;

static Comm communicator(int rank) {
  int devices = 0;
  CHECKED(cudaGetDeviceCount(&devices));
  CHECKED(cudaSetDevice(rank % devices));
  Comm comm = NULL;
  CHECKED(ncclCommInitRank(&comm, ranks, id, rank));
  return comm;
}

static void *runRank(void *number) {
  Rank rank = {.rank = (int)(intptr_t)number};
  Rank *r = &rank;
  r->comm = communicator(r->rank);
  CHECKED(cudaStreamCreateWithFlags(&r->stream, kNonBlocking));
  const size_t *sizes = quick ? kQuickSizes : kSizes;
  const size_t nSizes = quick ? sizeof kQuickSizes / sizeof *kQuickSizes : sizeof kSizes / sizeof *kSizes;
  const size_t bytes = sizes[nSizes - 1];
  CHECKED(ncclMemAlloc((void **)&r->send, bytes));
  CHECKED(ncclMemAlloc((void **)&r->recv, bytes));
  float *host = malloc(bytes);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) host[i] = (float)input(r->rank, i);
  CHECKED(cudaMemcpyAsync(r->send, host, bytes, kCopyDefault, r->stream));
  CHECKED(cudaStreamSynchronize(r->stream));
  free(host);

  for (int function = 0; function < (ranks == 1 ? kReduceScatter : kFunctions); ++function) {
    if (function == kAllToAll && ncclAlltoAll == NULL) continue;
    for (size_t s = 0; s < nSizes; ++s) {
      if (function == kAllReduce || sizes[s] >= sizeof(float) * (size_t)ranks) measure(r, "host", function, sizes[s]);
    }
    if (function == kAllReduce) launch(r, "host");
  }
  if (ranks > 1) single(r, "host");
  if (ranks > 1) {
    void *in = NULL, *out = NULL;
    CHECKED(ncclCommWindowRegister(r->comm, r->send, bytes, &in, kSymmetric));
    CHECKED(ncclCommWindowRegister(r->comm, r->recv, bytes, &out, kSymmetric));
    for (size_t s = 0; s < nSizes; ++s) measure(r, "host-symmetric", kAllReduce, sizes[s]);
    launch(r, "host-symmetric");
    CHECKED(ncclCommWindowDeregister(r->comm, out));
    CHECKED(ncclCommWindowDeregister(r->comm, in));
  }
  meet();
  CHECKED(ncclMemFree(r->recv));
  CHECKED(ncclMemFree(r->send));
  CHECKED(ncclCommDestroy(r->comm));
  return NULL;
}

static void world(void) {
  pthread_t threads[kMaxRanks];
  CHECKED(ncclGetUniqueId(&id));
  for (intptr_t r = 0; r < ranks; ++r) CHECKED(pthread_create(&threads[r], NULL, runRank, (void *)r));
  for (int r = 0; r < ranks; ++r) CHECKED(pthread_join(threads[r], NULL));
}

static Comm one;
static int out;
static int getVersion(void) {
  return ncclGetVersion(&out);
}
static int commCount(void) {
  return ncclCommCount(one, &out);
}
static int getDevice(void) {
  return cudaGetDevice(&out);
}
static int group(void) {
  return ncclGroupStart() | ncclGroupEnd();
}

// As Java's loop is compiled: inlined, but for the call itself.
static inline __attribute__((always_inline)) void call(const char *name, const char *wanted, int (*function)(void)) {
  if (strcmp(name, wanted) != 0) return;
  const int batch = quick ? 1000 : 100000, repetitions = quick ? 5 : 30;
  double ns[kMaxSamples];
  for (int i = -repetitions; i < repetitions; ++i) {
    const double from = nowNs();
    int results = 0;
    for (int k = 0; k < batch; ++k) results |= function();
    const double took = nowNs() - from;
    CHECKED(results);
    if (i >= 0) ns[i] = took / batch;
  }
  print("host", name, 1, 0, "ns", ns, repetitions);
}

static void calls(const char *wanted) {
  CHECKED(ncclGetUniqueId(&id));
  one = communicator(0);
  call("ncclGetVersion", wanted, getVersion);
  call("ncclCommCount", wanted, commCount);
  call("cudaGetDevice", wanted, getDevice);
  call("ncclGroupStart+End", wanted, group);
  CHECKED(ncclCommDestroy(one));
}

// From the start of the process to the first all-reduce of one rank. STARTED_NS is of the clock of nowNs.
static void start(double entered, double started) {
  double ms[5];
  loadLibraries();
  const double libraries = nowNs();
  CHECKED(ncclGetUniqueId(&id));
  one = communicator(0);
  Stream stream;
  float *x = NULL;
  CHECKED(cudaStreamCreateWithFlags(&stream, kNonBlocking));
  CHECKED(cudaMalloc((void **)&x, sizeof(float)));
  const double made = nowNs();
  CHECKED(ncclAllReduce(x, x, 1, kFloat32, kSum, one, stream));
  CHECKED(cudaStreamSynchronize(stream));
  const double done = nowNs();
  const double moments[] = {started, entered, libraries, made, done};
  const char *const names[] = {"start: process", "start: load libraries", "start: communicator",
                               "start: first all-reduce"};
  for (int i = 0; i < 4; ++i) {
    ms[i] = (moments[i + 1] - moments[i]) / 1e6;
    print("host", names[i], 1, 0, "ms", &ms[i], 1);
  }
  ms[4] = (done - started) / 1e6;
  print("host", "start", 1, 0, "ms", &ms[4], 1);
  CHECKED(ncclCommDestroy(one));
}

int main(int argc, char **argv) {
  const double entered = nowNs();
  if (argc < 3) return 2;
  quick = strcmp(argv[2], "true") == 0;
  ranks = 1;
  if (strcmp(argv[1], "start") == 0 && argc == 4) {
    start(entered, strtod(argv[3], NULL));
    return 0;
  }
  loadLibraries();
  if (strcmp(argv[1], "calls") == 0 && argc == 4) {
    calls(argv[3]);
  } else if (strcmp(argv[1], "world") == 0 && argc == 4 && (ranks = atoi(argv[3])) >= 1 && ranks <= kMaxRanks) {
    world();
  } else {
    return 2;
  }
  return 0;
}

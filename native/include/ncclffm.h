/* The C ABI of the nccl-ffm shim: everything Java calls in libncclffm_cuda.so and libncclffm_cpu.so.
 *
 * The shim holds kernels, their launchers and struct-layout queries, nothing else. It does not link libnccl and
 * includes none of its headers: peer addresses are collected by Java and arrive in ncclFfmDevComm. jextract reads this
 * file, so it is plain C and needs no CUDA header. Every function returning int returns an ncclResult_t value (0 =
 * ncclSuccess). */
#ifndef NCCLFFM_H_
#define NCCLFFM_H_

#ifndef __CUDACC_RTC__ /* it has no system headers; ncclffm/types.h gives it their types */
#include <stddef.h>
#include <stdint.h>
#endif

/* The shim hides every symbol but these. */
#define NCCLFFM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every incompatible change of this file; Java refuses a shim that reports another. */
#define NCCLFFM_ABI_VERSION 7

#define NCCLFFM_DEVCOMM_MAGIC 0x4e464443u /* "NFDC" */

/* A slot is a multiple of the first long, and at most the second. */
#define NCCLFFM_SLOT_UNIT 512u
#define NCCLFFM_MAX_SLOT_BYTES 67108864u /* 64 MiB */

#define NCCLFFM_QUEUE_MAGIC 0x4e465451u /* "NFTQ" */

/* Of a task queue: lanes, tasks in the ring of a lane (a power of two), and tasks of one ncclFfmTaskAppendOnStream. */
#define NCCLFFM_MAX_LANES 64u
#define NCCLFFM_MAX_DEPTH 1048576u
#define NCCLFFM_MAX_BATCH 16u

/* Results beside those of ncclResult_t. */
typedef enum ncclFfmResult {
  ncclFfmQueueFull = 1000,  /* the ring of the lane had no room, at once or until the deadline */
  ncclFfmQueueBroken = 1001 /* a producer took a place in the lane and never filled it: the lane has failed */
} ncclFfmResult;

/* A collective, or a function that is not one, in a call and in a status record. */
typedef enum ncclFfmFunction {
  ncclFfmFunctionNone = 0,
  ncclFfmFunctionAllReduce = 1,
  ncclFfmFunctionReduceScatter = 2,
  ncclFfmFunctionAllGather = 3,
  ncclFfmFunctionBroadcast = 4,
  ncclFfmFunctionReduce = 5,
  ncclFfmFunctionAllToAll = 6,
  ncclFfmFunctionBarrier = 7,
  ncclFfmFunctionHierarchicalAllReduce = 8,
  ncclFfmFunctionSend = 9,
  ncclFfmFunctionRecv = 10,
  ncclFfmFunctionSendRecv = 11,
  ncclFfmFunctionFusedScaleAllReduceSqrt = 12,
  ncclFfmFunctionGridSync = 13,
  ncclFfmFunctionFusedRmsNorm = 14,
  ncclFfmFunctionFusedSgd = 15,
  ncclFfmFunctionFusedAdamW = 16
} ncclFfmFunction;

/* How data travels. 0: the library chooses, by ncclffm/impl/choose.h. */
typedef enum ncclFfmProtocol {
  ncclFfmProtocolAuto = 0,
  ncclFfmProtocolLL = 1,
  ncclFfmProtocolLL128 = 2,
  ncclFfmProtocolSimple = 3
} ncclFfmProtocol;

/* Which way it takes. 0: the library chooses. */
typedef enum ncclFfmAlgorithm {
  ncclFfmAlgorithmAuto = 0,
  ncclFfmAlgorithmOneShot = 1, /* every rank gives all to each that needs it */
  ncclFfmAlgorithmTwoShot = 2, /* every rank works on its own shard, then hands it on */
  ncclFfmAlgorithmRing = 3     /* along the ring of ranks, neighbour to neighbour */
} ncclFfmAlgorithm;

/* The poorest path between two ranks of a communicator; what may travel on it depends on this. */
typedef enum ncclFfmPath {
  ncclFfmPathHostStaged = 0, /* pinned host memory */
  ncclFfmPathPcie = 1,
  ncclFfmPathNvLink = 2,
  ncclFfmPathSameGpu = 3, /* also one rank alone, and the CPU backend */
} ncclFfmPath;

/* What a task is, for people and for the peers to compare. All zero: there was none, or the peer's was not heard of. */
typedef struct ncclFfmTaskRecord {
  uint32_t present; /* 1 if there is one */
  uint32_t symbol;  /* FNV-1a, 32 bits, of the bytes of its name */
  uint32_t lane;
  uint32_t sequence; /* in the lane */
  uint32_t function; /* an ncclFfmFunction */
  int32_t datatype;
  int32_t op;
  int32_t root;
  uint64_t count;
} ncclFfmTaskRecord;

/* What went wrong, in host-mapped memory of one rank. The first thread that fails writes it, once; Java reads it after
 * an acquire load of ready. Codes: ncclTimeout (the peer did not come within timeoutNs), ncclRemoteError (abort was
 * set), ncclInvalidUsage (peer -1: a second collective on a busy channel; otherwise the peer called something else:
 * another function, count, type, operation, root, protocol or algorithm). Zeroed at creation.
 *
 * A task queue has one for each lane: a lane fails by itself. There, ncclInvalidUsage says that the peer's lane came to
 * another task (task and peerTask name both; peerTask is not known of sends and receives), ncclInvalidArgument that a
 * task had bad arguments, ncclFfmQueueBroken that a producer gave up between its ticket and the task. */
typedef struct ncclFfmStatus {
  uint32_t code;     /* an ncclResult_t, 0 while nothing failed */
  uint32_t function; /* an ncclFfmFunction */
  int32_t rank;      /* that failed */
  int32_t peer;      /* that it waited for, -1 if none */
  int32_t channel;
  uint32_t epoch; /* of the exchange that failed */
  uint64_t waitedNs;
  uint32_t abort;             /* Java stores non-zero: every wait of this rank ends with ncclRemoteError */
  uint32_t ready;             /* release-stored last: all fields but abort are complete */
  ncclFfmTaskRecord task;     /* that failed; of a task queue */
  ncclFfmTaskRecord peerTask; /* that the peer came to */
} ncclFfmStatus;

/* State of one channel, in device memory of the rank that owns it; only kernels of that rank touch it. Zeroed at
 * creation. */
typedef struct ncclFfmChannel {
  uint64_t state;    /* bits 0-31: epoch of the last finished exchange, advanced by kernels; bit 32: one is running */
  uint32_t failed;   /* entry 0 only: the ncclResult_t that the communicator has failed with, for good */
  uint32_t gridSync; /* of the grid whose first block is here: its top bit turns when all blocks have arrived */
  uint64_t partial;  /* of an update: the squares of this block's gradients, a double */
  uint32_t arrived;  /* of an update, entry 0 only: blocks that have read the step */
  uint32_t reserved0;
  uint64_t finished; /* entry 0 only: what the blocks of kernels that signal the host have added, 2^32 a kernel */
  uint32_t reserved[22];
} ncclFfmChannel;

/* State of the sends to and the receives from one peer on one channel, as above: bits 0-31 count the steps, bit 32 says
 * that one is running. */
typedef struct ncclFfmPair {
  uint64_t send;
  uint64_t recv;
} ncclFfmPair;

/* Memory that kernels of this rank load from and store to: part of a peer's, or of this rank's own that a peer reaches.
 * Every address in it is base + offset, and a protocol's offset is the same on both sides. Java fills it. */
typedef struct ncclLsaWindow {
  void *base; /* of byte 0, as mapped here */
  uint64_t bytes;
  void *handle; /* the ncclWindow_t where NCCL mapped the memory, else NULL; the shim does not look at it */
} ncclLsaWindow;

/* The windows of one rank towards its two neighbours on the ring of ranks: x the previous one, y the next one. Index 0
 * is inbound: local memory that the neighbour writes. Index 1 is outbound: the neighbour's memory as mapped here. */
typedef struct ncclLsa {
  ncclLsaWindow x[2];
  ncclLsaWindow y[2];
} ncclLsa;

/* What a kernel takes by value to communicate. Java fills it. At most 256 bytes. */
typedef struct ncclFfmDevComm {
  uint32_t magic;   /* NCCLFFM_DEVCOMM_MAGIC */
  uint32_t version; /* NCCLFFM_ABI_VERSION */
  int32_t rank;
  int32_t nRanks;
  int32_t nChannels;
  uint32_t slotBytes;       /* that one peer may have in flight on one channel and protocol */
  uint64_t timeoutNs;       /* bound of every wait; 0 = none */
  ncclFfmChannel *channels; /* device memory, nChannels entries */
  ncclFfmPair *pairs;       /* device memory, [nChannels][nRanks] */
  void **peers;           /* device memory, nRanks entries: base of rank r's window (128-byte aligned) as mapped here */
  ncclFfmStatus *status;  /* device pointer to host-mapped memory */
  ncclLsa lsa;            /* the windows of the neighbours on the ring of ranks */
  uint32_t path;          /* an ncclFfmPath */
  int32_t ranksPerDevice; /* the most ranks that share a GPU: their kernels wait for each other side by side */
  uint32_t protocol;      /* what Auto in a call means here: an ncclFfmProtocol */
  uint32_t algorithm;     /* an ncclFfmAlgorithm */
  struct ncclFfmTaskLane
      *lanes;           /* NULL. The scheduler of a task queue sets it, and status: each lane fails by itself */
  int32_t laneChannels; /* 0; of the scheduler: the channels of each lane */
  uint32_t reserved;
  uint32_t *hostSignal; /* device pointer to host-mapped memory, zeroed at creation: how many kernels have finished, as
                           signalHost of ncclffm/channel.h tells. NULL: nobody is told */
} ncclFfmDevComm;

/* A buffer at the same offset of a window on every rank, for zero-copy collectives. */
typedef struct ncclLsaBuffer {
  void **peers;   /* device memory, nRanks entries: base of rank r's window as mapped here; NULL: there is no window */
  uint64_t bytes; /* of the window */
  uint64_t offset;
} ncclLsaBuffer;

/* One collective, with NCCL's meaning of the arguments; the same on every rank but for the buffers, and for Send and
 * Recv. Java fills it. */
typedef struct ncclFfmCall {
  uint32_t function; /* an ncclFfmFunction */
  int32_t datatype;  /* an ncclDataType_t */
  int32_t op;        /* an ncclRedOp_t */
  int32_t
      root; /* of Broadcast and Reduce; the peer of Send (and SendRecv); ranks in a group of HierarchicalAllReduce */
  int32_t source;     /* the peer of Recv and SendRecv */
  uint32_t protocol;  /* an ncclFfmProtocol */
  uint32_t algorithm; /* an ncclFfmAlgorithm */
  int32_t blocks;     /* of the launch; 0: the library chooses */
  uint64_t count;     /* elements: of a buffer; of one rank's part where parts are exchanged */
  const void *sendbuff;
  void *recvbuff;
  ncclLsaBuffer send; /* both with peers: zero-copy, sendbuff and recvbuff are not looked at */
  ncclLsaBuffer recv;
} ncclFfmCall;

/* What ncclFfmFusedRmsNorm does beside the all-reduce. Both buffers are of the call's type. */
typedef struct ncclFfmRmsNorm {
  uint64_t tokens;
  uint64_t hidden;
  const void *weight; /* [hidden] */
  void *out;          /* [tokens][hidden]; may be the call's sendbuff */
  float eps;          /* at least 0, under the root */
  uint32_t reserved;
} ncclFfmRmsNorm;

/* What ncclFfmFusedSgd and ncclFfmFusedAdamW do with an averaged gradient. Buffers have one element for each of the
 * gradient's. All but the buffers' addresses are the same on every rank, and so are weights, momentum and variance. */
typedef struct ncclFfmOptimizer {
  float *weights;
  float *momentum;      /* beta1's of AdamW */
  float *variance;      /* of AdamW; not looked at by SGD */
  uint16_t *weightCopy; /* bfloat16: the weights after the update, rounded; or NULL */
  uint32_t *steps;      /* device memory: the steps taken so far, which the kernel counts; NULL: step says. Of AdamW */
  uint32_t step;        /* of AdamW without steps: which one this is, from 1 on */
  float learningRate;   /* at least 0 */
  float beta1;          /* in [0, 1); of SGD: the momentum */
  float beta2;          /* of AdamW, in [0, 1) */
  float eps;            /* of AdamW, at least 0, added to the root of the variance */
  float weightDecay;    /* at least 0, decoupled: weights *= 1 - learningRate * weightDecay */
  float maxNorm;        /* 0: no clipping; else the longest gradient, see ncclFfmFusedSgd */
} ncclFfmOptimizer;

/* A task. */
typedef struct ncclFfmTask {
  uint32_t sequence; /* its number in its lane */
  uint32_t symbol;   /* FNV-1a, 32 bits, of the bytes of its name */
  uint32_t function; /* an ncclFfmFunction: AllReduce to SendRecv, or None, which only holds a place in the lane */
  int32_t datatype;
  int32_t op;
  int32_t root;   /* as in ncclFfmCall */
  int32_t source; /* as in ncclFfmCall */
  uint32_t lane;
  uint64_t count;
  const void *sendbuff;
  void *recvbuff;
  uint32_t reserved[18];
} ncclFfmTask;

/* The place of a task in the ring of a lane, in device memory: one cache line. Producers write it, the scheduler reads
 * it. Each word holds 32 bits of the task, and above them the number of the task in its lane, plus 1; before, that of
 * the lap before. So whoever reads it knows of each word whether it is the task's, in whatever order the words come. */
typedef struct ncclFfmTaskSlot {
  uint64_t word[12]; /* symbol, function, datatype, op, root, source, count (low, high), sendbuff, recvbuff */
  uint64_t reserved[4];
} ncclFfmTaskSlot;

/* State of one lane, in device memory; what different threads write lies on different lines. Numbers of tasks, which
 * wrap, and are compared on the circle: head >= launched >= done, unless producers name numbers themselves. */
typedef struct ncclFfmTaskLane {
  uint32_t head; /* the next task to be numbered */
  uint32_t reserved0[31];
  uint32_t launched; /* tasks before it may run */
  uint32_t reserved1[31];
  uint32_t done; /* tasks before it are complete, and their places in the ring are free */
  uint32_t reserved2[31];
  uint64_t go;      /* to the other blocks of the lane: tasks before it are to be run; bit 32: leave after them */
  uint32_t arrived; /* blocks that have finished the task */
  uint32_t parked;  /* the attempt to end for which the lane takes no task until there is a verdict */
  uint32_t reserved3[28];
  uint32_t failed; /* the result that the lane has failed with, for good */
  uint32_t owned;  /* whether it has a LaneProducer (task_queue.h) */
  uint64_t running[3]; /* the record of the task that runs, packed */
  uint32_t reserved5[24];
} ncclFfmTaskLane;

/* What the lanes of a queue share, in device memory. */
typedef struct ncclFfmTaskShared {
  uint32_t closing;  /* attempts of the scheduler to end */
  uint32_t verdict;  /* what came of the last one: its number (31 bits), then whether the scheduler ends */
  uint32_t left;     /* blocks that have left */
  uint32_t finished; /* producers that have finished, of ncclFfmTaskControl.producers */
  uint32_t reserved[28];
} ncclFfmTaskShared;

/* Between the host and the scheduler, in host-mapped memory. Zeroed at creation.
 *
 * To have work done that a producer hands in, the host launches the producer, raises producers, and then, after a full
 * fence, looks at state. Of the n schedulers that it has launched, the last one sees the work as long as state is
 * before 2n - 1 on the circle; otherwise that one has announced its end, or ended, and the host launches another. A
 * scheduler that has nothing to do announces its end, and looks for work and producers once more before it ends; so one
 * of the two sees the other. (Raising producers first is as safe, but keeps the scheduler up while the launch of the
 * producer may be waiting for the device to go idle.) */
typedef struct ncclFfmTaskControl {
  uint32_t state;     /* the schedulers' alone: 2 for each that has ended, and 1 while the next has announced its end */
  uint32_t stop;      /* the host stores non-zero: the scheduler runs what is launched, and ends */
  uint32_t producers; /* that the host has launched, with the end of each: ncclFfmTaskProducerEnd, or as its function
                         says. One that does not end keeps the scheduler up until a stop, or all lanes have failed */
  uint32_t reserved[29];
} ncclFfmTaskControl;

/* How a scheduler ends. */
typedef enum ncclFfmSchedulerMode {
  ncclFfmSchedulerPersistent = 0, /* after idleNs with nothing to do, if no producer is queued or running */
  ncclFfmSchedulerDrain = 1,      /* when all that is launched is done */
  ncclFfmSchedulerDebug = 2       /* as Persistent; one lane, one block, one task at a time (depth 1) */
} ncclFfmSchedulerMode;

/* What a kernel takes by value to append tasks. Java fills in all but shared, lanes and tasks, which
 * ncclFfmTaskQueueInit does. At most 128 bytes. By value, not in device memory as the ring itself: its fields are
 * then read at no cost. */
typedef struct ncclFfmTaskQueue {
  uint32_t magic;   /* NCCLFFM_QUEUE_MAGIC */
  uint32_t version; /* NCCLFFM_ABI_VERSION */
  int32_t rank;     /* of the communicator, for status records */
  uint32_t nLanes;
  uint32_t depth;         /* of the ring of each lane */
  uint32_t blocksPerLane; /* of the scheduler. Lane l, block b works on channel l * blocksPerLane + b */
  uint64_t timeoutNs;     /* bound of every wait of a producer; 0 = none */
  uint64_t idleNs;        /* a persistent scheduler that has had nothing to do for so long ends */
  ncclFfmTaskShared *shared;
  ncclFfmTaskLane *lanes; /* nLanes */
  ncclFfmTaskSlot *tasks; /* [nLanes][depth] */
  ncclFfmStatus *status;  /* device pointer to host-mapped memory, nLanes entries */
  uint32_t *progress;     /* device pointer to host-mapped memory, nLanes entries: done of each lane, for the host */
  ncclFfmTaskControl *control; /* device pointer to host-mapped memory */
} ncclFfmTaskQueue;

/* Of a task: where it is, and what became of its append. */
typedef struct ncclFfmTicket {
  uint32_t lane;
  uint32_t sequence; /* the task is complete when done of its lane is beyond it, on the circle */
  uint32_t result;   /* of the append: an ncclResult_t or ncclFfmResult */
  uint32_t ready;    /* release-stored last, 1: the fields above are complete */
} ncclFfmTicket;

/* A few tasks that the host appends. */
typedef struct ncclFfmTaskBatch {
  uint32_t nTasks;        /* at most NCCLFFM_MAX_BATCH */
  uint32_t named;         /* non-zero: each task names its sequence; 0: the lane numbers it */
  ncclFfmTicket *tickets; /* device pointer to host-mapped memory, nTasks entries, or NULL */
  ncclFfmTask tasks[NCCLFFM_MAX_BATCH];
} ncclFfmTaskBatch;

/* A producer of many buckets: bucket k (elements [k * bucketCount, ...), the last one may be shorter) becomes
 * x = a * x + b, rounded once, and is all-reduced (sum), f32, in place. Each block takes a bucket after the other,
 * computes it, and appends its all-reduce as soon as it is ready; it does not wait. Bucket k is task
 * first[k % nLanes].sequence + k / nLanes of lane k % nLanes, on all ranks, however the blocks race. */
typedef struct ncclFfmTaskBuckets {
  float *buff;
  uint64_t count;
  uint64_t bucketCount;
  float a;
  float b;
  uint32_t symbol;
  int32_t blocks;
  ncclFfmTicket *first; /* device pointer to host-mapped memory, nLanes entries: filled in before the first bucket */
} ncclFfmTaskBuckets;

/* A producer that computes while it communicates. out[j] = sum over iterations i and ranks of the local part
 * f(in[j] + i), where f is x = a * x + b (one rounding), `rounds` times, all in f32. Every block works on its share of
 * the elements: it appends the all-reduce of iteration i, computes the local part of i + 1, waits for the ticket, and
 * adds the result to out, in the order of i. Iteration i of block k is
 * task first[n % nLanes].sequence + n / nLanes of lane n % nLanes, n = i * blocks + k. */
typedef struct ncclFfmTaskOverlap {
  const float *in;
  float *out;  /* is overwritten */
  float *work; /* 4 * count elements */
  uint64_t count;
  uint32_t iterations;
  uint32_t rounds;
  float a;
  float b;
  uint32_t symbol;
  int32_t blocks;
  uint32_t parts; /* 1: computes only, 2: communicates only (what is in work), 3: both. For measurements */
  uint32_t reserved;
  ncclFfmTicket *first; /* device pointer to host-mapped memory, nLanes entries: filled in before the first iteration */
  uint32_t *results;    /* device pointer to host-mapped memory, `blocks` entries: what each block ended with */
} ncclFfmTaskOverlap;

/* One row of the layout table; field "" is the struct itself. */
typedef struct ncclFfmLayout {
  const char *structName;
  const char *fieldName;
  uint64_t offset;
  uint64_t size;
} ncclFfmLayout;

#ifndef __CUDACC_RTC__ /* kernels see the structs only */

/* NCCLFFM_ABI_VERSION that the shim was built with. */
NCCLFFM_API int ncclFfmGetAbiVersion(int *version);

/* One line for people: backend, compiler, CUDA version, architectures. Static storage. */
NCCLFFM_API const char *ncclFfmGetBuildInfo(void);

/* Text of the last failure of a shim function on the calling thread, "" if none. Valid until the next failure on it. */
NCCLFFM_API const char *ncclFfmGetLastError(void);

/* sizeof and offsetof of every struct shared with Java, as the compiler of the shim sees them. Static storage. */
NCCLFFM_API int ncclFfmGetLayouts(const ncclFfmLayout **layouts, size_t *count);

/* Bytes of the window that each rank must provide, zeroed, for a device communicator of this shape. */
NCCLFFM_API int ncclFfmGetWindowBytes(int nRanks, int nChannels, unsigned int slotBytes, uint64_t *bytes);

/* Launches every kernel of the shim once with no work on the current device, so that no later first launch has to wait
 * for the device to go idle. Asynchronous on the stream (a cudaStream_t). */
NCCLFFM_API int ncclFfmPrime(void *stream);

/* How a call would run: fills in protocol, algorithm and blocks where the call leaves them open, from the table, the
 * communicator and the device. The same on every rank whose communicator and device are alike. Checks what
 * ncclFfmLaunch checks. */
NCCLFFM_API int ncclFfmChoose(const ncclFfmDevComm *comm, ncclFfmCall *call);

/* Runs a call in a kernel of its own: block b works on its share of the data, on channel b. Bad arguments are returned
 * here and nothing is launched: a struct that is none, a rank, type, operation, protocol or algorithm out of range, or
 * one that this path or function does not have; null, misaligned or partly overlapping buffers; bytes that do not fit
 * an address or a window; more blocks than channels, or than fit side by side with those of the ranks that share the
 * GPU. A failure of the exchange lands in comm->status. count 0 does nothing and needs no buffers (a Barrier ignores
 * it). Sums are taken in rank order where one rank adds (not along a ring), and are bit-identical on every rank. The
 * structs are read during the call only. Asynchronous on the stream. One collective at a time on a communicator: a
 * second one in flight is reported as ncclInvalidUsage. Sends and receives may run beside it. A kernel, one of those
 * below too, signals the host at its end if comm->hostSignal is set, whether or not it has failed. */
NCCLFFM_API int ncclFfmLaunch(const ncclFfmDevComm *comm, const ncclFfmCall *call, void *stream);

/* Kernels that compute, all-reduce and go on computing, in one launch: f32, f16 and bf16. The all-reduce is `call`, of
 * which function, op and root are not looked at; it goes by LL or Simple, one-shot or two-shot, or zero-copy, and what
 * else the communicator would choose gives way to the table. The rules of ncclFfmLaunch, also for blocks. The result is
 * bit for bit that of the three steps one after the other: what is between two steps is rounded to the call's type,
 * everything else is computed in f32. A bad argument of any kind is returned here, and nothing is launched. */

/* recvbuff = sqrt(|sum over the ranks of a * sendbuff + b|), a * x + b rounded once. a and b may differ between ranks,
 * but not zero-copy. */
NCCLFFM_API int ncclFfmFusedScaleAllReduceSqrt(const ncclFfmDevComm *comm, const ncclFfmCall *call, float a, float b,
                                               void *stream);

/* recvbuff (the residual, the same on all ranks, [tokens][hidden]) += the sum over the ranks of sendbuff; then
 * out = recvbuff / sqrt(mean over hidden of recvbuff^2 + eps) * weight. call->count is tokens * hidden. Never in place:
 * sendbuff and recvbuff are apart. */
NCCLFFM_API int ncclFfmFusedRmsNorm(const ncclFfmDevComm *comm, const ncclFfmCall *call, const ncclFfmRmsNorm *norm,
                                    void *stream);

/* recvbuff = g = the average over the ranks of sendbuff, the gradient, mostly in place; then, in f32,
 *   g *= min(1, maxNorm / (|g| + 1e-6)), if maxNorm is not 0; |g| is the norm of all elements, and recvbuff keeps g as
 *        it was
 *   SGD:   m = beta1 * m + g                  w = (1 - learningRate * weightDecay) * w - learningRate * m
 *   AdamW: m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g^2
 *          w = (1 - learningRate * weightDecay) * w - learningRate * m' / (sqrt(v') + eps),
 *          m' = m / (1 - beta1^step),   v' = v / (1 - beta2^step)
 * Weights that were equal on all ranks are so afterwards, to the bit. A graph that is replayed needs `steps`. */
NCCLFFM_API int ncclFfmFusedSgd(const ncclFfmDevComm *comm, const ncclFfmCall *call, const ncclFfmOptimizer *optimizer,
                                void *stream);
NCCLFFM_API int ncclFfmFusedAdamW(const ncclFfmDevComm *comm, const ncclFfmCall *call,
                                  const ncclFfmOptimizer *optimizer, void *stream);

/* Stores a pattern to [offset, offset + bytes) of a window, by ordinary stores of a kernel, the widest that the
 * addresses allow. The byte at offset o is a function of seed and o alone; the eight bytes from a multiple of 8 on are
 * different for each such offset and for each seed, so a seed for each (writer, reader) tells where a value belongs. 0
 * bytes do nothing. A window that is none (base NULL, end beyond the address space) or a range that is not in it is
 * ncclInvalidArgument. The struct is read during the call only. Asynchronous on the stream. */
NCCLFFM_API int ncclFfmLsaWritePattern(const ncclLsaWindow *window, uint64_t offset, uint64_t bytes, uint64_t seed,
                                       void *stream);

/* Loads [offset, offset + bytes) likewise and lowers *firstBad to the smallest offset in the window whose byte is not
 * that of ncclFfmLsaWritePattern. firstBad is 8-byte aligned and mapped for the device: host-mapped pinned memory, so
 * that the host reads the answer after the stream. The caller sets it to UINT64_MAX, which then says that all bytes are
 * right. Checks of one device may share it. Whether the writer's stores have happened before is the caller's affair. */
NCCLFFM_API int ncclFfmLsaCheckPattern(const ncclLsaWindow *window, uint64_t offset, uint64_t bytes, uint64_t seed,
                                       uint64_t *firstBad, void *stream);

/* Bytes of device memory for a queue of this shape. */
NCCLFFM_API int ncclFfmTaskQueueBytes(unsigned int nLanes, unsigned int depth, uint64_t *bytes);

/* Makes an empty queue in `memory` (device memory of ncclFfmTaskQueueBytes, 128-byte aligned): fills in shared, lanes
 * and tasks of the struct, and the memory, on the stream. Tasks are numbered from firstSequence on, which is the same
 * on all ranks. No scheduler of the queue is running. */
NCCLFFM_API int ncclFfmTaskQueueInit(ncclFfmTaskQueue *queue, void *memory, unsigned int firstSequence, void *stream);

/* Launches the scheduler: nLanes * blocksPerLane blocks, which run the launched tasks of every lane in their order, on
 * the channels from 0 on. All of them, and the blocks of the other ranks that share the GPU, must fit side by side.
 * Launches of one queue are on one stream. mode: an ncclFfmSchedulerMode. */
NCCLFFM_API int ncclFfmLaunchScheduler(const ncclFfmDevComm *comm, const ncclFfmTaskQueue *queue, unsigned int mode,
                                       void *stream);

/* Appends the tasks of a batch and launches them, in stream order. Each is one of those that ncclTaskAppend takes; what
 * becomes of it is in its ticket. A producer: counts as finished in control->producers when the kernel ends. */
NCCLFFM_API int ncclFfmTaskAppendOnStream(const ncclFfmTaskQueue *queue, const ncclFfmTaskBatch *batch, void *stream);

/* Says in stream order that one producer, which the host counted in control->producers, has finished. */
NCCLFFM_API int ncclFfmTaskProducerEnd(const ncclFfmTaskQueue *queue, void *stream);

/* The two prebuilt producers, of at most 2^30 tasks a lane. Each counts as one producer if it returns ncclSuccess, and
 * says itself that it has finished. */
NCCLFFM_API int ncclFfmTaskAppendBuckets(const ncclFfmTaskQueue *queue, const ncclFfmTaskBuckets *buckets,
                                         void *stream);
NCCLFFM_API int ncclFfmTaskIterate(const ncclFfmTaskQueue *queue, const ncclFfmTaskOverlap *overlap, void *stream);

#endif /* __CUDACC_RTC__ */

#ifdef __cplusplus
}
#endif

#endif /* NCCLFFM_H_ */

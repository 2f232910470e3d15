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
#define NCCLFFM_ABI_VERSION 3

#define NCCLFFM_DEVCOMM_MAGIC 0x4e464443u /* "NFDC" */

/* A slot is a multiple of the first long, and at most the second. */
#define NCCLFFM_SLOT_UNIT 512u
#define NCCLFFM_MAX_SLOT_BYTES 67108864u /* 64 MiB */

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
  ncclFfmFunctionGridSync = 13
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

/* What went wrong, in host-mapped memory of one rank. The first thread that fails writes it, once; Java reads it after
 * an acquire load of ready. Codes: ncclTimeout (the peer did not come within timeoutNs), ncclRemoteError (abort was
 * set), ncclInvalidUsage (peer -1: a second collective on a busy channel; otherwise the peer called something else:
 * another function, count, type, operation, root, protocol or algorithm). Zeroed at creation. */
typedef struct ncclFfmStatus {
  uint32_t code;     /* an ncclResult_t, 0 while nothing failed */
  uint32_t function; /* an ncclFfmFunction */
  int32_t rank;      /* that failed */
  int32_t peer;      /* that it waited for, -1 if none */
  int32_t channel;
  uint32_t epoch; /* of the exchange that failed */
  uint64_t waitedNs;
  uint32_t abort; /* Java stores non-zero: every wait of this rank ends with ncclRemoteError */
  uint32_t ready; /* release-stored last: the fields above (but for abort) are complete */
} ncclFfmStatus;

/* State of one channel, in device memory of the rank that owns it; only kernels of that rank touch it. Zeroed at
 * creation. */
typedef struct ncclFfmChannel {
  uint64_t state;    /* bits 0-31: epoch of the last finished exchange, advanced by kernels; bit 32: one is running */
  uint32_t failed;   /* entry 0 only: the ncclResult_t that the communicator has failed with, for good */
  uint32_t gridSync; /* entry 0 only: blocks that have arrived; the top bit turns when all have */
  uint32_t reserved[28];
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
 * second one in flight is reported as ncclInvalidUsage. Sends and receives may run beside it. */
NCCLFFM_API int ncclFfmLaunch(const ncclFfmDevComm *comm, const ncclFfmCall *call, void *stream);

/* One launch: x = a*x + b (one rounding), all-reduce (sum), x = sqrt(|x|); f32, in place on buff (LL, one-shot). The
 * rules of ncclFfmLaunch. */
NCCLFFM_API int ncclFfmFusedScaleAllReduceSqrt(const ncclFfmDevComm *comm, float *buff, size_t count, float a, float b,
                                               void *stream);

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

#endif /* __CUDACC_RTC__ */

#ifdef __cplusplus
}
#endif

#endif /* NCCLFFM_H_ */

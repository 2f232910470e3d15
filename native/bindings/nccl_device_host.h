/* nccl.h and the host side of NCCL's device API as plain C, for jextract.
 *
 * NCCL's headers that parse as C are included as they are. The two below do not (nccl_device/gin_barrier.h and
 * nccl_device/impl/comm__types.h reach C++ templates), so their host part is declared here again. Nothing is compiled
 * from this file; layouts.txt, which LayoutTest compares, comes from the C++ originals. */
#ifndef NCCLFFM_NCCL_DEVICE_HOST_H_
#define NCCLFFM_NCCL_DEVICE_HOST_H_

/* nccl.h declares these as f(), which in C leaves the arguments open: jextract would take them for variadic. */
#define ncclGroupStart() ncclGroupStart(void)
#define ncclGroupEnd() ncclGroupEnd(void)
#define ncclResetDebugInit() ncclResetDebugInit(void)
#include <nccl.h>
#undef ncclGroupStart
#undef ncclGroupEnd
#undef ncclResetDebugInit

#include <nccl_device/core.h>
#include <nccl_device/impl/core__types.h>
#include <nccl_device/impl/ll_a2a__types.h>
#include <nccl_device/impl/lsa_barrier__types.h>

struct ncclGinBarrierHandle {
  ncclGinSignal_t signal0;
  ncclDevResourceHandle_t unused;
};

ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int nBarriers,
                                             ncclGinBarrierHandle_t *outHandle, ncclDevResourceRequirements_t *outReq);

/* Only what says whose struct this is; the rest belongs to NCCL's device code and changes with its minor versions. */
struct ncclDevComm {
  unsigned int magic;
  unsigned int version;
  int rank, nRanks;
  uint32_t nRanks_rcp32;
  int lsaRank, lsaSize;
  uint32_t lsaSize_rcp32;
  uint64_t opaque[26];
};

#endif /* NCCLFFM_NCCL_DEVICE_HOST_H_ */

// What the sessions of NCCL's device API need of a device communicator: arithmetic only, no communicator is touched.
#include "error.h"

namespace ncclffm::cpu {

namespace {

void checkOutputs(const char *function, const void *handle, const void *requirements) {
  if (handle == nullptr || requirements == nullptr) {
    throw NcclFailure(ncclInvalidArgument, format("%s: outHandle or outReq is NULL", function));
  }
}

}  // namespace

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

// A barrier has three words of state and an inbox word for every rank of its team.
ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t team, int nBarriers, ncclLsaBarrierHandle_t *outHandle,
                                             ncclDevResourceRequirements_t *outReq) {
  return guardNccl("ncclLsaBarrierCreateRequirement", [&] {
    checkOutputs("ncclLsaBarrierCreateRequirement", outHandle, outReq);
    *outReq = {};
    outHandle->nBarriers = nBarriers;
    outReq->bufferSize = static_cast<size_t>(nBarriers) * (3 + static_cast<size_t>(team.nRanks)) * sizeof(uint32_t);
    outReq->bufferAlign = alignof(uint32_t);
    outReq->outBufferHandle = &outHandle->bufHandle;
    return ncclSuccess;
  });
}

// A slot carries 8 bytes of data.
int ncclLLA2ACalcSlots(int maxElts, int maxEltSize) {
  return maxElts * ((maxEltSize + 7) / 8);
}

// A block has a line of state and its slots twice, by turns; lines have 16 bytes.
ncclResult_t ncclLLA2ACreateRequirement(int nBlocks, int nSlots, ncclLLA2AHandle_t *outHandle,
                                        ncclDevResourceRequirements_t *outReq) {
  return guardNccl("ncclLLA2ACreateRequirement", [&] {
    checkOutputs("ncclLLA2ACreateRequirement", outHandle, outReq);
    *outReq = {};
    outHandle->nSlots = static_cast<uint32_t>(nSlots);
    outReq->bufferSize = static_cast<size_t>(nBlocks) * (1 + 2 * static_cast<size_t>(nSlots)) * 16;
    outReq->bufferAlign = 16;
    outReq->outBufferHandle = &outHandle->bufHandle;
    return ncclSuccess;
  });
}

ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t, ncclTeam_t team, int nBarriers,
                                             ncclGinBarrierHandle_t *outHandle, ncclDevResourceRequirements_t *outReq) {
  return guardNccl("ncclGinBarrierCreateRequirement", [&] {
    checkOutputs("ncclGinBarrierCreateRequirement", outHandle, outReq);
    *outReq = {};
    outReq->ginSignalCount = nBarriers * team.nRanks;
    outReq->outGinSignalStart = &outHandle->signal0;
    return ncclSuccess;
  });
}

// The exported functions, over the types of abi.h. Apart from them so that test cpu_real_headers can compile these
// declarations after NVIDIA's headers, where any difference in a signature is an error.
#ifndef NCCLFFM_CPU_ABI_FUNCTIONS_H_
#define NCCLFFM_CPU_ABI_FUNCTIONS_H_

#include <cstddef>

#define NCCLFFM_EXPORT __attribute__((visibility("default")))

extern "C" {

NCCLFFM_EXPORT cudaError_t cudaRuntimeGetVersion(int *version);
NCCLFFM_EXPORT cudaError_t cudaDriverGetVersion(int *version);
NCCLFFM_EXPORT cudaError_t cudaGetDeviceCount(int *count);
NCCLFFM_EXPORT cudaError_t cudaSetDevice(int device);
NCCLFFM_EXPORT cudaError_t cudaGetDevice(int *device);
NCCLFFM_EXPORT cudaError_t cudaDeviceSynchronize(void);
NCCLFFM_EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
NCCLFFM_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
NCCLFFM_EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
NCCLFFM_EXPORT cudaError_t cudaDeviceCanAccessPeer(int *canAccess, int device, int peer);
NCCLFFM_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer);
NCCLFFM_EXPORT cudaError_t cudaDeviceGetP2PAttribute(int *value, cudaDeviceP2PAttr attribute, int device, int peer);
NCCLFFM_EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device);
NCCLFFM_EXPORT cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id);

NCCLFFM_EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes);
NCCLFFM_EXPORT cudaError_t cudaFree(void *pointer);
NCCLFFM_EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaFreeHost(void *pointer);
NCCLFFM_EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaHostUnregister(void *pointer);
NCCLFFM_EXPORT cudaError_t cudaHostGetFlags(unsigned int *flags, void *host);
NCCLFFM_EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
NCCLFFM_EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                           cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int toDevice, const void *from, int fromDevice, size_t bytes,
                                               cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaMemset(void *pointer, int value, size_t bytes);
NCCLFFM_EXPORT cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer);

NCCLFFM_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer);
NCCLFFM_EXPORT cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer);

NCCLFFM_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority);
NCCLFFM_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *userData);
NCCLFFM_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
NCCLFFM_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event);
NCCLFFM_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event);
NCCLFFM_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event);
NCCLFFM_EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

NCCLFFM_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
NCCLFFM_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
NCCLFFM_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
NCCLFFM_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                         unsigned long long flags);
NCCLFFM_EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
NCCLFFM_EXPORT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t executable, cudaGraph_t graph,
                                               cudaGraphExecUpdateResultInfo *info);
NCCLFFM_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
NCCLFFM_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph);

NCCLFFM_EXPORT const char *cudaGetErrorName(cudaError_t error);
NCCLFFM_EXPORT const char *cudaGetErrorString(cudaError_t error);
NCCLFFM_EXPORT cudaError_t cudaGetLastError(void);
NCCLFFM_EXPORT cudaError_t cudaPeekAtLastError(void);

NCCLFFM_EXPORT ncclResult_t ncclGetVersion(int *version);
NCCLFFM_EXPORT const char *ncclGetErrorString(ncclResult_t result);
NCCLFFM_EXPORT const char *ncclGetLastError(ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
NCCLFFM_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nRanks, ncclUniqueId id, int rank);
NCCLFFM_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nRanks, ncclUniqueId id, int rank,
                                                   ncclConfig_t *config);
NCCLFFM_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nRanks, int rank, int nIds,
                                                     ncclUniqueId *ids, ncclConfig_t *config);
NCCLFFM_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int nDevices, const int *devices);
NCCLFFM_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
NCCLFFM_EXPORT ncclResult_t ncclCommCount(ncclComm_t comm, int *count);
NCCLFFM_EXPORT ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device);
NCCLFFM_EXPORT ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);
NCCLFFM_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newComm,
                                          ncclConfig_t *config);
NCCLFFM_EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int excludedCount, ncclComm_t *newComm,
                                           ncclConfig_t *config, int flags);
NCCLFFM_EXPORT ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id);
NCCLFFM_EXPORT ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *id, int rank,
                                         ncclComm_t *newComm, ncclConfig_t *config);
NCCLFFM_EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
NCCLFFM_EXPORT ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
NCCLFFM_EXPORT ncclResult_t ncclCommResume(ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value);
NCCLFFM_EXPORT void ncclResetDebugInit();
NCCLFFM_EXPORT ncclResult_t ncclGroupStart(void);
NCCLFFM_EXPORT ncclResult_t ncclGroupEnd(void);
NCCLFFM_EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);

NCCLFFM_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                                     ncclScalarResidence_t residence, ncclComm_t comm);
NCCLFFM_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

NCCLFFM_EXPORT ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                          ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                          int root, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                                      cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                       ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                              ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                              cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                         ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                       int root, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                        int root, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                                     ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                                     cudaStream_t stream);

NCCLFFM_EXPORT ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                                          ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                                          unsigned int flags, ncclComm_t comm, cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                                       cudaStream_t stream);
NCCLFFM_EXPORT ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm,
                                           cudaStream_t stream);

NCCLFFM_EXPORT ncclResult_t ncclMemAlloc(void **pointer, size_t bytes);
NCCLFFM_EXPORT ncclResult_t ncclMemFree(void *pointer);
NCCLFFM_EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *window,
                                                   int flags);
NCCLFFM_EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
NCCLFFM_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
NCCLFFM_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
NCCLFFM_EXPORT ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **pointer);
NCCLFFM_EXPORT ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **pointer);
NCCLFFM_EXPORT ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t window, size_t offset,
                                                         ncclMultimemHandle_t multimem, void **pointer);
NCCLFFM_EXPORT ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void **pointer);
NCCLFFM_EXPORT ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank, void **pointer);
NCCLFFM_EXPORT ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t *properties);
NCCLFFM_EXPORT ncclTeam_t ncclTeamWorld(ncclComm_t comm);
NCCLFFM_EXPORT ncclTeam_t ncclTeamLsa(ncclComm_t comm);
NCCLFFM_EXPORT ncclTeam_t ncclTeamRail(ncclComm_t comm);
NCCLFFM_EXPORT int ncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank);
NCCLFFM_EXPORT int ncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank);

NCCLFFM_EXPORT ncclResult_t ncclLsaBarrierCreateRequirement(ncclTeam_t team, int nBarriers,
                                                            ncclLsaBarrierHandle_t *outHandle,
                                                            ncclDevResourceRequirements_t *outReq);
NCCLFFM_EXPORT int ncclLLA2ACalcSlots(int maxElts, int maxEltSize);
NCCLFFM_EXPORT ncclResult_t ncclLLA2ACreateRequirement(int nBlocks, int nSlots, ncclLLA2AHandle_t *outHandle,
                                                       ncclDevResourceRequirements_t *outReq);
NCCLFFM_EXPORT ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int nBarriers,
                                                            ncclGinBarrierHandle_t *outHandle,
                                                            ncclDevResourceRequirements_t *outReq);

NCCLFFM_EXPORT ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key);
NCCLFFM_EXPORT ncclResult_t ncclParamGetI8(ncclParamHandle_t handle, int8_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetI16(ncclParamHandle_t handle, int16_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetI32(ncclParamHandle_t handle, int32_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetI64(ncclParamHandle_t handle, int64_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetU8(ncclParamHandle_t handle, uint8_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetU16(ncclParamHandle_t handle, uint16_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetU32(ncclParamHandle_t handle, uint32_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetU64(ncclParamHandle_t handle, uint64_t *out);
NCCLFFM_EXPORT ncclResult_t ncclParamGetStr(ncclParamHandle_t handle, const char **out);
NCCLFFM_EXPORT ncclResult_t ncclParamGet(ncclParamHandle_t handle, void *out, int maxLen, int *len);
NCCLFFM_EXPORT ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *valueLen);
NCCLFFM_EXPORT ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen);
NCCLFFM_EXPORT void ncclParamDumpAll(void);

}  // extern "C"

#endif  // NCCLFFM_CPU_ABI_FUNCTIONS_H_

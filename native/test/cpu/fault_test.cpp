// Fault injection, parameters, and the arithmetic of requirements.
#include "fault.h"

#include <dlfcn.h>

#include <chrono>
#include <cstring>

#include "world.h"

using namespace test;
using Clock = std::chrono::steady_clock;

namespace {

/// Every exported function that returns a result code, from abi_functions.h.
const char *const kFunctions[] = {
#include "exported_functions.inc"
};

}  // namespace

TEST(everyFunctionFailsWithTheCodeThatARuleSays) {
  CHECK(sizeof(kFunctions) / sizeof(kFunctions[0]) > 100);
  for (const char *name : kFunctions) {
    const bool exempt = std::strcmp(name, "cudaGetLastError") == 0 || std::strcmp(name, "cudaPeekAtLastError") == 0;
    if (exempt) {
      continue;  // they report errors of others
    }
    for (int code : {2, 6}) {
      NCCL_OK(ncclFfmCpuSetFaults((std::string(name) + ":result=" + std::to_string(code)).c_str()));
      // The arguments are not looked at: no argument is as good as the right ones.
      auto *function = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, name));
      CHECK_EQ_IN(function != nullptr, true, name);
      CHECK_EQ_IN(function(), code, name);
    }
  }
  NCCL_OK(ncclFfmCpuSetFaults(nullptr));
}

TEST(faultsComeAfterAndForAsManyCallsAsSaid) {
  int version = 0;
  NCCL_OK(ncclFfmCpuSetFaults("ncclGetVersion:result=3,after=2,times=2;cudaMalloc:result=2"));
  for (ncclResult_t want : {ncclSuccess, ncclSuccess, ncclInternalError, ncclInternalError, ncclSuccess}) {
    CHECK_EQ(ncclGetVersion(&version), want);
  }
  CHECK_CONTAINS(ncclGetLastError(nullptr), "ncclGetVersion: injected fault");
  void *pointer = nullptr;
  CHECK_EQ(cudaMalloc(&pointer, 8), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  NCCL_OK(ncclFfmCpuSetFaults("ncclGetVersion:delay_ms=50"));
  const auto start = Clock::now();
  NCCL_OK(ncclGetVersion(&version));
  CHECK(Clock::now() - start >= std::chrono::milliseconds(50));
  for (const char *wrong : {"ncclGetVersion", ":result=1", "ncclGetVersion:result", "ncclGetVersion:result=x",
                            "ncclGetVersion:wrong=1", "ncclGetVersion:result=-1"}) {
    CHECK_EQ_IN(ncclFfmCpuSetFaults(wrong), ncclInvalidArgument, wrong);
    CHECK_CONTAINS(ncclGetLastError(nullptr), "fault rule");
  }
  NCCL_OK(ncclFfmCpuSetFaults(""));
}

TEST(faultInAGroupFailsTheGroup) {
  onRanks(1, [](Rank &rank) {
    auto *data = deviceArray<int>(1);
    NCCL_OK(ncclFfmCpuSetFaults("ncclBroadcast:result=5"));
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CHECK_EQ(ncclBroadcast(data, data, 1, ncclInt32, 0, rank.comm, rank.stream), ncclInvalidUsage);
    CHECK_EQ(ncclGroupEnd(), ncclInvalidUsage);
    NCCL_OK(ncclFfmCpuSetFaults(nullptr));
    CUDA_OK(cudaFree(data));
  });
}

TEST(parametersAreReadFromTheEnvironment) {
  setenv("NCCL_DEBUG_FILE", "the file", 1);
  setenv("NCCL_DEBUG_SUBSYS", "12345678901", 1);
  setenv("NCCL_DEBUG_TIMESTAMP_LEVELS", "no number", 1);
  const char **keys = nullptr;
  int count = 0;
  NCCL_OK(ncclParamGetAllParameterKeys(&keys, &count));
  CHECK_EQ(count, 4);
  for (int i = 0; i < count; ++i) {
    const char *value = nullptr;
    int length = -1;
    NCCL_OK(ncclParamGetParameter(keys[i], &value, &length));
    CHECK_EQ(static_cast<size_t>(length), std::strlen(value));
  }
  ncclParamHandle_t file = nullptr;
  ncclParamHandle_t subsystems = nullptr;
  ncclParamHandle_t levels = nullptr;
  NCCL_OK(ncclParamBind(&file, "NCCL_DEBUG_FILE"));
  NCCL_OK(ncclParamBind(&subsystems, "NCCL_DEBUG_SUBSYS"));
  NCCL_OK(ncclParamBind(&levels, "NCCL_DEBUG_TIMESTAMP_LEVELS"));
  CHECK_EQ(ncclParamBind(&file, "NCCL_NONE"), ncclInvalidArgument);
  const char *text = nullptr;
  NCCL_OK(ncclParamGetStr(file, &text));
  CHECK_EQ(std::string(text), "the file");
  CHECK_EQ(ncclParamGetStr(levels, &text), ncclInvalidArgument);
  uint64_t u64 = 0;
  uint32_t u32 = 0;
  int64_t i64 = 0;
  uint8_t u8 = 0;
  NCCL_OK(ncclParamGetU64(subsystems, &u64));
  CHECK_EQ(u64, 12345678901u);
  NCCL_OK(ncclParamGetU32(levels, &u32));
  CHECK_EQ(u32, 4u);  // the default
  CHECK_EQ(ncclParamGetI64(subsystems, &i64), ncclInvalidArgument);
  CHECK_EQ(ncclParamGetU8(levels, &u8), ncclInvalidArgument);
  CHECK_EQ(ncclParamGetU64(nullptr, &u64), ncclInvalidArgument);
  char raw[16];
  int length = -1;
  NCCL_OK(ncclParamGet(file, raw, sizeof(raw), &length));
  CHECK_EQ(length, 9);
  CHECK_EQ(std::string(raw), "the file");
  CHECK_EQ(ncclParamGet(file, raw, 8, &length), ncclInvalidArgument);
  NCCL_OK(ncclParamGet(subsystems, raw, sizeof(raw), &length));
  CHECK_EQ(length, 8);
  CHECK_EQ(std::memcmp(raw, &u64, 8), 0);
  int none = 0;
  CHECK_EQ(ncclParamGetParameter("NCCL_NONE", &text, &none), ncclInvalidArgument);
}

// The figures are NCCL 2.30.7's.
TEST(requirementsAreNcclsOwn) {
  ncclDevResourceRequirements_t needs;
  std::memset(&needs, 0x55, sizeof(needs));
  ncclLsaBarrierHandle_t barrier = {};
  NCCL_OK(ncclLsaBarrierCreateRequirement(ncclTeam_t{8, 1, 1}, 5, &barrier, &needs));
  CHECK_EQ(needs.bufferSize, (3 * 5 + 5 * 8) * 4u);
  CHECK_EQ(needs.bufferAlign, 4u);
  CHECK_EQ(needs.outBufferHandle, &barrier.bufHandle);
  CHECK(needs.next == nullptr && needs.ginSignalCount == 0 && barrier.nBarriers == 5);
  CHECK_EQ(ncclLLA2ACalcSlots(10, 8), 10);
  CHECK_EQ(ncclLLA2ACalcSlots(10, 9), 20);
  ncclLLA2AHandle_t exchange = {};
  NCCL_OK(ncclLLA2ACreateRequirement(3, 7, &exchange, &needs));
  CHECK_EQ(needs.bufferSize, 3 * 15 * 16u);
  CHECK_EQ(needs.bufferAlign, 16u);
  CHECK_EQ(exchange.nSlots, 7u);
  CHECK_EQ(needs.outBufferHandle, &exchange.bufHandle);
  ncclGinBarrierHandle_t rails = {};
  NCCL_OK(ncclGinBarrierCreateRequirement(nullptr, ncclTeam_t{4, 0, 8}, 6, &rails, &needs));
  CHECK_EQ(needs.ginSignalCount, 24);
  CHECK_EQ(needs.outGinSignalStart, &rails.signal0);
  CHECK_EQ(needs.bufferSize, 0u);
  CHECK_EQ(ncclLsaBarrierCreateRequirement(ncclTeam_t{8, 1, 1}, 5, nullptr, &needs), ncclInvalidArgument);
}

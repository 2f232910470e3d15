// Pre-multiplied sums, registered buffers, teams, simulated groups.
#include <cstring>

#include "reference.h"
#include "world.h"

using namespace test;

namespace {

/// The bits of a small number in an element type.
std::vector<char> element(ncclDataType_t type, int value) {
  std::vector<char> bytes(bytesOf(type));
  const auto store = [&](const auto &typed) { std::memcpy(bytes.data(), &typed, bytes.size()); };
  switch (type) {
    case ncclFloat16:
      store(encode(kFloat16, value));
      break;
    case ncclBfloat16:
      store(encode(kBfloat16, value));
      break;
    case ncclFloat8e4m3:
      store(encode(kFloat8e4m3, value));
      break;
    case ncclFloat8e5m2:
      store(encode(kFloat8e5m2, value));
      break;
    case ncclFloat32:
      store(static_cast<float>(value));
      break;
    case ncclFloat64:
      store(static_cast<double>(value));
      break;
    default:
      store(static_cast<int64_t>(value));  // little-endian: the low bytes come first
  }
  return bytes;
}

std::vector<char> repeated(const std::vector<char> &one, size_t count) {
  std::vector<char> all;
  for (size_t i = 0; i < count; ++i) {
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

}  // namespace

// Rank r contributes r + 1, multiplied by its own factor r + 2: exact in every type.
TEST(preMulSumOfEveryTypeWithEveryRanksOwnFactor) {
  constexpr int kRanks = 2;
  constexpr size_t kCount = 5;
  onRanks(kRanks, [](Rank &rank) {
    for (ncclDataType_t type : kAllTypes) {
      for (bool onDevice : {false, true}) {
        const size_t bytes = bytesOf(type);
        std::vector<char> factor = element(type, rank.rank + 2);
        auto *deviceFactor = deviceArray<char>(bytes);
        auto *data = deviceArray<char>(kCount * kRanks * bytes);
        auto *result = deviceArray<char>(kCount * kRanks * bytes);
        toDevice(data, repeated(element(type, rank.rank + 1), kCount * kRanks));
        ncclRedOp_t op = ncclSum;
        NCCL_OK(ncclRedOpCreatePreMulSum(&op, onDevice ? deviceFactor : factor.data(), type,
                                         onDevice ? ncclScalarDevice : ncclScalarHostImmediate, rank.comm));
        CHECK(op > ncclNumOps);
        if (onDevice) {  // read when the collective runs, not before
          CUDA_OK(cudaMemcpyAsync(deviceFactor, factor.data(), bytes, cudaMemcpyHostToDevice, rank.stream));
        } else {
          std::memset(factor.data(), 0, bytes);
        }
        NCCL_OK(ncclGroupStart());
        NCCL_OK(ncclAllReduce(data, result, kCount, type, op, rank.comm, rank.stream));
        NCCL_OK(ncclReduceScatter(data, result + kCount * bytes, kCount, type, op, rank.comm, rank.stream));
        NCCL_OK(ncclRedOpDestroy(op, rank.comm));  // allowed as soon as the last function has returned
        NCCL_OK(ncclGroupEnd());
        CUDA_OK(cudaStreamSynchronize(rank.stream));
        const std::vector<char> want = repeated(element(type, 1 * 2 + 2 * 3), 2 * kCount);
        CHECK_EQ_IN(toHost(result, want.size()) == want, true, "type " + std::to_string(type));
        NCCL_OK(ncclRedOpCreatePreMulSum(&op, element(type, 2).data(), type, ncclScalarHostImmediate, rank.comm));
        NCCL_OK(ncclReduce(data, data, kCount, type, op, 1, rank.comm, rank.stream));
        CUDA_OK(cudaStreamSynchronize(rank.stream));
        if (rank.rank == 1) {
          CHECK(toHost(data, kCount * bytes) == repeated(element(type, 6), kCount));
        }
        NCCL_OK(ncclRedOpDestroy(op, rank.comm));
        CUDA_OK(cudaFree(data));
        CUDA_OK(cudaFree(result));
        CUDA_OK(cudaFree(deviceFactor));
      }
    }
  });
}

TEST(preMulSumIsRefusedWhereItDoesNotBelong) {
  onRanks(1, [](Rank &rank) {
    ncclUniqueId id;
    NCCL_OK(ncclGetUniqueId(&id));
    ncclComm_t other = nullptr;
    NCCL_OK(ncclCommInitRank(&other, 1, id, 0));
    float factor = 2;
    ncclRedOp_t op = ncclSum;
    NCCL_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, rank.comm));
    auto *data = deviceArray<float>(1);
    const auto refuses = [&](ncclResult_t got, const char *why) {
      CHECK_EQ_IN(got, ncclInvalidArgument, why);
      CHECK_CONTAINS(ncclGetLastError(nullptr), why);
    };
    refuses(ncclAllReduce(data, data, 1, ncclFloat32, op, other, rank.stream), "not made on this communicator");
    refuses(ncclAllReduce(data, data, 1, ncclInt32, op, rank.comm, rank.stream), "was made for ncclFloat32");
    refuses(ncclRedOpDestroy(op, other), "not made on this communicator");
    refuses(ncclRedOpDestroy(ncclSum, rank.comm), "built in");
    ncclRedOp_t none = ncclSum;
    refuses(ncclRedOpCreatePreMulSum(&none, &factor, ncclFloat32, ncclScalarDevice, rank.comm), "scalar");
    refuses(ncclRedOpCreatePreMulSum(&none, &factor, ncclFloat32, static_cast<ncclScalarResidence_t>(2), rank.comm),
            "residence 2");
    refuses(ncclRedOpCreatePreMulSum(&none, nullptr, ncclFloat32, ncclScalarHostImmediate, rank.comm), "NULL");
    NCCL_OK(ncclRedOpDestroy(op, rank.comm));
    refuses(ncclRedOpDestroy(op, rank.comm), "destroyed");
    refuses(ncclAllReduce(data, data, 1, ncclFloat32, op, rank.comm, rank.stream), "not built in");
    NCCL_OK(ncclCommDestroy(other));
  });
}

TEST(ranksThatMixPreMulSumAndSumAreTold) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<float>(1);
    float factor = 2;
    ncclRedOp_t op = ncclSum;
    if (rank.rank == 1) {
      NCCL_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, rank.comm));
    }
    NCCL_OK(ncclAllReduce(data, data, 1, ncclFloat32, op, rank.comm, rank.stream));
    CHECK_EQ(cudaStreamSynchronize(rank.stream), cudaErrorLaunchFailure);
    CHECK_CONTAINS(ncclGetLastError(rank.comm), "pre-multiplied sum");
  });
}

TEST(buffersAreRegisteredAndDeregisteredOnce) {
  onRanks(1, [](Rank &rank) {
    auto *data = deviceArray<char>(4096);
    void *first = nullptr;
    void *second = nullptr;
    NCCL_OK(ncclCommRegister(rank.comm, data, 4096, &first));
    NCCL_OK(ncclCommRegister(rank.comm, data + 1024, 1024, &second));
    CHECK(first != nullptr && second != nullptr && first != second);
    NCCL_OK(ncclCommDeregister(rank.comm, first));
    CHECK_EQ(ncclCommDeregister(rank.comm, first), ncclInvalidUsage);
    NCCL_OK(ncclCommDeregister(rank.comm, nullptr));
    CHECK_EQ(ncclCommRegister(rank.comm, data, 4097, &first), ncclInvalidArgument);
    CHECK_EQ(ncclCommRegister(rank.comm, &first, 8, &first), ncclInvalidArgument);
    CHECK_EQ(ncclCommRegister(rank.comm, data, 0, &first), ncclInvalidArgument);
    CHECK_EQ(ncclCommRegister(rank.comm, data, 8, nullptr), ncclInvalidArgument);
    CUDA_OK(cudaFree(data));
  });  // the second one ends with the communicator
}

TEST(teamsAreTheWorldAndRailsOfOne) {
  onRanks(3, [](Rank &rank) {
    const ncclTeam_t world = ncclTeamWorld(rank.comm);
    const ncclTeam_t rail = ncclTeamRail(rank.comm);
    CHECK(rail.nRanks == 1 && rail.rank == 0 && rail.stride == 3);
    for (int peer = 0; peer < 3; ++peer) {
      CHECK_EQ(ncclTeamRankToWorld(rank.comm, world, peer), peer);
      CHECK_EQ(ncclTeamRankToLsa(rank.comm, world, peer), peer);
    }
    CHECK_EQ(ncclTeamRankToWorld(rank.comm, rail, 0), rank.rank);
    CHECK_EQ(ncclTeamRankToLsa(rank.comm, ncclTeam_t{1, 0, 1}, 0), rank.rank);
  });
  CHECK_EQ(ncclTeamRail(nullptr).nRanks, 0);
  ncclResetDebugInit();
}

TEST(simulatedGroupStartsNothing) {
  onRanks(2, [](Rank &rank) {
    auto *data = deviceArray<int>(2);
    toDevice(data, {1, 1});
    ncclSimInfo_t info = {sizeof(ncclSimInfo_t), 0x74685283, 23007, -1};
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(data, data, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    NCCL_OK(ncclGroupSimulateEnd(&info));
    CHECK(info.estimatedTime > 0);
    NCCL_OK(ncclAllReduce(data + 1, data + 1, 1, ncclInt32, ncclSum, rank.comm, rank.stream));
    CUDA_OK(cudaStreamSynchronize(rank.stream));
    CHECK(toHost(data, 2) == std::vector<int>({1, 2}));
    info.magic = 0;
    NCCL_OK(ncclGroupStart());
    CHECK_EQ(ncclGroupSimulateEnd(&info), ncclInvalidArgument);
    CHECK_EQ(ncclGroupSimulateEnd(&info), ncclInvalidUsage);
    CUDA_OK(cudaFree(data));
  });
}

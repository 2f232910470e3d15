// The table of operations and the exported functions that fill it.
#include "red_op.h"

#include <cstring>
#include <map>
#include <mutex>

#include "error.h"
#include "memory.h"
#include "open_comm.h"
#include "reduce.h"

namespace ncclffm::cpu {

namespace {

struct Entry {
  const Communicator *comm;
  PreMulSum op;
};

struct Table {
  std::mutex mutex;
  std::map<int, Entry> entries;
  int last = ncclNumOps;
};

Table &table() {
  static auto *all = new Table;  // leaked, as every table of the backend
  return *all;
}

}  // namespace

std::optional<PreMulSum> findRedOp(const Communicator &comm, int op) {
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().entries.find(op);
  return found == table().entries.end() || found->second.comm != &comm ? std::nullopt
                                                                       : std::make_optional(found->second.op);
}

void closeRedOps(const Communicator &comm) {
  std::lock_guard<std::mutex> lock(table().mutex);
  for (auto entry = table().entries.begin(); entry != table().entries.end();) {
    entry = entry->second.comm == &comm ? table().entries.erase(entry) : std::next(entry);
  }
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  return guardNccl("ncclRedOpCreatePreMulSum", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclRedOpCreatePreMulSum", handle);
    if (op == nullptr || scalar == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: op or scalar is NULL");
    }
    const size_t bytes = elementBytes(datatype);
    if (bytes == 0) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclRedOpCreatePreMulSum: datatype %d is not an ncclDataType_t", datatype));
    }
    PreMulSum created = {datatype, 0, nullptr};
    if (residence == ncclScalarHostImmediate) {
      std::memcpy(&created.scalar, scalar, bytes);
    } else if (residence == ncclScalarDevice && isDeviceVisible(scalar, bytes)) {
      created.deviceScalar = scalar;
    } else {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclRedOpCreatePreMulSum: residence %d is not an ncclScalarResidence_t, or scalar %p "
                               "is not %zu bytes of device or pinned memory",
                               residence, scalar, bytes));
    }
    std::lock_guard<std::mutex> lock(table().mutex);
    table().entries[++table().last] = {comm.get(), created};
    *op = static_cast<ncclRedOp_t>(table().last);
    return ncclSuccess;
  });
}

// Collectives that were given the operation have copied what they need.
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  return guardNccl("ncclRedOpDestroy", [&] {
    const std::shared_ptr<OpenComm> open = openHandle("ncclRedOpDestroy", handle);
    const std::shared_ptr<Communicator> comm = open->comm();
    if (comm == nullptr || !findRedOp(*comm, op)) {
      throw NcclFailure(
          ncclInvalidArgument,
          format("ncclRedOpDestroy: op %d is built in, or was not made on this communicator, or destroyed", op));
    }
    std::lock_guard<std::mutex> lock(table().mutex);
    table().entries.erase(op);
    return ncclSuccess;
  });
}

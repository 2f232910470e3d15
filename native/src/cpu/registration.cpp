// ncclCommRegister: here it makes nothing faster; the handles and their rules are NCCL's.
#include "registration.h"

#include "error.h"
#include "handles.h"
#include "open_comm.h"
#include "operation.h"

namespace ncclffm::cpu {

namespace {

struct Registration {
  const Communicator *comm;
};

Handles<void *, Registration> &registrations() {
  static auto *table = new Handles<void *, Registration>(0x500000000);  // leaked, as every table of the backend
  return *table;
}

}  // namespace

void closeRegistrations(const Communicator &comm) {
  registrations().removeIf([&](const Registration &registration) { return registration.comm == &comm; });
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclCommRegister(const ncclComm_t handle, void *buff, size_t size, void **result) {
  return guardNccl("ncclCommRegister", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommRegister", handle);
    comm->checkUsable("ncclCommRegister");
    if (result == nullptr || size == 0) {
      throw NcclFailure(ncclInvalidArgument, "ncclCommRegister: handle is NULL or size is 0");
    }
    (void)checkedBuffer("ncclCommRegister", "buff", buff, size, *comm);
    *result = registrations().add(std::make_shared<Registration>(Registration{comm.get()}));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommDeregister(const ncclComm_t handle, void *registration) {
  return guardNccl("ncclCommDeregister", [&] {
    const std::shared_ptr<OpenComm> open = openHandle("ncclCommDeregister", handle);
    if (registration == nullptr) {
      return ncclSuccess;  // as NCCL, whose ncclCommRegister may give NULL
    }
    const std::shared_ptr<Registration> found = registrations().find(registration);
    if (found == nullptr || found->comm != open->comm().get() || registrations().remove(registration) == nullptr) {
      throw NcclFailure(ncclInvalidUsage,
                        format("ncclCommDeregister: handle %p is not registered on this communicator", registration));
    }
    return ncclSuccess;
  });
}

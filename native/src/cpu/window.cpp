// Registration of windows, a collective of the callers' threads, and the addresses of peers' memory.
#include "window.h"

#include <algorithm>
#include <vector>

#include "error.h"
#include "group.h"
#include "heap.h"
#include "operation.h"

namespace ncclffm::cpu {

namespace {

struct Window {
  std::shared_ptr<Communicator> comm;  // keeps the peers' heaps mapped
  struct Part {
    char *base;  // as mapped here
    uint64_t bytes;
  };
  std::vector<Part> parts;  // by rank
};

Handles<ncclWindow_t, Window> &windows() {
  static auto *table = new Handles<ncclWindow_t, Window>(0x400000000);  // leaked, as every table of the backend
  return *table;
}

constexpr const char *kRegister = "ncclCommWindowRegister";

std::shared_ptr<Window> gather(const std::shared_ptr<Communicator> &comm) {
  if (comm->awaitAll(comm->hostCursor(), kRegister) != ncclSuccess) {
    throw NcclFailure(comm->error(), comm->errorText());
  }
  auto window = std::make_shared<Window>();
  window->comm = comm;
  for (int rank = 0; rank < comm->nRanks(); ++rank) {
    const Descriptor &d = comm->descriptorOf(comm->hostCursor(), rank);
    char *base = comm->at(rank, d.send, d.count);
    if (base == nullptr) {
      throw NcclFailure(
          comm->fail(ncclInternalError, format("%s: rank %d names memory outside its heap", kRegister, rank)),
          comm->errorText());
    }
    window->parts.push_back({base, d.count});
  }
  return window;
}

}  // namespace

void registerAll(std::vector<WindowRequest> requests) {
  while (!requests.empty()) {
    // One window per communicator and round: a second one must not overwrite the first's descriptor.
    std::vector<WindowRequest> round;
    std::vector<WindowRequest> later;
    for (WindowRequest &request : requests) {
      const bool taken = std::any_of(round.begin(), round.end(),
                                     [&](const WindowRequest &other) { return other.comm == request.comm; });
      (taken ? later : round).push_back(std::move(request));
    }
    for (const WindowRequest &request : round) {
      request.comm->arrive(request.comm->hostCursor(), request.descriptor);
    }
    for (const WindowRequest &request : round) {
      *request.window = windows().add(gather(request.comm));
    }
    requests = std::move(later);
  }
}

void closeWindows(const Communicator &comm) {
  windows().removeIf([&](const Window &window) { return window.comm.get() == &comm; });
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void *buff, size_t size, ncclWindow_t *window, int flags) {
  return inGroup(guardNccl(kRegister, [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator(kRegister, handle);
    if (comm->error() != ncclSuccess) {
      throw NcclFailure(comm->error(), comm->errorText());
    }
    if (window == nullptr || size == 0) {
      throw NcclFailure(ncclInvalidArgument, format("%s: win is NULL or size is 0", kRegister));
    }
    if ((flags & ~(NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING)) != 0) {
      throw NcclFailure(ncclInvalidArgument, format("%s: unknown bits in winFlags 0x%x", kRegister, flags));
    }
    *window = nullptr;
    const uint64_t offset = checkedBuffer(kRegister, "buff", buff, size, *comm);
    if (Heap::instance().find(buff)->by != AllocatedBy::kNcclMemAlloc) {
      throw NcclFailure(ncclInvalidArgument, format("%s: buff %p is not from ncclMemAlloc", kRegister, buff));
    }
    if (offset % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
      throw NcclFailure(ncclInvalidArgument,
                        format("%s: buff %p is not aligned to %d bytes", kRegister, buff, NCCL_WIN_REQUIRED_ALIGNMENT));
    }
    WindowRequest request{comm, {}, window};
    request.descriptor.function = Function::kWindowRegister;
    request.descriptor.root = flags;
    request.descriptor.count = size;
    request.descriptor.send = offset;
    return submit(std::move(request));
  }));
}

// Local: peers that still use the memory are the caller's concern, as they are when it is freed.
ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  return guardNccl("ncclCommWindowDeregister", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclCommWindowDeregister", handle);
    const std::shared_ptr<Window> found = windows().find(window);
    if (found == nullptr || found->comm != comm) {
      throw NcclFailure(
          ncclInvalidArgument,
          format("ncclCommWindowDeregister: window %p is not open on this communicator", static_cast<void *>(window)));
    }
    (void)windows().remove(window);
    return ncclSuccess;
  });
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t handle, size_t offset, int lsaRank, void **pointer) {
  return guardNccl("ncclGetLsaDevicePointer", [&] {
    const std::shared_ptr<Window> window = windows().find(handle);
    if (window == nullptr || pointer == nullptr) {
      throw NcclFailure(ncclInvalidArgument, format("ncclGetLsaDevicePointer: window %p is not open or outPtr is NULL",
                                                    static_cast<void *>(handle)));
    }
    const auto count = static_cast<int>(window->parts.size());
    if (lsaRank < 0 || lsaRank >= count) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclGetLsaDevicePointer: lsaRank %d is not in [0, %d)", lsaRank, count));
    }
    const Window::Part &part = window->parts[static_cast<size_t>(lsaRank)];
    if (offset >= part.bytes) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclGetLsaDevicePointer: offset %zu is outside the window of %llu bytes of rank %d",
                               offset, static_cast<unsigned long long>(part.bytes), lsaRank));
    }
    *pointer = part.base + offset;
    return ncclSuccess;
  });
}

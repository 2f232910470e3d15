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
  int flags = 0;
};

Handles<ncclWindow_t, Window> &windows() {
  static auto *table = new Handles<ncclWindow_t, Window>(0x400000000);  // leaked, as every table of the backend
  return *table;
}

constexpr const char *kRegister = "ncclCommWindowRegister";

std::shared_ptr<Window> gather(const std::shared_ptr<Communicator> &comm, int flags) {
  comm->meetAll(kRegister);
  auto window = std::make_shared<Window>();
  window->comm = comm;
  window->flags = flags;
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

ncclResult_t pointerInto(const char *function, ncclWindow_t handle, size_t offset, int rank, void **pointer) {
  const std::shared_ptr<Window> window = windows().find(handle);
  if (window == nullptr || pointer == nullptr) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: window %p is not open or outPtr is NULL", function, static_cast<void *>(handle)));
  }
  const auto count = static_cast<int>(window->parts.size());
  if (rank < 0 || rank >= count) {
    throw NcclFailure(ncclInvalidArgument, format("%s: rank %d is not in [0, %d)", function, rank, count));
  }
  const Window::Part &part = window->parts[static_cast<size_t>(rank)];
  if (offset >= part.bytes) {
    throw NcclFailure(ncclInvalidArgument, format("%s: offset %zu is outside the window of %llu bytes of rank %d",
                                                  function, offset, static_cast<unsigned long long>(part.bytes), rank));
  }
  *pointer = part.base + offset;
  return ncclSuccess;
}

}  // namespace

bool isInSymmetricWindow(const Communicator &comm, const void *pointer, uint64_t bytes) {
  const auto *address = static_cast<const char *>(pointer);
  const auto windowsNow = windows().all();
  return std::any_of(windowsNow.begin(), windowsNow.end(), [&](const std::shared_ptr<Window> &window) {
    const Window::Part &own = window->parts[static_cast<size_t>(window->comm->rank())];
    return window->comm.get() == &comm && (window->flags & NCCL_WIN_COLL_SYMMETRIC) != 0 && address >= own.base &&
           bytes <= own.bytes && static_cast<uint64_t>(address - own.base) <= own.bytes - bytes;
  });
}

uint64_t offsetInWindow(const char *function, const Communicator &comm, ncclWindow_t handle, int rank, uint64_t offset,
                        uint64_t bytes) {
  const std::shared_ptr<Window> window = windows().find(handle);
  if (window == nullptr || window->comm.get() != &comm) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: window %p is not open on this communicator", function, static_cast<void *>(handle)));
  }
  const Window::Part &part = window->parts[static_cast<size_t>(rank)];
  if (bytes > part.bytes || offset > part.bytes - bytes) {
    throw NcclFailure(ncclInvalidArgument,
                      format("%s: %llu bytes at offset %llu leave the window of %llu bytes of rank %d", function,
                             static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset),
                             static_cast<unsigned long long>(part.bytes), rank));
  }
  return static_cast<uint64_t>(part.base - comm.processOf(rank).heapBase) + offset;
}

void closeWindows(const Communicator &comm) {
  windows().removeIf([&](const Window &window) { return window.comm.get() == &comm; });
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclCommWindowRegister(ncclComm_t handle, void *buff, size_t size, ncclWindow_t *window, int flags) {
  return inGroup(guardNccl(kRegister, [&] {
    const std::shared_ptr<OpenComm> open = readyHandle(kRegister, handle);
    const std::shared_ptr<Communicator> comm = open->comm();
    comm->checkUsable(kRegister);
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
    Descriptor descriptor;
    descriptor.function = Function::kWindowRegister;
    descriptor.root = flags;
    descriptor.count = size;
    descriptor.send = offset;
    return submitUntold(Task{kRegister,
                             open,
                             {[comm, descriptor] { comm->arrive(comm->hostCursor(), descriptor); },
                              [comm, window, flags] { *window = windows().add(gather(comm, flags)); }}});
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

ncclResult_t ncclWinGetUserPtr(ncclComm_t handle, ncclWindow_t window, void **pointer) {
  return guardNccl("ncclWinGetUserPtr", [&] {
    const std::shared_ptr<Communicator> comm = openCommunicator("ncclWinGetUserPtr", handle);
    const std::shared_ptr<Window> found = windows().find(window);
    if (found == nullptr || found->comm != comm || pointer == nullptr) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclWinGetUserPtr: window %p is not open on this communicator or outUserPtr is NULL",
                               static_cast<void *>(window)));
    }
    *pointer = found->parts[static_cast<size_t>(comm->rank())].base;
    return ncclSuccess;
  });
}

ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsaRank, void **pointer) {
  return guardNccl("ncclGetLsaDevicePointer",
                   [&] { return pointerInto("ncclGetLsaDevicePointer", window, offset, lsaRank, pointer); });
}

// One team of all ranks: a rank of the communicator is the same rank of the team.
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **pointer) {
  return guardNccl("ncclGetPeerDevicePointer",
                   [&] { return pointerInto("ncclGetPeerDevicePointer", window, offset, peer, pointer); });
}

// There is no multicast: NULL and ncclSuccess, as NCCL says where NVLink has none.
ncclResult_t ncclGetMultimemDevicePointer(ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem,
                                          void **pointer) {
  return guardNccl("ncclGetMultimemDevicePointer", [&] {
    if (multimem.mcBasePtr == nullptr) {
      throw NcclFailure(ncclInvalidArgument, "ncclGetMultimemDevicePointer: multimem.mcBasePtr is NULL");
    }
    return ncclGetLsaMultimemDevicePointer(window, offset, pointer);
  });
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t, void **pointer) {
  return guardNccl("ncclGetLsaMultimemDevicePointer", [&] {
    if (windows().find(window) == nullptr || pointer == nullptr) {
      throw NcclFailure(ncclInvalidArgument,
                        format("ncclGetLsaMultimemDevicePointer: window %p is not open or outPtr is NULL",
                               static_cast<void *>(window)));
    }
    *pointer = nullptr;
    return ncclSuccess;
  });
}

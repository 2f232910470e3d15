// Peer access, PCI bus ids, UUIDs, copies between devices.
#include "topology.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "abi.h"
#include "device.h"
#include "error.h"
#include "fd.h"

namespace ncclffm::cpu {

namespace {

/// The pairs (device, peer) for which cudaDeviceEnablePeerAccess was called.
struct PeerTable {
  std::mutex mutex;
  std::set<std::pair<int, int>> enabled;
};

PeerTable &peerTable() {
  static auto *table = new PeerTable;  // leaked, as every table of the backend
  return *table;
}

bool isDevice(int device) {
  return device >= 0 && device < deviceCount();
}

// Emulated devices are on a PCI domain that no machine has, with a bus of their own each up to 256.
constexpr unsigned int kPciDomain = 0xffff;
constexpr unsigned int kPciBuses = 256;
constexpr int kPciIdBytes = 13;  // "FFFF:00:00.0" and its end

/// FNV-1a, finished with a multiplication that lets the last byte reach every bit.
uint64_t hash(uint64_t start, const char *text, size_t length) {
  uint64_t value = start;
  for (size_t i = 0; i < length; ++i) {
    value = (value ^ static_cast<unsigned char>(text[i])) * 0x100000001b3u;
  }
  return (value ^ (value >> 32)) * 0x9e3779b97f4a7c15u;
}

}  // namespace

bool canAccessPeer(int device, int peer) {
  const char *allowed = std::getenv("NCCLFFM_CPU_PEER_ACCESS");
  return device != peer && (allowed == nullptr || std::strcmp(allowed, "0") != 0);
}

void fillUuid(int device, char *uuid) {
  char text[80] = "";
  const Fd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  const ssize_t got = file.open() ? read(file.get(), text, 64) : 0;
  size_t length = got > 0 ? static_cast<size_t>(got) : 0;
  std::memcpy(text + length, &device, sizeof(device));
  length += sizeof(device);
  const uint64_t halves[2] = {hash(0xcbf29ce484222325u, text, length), hash(0x84222325cbf29ce4u, text, length)};
  std::memcpy(uuid, halves, sizeof(halves));
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

cudaError_t cudaDeviceCanAccessPeer(int *canAccess, int device, int peer) {
  return guardCuda([&] {
    if (canAccess == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(device) || !isDevice(peer)) {
      return cudaErrorInvalidDevice;
    }
    *canAccess = canAccessPeer(device, peer) ? 1 : 0;
    return cudaSuccess;
  });
}

// The state is kept, and nothing depends on it: the devices are threads of one address space.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) {
  return guardCuda([&] {
    if (flags != 0) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(peer) || peer == currentDevice()) {
      return cudaErrorInvalidDevice;
    }
    if (!canAccessPeer(currentDevice(), peer)) {
      return cudaErrorPeerAccessUnsupported;
    }
    std::lock_guard<std::mutex> lock(peerTable().mutex);
    const bool added = peerTable().enabled.insert({currentDevice(), peer}).second;
    return added ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
  });
}

cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return guardCuda([&] {
    if (!isDevice(peer)) {
      return cudaErrorInvalidDevice;
    }
    std::lock_guard<std::mutex> lock(peerTable().mutex);
    const bool removed = peerTable().enabled.erase({currentDevice(), peer}) != 0;
    return removed ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
  });
}

cudaError_t cudaDeviceGetP2PAttribute(int *value, cudaDeviceP2PAttr attribute, int device, int peer) {
  return guardCuda([&] {
    if (value == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(device) || !isDevice(peer) || device == peer) {
      return cudaErrorInvalidDevice;
    }
    switch (attribute) {
      case cudaDevP2PAttrAccessSupported:
      case cudaDevP2PAttrNativeAtomicSupported:
        *value = canAccessPeer(device, peer) ? 1 : 0;
        return cudaSuccess;
      case cudaDevP2PAttrPerformanceRank:  // all links are alike
      case cudaDevP2PAttrCudaArrayAccessSupported:
      case cudaDevP2PAttrOnlyPartialNativeAtomicSupported:
        *value = 0;
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  return guardCuda([&] {
    if (id == nullptr || length < kPciIdBytes) {
      return cudaErrorInvalidValue;
    }
    if (!isDevice(device)) {
      return cudaErrorInvalidDevice;
    }
    const auto number = static_cast<unsigned int>(device);
    std::snprintf(id, static_cast<size_t>(length), "%04X:%02X:%02X.0", kPciDomain, number % kPciBuses,
                  number / kPciBuses);
    return cudaSuccess;
  });
}

// As CUDA: domain:bus:device.function, domain:bus:device or bus:device.function, hexadecimal; no domain is domain 0.
cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id) {
  return guardCuda([&] {
    if (device == nullptr || id == nullptr) {
      return cudaErrorInvalidValue;
    }
    unsigned int domain = 0;
    unsigned int bus = 0;
    unsigned int slot = 0;
    unsigned int function = 0;
    const auto matches = [&](int fields, int want, const int &end) {
      return fields == want && end > 0 && id[end] == '\0';
    };
    int end = 0;
    const int whole = std::sscanf(id, "%x:%x:%x.%x%n", &domain, &bus, &slot, &function, &end);
    if (!matches(whole, 4, end)) {
      function = 0;
      end = 0;
      const int noFunction = std::sscanf(id, "%x:%x:%x%n", &domain, &bus, &slot, &end);
      if (!matches(noFunction, 3, end)) {
        domain = 0;
        end = 0;
        const int noDomain = std::sscanf(id, "%x:%x.%x%n", &bus, &slot, &function, &end);
        if (!matches(noDomain, 3, end)) {
          return cudaErrorInvalidValue;
        }
      }
    }
    const uint64_t number = static_cast<uint64_t>(slot) * kPciBuses + bus;
    if (domain != kPciDomain || bus >= kPciBuses || function != 0 || number >= static_cast<uint64_t>(deviceCount())) {
      return cudaErrorInvalidDevice;
    }
    *device = static_cast<int>(number);
    return cudaSuccess;
  });
}

// Works between any two devices, as on CUDA, where a pair without peer access goes through the host.
cudaError_t cudaMemcpyPeerAsync(void *to, int toDevice, const void *from, int fromDevice, size_t bytes,
                                cudaStream_t stream) {
  return guardCuda([&] {
    if (!isDevice(toDevice) || !isDevice(fromDevice)) {
      return cudaErrorInvalidDevice;
    }
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  });
}

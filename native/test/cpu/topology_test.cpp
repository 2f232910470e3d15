// What devices are to each other: peer access, attributes of the links, PCI bus ids, UUIDs, copies between devices.
#include <cstring>
#include <set>

#include "world.h"

using namespace test;

namespace {

std::string uuidOf(int device) {
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, device));
  return std::string(properties.uuid, sizeof(properties.uuid));
}

int p2p(cudaDeviceP2PAttr attribute, int device, int peer) {
  int value = -1;
  CUDA_OK(cudaDeviceGetP2PAttribute(&value, attribute, device, peer));
  return value;
}

}  // namespace

TEST(devicesReachEachOtherAndNotThemselves) {
  int can = -1;
  CUDA_OK(cudaDeviceCanAccessPeer(&can, 0, 7));
  CHECK_EQ(can, 1);
  CUDA_OK(cudaDeviceCanAccessPeer(&can, 3, 3));
  CHECK_EQ(can, 0);
  CHECK_EQ(cudaDeviceCanAccessPeer(&can, 0, 8), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceCanAccessPeer(&can, -1, 0), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceCanAccessPeer(nullptr, 0, 1), cudaErrorInvalidValue);
  CHECK_EQ(p2p(cudaDevP2PAttrAccessSupported, 0, 1), 1);
  CHECK_EQ(p2p(cudaDevP2PAttrNativeAtomicSupported, 1, 0), 1);
  CHECK_EQ(p2p(cudaDevP2PAttrPerformanceRank, 1, 0), 0);
  CHECK_EQ(p2p(cudaDevP2PAttrCudaArrayAccessSupported, 1, 0), 0);
  CHECK_EQ(cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrAccessSupported, 2, 2), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceGetP2PAttribute(&can, cudaDevP2PAttrAccessSupported, 2, 8), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceGetP2PAttribute(&can, static_cast<cudaDeviceP2PAttr>(9), 1, 2), cudaErrorInvalidValue);
}

TEST(peerAccessIsSwitchedPerDirectionAndOnce) {
  CUDA_OK(cudaSetDevice(1));
  CHECK_EQ(cudaDeviceDisablePeerAccess(2), cudaErrorPeerAccessNotEnabled);
  CUDA_OK(cudaDeviceEnablePeerAccess(2, 0));
  CHECK_EQ(cudaDeviceEnablePeerAccess(2, 0), cudaErrorPeerAccessAlreadyEnabled);
  CHECK_EQ(cudaGetLastError(), cudaErrorPeerAccessAlreadyEnabled);
  CUDA_OK(cudaSetDevice(2));
  CHECK_EQ(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
  CUDA_OK(cudaDeviceEnablePeerAccess(1, 0));
  CUDA_OK(cudaDeviceDisablePeerAccess(1));
  CUDA_OK(cudaSetDevice(1));
  CUDA_OK(cudaDeviceDisablePeerAccess(2));
  CHECK_EQ(cudaDeviceDisablePeerAccess(2), cudaErrorPeerAccessNotEnabled);
  CHECK_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceEnablePeerAccess(8, 0), cudaErrorInvalidDevice);
  CHECK_EQ(cudaDeviceEnablePeerAccess(2, 1), cudaErrorInvalidValue);
  CHECK_EQ(cudaDeviceDisablePeerAccess(-1), cudaErrorInvalidDevice);
  std::atomic<int> first{0};
  onThreads(4, [&](int) {
    CUDA_OK(cudaSetDevice(5));
    const cudaError_t error = cudaDeviceEnablePeerAccess(6, 0);
    CHECK(error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled);
    first += error == cudaSuccess ? 1 : 0;
  });
  CHECK_EQ(first.load(), 1);
}

TEST(environmentTakesPeerAccessAway) {
  setenv("NCCLFFM_CPU_PEER_ACCESS", "0", 1);
  int can = -1;
  CUDA_OK(cudaDeviceCanAccessPeer(&can, 0, 1));
  CHECK_EQ(can, 0);
  CHECK_EQ(p2p(cudaDevP2PAttrAccessSupported, 0, 1), 0);
  CHECK_EQ(p2p(cudaDevP2PAttrNativeAtomicSupported, 0, 1), 0);
  CHECK_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessUnsupported);
  CHECK_EQ(std::string(cudaGetErrorString(cudaGetLastError())),
           "peer access is not supported between these two devices");
}

TEST(pciBusIdsNameDevices) {
  std::set<std::string> seen;
  for (int device = 0; device < 8; ++device) {
    char id[13];
    CUDA_OK(cudaDeviceGetPCIBusId(id, sizeof(id), device));
    CHECK(seen.insert(id).second);
    std::string text = id;
    std::string lower = text;
    for (char &c : lower) {
      c = static_cast<char>(std::tolower(c));
    }
    for (const std::string &form : {text, lower, text.substr(0, text.size() - 2)}) {
      int found = -1;
      CUDA_OK(cudaDeviceGetByPCIBusId(&found, form.c_str()));
      CHECK_EQ_IN(found, device, form);
    }
  }
  char id[64];
  CHECK_EQ(cudaDeviceGetPCIBusId(id, 12, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaDeviceGetPCIBusId(nullptr, 64, 0), cudaErrorInvalidValue);
  CHECK_EQ(cudaDeviceGetPCIBusId(id, 64, 8), cudaErrorInvalidDevice);
  int device = -1;
  for (const char *foreign : {"0000:00:00.0", "00:01.0", "FFFF:08:00.0", "FFFF:00:00.1", "FFFF:100:00.0"}) {
    CHECK_EQ_IN(cudaDeviceGetByPCIBusId(&device, foreign), cudaErrorInvalidDevice, foreign);
  }
  for (const char *wrong : {"", "FFFF", "FFFF:00", "FFFF:00:00.0y", "FFFF:00:00.", "no:such:id.0"}) {
    CHECK_EQ_IN(cudaDeviceGetByPCIBusId(&device, wrong), cudaErrorInvalidValue, wrong);
  }
  CHECK_EQ(cudaDeviceGetByPCIBusId(nullptr, "FFFF:00:00.0"), cudaErrorInvalidValue);
  CHECK_EQ(device, -1);
}

// That they are the same in other processes is checked in ipc_test.cpp.
TEST(uuidsTellDevicesApart) {
  std::set<std::string> seen;
  for (int device = 0; device < 8; ++device) {
    CHECK(seen.insert(uuidOf(device)).second);
    CHECK(uuidOf(device) == uuidOf(device));
  }
}

TEST(copiesBetweenDevicesFollowTheStream) {
  setenv("NCCLFFM_CPU_PEER_ACCESS", "0", 1);  // they need none
  CUDA_OK(cudaSetDevice(1));
  auto *from = deviceArray<int>(1000);
  toDevice(from, std::vector<int>(1000, 5));
  CUDA_OK(cudaSetDevice(2));
  auto *to = deviceArray<int>(1000);
  const cudaStream_t stream = newStream();
  Gate gate;
  CUDA_OK(cudaLaunchHostFunc(stream, Gate::waitAt, &gate));
  CUDA_OK(cudaMemcpyPeerAsync(to, 2, from, 1, 1000 * sizeof(int), stream));
  CHECK_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  gate.open();
  CUDA_OK(cudaStreamSynchronize(stream));
  CHECK(toHost(to, 1000) == std::vector<int>(1000, 5));
  int local = 0;
  CHECK_EQ(cudaMemcpyPeerAsync(to, 2, from, 8, 4, stream), cudaErrorInvalidDevice);
  CHECK_EQ(cudaMemcpyPeerAsync(to, -1, from, 1, 4, stream), cudaErrorInvalidDevice);
  CHECK_EQ(cudaMemcpyPeerAsync(&local, 2, from, 1, 4, stream), cudaErrorInvalidValue);
  CHECK_EQ(cudaMemcpyPeerAsync(to, 2, from, 1, 4001, stream), cudaErrorInvalidValue);
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaFree(to));
  CUDA_OK(cudaFree(from));
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.lsa.DeviceTopology;
import io.ncclffm.lsa.LsaPath;
import io.ncclffm.lsa.LsaProvider;
import java.time.Duration;
import org.junit.jupiter.api.Test;

class DeviceTopologyTest {
  @Test
  void everyDeviceReachesItself() {
    DeviceTopology topology = DeviceTopology.query();
    assertEquals(CudaDevice.count(), topology.devices().size());
    for (CudaDevice device : topology.devices()) {
      DeviceTopology.Pair self = topology.pair(device, device);
      assertTrue(self.canAccess() && self.nativeAtomics() && self.sameGpu(), self.toString());
      assertEquals(LsaPath.SAME_GPU, topology.path(device, device, LsaProvider.CUDA_IPC));
      assertEquals(LsaPath.HOST_STAGED, topology.path(device, device, LsaProvider.HOST_STAGED));
      assertNull(
          topology.path(
              device, device, TestRanks.onCpu() ? LsaProvider.NCCL_WINDOW : LsaProvider.CPU));
    }
  }

  @Test
  void devicesHaveIdentitiesOfTheirOwn() {
    for (int a = 0; a < CudaDevice.count(); a++) {
      for (int b = 0; b < a; b++) {
        assertNotEquals(new CudaDevice(a).uuid(), new CudaDevice(b).uuid());
        assertNotEquals(new CudaDevice(a).pciBusId(), new CudaDevice(b).pciBusId());
      }
    }
  }

  @Test
  void theTableHasARowForEveryPair() {
    DeviceTopology topology = DeviceTopology.query();
    String table = topology.toString();
    System.out.println(table);
    int devices = topology.devices().size();
    assertEquals(devices + 1 + devices * devices, table.lines().count(), table);
    assertTrue(table.contains(new CudaDevice(0).pciBusId()), table);
  }

  @Test
  void pairsWithoutPeerAccessAreLeftToTheHost() throws Exception {
    TestRanks.assumeCpu("peer access cannot be taken away");
    try (ChildJvm child =
        ChildJvm.of(WithoutPeerAccess.class)
            .environment("NCCLFFM_CPU_PEER_ACCESS", 0)
            .environment("NCCLFFM_CPU_DEVICES", 2)
            .start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(60)), child.output());
      Messages.assertNames(new Exception(child.output()), "IPC null", "HOST HOST_STAGED");
    }
  }

  /** Prints what the providers would do. */
  static final class WithoutPeerAccess {
    private WithoutPeerAccess() {}

    public static void main(String[] args) {
      DeviceTopology topology = DeviceTopology.query();
      CudaDevice a = new CudaDevice(0);
      CudaDevice b = new CudaDevice(1);
      System.out.println("IPC " + topology.path(a, b, LsaProvider.CUDA_IPC));
      System.out.println("HOST " + topology.path(a, b, LsaProvider.HOST_STAGED));
    }
  }

  @Test
  void anUnknownDeviceIsRefused() {
    assertThrows(IllegalArgumentException.class, () -> new CudaDevice(CudaDevice.count()));
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclDeviceCommunicator;
import io.ncclffm.core.NcclDeviceRequirements;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclDevComm;
import java.lang.foreign.MemorySegment;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** NCCL's own device communicators; only a GPU has them. */
class NcclDeviceCommunicatorTest {
  private static boolean isBindingsVersionLoaded() {
    return Nccl.versions().nccl().version().equals(Nccl.versions().nccl().headerVersion());
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void everyRankGetsOneThatKnowsItsTeam(int ranks) {
    assumeTrue(!TestRanks.onCpu(), "the CPU backend has none");
    assumeTrue(isBindingsVersionLoaded(), "needs the NCCL of the bindings");
    NcclDeviceRequirements requirements =
        NcclDeviceRequirements.builder().lsaBarrierCount(4).build();
    try (LocalWorld world = TestRanks.open(ranks)) {
      world.run(
          r -> {
            for (int round = 0; round < 3; round++) {
              NcclDeviceCommunicator made = r.communicator().createDeviceCommunicator(requirements);
              MemorySegment struct = made.struct();
              assertEquals(NcclH.NCCL_API_MAGIC(), ncclDevComm.magic(struct));
              assertEquals(r.rank(), ncclDevComm.rank(struct));
              assertEquals(ranks, ncclDevComm.nRanks(struct));
              assertEquals(r.communicator().teamLsa().size(), ncclDevComm.lsaSize(struct));
              if (round < 2) {
                made.close(); // the last is left to the communicator
                made.close();
                assertThrows(IllegalStateException.class, made::struct);
              }
            }
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void whatTheMachineLacksIsRefused() {
    assumeTrue(!TestRanks.onCpu(), "the CPU backend has none");
    assumeTrue(isBindingsVersionLoaded(), "needs the NCCL of the bindings");
    NcclDeviceRequirements signals =
        NcclDeviceRequirements.builder().ginSignalCount(1).build(); // and no connection
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r ->
              Messages.assertNames(
                  assertThrows(
                      NcclException.class,
                      () -> r.communicator().createDeviceCommunicator(signals)),
                  "ncclDevCommCreate",
                  "GIN"));
    }
  }

  @Test
  void theCpuBackendSaysThatItHasNone() {
    TestRanks.assumeCpu("a GPU has them");
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r ->
              Messages.assertNames(
                  assertThrows(
                      UnsupportedByLibraryException.class,
                      () -> r.communicator().createDeviceCommunicator(NcclDeviceRequirements.NONE)),
                  "ncclDevCommCreate",
                  "CPU backend"));
      TestRanks.assertWorks(world);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.UnsupportedByLibraryException;
import java.util.Arrays;

/** Where tests get their ranks from, and what they ask about the machine below. */
public final class TestRanks {
  /** The most that any test opens. On a GPU the process must be prepared for them in advance. */
  static final int MOST = 8;

  /** The most that the loaded NCCL allows here. */
  private static final int LIMIT = prepareForMost();

  private static int prepareForMost() {
    try {
      DeviceSharing.prepare(MOST, MOST);
      return MOST;
    } catch (UnsupportedByLibraryException e) { // an older NCCL: one rank a GPU
      return CudaDevice.count();
    }
  }

  /** For tests that open ranks by themselves: nothing but the initialisation of this class. */
  static void prepare() {}

  private TestRanks() {}

  /**
   * Ranks that have met once. NCCL connects them inside their first collective, where a rank waits
   * in the call itself for one that does not come.
   */
  public static LocalWorld open(int ranks) {
    assumeTrue(
        ranks <= LIMIT,
        "NCCL " + Nccl.versions().nccl().version() + " takes no more than a rank a GPU");
    LocalWorld world = LocalWorld.open(ranks);
    try {
      assertWorks(world);
      return world;
    } catch (RuntimeException | Error e) {
      world.close();
      throw e;
    }
  }

  public static boolean onCpu() {
    return Nccl.versions().backend() == Backend.CPU;
  }

  public static void assumeCpu(String why) {
    assumeTrue(onCpu(), "only on the CPU backend: " + why);
  }

  static void assumeDevices(int least) {
    int devices = CudaDevice.count();
    assumeTrue(devices >= least, "needs " + least + " devices, there are " + devices);
  }

  static void assumeShim() {
    assumeTrue(
        Nccl.versions().shim() != null, "the CUDA shim was not built: no nvcc at build time");
  }

  /** A real all-reduce: the ranks' communicators and streams still do their work. */
  static void assertWorks(LocalWorld world) {
    float[][] results = new float[world.size()][1000];
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            Arrays.fill(results[rank.rank()], rank.rank() + 1);
            x.of(rank).copyFrom(results[rank.rank()], rank.stream());
            rank.communicator().allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
            x.of(rank).copyTo(results[rank.rank()], rank.stream());
          });
    }
    float[] expected = new float[1000];
    Arrays.fill(expected, world.size() * (world.size() + 1) / 2f);
    for (float[] result : results) {
      assertArrayEquals(expected, result);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.io.IOException;
import org.junit.jupiter.api.Test;

/** A process that makes, splits and closes communicators for long does not grow. */
class CyclesTest {
  /** What the JVM's own heap and the allocator's caches may add after the warm-up. */
  private static final long MORE_KIB = 32 << 10;

  @Test
  void createSplitAndCloseLeaveNothingBehind() throws IOException {
    // On a GPU a pair of ranks takes a second to set up; a leak of one cycle shows in ten as well.
    int cycles = TestRanks.onCpu() ? 1000 : 10;
    int warmUp = TestRanks.onCpu() ? 200 : 3;
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT32, 1)) {
      cycle(world, x, warmUp);
      System.gc();
      Resources before = Resources.now();
      long start = System.nanoTime();
      cycle(world, x, cycles);
      long micros = (System.nanoTime() - start) / 1000 / cycles;
      System.gc();
      Resources after = Resources.now();
      System.out.println(cycles + " cycles of " + micros + " us each");
      System.out.println("  before: " + before);
      System.out.println("  after:  " + after);
      before.assertNoMoreThan(5, "after " + cycles + " cycles");
      assertTrue(after.residentKib() <= before.residentKib() + MORE_KIB, "VmRSS: see above");
      assertTrue(after.mappedKib() <= before.mappedKib() + MORE_KIB, "VmSize: see above");
    }
  }

  private static void cycle(LocalWorld world, RankBuffers x, int cycles) {
    for (int i = 0; i < cycles; i++) {
      NcclUniqueId id = NcclUniqueId.create();
      int number = i;
      world.run(
          rank -> {
            Communicator comm = Communicator.create(id, 2, rank.rank(), rank.device());
            Communicator child = comm.split(0, -rank.rank(), CommunicatorConfig.DEFAULT);
            int[] value = {child.rank() + 1};
            x.of(rank).copyFrom(value, rank.stream());
            child.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
            x.of(rank).copyTo(value, rank.stream());
            assertEquals(3, value[0], "cycle " + number);
            if (number % 2 == 0) {
              child.close(); // else by the parent's close
            }
            comm.close();
          });
    }
  }
}

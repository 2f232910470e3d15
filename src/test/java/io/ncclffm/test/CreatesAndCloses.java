package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.io.IOException;

/**
 * A child JVM's main class: two ranks make a communicator, split it, use and close both, 1,000
 * times. Prints what the process held before and after, and fails if it is more than it should be.
 */
final class CreatesAndCloses {
  /** For code that is still being compiled, and the allocator's caches: 16 KiB a cycle. */
  private static final long MORE_KIB = 16 << 10;

  private CreatesAndCloses() {}

  public static void main(String[] arguments) throws IOException {
    // On a GPU a pair of ranks takes a second to set up; a leak of one cycle shows in ten as well.
    int cycles = TestRanks.onCpu() ? 1000 : 10;
    int warmUp = TestRanks.onCpu() ? 300 : 3;
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT32, 1)) {
      cycle(world, x, warmUp);
      Resources before = Resources.now();
      long start = System.nanoTime();
      cycle(world, x, cycles);
      long micros = (System.nanoTime() - start) / 1000 / cycles;
      Resources after = Resources.now();
      System.out.printf(
          "FIGURES %d cycles of %d us; before %s, after %s%n", cycles, micros, before, after);
      before.assertNoMoreThan(5, "after " + cycles + " cycles");
      if (after.residentKib() > before.residentKib() + MORE_KIB
          || after.mappedKib() > before.mappedKib() + MORE_KIB) {
        throw new AssertionError("VmRSS or VmSize grew by more than " + MORE_KIB + " KiB");
      }
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
            if (value[0] != 3) {
              throw new AssertionError("cycle " + number + ": " + value[0] + ", not 3");
            }
            if (number % 2 == 0) {
              child.close(); // else by the parent's close
            }
            comm.close();
          });
    }
  }
}

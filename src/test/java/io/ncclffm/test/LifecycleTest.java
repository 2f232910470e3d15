package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Nothing piles up while ranks come and go, and nothing keeps the JVM from ending. */
class LifecycleTest {
  private static final Path DESCRIPTORS = Path.of("/proc/self/fd");
  private static final Path THREADS = Path.of("/proc/self/task");
  private static final Duration SETTLE = Duration.ofSeconds(20);

  @Test
  void openingAndClosingRanksLeavesNothingBehind() throws IOException {
    // On a GPU a pair of ranks takes a second to set up.
    int cycles = TestRanks.onCpu() ? 200 : 10;
    cycle(5);
    long descriptors = entries(DESCRIPTORS);
    long threads = entries(THREADS);
    cycle(cycles);
    // The JVM may start a compiler thread or open a jar of its own, but not one for each cycle.
    assertSettles(DESCRIPTORS, descriptors + cycles / 10);
    assertSettles(THREADS, threads + cycles / 10);
  }

  private static void cycle(int cycles) {
    for (int i = 0; i < cycles; i++) {
      try (LocalWorld world = TestRanks.open(2)) {
        float[][] results = new float[2][1];
        world.run(
            rank -> {
              try (DeviceBuffer x = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 1)) {
                x.copyFrom(new float[] {rank.rank() + 1}, rank.stream());
                rank.communicator().allReduce(x, x, ReduceOp.SUM, rank.stream());
                x.copyTo(results[rank.rank()], rank.stream());
              }
            });
        assertEquals(3, results[0][0], "cycle " + i);
        assertEquals(3, results[1][0], "cycle " + i);
      }
    }
  }

  private static long entries(Path folder) throws IOException {
    try (Stream<Path> files = Files.list(folder)) {
      return files.count();
    }
  }

  /** Threads that were told to end take a moment to be gone. */
  private static void assertSettles(Path folder, long most) throws IOException {
    long deadline = System.nanoTime() + SETTLE.toNanos();
    long now = entries(folder);
    while (now > most && System.nanoTime() < deadline) {
      LockSupport.parkNanos(1_000_000);
      now = entries(folder);
    }
    assertTrue(now <= most, folder + " has " + now + " entries, expected " + most + " at most");
  }

  // Rows 14 and 15 of the table of known faults: clean-up while the process ends.
  @ParameterizedTest
  @ValueSource(strings = {"idle", "pending"})
  void jvmEndsWithEverythingOpen(String work) throws Exception {
    try (ChildJvm child = ChildJvm.of(LeavesEverythingOpen.class, work).start()) {
      child.awaitLine("MAIN ENDS", Duration.ofSeconds(60));
      assertEquals(0, child.exitStatus(Duration.ofSeconds(5)), child.output());
    }
  }

  @Test
  void streamOutlivesAnAbortedCommunicator() {
    NcclUniqueId second = NcclUniqueId.create();
    float[][] results = new float[2][1];
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1)) {
      LocalWorld.Rank[] ranks = new LocalWorld.Rank[2];
      world.run(
          rank -> {
            ranks[rank.rank()] = rank;
            if (rank.rank() == 0) { // the other does not come
              DeviceBuffer own = x.of(rank);
              rank.communicator().allReduce(own, own, ReduceOp.SUM, rank.stream());
            }
          });
      for (LocalWorld.Rank rank : ranks) {
        rank.communicator().abort();
      }
      world.run(
          rank -> {
            float[] value = results[rank.rank()];
            value[0] = 1 + rank.rank();
            try (Communicator fresh = Communicator.create(second, 2, rank.rank(), rank.device())) {
              x.of(rank).copyFrom(value, rank.stream());
              fresh.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
              x.of(rank).copyTo(value, rank.stream());
            }
          });
    }
    assertArrayEquals(new float[][] {{3}, {3}}, results);
  }
}

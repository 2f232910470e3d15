package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.HierarchicalAllReduce;
import java.lang.foreign.MemorySegment;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Kernels in the teams, NCCL between them: as if it were one all-reduce. */
class HierarchicalAllReduceTest {
  private static final long SEED = 0x5eed_2028L;
  private static final Duration START = Duration.ofSeconds(90);

  private static final DeviceCommunicatorConfig CONFIG =
      DeviceCommunicatorConfig.builder().channels(4).slotBytes(1024).build();

  private static final List<ReduceOp> OPS =
      List.of(ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG);

  private static final int[] COUNTS = {0, 1, 3, 8, 1001};

  private final Queue<String> failures = new ConcurrentLinkedQueue<>();

  @BeforeAll
  static void needsShim() {
    TestRanks.assumeShim();
  }

  private static MemorySegment segment(byte[] bytes) {
    return MemorySegment.ofArray(bytes);
  }

  @ParameterizedTest(name = "{0} ranks in teams of {1}")
  @CsvSource({"1,1", "2,1", "2,2", "4,1", "4,2", "6,3", "6,2", "8,2", "8,4"})
  void everyTypeAndOperationMatchesTheReference(int ranks, int teamSize) {
    int largest = COUNTS[COUNTS.length - 1];
    HierarchicalAllReduce[] reducers = new HierarchicalAllReduce[ranks];
    try (LocalWorld world = TestRanks.open(ranks)) {
      world.run(
          r ->
              reducers[r.rank()] =
                  HierarchicalAllReduce.create(r.communicator(), teamSize, CONFIG));
      assertEquals(teamSize, reducers[0].teamSize());
      assertEquals(ranks / teamSize, reducers[0].teams());
      for (DataType type : DataType.values()) {
        if (Elements.isFloat8(type)) {
          continue;
        }
        try (RankBuffers x = RankBuffers.allocate(world, type, largest + 8);
            RankBuffers y = RankBuffers.allocate(world, type, largest + 8)) {
          for (ReduceOp op : OPS) {
            for (int count : COUNTS) {
              exercise(world, reducers, x, y, type, op, count);
            }
          }
        }
      }
    }
    assertEquals(List.of(), List.copyOf(failures), "seed " + SEED);
  }

  private void exercise(
      LocalWorld world,
      HierarchicalAllReduce[] reducers,
      RankBuffers x,
      RankBuffers y,
      DataType type,
      ReduceOp op,
      int count) {
    Inputs inputs = new Inputs(type, op, world.size(), count, SEED + count);
    byte[][] results = new byte[world.size()][];
    world.run(
        rank -> {
          int r = rank.rank();
          String what = type + " " + op + ", " + count + " elements, rank " + r;
          DeviceBuffer send = x.of(r);
          DeviceBuffer recv = y.of(r);
          byte[] whole = new byte[(count + 8) * type.bytes()];
          recv.copyFrom(segment(whole), rank.stream());
          send.copyFrom(segment(inputs.bytes(r)), 3, rank.stream());
          reducers[r].allReduce(send, 3, recv, 1, count, op, rank.stream());
          recv.copyTo(segment(whole), rank.stream());
          compare(inputs, whole, 1, count, what);
          for (int i = 0; i < whole.length; i++) {
            if ((i < type.bytes() || i >= (1 + count) * type.bytes()) && whole[i] != 0) {
              failures.add(what + ": byte " + i + " beside the result was changed");
            }
          }
          byte[] result = new byte[count * type.bytes()];
          reducers[r].allReduce(send, 3, send, 3, count, op, rank.stream());
          send.copyTo(segment(result), 3, rank.stream());
          compare(inputs, result, 0, count, what + ", in place");
          results[r] = result;
        });
    for (byte[] result : results) {
      if (!Arrays.equals(results[0], result)) {
        failures.add(type + " " + op + ": not bit-identical on all ranks");
      }
    }
  }

  private void compare(Inputs inputs, byte[] result, int at, int count, String what) {
    @Nullable String wrong = inputs.mismatchWithReduction(0, count, Elements.view(result), at);
    if (wrong != null) {
      failures.add(what + ": " + wrong);
    }
  }

  @Test
  void badInputIsRefusedAndItEndsWithItsCommunicator() {
    HierarchicalAllReduce[] reducers = new HierarchicalAllReduce[4];
    try (LocalWorld world = TestRanks.open(4);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers longer = RankBuffers.allocate(world, DataType.FLOAT32, 9);
        RankBuffers ints = RankBuffers.allocate(world, DataType.INT32, 8)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> HierarchicalAllReduce.create(comm, 3, CONFIG)),
                "teams of 3",
                "divide");
            HierarchicalAllReduce reducer = HierarchicalAllReduce.create(comm, 2, CONFIG);
            reducers[rank.rank()] = reducer;
            DeviceBuffer mine = x.of(rank);
            refused(reducer, rank, mine, 0, longer.of(rank), 0, 10, "10 elements from offset 0");
            refused(reducer, rank, mine, 0, ints.of(rank), 0, 8, "differ in type");
            refused(reducer, rank, mine, 0, mine, 2, 4, "overlap");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> reducer.allReduce(mine, longer.of(rank), ReduceOp.SUM, rank.stream())),
                "lengths");
            HierarchicalAllReduce second = HierarchicalAllReduce.create(comm, 4, CONFIG);
            second.close();
            second.close();
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class,
                    () -> second.allReduce(mine, mine, ReduceOp.SUM, rank.stream())),
                "closed");
          });
      // A rank that still frees its memory would wait for a kernel of one that does not.
      world.run(
          rank -> {
            DeviceBuffer mine = x.of(rank);
            reducers[rank.rank()].allReduce(mine, mine, ReduceOp.SUM, rank.stream());
            rank.stream().synchronize();
          });
    }
    for (HierarchicalAllReduce reducer : reducers) {
      assertThrows(IllegalStateException.class, () -> reducer.deviceCommunicator().struct());
    }
  }

  private static void refused(
      HierarchicalAllReduce reducer,
      LocalWorld.Rank rank,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      String why) {
    Messages.assertNames(
        assertThrows(
            IllegalArgumentException.class,
            () ->
                reducer.allReduce(
                    send, sendOffset, recv, recvOffset, count, ReduceOp.SUM, rank.stream())),
        "hierarchical all-reduce",
        why);
  }

  /**
   * Two groups of two processes that NCCL takes for two hosts. On a GPU the teams are those that
   * NCCL finds, and it goes over the network between them; the CPU backend knows one host only.
   */
  @Test
  void processesOnDifferentHostsReduceOverTheNetwork(@TempDir Path folder) throws Exception {
    int ranks = 4;
    List<ChildJvm> children = new ArrayList<>();
    try {
      for (int r = 0; r < ranks; r++) {
        ChildJvm.Setup setup =
            ChildJvm.of(
                HierarchicalProcess.class, "" + r, "" + ranks, TestRanks.onCpu() ? "2" : "0");
        setup.environment("NCCL_HOSTID", "host" + r / 2);
        setup.environment("NCCL_DEBUG", "INFO");
        setup.environment("NCCL_DEBUG_FILE", folder.resolve("nccl" + r).toString());
        children.add(setup.start());
      }
      String id = children.get(0).awaitLine("ID ", START);
      for (int r = 1; r < ranks; r++) {
        children.get(r).send(id);
      }
      for (int r = 0; r < ranks; r++) {
        ChildJvm child = children.get(r);
        assertEquals("2 teams of 2", child.awaitLine("TEAMS ", START));
        child.awaitLine("RIGHT", START);
        assertEquals(0, child.exitStatus(START), child.output());
        if (!TestRanks.onCpu()) {
          String told = Files.readString(folder.resolve("nccl" + r));
          assertTrue(told.contains("via NET/"), told);
        }
      }
    } finally {
      children.forEach(ChildJvm::close);
    }
  }
}

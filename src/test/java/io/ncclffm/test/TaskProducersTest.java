package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static io.ncclffm.test.TaskRanks.PATIENCE;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclFfmTaskLane;
import io.ncclffm.core.bindings.shim.ncclFfmTaskQueue;
import io.ncclffm.core.bindings.shim.ncclFfmTaskSlot;
import io.ncclffm.device.ProducerRun;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskOverlap;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.TaskQueueSnapshot;
import io.ncclffm.device.Ticket;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Kernels that append tasks: buckets, overlap, and one's own. */
class TaskProducersTest {
  private static final int RANKS = 2;
  private static final TaskOverlap.Parts BOTH = TaskOverlap.Parts.BOTH;

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  private static TaskQueueConfig.Builder lanes(int lanes) {
    return TaskQueueConfig.builder().lanes(lanes).timeout(LONG);
  }

  private static void await(CyclicBarrier barrier) throws Exception {
    barrier.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
  }

  private static float input(int rank, int round, int i) {
    long random = Inputs.mix(DeviceCases.SEED + (rank * 1000L + round) * 100_000 + i);
    return (random >>> 40) / (float) (1 << 24) - 0.5f;
  }

  private static DeviceBuffer part(DeviceBuffer x, long at, long count) {
    return DeviceBuffer.wrap(x.device(), DataType.FLOAT32, count, x.address(at));
  }

  /** Sums are taken in rank order and rounded once each, so they are known to the bit. */
  @ParameterizedTest(
      name = "{0} ranks, {1} lanes of {2} blocks, depth {3}, {4} producer blocks, {5}")
  @CsvSource({
    "1, 2, 1, 64, 2, PERSISTENT",
    "2, 1, 1, 1, 2, DEBUG",
    "2, 3, 1, 8, 4, PERSISTENT",
    "3, 2, 2, 4, 3, PERSISTENT",
    "4, 1, 1, 16, 2, DRAIN"
  })
  void bucketsAreComputedAndReduced(
      int ranks, int lanes, int blocks, int depth, int producers, TaskQueueConfig.Mode mode) {
    int count = 3001;
    int bucket = 97;
    int at = 7;
    TaskQueueConfig config = lanes(lanes).blocksPerLane(blocks).depth(depth).mode(mode).build();
    try (LocalWorld world = TestRanks.open(ranks);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            TaskBuckets work = new TaskBuckets(x, at, count, bucket, 1.5f, -0.25f, producers);
            assertEquals(31, work.buckets());
            for (int round = 0; round < 5; round++) {
              float[] values = new float[at + count + 1];
              float[] expected = new float[values.length];
              for (int i = 0; i < values.length; i++) {
                values[i] = expected[i] = input(rank.rank(), round, i);
              }
              x.copyFrom(values, rank.stream());
              for (int i = at; i < at + count; i++) {
                expected[i] = Math.fma(1.5f, input(0, round, i), -0.25f);
                for (int r = 1; r < ranks; r++) {
                  expected[i] += Math.fma(1.5f, input(r, round, i), -0.25f);
                }
              }
              ProducerRun run = queue.buckets(GRADIENTS, work, rank.stream());
              run.await(LONG);
              assertTrue(run.isDone());
              assertNull(run.failure());
              x.copyTo(values, rank.stream());
              assertArrayEquals(expected, values, "round " + round + ", " + run);
            }
            TaskQueueSnapshot snapshot = queue.snapshot();
            assertEquals(5 * ((31 + lanes - 1) / lanes), snapshot.lanes().get(0).done());
          });
    }
  }

  @ParameterizedTest(name = "{0} ranks, {1} lanes, depth {2}, {3} blocks, {4}, {5}")
  @CsvSource({
    "1, 2, 4, 2, BOTH, PERSISTENT",
    "2, 2, 4, 3, BOTH, PERSISTENT",
    "2, 1, 1, 1, BOTH, DEBUG",
    "3, 4, 8, 4, BOTH, PERSISTENT",
    "2, 2, 4, 2, BOTH, DRAIN",
    "2, 2, 4, 2, COMPUTE, PERSISTENT",
    "2, 2, 4, 2, COMMUNICATE, PERSISTENT"
  })
  void iterationsAddUp(
      int ranks,
      int lanes,
      int depth,
      int blocks,
      TaskOverlap.Parts parts,
      TaskQueueConfig.Mode mode) {
    int count = 500;
    int iterations = 7;
    TaskQueueConfig config = lanes(lanes).depth(depth).mode(mode).build();
    try (LocalWorld world = TestRanks.open(ranks);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      world.run(
          rank -> {
            DeviceBuffer x = tasks.x(rank);
            float[] in = new float[count];
            float[] expected = new float[count];
            for (int i = 0; i < count; i++) {
              in[i] = input(rank.rank(), 0, i);
            }
            x.copyFrom(in, rank.stream());
            TaskOverlap work =
                new TaskOverlap(
                    part(x, 0, count),
                    part(x, count, count),
                    part(x, 2 * count, 4 * count),
                    iterations,
                    3,
                    0.75f,
                    0.5f,
                    blocks,
                    parts);
            int first = parts == BOTH ? 0 : rank.rank();
            int end = parts == BOTH ? ranks : rank.rank() + 1;
            for (int i = 0; i < count; i++) {
              for (int k = 0; k < iterations; k++) {
                float ofAll = 0;
                for (int r = first; r < end; r++) {
                  float y = input(r, 0, i) + k;
                  for (int n = 0; n < 3; n++) {
                    y = Math.fma(0.75f, y, 0.5f);
                  }
                  ofAll = r == first ? y : ofAll + y;
                }
                expected[i] = k == 0 ? ofAll : expected[i] + ofAll;
              }
            }
            ProducerRun run = tasks.of(rank).overlap(GRADIENTS, work, rank.stream());
            run.await(LONG);
            assertNull(run.failure());
            if (parts != TaskOverlap.Parts.COMMUNICATE) {
              float[] out = new float[2 * count];
              x.copyTo(out, rank.stream());
              for (int i = 0; i < count; i++) {
                assertEquals(expected[i], out[count + i], "element " + i + ", " + run);
              }
            }
            long all = 0;
            for (TaskQueueSnapshot.Lane lane : tasks.of(rank).snapshot().lanes()) {
              all += lane.done();
            }
            assertEquals(parts == TaskOverlap.Parts.COMPUTE ? 0 : iterations * blocks, all);
          });
    }
  }

  /**
   * The host, and kernels that append, in turn on one stream: numbers are the same on all ranks.
   */
  @Test
  void hostAndKernelsAppendInTurn() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(3).depth(8).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            x.fill((byte) 0, rank.stream());
            Ticket ticket = queue.ticket();
            TaskBuckets work = new TaskBuckets(x, 0, 100, 10, 1f / RANKS, 1, 2);
            ProducerRun[] all = new ProducerRun[2 * TaskQueue.MOST_RUNS];
            for (int i = 0; i < all.length; i++) {
              all[i] = queue.buckets(GRADIENTS, work, rank.stream());
              queue.allReduce(GRADIENTS, i % 3, x, 200, x, 200, 50, ReduceOp.SUM, ticket);
              queue.launch(rank.stream());
              ticket.await(LONG);
              all[i].await(LONG);
            }
            float[] values = new float[100];
            x.copyTo(values, rank.stream());
            assertEquals(RANKS * all.length, values[99]);
          });
    }
  }

  @Test
  void tooManyUnfinishedKernelsAreRefusedAndNothingIsLost() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            TaskOverlap work =
                new TaskOverlap(
                    part(x, 0, 10),
                    part(x, 10, 10),
                    part(x, 20, 40),
                    1,
                    1,
                    1,
                    0,
                    1,
                    TaskOverlap.Parts.COMMUNICATE);
            ProducerRun[] all = new ProducerRun[TaskQueue.MOST_RUNS];
            if (rank.rank() == 0) {
              for (int i = 0; i < all.length; i++) {
                all[i] = queue.overlap(GRADIENTS, work, rank.stream());
              }
              assertFalse(all[0].isDone());
              Messages.assertNames(
                  assertThrows(
                      IllegalStateException.class,
                      () -> queue.overlap(GRADIENTS, work, rank.stream())),
                  "ncclFfmTaskIterate",
                  "16 kernels");
            }
            await(barrier);
            for (int i = 0; i < all.length; i++) {
              if (rank.rank() == 1) {
                all[i] = queue.overlap(GRADIENTS, work, rank.stream());
                all[i].await(LONG);
              }
            }
            for (ProducerRun run : all) {
              run.await(LONG);
            }
            queue.overlap(GRADIENTS, work, rank.stream()).await(LONG);
          });
    }
  }

  @Test
  void runThatIsAbortedFailsAndOneThatIsClosedKeepsItsOutcome() {
    ProducerRun[] good = new ProducerRun[RANKS];
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (LocalWorld world = TestRanks.open(RANKS)) {
      try (TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
        world.run(
            rank -> {
              TaskBuckets work = new TaskBuckets(tasks.x(rank), 0, 100, 10, 1, 1, 2);
              good[rank.rank()] = tasks.of(rank).buckets(GRADIENTS, work, rank.stream());
            });
      }
      for (ProducerRun run : good) {
        assertTrue(run.isDone());
        assertNull(run.failure());
      }
      try (TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
        world.run(
            rank -> {
              if (rank.rank() == 0) {
                TaskBuckets work = new TaskBuckets(tasks.x(rank), 0, 100, 10, 1, 1, 2);
                ProducerRun run = tasks.of(rank).buckets(GRADIENTS, work, rank.stream());
                assertFalse(run.isDone());
                tasks.of(rank).abort();
                TaskQueueException e =
                    assertThrows(TaskQueueException.class, () -> run.await(PATIENCE));
                Messages.assertNames(e, "ncclRemoteError", "lane 0");
                assertNotNull(run.failure());
              }
              await(barrier);
            });
      }
    }
  }

  /** A kernel of one's own, played by copies: it fills a place of a ring and has it run. */
  @Test
  void ownKernelTakesTheStructAndIsCounted() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).idle(Duration.ZERO).build());
        Arena arena = Arena.ofShared()) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            x.copyFrom(new float[] {rank.rank() + 1, 0}, rank.stream());
            long send = x.address(0).address();
            long recv = x.address(1).address();
            long[] words = {
              GRADIENTS.hash(),
              ShimH.ncclFfmFunctionAllReduce(),
              DataType.FLOAT32.ncclValue(),
              ReduceOp.SUM.ncclValue(),
              0,
              0,
              1,
              0,
              send,
              send >>> 32,
              recv,
              recv >>> 32
            };
            MemorySegment task = ncclFfmTaskSlot.allocate(arena);
            for (int i = 0; i < words.length; i++) {
              ncclFfmTaskSlot.word(task, i, 1L << 32 | words[i] & 0xffffffffL);
            }
            MemorySegment ring = ncclFfmTaskQueue.tasks(queue.struct());
            DeviceBuffer.wrap(rank.device(), DataType.UINT8, task.byteSize(), ring)
                .copyFrom(task, rank.stream());
            long lane = ncclFfmTaskQueue.lanes(queue.struct()).address();
            for (long at :
                new long[] {ncclFfmTaskLane.head$offset(), ncclFfmTaskLane.launched$offset()}) {
              MemorySegment word = MemorySegment.ofAddress(lane + at);
              DeviceBuffer.wrap(rank.device(), DataType.INT32, 1, word)
                  .copyFrom(new int[] {1}, rank.stream());
            }
            queue.producerLaunched(rank.stream());
            queue.stop(LONG);
            TaskQueueSnapshot snapshot = queue.snapshot();
            assertEquals(1, snapshot.lanes().get(0).done());
            assertEquals(0, snapshot.producers());
            float[] values = new float[2];
            x.copyTo(values, rank.stream());
            assertEquals(RANKS * (RANKS + 1) / 2, values[1]);
          });
    }
  }
}

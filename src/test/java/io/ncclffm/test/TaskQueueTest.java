package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static io.ncclffm.test.TaskRanks.OTHER;
import static io.ncclffm.test.TaskRanks.PATIENCE;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueSnapshot;
import io.ncclffm.device.TaskRecord;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** Tasks that the host appends: their results, their order, their tickets, and the scheduler. */
class TaskQueueTest {
  private static final int RANKS = 2;

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

  private static MemorySegment segment(byte[] bytes) {
    return MemorySegment.ofArray(bytes);
  }

  @ParameterizedTest(name = "{0} ranks, {1} lanes of {2} blocks, depth {3}, {4}")
  @CsvSource({
    "1, 2, 1, 64, PERSISTENT",
    "2, 2, 2, 8, PERSISTENT",
    "2, 1, 1, 1, DEBUG",
    "3, 4, 1, 64, PERSISTENT",
    "4, 1, 1, 2, PERSISTENT",
    "4, 2, 1, 16, DRAIN",
    "8, 1, 1, 16, PERSISTENT"
  })
  void everyTaskMatchesTheReference(
      int ranks, int lanes, int blocks, int depth, TaskQueueConfig.Mode mode) {
    TaskQueueConfig config = lanes(lanes).blocksPerLane(blocks).depth(depth).mode(mode).build();
    Queue<String> failures = new ConcurrentLinkedQueue<>();
    List<ReduceOp> others = DeviceCases.OPS.subList(1, DeviceCases.OPS.size());
    try (LocalWorld world = TestRanks.open(ranks);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      List<DataType> types = DeviceCases.types();
      for (int i = 0; i < types.size(); i++) {
        // On the CPU backend a few: there are many shapes.
        if (!TestRanks.onCpu() || i % 3 == (ranks + lanes) % 3) {
          for (ReduceOp op : List.of(ReduceOp.SUM, others.get(i % others.size()))) {
            DeviceCases cases = DeviceCases.make(types.get(i), op, ranks, false, false);
            runCases(tasks, cases, types.get(i), failures);
          }
        }
      }
    }
    List<String> all = List.copyOf(failures);
    assertEquals(List.of(), all.subList(0, Math.min(5, all.size())), "seed " + DeviceCases.SEED);
  }

  private static void runCases(
      TaskRanks tasks, DeviceCases cases, DataType type, Queue<String> failures) {
    LocalWorld world = tasks.world;
    byte[][] images = new byte[world.size()][];
    for (int r = 0; r < world.size(); r++) {
      images[r] = cases.image(r);
    }
    long elements = images[0].length / type.bytes();
    long sendElements = cases.inputs(0).length / type.bytes() + 8L;
    try (RankBuffers send = RankBuffers.allocate(world, type, sendElements);
        RankBuffers recv = RankBuffers.allocate(world, type, elements)) {
      int[] inputsAt = new int[world.size()]; // each rank's data is aligned differently
      Arrays.setAll(inputsAt, r -> r * 3 % 8);
      // All copies first: one may stand behind a scheduler that waits for this rank's task.
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(segment(cases.inputs(r)), inputsAt[r], rank.stream());
            recv.of(r).copyFrom(segment(images[r]), rank.stream());
          });
      world.run(
          rank -> {
            int r = rank.rank();
            TaskQueue queue = tasks.of(rank);
            List<Ticket> tickets = new ArrayList<>();
            for (DeviceCase c : cases.all()) {
              Ticket ticket = queue.ticket();
              int lane = tickets.size() % queue.config().lanes();
              c.append(queue, GRADIENTS, lane, send.of(r), inputsAt[r], recv.of(r), ticket);
              tickets.add(ticket);
              if (tickets.size() % 50 == 0) {
                queue.launch(rank.stream());
              }
            }
            queue.launch(rank.stream());
            for (Ticket ticket : tickets) {
              ticket.await(LONG);
            }
            byte[] after = new byte[images[r].length];
            recv.of(r).copyTo(segment(after), rank.stream());
            rank.stream().synchronize();
            failures.addAll(cases.check(r, images[r], after));
            byte[] sent = new byte[cases.inputs(r).length];
            send.of(r).copyTo(segment(sent), inputsAt[r], rank.stream());
            if (!Arrays.equals(sent, cases.inputs(r))) {
              failures.add(type + ", rank " + r + ": a send buffer was changed");
            }
          });
    }
  }

  @Test
  void sendsReceivesPlaceholdersAndBarriersKeepInStep() {
    int ranks = 4;
    try (LocalWorld world = TestRanks.open(ranks);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            int r = rank.rank();
            TaskQueue queue = tasks.of(rank);
            float[] values = new float[TaskRanks.COUNT];
            Arrays.fill(values, r + 1);
            tasks.x(rank).copyFrom(values, rank.stream());
            Ticket[] tickets = new Ticket[3 * ranks];
            for (int i = 0; i < tickets.length; i++) {
              tickets[i] = queue.ticket();
            }
            // Every rank hands its value to the next, one pair after the other.
            for (int from = 0; from < ranks; from++) {
              int to = (from + 1) % ranks;
              Ticket ticket = tickets[from];
              if (r == from) {
                queue.send(GRADIENTS, 0, tasks.x(rank), 5, 100, to, ticket);
              } else if (r == to) {
                queue.recv(GRADIENTS, 0, tasks.x(rank), 1000, 100, from, ticket);
              } else {
                queue.placeholder(GRADIENTS, 0, ticket);
              }
              queue.barrier(OTHER, 0, tickets[ranks + from]);
              queue.allReduce(
                  OTHER,
                  0,
                  tasks.x(rank),
                  5,
                  tasks.x(rank),
                  2000 + from,
                  1,
                  ReduceOp.SUM,
                  tickets[2 * ranks + from]);
            }
            queue.launch(rank.stream());
            for (Ticket ticket : tickets) {
              ticket.await(LONG);
            }
            tasks.x(rank).copyTo(values, rank.stream());
            assertEquals((r + ranks - 1) % ranks + 1, values[1000]);
            assertEquals((r + ranks - 1) % ranks + 1, values[1099]);
            assertEquals(ranks * (ranks + 1) / 2, values[2000]);
            assertEquals(ranks * (ranks + 1) / 2, values[2000 + ranks - 1]);
          });
    }
  }

  /** x += sum over the ranks of x, again and again: each task needs the one before. */
  @ParameterizedTest(name = "{0} blocks")
  @CsvSource({"1", "3"})
  void tasksOfALaneRunInTheirOrder(int blocks) {
    int steps = 20;
    TaskQueueConfig config = lanes(1).blocksPerLane(blocks).depth(4).build();
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            float[] values = new float[TaskRanks.COUNT];
            Arrays.fill(values, 1);
            x.copyFrom(values, rank.stream());
            Ticket ticket = queue.ticket();
            for (int i = 0; i < steps; i++) {
              ticket = queue.ticket();
              queue.allReduce(GRADIENTS, 0, x, 0, x, 0, TaskRanks.COUNT, ReduceOp.SUM, ticket);
            }
            queue.launch(rank.stream());
            ticket.await(LONG); // and with it all before
            assertEquals(steps - 1, ticket.sequence());
            x.copyTo(values, rank.stream());
            float[] expected = new float[TaskRanks.COUNT];
            Arrays.fill(expected, 1 << steps);
            assertArrayEquals(expected, values);
          });
    }
  }

  /** A lane stands still, because one rank has not come to it; the other goes on. */
  @Test
  void lanesDoNotWaitForEachOther() throws Exception {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            float[] values = new float[10];
            Arrays.fill(values, rank.rank() + 1);
            x.copyFrom(values, rank.stream());
            Ticket standing = queue.ticket();
            Ticket going = queue.ticket();
            if (rank.rank() == 0) {
              queue.allReduce(GRADIENTS, 0, x, 0, x, 100, 10, ReduceOp.SUM, standing);
            }
            for (int i = 0; i < 5; i++) {
              queue.allReduce(OTHER, 1, x, 0, x, 200, 10, ReduceOp.SUM, going);
              queue.launch(rank.stream());
              going.await(LONG);
            }
            if (rank.rank() == 0) {
              assertFalse(standing.isDone());
              assertNull(standing.failure());
              TaskQueueSnapshot snapshot = queue.snapshot();
              TaskRecord oldest = snapshot.oldest();
              assertEquals(GRADIENTS, oldest.symbol());
              assertEquals("ncclFfmAllReduce", oldest.function());
              assertEquals(DataType.FLOAT32, oldest.type());
              assertEquals(ReduceOp.SUM, oldest.op());
              assertEquals(10, oldest.count());
              assertEquals(0, oldest.sequence());
              TaskQueueSnapshot.Lane first = snapshot.lanes().get(0);
              assertEquals(1, first.head());
              assertEquals(1, first.launched());
              assertEquals(0, first.done());
              assertNull(first.failure());
              TaskQueueSnapshot.Lane second = snapshot.lanes().get(1);
              assertEquals(5, second.head());
              assertEquals(5, second.done());
              assertNull(second.oldest());
              assertEquals(TaskQueueSnapshot.Scheduler.RUNNING, snapshot.scheduler());
              assertTrue(first.toString().contains("oldest task \"gradients\""), first.toString());
            }
            await(barrier);
            if (rank.rank() == 1) {
              queue.allReduce(GRADIENTS, 0, x, 0, x, 100, 10, ReduceOp.SUM, standing);
              queue.launch(rank.stream());
            }
            standing.await(LONG);
            x.copyTo(values, rank.stream());
          });
    }
  }

  /**
   * A scheduler that ends as soon as it has nothing to do, against work that comes all the time:
   * every task is run, whoever is first.
   */
  @ParameterizedTest
  @EnumSource(names = {"PERSISTENT", "DRAIN"})
  void tasksThatComeWhileTheSchedulerEndsAreRun(TaskQueueConfig.Mode mode) {
    int rounds = TestRanks.onCpu() ? 400 : 2000;
    TaskQueueConfig config = lanes(2).idle(Duration.ZERO).mode(mode).build();
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket[] tickets = {queue.ticket(), queue.ticket()};
            float[] value = new float[1];
            for (int i = 0; i < rounds; i++) {
              value[0] = rank.rank() + i;
              x.copyFrom(value, rank.stream());
              for (int l = 0; l < 2; l++) {
                queue.allReduce(GRADIENTS, l, x, 0, x, 1 + l, 1, ReduceOp.SUM, tickets[l]);
              }
              queue.launch(rank.stream());
              for (Ticket ticket : tickets) {
                ticket.await(LONG);
                assertEquals(i, ticket.sequence());
              }
              if (i % 10 == 0) {
                awaitStopped(queue);
              }
              float[] sums = new float[3];
              x.copyTo(sums, rank.stream());
              assertEquals(2 * i + 1, sums[1]);
              assertEquals(2 * i + 1, sums[2]);
            }
            TaskQueueSnapshot last = queue.snapshot();
            assertTrue(last.schedulerLaunches() >= rounds / 10, last.toString());
            assertEquals(rounds, last.lanes().get(1).done());
            assertEquals(rounds / queue.config().depth(), last.lanes().get(1).generation());
          });
    }
  }

  private static void awaitStopped(TaskQueue queue) {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    while (queue.snapshot().scheduler() != TaskQueueSnapshot.Scheduler.STOPPED) {
      assertTrue(System.nanoTime() - deadline < 0, () -> queue.snapshot().toString());
      Thread.onSpinWait();
    }
  }

  @Test
  void idleSchedulerEndsByItself() {
    try (LocalWorld world = TestRanks.open(1);
        TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Ticket ticket = queue.ticket();
            queue.barrier(GRADIENTS, 3, ticket);
            queue.launch(rank.stream());
            ticket.await(LONG);
            awaitStopped(queue);
            assertEquals(0, queue.snapshot().producers());
          });
    }
  }

  @Test
  void stopDrainsAndTheQueueWorksOn() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(2).idle(LONG).depth(4).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            for (int round = 0; round < 3; round++) {
              List<Ticket> tickets = new ArrayList<>();
              for (int i = 0; i < 40; i++) {
                Ticket ticket = queue.ticket();
                queue.allReduce(GRADIENTS, i % 2, x, i, x, i, 1, ReduceOp.SUM, ticket);
                tickets.add(ticket);
              }
              queue.launch(rank.stream());
              Ticket later = queue.ticket();
              queue.barrier(OTHER, 0, later);
              queue.stop(LONG);
              for (Ticket ticket : tickets) {
                assertTrue(ticket.isDone(), ticket::toString);
                assertNull(ticket.failure());
              }
              assertFalse(later.isDone(), "it was not launched");
              assertEquals(TaskQueueSnapshot.Scheduler.STOPPED, queue.snapshot().scheduler());
              queue.launch(rank.stream());
              later.await(LONG);
            }
            queue.stop(LONG);
            queue.stop(LONG);
          });
    }
  }

  @Test
  void stopAndAwaitAreBounded() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    Duration little = Duration.ofMillis(50);
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Ticket ticket = queue.ticket();
            if (rank.rank() == 0) {
              queue.barrier(GRADIENTS, 0, ticket);
              queue.launch(rank.stream());
              Messages.assertNames(
                  assertThrows(DeadlineException.class, () -> queue.stop(little)),
                  "stop of the task queue");
              Messages.assertNames(
                  assertThrows(DeadlineException.class, () -> ticket.await(little)),
                  "\"gradients\"",
                  "ncclFfmBarrier",
                  "lane 0, number 0");
            }
            await(barrier);
            if (rank.rank() == 1) {
              queue.barrier(GRADIENTS, 0, ticket);
              queue.launch(rank.stream());
            }
            ticket.await(LONG);
            queue.stop(LONG);
          });
    }
  }

  /** As many as the host may have on the way, and the ones behind them. */
  @Test
  void manyTasksAreOnTheWay() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(2).depth(4).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket[] tickets = new Ticket[TaskQueue.MOST_ON_THE_WAY];
            for (int i = 0; i < tickets.length; i++) {
              tickets[i] = queue.ticket();
            }
            x.copyFrom(new float[tickets.length], rank.stream());
            for (int round = 0; round < 2; round++) {
              for (int i = 0; i < tickets.length; i++) {
                queue.allReduce(GRADIENTS, i % 2, x, i, x, i, 1, ReduceOp.SUM, tickets[i]);
                if (i == 6) {
                  queue.launch(rank.stream()); // so that batches cross the end of the places
                }
              }
              queue.launch(rank.stream());
              for (Ticket ticket : tickets) {
                ticket.await(LONG);
              }
            }
            assertEquals(tickets.length - 1, tickets[tickets.length - 1].sequence());
          });
    }
  }

  /** A launch is in the order of its stream, and tasks of two streams come to one lane or two. */
  @Test
  void streamsOrderWhatTheyHandOver() {
    CudaStream[] second = new CudaStream[RANKS];
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(rank -> second[rank.rank()] = CudaStream.create(rank.device()));
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket one = queue.ticket();
            Ticket two = queue.ticket();
            for (int i = 0; i < 20; i++) {
              x.copyFrom(new float[] {i, 2 * i}, rank.stream());
              queue.allReduce(GRADIENTS, 0, x, 0, x, 10, 1, ReduceOp.SUM, one);
              queue.launch(rank.stream());
              queue.allReduce(OTHER, 1, x, 1, x, 11, 1, ReduceOp.SUM, two);
              queue.launch(second[rank.rank()]);
              one.await(LONG);
              two.await(LONG);
              float[] values = new float[12];
              x.copyTo(values, rank.stream());
              assertEquals(RANKS * i, values[10]);
              assertEquals(RANKS * 2 * i, values[11]);
            }
          });
      world.run(rank -> second[rank.rank()].close());
    }
  }

  @Test
  void symbolsAreHashedAsKernelsDo() {
    // FNV-1a of "gradients"-like names, by the published algorithm.
    assertEquals(0xe40c292c, TaskSymbol.of("a").hash());
    assertEquals(0xbf9cf968, TaskSymbol.of("foobar").hash());
    assertEquals("\"foobar\"", TaskSymbol.ofHash(0xbf9cf968).toString());
    assertEquals("0x00000007", TaskSymbol.ofHash(7).toString());
    assertEquals(TaskSymbol.of("foobar"), TaskSymbol.ofHash(0xbf9cf968));
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> TaskSymbol.of("")), "empty");
    // Two names with one hash, found by search.
    TaskSymbol.of("costarring");
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> TaskSymbol.of("liquid")),
        "\"liquid\"",
        "\"costarring\"",
        "same hash");
  }

  @Test
  void everyFunctionHasATask() {
    // What DeviceCases and the test above cover, so that a new function is not forgotten.
    assertEquals(11, DeviceFunction.values().length);
    assertEquals(8, DeviceCases.FUNCTIONS.size());
  }
}

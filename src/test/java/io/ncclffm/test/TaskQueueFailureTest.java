package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.COUNT;
import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static io.ncclffm.test.TaskRanks.OTHER;
import static io.ncclffm.test.TaskRanks.PATIENCE;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.params.provider.Arguments.arguments;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmTaskLane;
import io.ncclffm.core.bindings.shim.ncclFfmTaskQueue;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.ProducerRun;
import io.ncclffm.device.QueueFullException;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskOverlap;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.TaskRecord;
import io.ncclffm.device.Ticket;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.MethodSource;

/** What becomes of a task queue when something goes wrong: nobody hangs, and all is named. */
class TaskQueueFailureTest {
  private static final int RANKS = 3;

  /** The rank that does something else. */
  private static final int ODD = 2;

  private static final Duration SHORT = Duration.ofMillis(300);
  private static final ReduceOp SUM = ReduceOp.SUM;

  private static LocalWorld world;

  @BeforeAll
  static void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(RANKS);
  }

  @AfterAll
  static void closeWorld() {
    if (world != null) {
      TestRanks.assertWorks(world);
      world.close();
    }
  }

  private static TaskQueueConfig.Builder lanes(int lanes) {
    return TaskQueueConfig.builder().lanes(lanes).timeout(LONG);
  }

  private static void await(CyclicBarrier barrier) throws Exception {
    barrier.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
  }

  private static void assertLaneWorks(
      TaskQueue queue, int lane, DeviceBuffer x, LocalWorld.Rank r) {
    float[] values = new float[20];
    Arrays.fill(values, r.rank() + 1);
    x.copyFrom(values, r.stream());
    Ticket ticket = queue.ticket();
    for (int i = 0; i < 3; i++) {
      queue.allReduce(GRADIENTS, lane, x, 0, x, 10, 10, SUM, ticket);
      queue.launch(r.stream());
      ticket.await(LONG);
    }
    x.copyTo(values, r.stream());
    assertEquals(r.size() * (r.size() + 1) / 2, values[19]);
  }

  private static TaskQueueException failed(Ticket ticket) {
    TaskQueueException thrown =
        assertThrows(TaskQueueException.class, () -> ticket.await(PATIENCE));
    assertTrue(ticket.isDone());
    assertEquals(thrown.getMessage(), ticket.failure().getMessage());
    assertFalse(thrown.isCommunicatorFatal());
    return thrown;
  }

  private interface Append {
    void to(TaskQueue queue, DeviceBuffer x, Ticket ticket);
  }

  static Stream<Arguments> differences() {
    Append usual = (q, x, t) -> q.allReduce(GRADIENTS, 0, x, 0, x, 100, 70, SUM, t);
    Append root0 = (q, x, t) -> q.broadcast(GRADIENTS, 0, x, 0, x, 100, 70, 0, t);
    Append root1 = (q, x, t) -> q.broadcast(GRADIENTS, 0, x, 0, x, 100, 70, 1, t);
    Append ofInts =
        (q, x, t) -> {
          DeviceBuffer ints =
              DeviceBuffer.wrap(x.device(), DataType.INT32, x.count(), x.address(0));
          q.allReduce(GRADIENTS, 0, ints, 0, ints, 100, 70, SUM, t);
        };
    return Stream.of(
        arguments(
            "symbol",
            usual,
            (Append) (q, x, t) -> q.allReduce(OTHER, 0, x, 0, x, 100, 70, SUM, t),
            "task \"another task\" (ncclFfmAllReduce of 70 x FLOAT32, sum"),
        arguments(
            "count",
            usual,
            (Append) (q, x, t) -> q.allReduce(GRADIENTS, 0, x, 0, x, 100, 71, SUM, t),
            "task \"gradients\" (ncclFfmAllReduce of 71 x FLOAT32, sum"),
        arguments("type", usual, ofInts, "(ncclFfmAllReduce of 70 x INT32, sum"),
        arguments(
            "op",
            usual,
            (Append) (q, x, t) -> q.allReduce(GRADIENTS, 0, x, 0, x, 100, 70, ReduceOp.MAX, t),
            "(ncclFfmAllReduce of 70 x FLOAT32, max"),
        arguments(
            "function",
            usual,
            (Append) (q, x, t) -> q.barrier(GRADIENTS, 0, t),
            "(ncclFfmBarrier of 0 x INT8"),
        arguments("root", root0, root1, "(ncclFfmBroadcast of 70 x FLOAT32, root or peer 1)"));
  }

  @ParameterizedTest(name = "another {0}")
  @MethodSource("differences")
  void ranksThatDisagreeAreToldOfBothTasks(String what, Append usual, Append odd, String oddText) {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    try (TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(
          rank -> {
            boolean isOdd = rank.rank() == ODD;
            TaskQueue queue = tasks.of(rank);
            comms[rank.rank()] = queue.deviceCommunicator();
            DeviceBuffer x = tasks.x(rank);
            Ticket before = queue.ticket();
            Ticket ticket = queue.ticket();
            Ticket behind = queue.ticket();
            queue.barrier(OTHER, 0, before);
            (isOdd ? odd : usual).to(queue, x, ticket);
            queue.allReduce(GRADIENTS, 0, x, 0, x, 100, 70, SUM, behind);
            queue.launch(rank.stream());
            TaskQueueException e = failed(ticket);
            Messages.assertNames(
                e, "ncclInvalidUsage", "on rank " + rank.rank(), "lane 0", "came to", oddText);
            assertEquals(rank.rank(), e.rank());
            assertEquals(0, e.lane());
            assertTrue(isOdd ? e.peer() < ODD : e.peer() == ODD, "peer " + e.peer());
            TaskRecord own = e.task();
            TaskRecord theirs = e.peerTask();
            assertNotNull(own, e.getMessage());
            assertNotNull(theirs, e.getMessage());
            assertTrue((isOdd ? own : theirs).toString().contains(oddText), e.getMessage());
            assertEquals("\"gradients\"", (isOdd ? theirs : own).symbol().toString());
            assertEquals(1, own.sequence());
            assertEquals(1, theirs.sequence());
            before.await(LONG); // what came before is done
            assertNull(before.failure());
            assertEquals(e.getMessage(), failed(behind).getMessage());
            // At once, and nothing is appended.
            assertThrows(TaskQueueException.class, () -> queue.barrier(OTHER, 0, before));
            assertTrue(before.isDone());
            assertEquals(e.getMessage(), queue.failure(0).getMessage());
            assertNull(queue.failure(1));
            assertEquals(5, queue.snapshot().lanes().get(0).failure().resultCode());
            assertLaneWorks(queue, 1, x, rank);
            assertEquals(Communicator.State.READY, rank.communicator().state());
            await(barrier);
          });
      // A new queue on the same device communicator has lanes that work.
      world.run(rank -> tasks.of(rank).close());
      world.run(
          rank ->
              tasks.queues[rank.rank()] = TaskQueue.create(comms[rank.rank()], lanes(2).build()));
      world.run(
          rank -> {
            assertLaneWorks(tasks.of(rank), 0, tasks.x(rank), rank);
            assertLaneWorks(tasks.of(rank), 1, tasks.x(rank), rank);
          });
    }
  }

  @Test
  void ranksThatDisagreeOnTheOrderAreTold() {
    try (TaskRanks tasks = TaskRanks.open(world, lanes(1).blocksPerLane(2).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket[] tickets = {queue.ticket(), queue.ticket()};
            for (int i = 0; i < 2; i++) {
              boolean isFirst = i == 0 ^ rank.rank() == ODD;
              queue.allReduce(isFirst ? GRADIENTS : OTHER, 0, x, 0, x, 100, 70, SUM, tickets[i]);
            }
            queue.launch(rank.stream());
            for (Ticket ticket : tickets) {
              Messages.assertNames(
                  failed(ticket), "\"gradients\"", "\"another task\"", "number 0 of lane 0");
            }
          });
    }
  }

  /** A name that this process does not know is shown as its hash. */
  @Test
  void unknownNamesAreShownInHexadecimal() {
    try (TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Ticket ticket = queue.ticket();
            int hash = rank.rank() == ODD ? 0x1234abcd : 0x00c0ffee;
            queue.barrier(io.ncclffm.device.TaskSymbol.ofHash(hash), 0, ticket);
            queue.launch(rank.stream());
            Messages.assertNames(failed(ticket), "0x1234abcd", "0x00c0ffee");
          });
    }
  }

  @Test
  void rankThatDoesNotComeIsNamedAndOtherLanesGoOn() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (TaskRanks tasks =
        TaskRanks.open(world, TaskRanks.small().timeout(SHORT).build(), lanes(2).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket ticket = queue.ticket();
            if (rank.rank() != ODD) {
              queue.allReduce(GRADIENTS, 0, x, 0, x, 100, 70, SUM, ticket);
              queue.launch(rank.stream());
              TaskQueueException e = failed(ticket);
              Messages.assertNames(
                  e, "ncclTimeout", "\"gradients\"", "number 0 of lane 0", "for rank " + ODD);
              assertEquals(ODD, e.peer());
              assertTrue(e.waited().compareTo(SHORT) >= 0, "waited " + e.waited());
              assertTrue(e.waited().compareTo(PATIENCE) < 0, "waited " + e.waited());
              assertNull(e.peerTask());
            }
            await(barrier);
            assertLaneWorks(queue, 1, x, rank);
          });
    }
  }

  @Test
  void fullRingIsToldAndNothingIsLost() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    int depth = 4;
    try (TaskRanks tasks = TaskRanks.open(world, lanes(1).depth(depth).timeout(SHORT).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            x.copyFrom(new float[] {1, 1, 1, 1, 1, 1, 1, 1}, rank.stream());
            Ticket[] tickets = new Ticket[depth + 2];
            for (int i = 0; i < tickets.length; i++) {
              tickets[i] = queue.ticket();
            }
            int first = rank.rank() == ODD ? tickets.length : 0;
            for (int i = first; i < tickets.length; i++) {
              queue.allReduce(GRADIENTS, 0, x, i, x, 10 + i, 1, SUM, tickets[i]);
            }
            queue.launch(rank.stream());
            if (rank.rank() != ODD) {
              for (int i = depth; i < depth + 2; i++) {
                Ticket ticket = tickets[i];
                QueueFullException e =
                    assertThrows(QueueFullException.class, () -> ticket.await(PATIENCE));
                Messages.assertNames(
                    e, "ncclFfmQueueFull (1000)", "ring of 4 tasks", "\"gradients\"", "300 ms");
                assertEquals("ncclFfmAllReduce", e.operation());
                assertEquals(1000, e.resultCode());
                assertEquals(-1, ticket.sequence());
                assertFalse(e.isCommunicatorFatal());
              }
              assertFalse(tickets[0].isDone());
            }
            await(barrier);
            if (rank.rank() == ODD) {
              for (int i = 0; i < depth; i++) {
                queue.allReduce(GRADIENTS, 0, x, i, x, 10 + i, 1, SUM, tickets[i]);
              }
              queue.launch(rank.stream());
            }
            for (int i = 0; i < depth; i++) {
              tickets[i].await(LONG);
              assertEquals(i, tickets[i].sequence());
            }
            assertNull(queue.failure(0));
            queue.allReduce(GRADIENTS, 0, x, 4, x, 14, 1, SUM, tickets[4]);
            queue.launch(rank.stream());
            tickets[4].await(LONG);
            assertEquals(depth, tickets[4].sequence());
            float[] values = new float[16];
            x.copyTo(values, rank.stream());
            for (int i = 0; i < 5; i++) {
              assertEquals(RANKS, values[10 + i]);
            }
          });
    }
  }

  /** Blocks of a kernel take numbers: where there is no room in time, the lane has failed. */
  @Test
  void fullRingOfAKernelFailsItsLane() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (TaskRanks tasks = TaskRanks.open(world, lanes(1).depth(1).timeout(SHORT).build())) {
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              TaskQueue queue = tasks.of(rank);
              DeviceBuffer x = tasks.x(rank);
              TaskOverlap work =
                  new TaskOverlap(
                      part(x, 0, 100),
                      part(x, 100, 100),
                      part(x, 200, 400),
                      2,
                      1,
                      1,
                      0,
                      2,
                      TaskOverlap.Parts.BOTH);
              ProducerRun run = queue.overlap(GRADIENTS, work, rank.stream());
              QueueFullException e =
                  assertThrows(QueueFullException.class, () -> run.await(PATIENCE));
              Messages.assertNames(
                  e, "ncclFfmTaskIterate", "ncclFfmQueueFull", "ring of 1 tasks", "lane 0");
              assertEquals("ncclTimeout", NcclException.resultName(queue.failure(0).resultCode()));
              assertEquals(e.getMessage(), run.failure().getMessage());
              Messages.assertNames(
                  assertThrows(
                      TaskQueueException.class,
                      () -> queue.overlap(GRADIENTS, work, rank.stream())),
                  "ncclTimeout");
            }
            await(barrier);
          });
    }
  }

  private static DeviceBuffer part(DeviceBuffer x, int at, int count) {
    return DeviceBuffer.wrap(x.device(), DataType.FLOAT32, count, x.address(at));
  }

  /** A producer that dies between its number and its task, played by writing to the lane. */
  @Test
  void numberThatIsNeverFilledBreaksTheLane() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (TaskRanks tasks = TaskRanks.open(world, lanes(2).timeout(SHORT).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            if (rank.rank() == 0) {
              MemorySegment lane = ncclFfmTaskQueue.lanes(queue.struct());
              for (long at :
                  new long[] {ncclFfmTaskLane.head$offset(), ncclFfmTaskLane.launched$offset()}) {
                DeviceBuffer.wrap(
                        rank.device(),
                        DataType.INT32,
                        1,
                        MemorySegment.ofAddress(lane.address() + at))
                    .copyFrom(new int[] {1}, rank.stream());
              }
              queue.producerLaunched(rank.stream());
              long deadline = System.nanoTime() + PATIENCE.toNanos();
              while (queue.failure(0) == null) {
                assertTrue(System.nanoTime() - deadline < 0, queue.snapshot()::toString);
                Thread.onSpinWait();
              }
              TaskQueueException e = queue.failure(0);
              Messages.assertNames(
                  e, "ncclFfmQueueBroken (1001)", "number 0 was taken by a producer", "lane 0");
              assertTrue(e.waited().compareTo(SHORT) >= 0, "waited " + e.waited());
              assertNull(e.task());
            }
            await(barrier);
            assertLaneWorks(queue, 1, tasks.x(rank), rank);
          });
    }
  }

  @Test
  void abortFromAnotherThreadEndsWaitingAndNamesTheTask() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    DeviceCommunicator[] fresh = new DeviceCommunicator[RANKS];
    try (TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Ticket ticket = queue.ticket();
            if (rank.rank() == 0) {
              queue.barrier(GRADIENTS, 0, ticket);
              queue.launch(rank.stream());
              assertFalse(ticket.isDone(), "its peers have not come");
              await(barrier);
              TaskQueueException e = failed(ticket);
              Messages.assertNames(e, "ncclRemoteError", "rank 0", "aborted by this process");
              Messages.assertNames(
                  assertThrows(
                      TaskQueueException.class, () -> queue.barrier(GRADIENTS, 1, queue.ticket())),
                  "aborted");
              assertNotNull(queue.failure(1), "every lane is aborted");
            } else {
              await(barrier);
              tasks.queues[0].abort();
              tasks.queues[0].abort();
            }
            await(barrier);
            assertEquals(Communicator.State.READY, rank.communicator().state());
          });
      world.run(rank -> tasks.of(rank).deviceCommunicator().close());
      world.run(
          rank -> {
            fresh[rank.rank()] =
                DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build());
            tasks.queues[rank.rank()] = TaskQueue.create(fresh[rank.rank()], lanes(2).build());
          });
      world.run(rank -> assertLaneWorks(tasks.of(rank), 0, tasks.x(rank), rank));
    }
  }

  @Test
  void abortOfTheDeviceCommunicatorAbortsItsQueue() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Ticket ticket = queue.ticket();
            if (rank.rank() == 1) {
              queue.barrier(GRADIENTS, 0, ticket);
              queue.launch(rank.stream());
              await(barrier);
              assertEquals(6, failed(ticket).resultCode());
              assertNotNull(queue.failure(1), "also a lane on which nobody waits for a peer");
              assertThrows(
                  DeviceCommException.class, () -> queue.deviceCommunicator().throwIfFailed());
            } else {
              await(barrier);
              if (rank.rank() == 0) {
                tasks.queues[1].deviceCommunicator().abort();
              }
            }
            await(barrier);
          });
    }
  }

  /** An exception of one rank aborts all: those who wait for a ticket end, and all is freed. */
  @Test
  void exceptionOfOneRankEndsTheOthersWait() {
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (LocalWorld own = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(own, DataType.FLOAT32, COUNT)) {
      IllegalStateException thrown =
          assertThrows(
              IllegalStateException.class,
              () ->
                  own.run(
                      rank -> {
                        DeviceCommunicator comm =
                            DeviceCommunicator.create(
                                rank.communicator(), TaskRanks.small().build());
                        TaskQueue queue = TaskQueue.create(comm, lanes(1).build());
                        Ticket ticket = queue.ticket();
                        await(barrier);
                        if (rank.rank() == 0) {
                          throw new IllegalStateException("rank 0 gives up");
                        }
                        queue.allReduce(
                            GRADIENTS, 0, x.of(rank), 0, x.of(rank), 0, COUNT, SUM, ticket);
                        queue.launch(rank.stream());
                        ticket.await(LONG);
                      }));
      assertEquals("rank 0 gives up", thrown.getMessage());
      assertEquals(1, thrown.getSuppressed().length);
    }
  }

  /** Only then can a rank allocate for as long as it takes, while another has gone ahead. */
  @Test
  void ranksThatMakeAQueueMeetOnTheHost() {
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    TaskQueue[] queues = new TaskQueue[RANKS];
    Thread[] first = new Thread[1];
    world.run(
        rank ->
            comms[rank.rank()] =
                DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build()));
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    world.run(
        rank -> {
          if (rank.rank() == 0) {
            first[0] = Thread.currentThread();
          }
          await(barrier);
          long deadline = System.nanoTime() + PATIENCE.toNanos();
          while (rank.rank() != 0 && !isMeeting(first[0])) {
            assertTrue(System.nanoTime() < deadline, "rank 0 does not wait on the host");
            Thread.onSpinWait();
          }
          queues[rank.rank()] = TaskQueue.create(comms[rank.rank()], lanes(1).build());
        });
    world.run(rank -> assertEquals(0, queues[rank.rank()].snapshot().lanes().get(0).done()));
    world.run(rank -> comms[rank.rank()].close());
  }

  /** The others need not wait for a rank whose device communicator has failed. */
  @Test
  void rankThatHasFailedTellsTheOthers() {
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    world.run(
        rank ->
            comms[rank.rank()] =
                DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build()));
    comms[ODD].abort();
    world.run(
        rank -> {
          NcclException e =
              assertThrows(NcclException.class, () -> TaskQueue.create(comms[rank.rank()]));
          if (rank.rank() == ODD) {
            assertTrue(e instanceof DeviceCommException, e.toString());
          } else {
            Messages.assertNames(e, "rank " + ODD + " could not make its queue");
          }
        });
    world.run(rank -> comms[rank.rank()].close());
  }

  private static boolean isMeeting(Thread thread) {
    return Arrays.stream(thread.getStackTrace())
        .anyMatch(frame -> frame.getClassName().endsWith(".Meeting"));
  }

  /**
   * A launch may block, as when kernels before it do not end: that must not keep others waiting.
   */
  @Test
  void launchThatBlocksKeepsNeitherTicketsNorAbortWaiting() throws Exception {
    TestRanks.assumeCpu("the launch is slowed down");
    TaskQueue[] queue = new TaskQueue[1];
    Thread[] launcher = new Thread[1];
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      Thread other =
          Thread.ofPlatform()
              .start(
                  () -> {
                    try {
                      await(barrier);
                      awaitInside(launcher[0], "ncclFfmTaskAppendOnStream");
                      long start = System.nanoTime();
                      Ticket ticket = queue[0].ticket();
                      assertNull(queue[0].failure(0));
                      assertThrows(IllegalStateException.class, ticket::isDone);
                      queue[0].abort();
                      assertNotNull(queue[0].failure(0));
                      long took = System.nanoTime() - start;
                      assertTrue(
                          isInside(launcher[0], "ncclFfmTaskAppendOnStream"),
                          "it took " + took + " ns");
                    } catch (Exception e) {
                      throw new AssertionError(e);
                    } finally {
                      Faults.clear();
                    }
                  });
      AssertionError[] trouble = new AssertionError[1];
      other.setUncaughtExceptionHandler((thread, e) -> trouble[0] = new AssertionError(e));
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              queue[0] = tasks.of(rank);
              launcher[0] = Thread.currentThread();
              Ticket ticket = queue[0].ticket();
              queue[0].barrier(GRADIENTS, 0, ticket);
              Faults.inject("ncclFfmLaunch:delay_ms=6000");
              await(barrier);
              queue[0].launch(rank.stream());
              Messages.assertNames(failed(ticket), "ncclRemoteError", "aborted");
            }
          });
      other.join();
      if (trouble[0] != null) {
        throw trouble[0];
      }
    } finally {
      Faults.clear();
    }
  }

  private static boolean isInside(Thread thread, String method) {
    return Arrays.stream(thread.getStackTrace())
        .anyMatch(frame -> frame.getMethodName().equals(method));
  }

  private static void awaitInside(Thread thread, String method) {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    while (!isInside(thread, method)) {
      assertTrue(System.nanoTime() < deadline, thread + " does not come to " + method);
      Thread.onSpinWait();
    }
  }

  /** What was not launched is not waited for. */
  @Test
  void producerThatCannotBeLaunchedIsNotCounted() {
    TestRanks.assumeCpu("the fault is injected");
    try (TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              TaskQueue queue = tasks.of(rank);
              TaskBuckets work = new TaskBuckets(tasks.x(rank), 0, COUNT, COUNT, 1, 0, 1);
              Faults.inject("ncclFfmLaunch:result=719");
              Messages.assertNames(
                  assertThrows(
                      NcclException.class, () -> queue.buckets(GRADIENTS, work, rank.stream())),
                  "ncclFfmTaskAppendBuckets",
                  "cudaErrorLaunchFailure");
              Faults.clear();
              assertEquals(0, queue.snapshot().producers());
              queue.stop(PATIENCE);
            }
          });
      world.run(rank -> assertLaneWorks(tasks.of(rank), 0, tasks.x(rank), rank));
    } finally {
      Faults.clear();
    }
  }
}

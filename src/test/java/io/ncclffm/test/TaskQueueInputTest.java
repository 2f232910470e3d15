package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmTaskQueue;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.QueueFullException;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskOverlap;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** What a task queue refuses, before anything is handed over, so that nothing is lost. */
class TaskQueueInputTest {
  private static final int RANKS = 2;
  private static final int COUNT = TaskRanks.COUNT;
  private static final ReduceOp SUM = ReduceOp.SUM;
  private static final TaskSymbol G = GRADIENTS;

  private static LocalWorld world;
  private static TaskRanks tasks;

  /** Rank 0's, used by the tests' own thread while no rank's task runs: nothing is launched. */
  private static TaskQueue queue;

  private static DeviceBuffer x;
  private static CudaStream stream;
  private static Ticket t;

  @BeforeAll
  static void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(RANKS);
    tasks = TaskRanks.open(world, TaskQueueConfig.builder().lanes(2).depth(4).build());
    queue = tasks.queues[0];
    x = tasks.x.of(0);
    world.run(
        rank -> {
          if (rank.rank() == 0) {
            stream = rank.stream();
          }
        });
    t = queue.ticket();
  }

  @AfterAll
  static void closeWorld() {
    if (tasks != null) {
      world.run( // nothing of all that was appended
          rank -> {
            Ticket ticket = tasks.of(rank).ticket();
            tasks.of(rank).barrier(GRADIENTS, 1, ticket);
            tasks.of(rank).launch(rank.stream());
            ticket.await(LONG);
            assertEquals(0, ticket.sequence());
          });
      tasks.close();
    }
    if (world != null) {
      world.close();
    }
  }

  private static void refused(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(IllegalArgumentException.class, call::run), texts);
    assertThrows(IllegalStateException.class, t::isDone, "the ticket stands for a task");
  }

  private static void refusedByTheShim(Runnable call, String... texts) {
    NcclException e = assertThrows(NcclException.class, call::run);
    assertEquals("ncclInvalidArgument", NcclException.resultName(e.resultCode()));
    Messages.assertNames(e, texts);
    assertThrows(IllegalStateException.class, t::isDone, "the ticket stands for a task");
  }

  private static TaskQueueConfig.Builder lanes(int lanes) {
    return TaskQueueConfig.builder().lanes(lanes);
  }

  private static void illegal(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(IllegalStateException.class, call::run), texts);
  }

  @Test
  void lanesThatAreNone() {
    refused(() -> queue.barrier(G, 2, t), "ncclFfmBarrier", "lane 2", "0 to 1");
    refused(() -> queue.placeholder(G, -1, t), "placeholder", "lane -1");
    refused(() -> queue.failure(2), "lane 2");
  }

  @Test
  void rangesThatLeaveTheBuffer() {
    String all = "from offset 1 do not lie in";
    refused(
        () -> queue.allReduce(G, 0, x, 1, x, 0, COUNT, SUM, t),
        "ncclFfmAllReduce",
        COUNT + " elements " + all);
    refused(() -> queue.allReduce(G, 0, x, 0, x, 1, COUNT, SUM, t), all);
    refused(
        () -> queue.reduceScatter(G, 0, x, 1, x, 0, COUNT / 2, SUM, t),
        "ncclFfmReduceScatter",
        all);
    refused(() -> queue.allGather(G, 0, x, 0, x, 1, COUNT / 2, t), "ncclFfmAllGather", all);
    refused(() -> queue.allToAll(G, 0, x, 0, x, 1, COUNT / 2, t), "ncclFfmAllToAll", all);
    refused(() -> queue.broadcast(G, 0, x, 1, x, 0, COUNT, 0, t), "ncclFfmBroadcast", all);
    refused(() -> queue.reduce(G, 0, x, 1, x, 0, COUNT, SUM, 0, t), "ncclFfmReduce", all);
    refused(() -> queue.send(G, 0, x, 1, COUNT, 1, t), "ncclFfmSend", all);
    refused(() -> queue.recv(G, 0, x, 1, COUNT, 1, t), "ncclFfmRecv", all);
    refused(() -> queue.sendRecv(G, 0, x, 1, 1, x, 0, 1, COUNT, t), "ncclFfmSendRecv", all);
    refused(() -> queue.send(G, 0, x, 0, -1, 1, t), "-1 elements");
    refused(() -> queue.allGather(G, 0, x, 0, x, 0, Long.MAX_VALUE, t), "each of 2 ranks");
    DeviceBuffer huge = DeviceBuffer.wrap(x.device(), DataType.INT8, 1L << 42, x.address(0));
    refused(() -> queue.send(G, 0, huge, 0, 1L << 41, 1, t), "at most 1099511627776");
  }

  @Test
  void rootsPeersAndGroupsThatAreNone() {
    refused(() -> queue.broadcast(G, 0, x, 0, x, 0, 8, 2, t), "ncclFfmBroadcast", "root 2");
    refused(() -> queue.reduce(G, 0, x, 0, x, 0, 8, SUM, -1, t), "ncclFfmReduce", "root -1");
    refused(() -> queue.send(G, 0, x, 0, 8, 0, t), "ncclFfmSend", "peer 0", "another rank");
    refused(() -> queue.recv(G, 0, x, 0, 8, 2, t), "ncclFfmRecv", "peer 2");
    refused(() -> queue.sendRecv(G, 0, x, 0, 1, x, 8, 0, 8, t), "ncclFfmSendRecv", "peer 0");
    refused(
        () -> queue.hierarchicalAllReduce(G, 0, x, 0, x, 0, 8, SUM, 3, t),
        "ncclFfmHierarchicalAllReduce",
        "groups of 3",
        "2 ranks");
  }

  @Test
  void typesOperationsAndBuffersOfOthers() {
    DeviceBuffer small = DeviceBuffer.wrap(x.device(), DataType.FLOAT8_E5M2, COUNT, x.address(0));
    refused(() -> queue.allReduce(G, 0, small, 0, small, 0, 8, SUM, t), "FLOAT8_E5M2");
    DeviceBuffer ints = DeviceBuffer.wrap(x.device(), DataType.INT32, COUNT, x.address(0));
    refused(() -> queue.allReduce(G, 0, x, 0, ints, 0, 8, SUM, t), "differ in type");
    try (ReduceOp half =
        queue.deviceCommunicator().communicator().createPreMulSum(DataType.FLOAT32, 0.5)) {
      refused(() -> queue.reduce(G, 0, x, 0, x, 0, 8, half, 0, t), "NCCL's own");
    }
    if (CudaDevice.count() > 1) {
      DeviceBuffer other =
          DeviceBuffer.wrap(new CudaDevice(1), DataType.FLOAT32, COUNT, x.address(0));
      refused(() -> queue.allReduce(G, 0, x, 0, other, 0, 8, SUM, t), "is on another device");
    }
    refusedByTheShim(
        () -> queue.allReduce(G, 0, x, 0, x, 4, 8, SUM, t), "ncclFfmAllReduce", "overlap");
    refusedByTheShim(() -> queue.allToAll(G, 0, x, 0, x, 0, 8, t), "ncclFfmAllToAll", "overlap");
    DeviceBuffer odd =
        DeviceBuffer.wrap(
            x.device(), DataType.FLOAT32, 8, MemorySegment.ofAddress(x.address(0).address() + 2));
    refusedByTheShim(() -> queue.broadcast(G, 0, odd, 0, odd, 0, 8, 0, t), "aligned");
  }

  @Test
  void ticketsOfOthersAndUnfinishedOnes() {
    Ticket foreign = tasks.queues[1].ticket();
    refused(
        () -> queue.barrier(G, 0, foreign), "ncclFfmBarrier", "the ticket is of the task queue");
    illegal(() -> foreign.await(LONG), "no task was appended with it");
    illegal(foreign::isDone, "no task was appended with it");
    illegal(foreign::sequence, "no task was appended with it");
    world.run(
        rank -> {
          TaskQueue mine = tasks.of(rank);
          Ticket ticket = mine.ticket();
          mine.barrier(G, 0, ticket);
          illegal(() -> mine.barrier(G, 0, ticket), "unfinished task", "ncclFfmBarrier", "await");
          illegal(() -> ticket.await(LONG), "was not launched");
          assertFalse(ticket.isDone());
          assertEquals(-1, ticket.sequence());
          mine.launch(rank.stream());
          ticket.await(LONG);
          long number = ticket.sequence();
          mine.barrier(G, 0, ticket);
          mine.launch(rank.stream());
          ticket.await(LONG);
          assertEquals(number + 1, ticket.sequence());
          assertNull(ticket.failure());
          assertThrows(
              IllegalArgumentException.class, () -> ticket.await(Duration.ZERO), "a deadline");
        });
  }

  @Test
  void streamsThatAreNone() {
    refused(() -> queue.launch(null), "ncclFfmTaskAppendOnStream", "stream is null");
    if (CudaDevice.count() > 1) {
      try (CudaStream other = CudaStream.create(new CudaDevice(1))) {
        refused(() -> queue.launch(other), "ncclFfmTaskAppendOnStream", "another device");
      }
    }
    Messages.assertNames(
        assertThrows(
            IllegalStateException.class,
            () -> CudaGraph.capture(stream, () -> queue.launch(stream))),
        "ncclFfmTaskAppendOnStream",
        "is being captured");
    stream.synchronize();
  }

  @Test
  void producersThatAreNone() {
    Runnable empty = () -> new TaskBuckets(x, 0, COUNT, 0, 1, 0, 1);
    refused(empty, "ncclFfmTaskAppendBuckets", "buckets of 0");
    refused(() -> new TaskBuckets(x, 1, COUNT, 9, 1, 0, 1), "from offset 1 do not lie in");
    refused(() -> new TaskBuckets(x, 0, COUNT, 9, 1, 0, 0), "0 blocks", "1 to 1024");
    refused(() -> new TaskBuckets(x, 0, COUNT, 9, 1, 0, 1025), "1025 blocks");
    DeviceBuffer ints = DeviceBuffer.wrap(x.device(), DataType.INT32, COUNT, x.address(0));
    refused(() -> new TaskBuckets(ints, 0, COUNT, 9, 1, 0, 1), "FLOAT32");
    TaskOverlap.Parts both = TaskOverlap.Parts.BOTH;
    DeviceBuffer in = part(0, 100);
    DeviceBuffer out = part(100, 100);
    DeviceBuffer work = part(200, 400);
    refused(
        () -> new TaskOverlap(in, part(100, 99), work, 1, 1, 1, 0, 1, both),
        "ncclFfmTaskIterate",
        "as many elements as in");
    refused(() -> new TaskOverlap(in, out, part(200, 399), 1, 1, 1, 0, 1, both), "four times");
    refused(() -> new TaskOverlap(in, out, work, -1, 1, 1, 0, 1, both), "-1 iterations");
    refused(() -> new TaskOverlap(in, out, work, 1, -2, 1, 0, 1, both), "-2 rounds");
    refused(() -> new TaskOverlap(in, out, work, 1, 1, 1, 0, 0, both), "0 blocks");
    refused(() -> new TaskOverlap(in, in, work, 1, 1, 1, 0, 1, both), "apart");
    refused(() -> new TaskOverlap(in, out, part(150, 400), 1, 1, 1, 0, 1, both), "apart");
    refused(
        () -> new TaskOverlap(in, out, work, Integer.MAX_VALUE, 1, 1, 0, 1000, both),
        "2147483647000 tasks");
    refused(() -> queue.buckets(G, new TaskBuckets(x, 0, 8, 8, 1, 0, 1), null), "stream is null");
  }

  private static DeviceBuffer part(int at, int count) {
    return DeviceBuffer.wrap(x.device(), DataType.FLOAT32, count, x.address(at));
  }

  @Test
  void tooManyOnTheWayAreRefusedAtOnceAndNothingIsLost() {
    world.run(
        rank -> {
          TaskQueue mine = tasks.of(rank);
          Ticket[] all = new Ticket[TaskQueue.MOST_ON_THE_WAY];
          for (int i = 0; i < all.length; i++) {
            all[i] = mine.ticket();
            mine.placeholder(G, 0, all[i]);
          }
          Ticket more = mine.ticket();
          Messages.assertNames(
              assertThrows(QueueFullException.class, () -> mine.placeholder(G, 0, more)),
              "placeholder",
              "ncclFfmQueueFull (1000)",
              "1024 tasks",
              "launch them");
          mine.launch(rank.stream());
          for (Ticket ticket : all) {
            ticket.await(LONG);
          }
          mine.placeholder(G, 0, more);
          mine.launch(rank.stream());
          more.await(LONG);
          assertEquals(all[0].sequence() + all.length, more.sequence());
        });
  }

  @Test
  void configurationsThatAreNone() {
    TaskQueueConfig.Builder b = TaskQueueConfig.builder();
    refused(() -> b.lanes(0), "lanes 0", "1 to 64");
    refused(() -> b.lanes(65), "lanes 65");
    refused(() -> b.depth(0), "depth 0");
    refused(() -> b.depth(48), "depth 48", "power of two");
    refused(() -> b.depth(1 << 21), "depth 2097152", "1048576");
    refused(() -> b.blocksPerLane(0), "blocksPerLane 0");
    refused(() -> b.idle(Duration.ofMillis(-1)), "idle", "negative");
    refused(() -> b.timeout(Duration.ofMillis(-1)), "timeout", "negative");
    refused(
        () -> TaskQueueConfig.builder().mode(TaskQueueConfig.Mode.DEBUG).lanes(2).build(),
        "DEBUG",
        "2 lanes");
    TaskQueueConfig debug = TaskQueueConfig.builder().mode(TaskQueueConfig.Mode.DEBUG).build();
    assertEquals(1, debug.lanes() * debug.depth() * debug.blocksPerLane());
    assertTrue(TaskQueueConfig.DEFAULT.lanes() * TaskQueueConfig.DEFAULT.blocksPerLane() <= 8);
  }

  @Test
  void deviceCommunicatorWithAQueueTakesNothingElse() {
    DeviceCommunicator comm = queue.deviceCommunicator();
    String why = "has a task queue";
    illegal(() -> comm.allReduce(x, x, SUM, stream), "ncclFfmAllReduce", why);
    illegal(() -> comm.send(x, 1, stream), "ncclFfmSend", why);
    illegal(() -> FusedKernels.scaleAllReduceSqrt(comm, x, 1, 1, stream), why);
    illegal(() -> TaskQueue.create(comm), why, "make another device communicator");
    assertTrue(ncclFfmTaskQueue.sizeof() <= 128, "a kernel takes it by value");
    assertEquals(2, ncclFfmTaskQueue.nLanes(queue.struct()));
    assertTrue(queue.struct().isReadOnly());
  }

  /** All ranks are told, whichever asks for what cannot be, and the communicator works on. */
  @Test
  void queuesThatCannotBe() {
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    // One after the other: on a shared GPU a rank that frees waits for the next one's kernels.
    world.run(
        rank ->
            comms[rank.rank()] =
                DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build()));
    world.run(
        rank ->
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> TaskQueue.create(comms[rank.rank()], lanes(5).build())),
                "5 lanes",
                "4 channels",
                "DeviceCommunicatorConfig"));
    world.run(
        rank -> {
          TaskQueueConfig mixed = lanes(rank.rank() == 0 ? 5 : 2).build();
          Messages.assertNames(
              assertThrows(
                  RuntimeException.class, () -> TaskQueue.create(comms[rank.rank()], mixed)),
              rank.rank() == 0 ? "5 lanes" : "rank 0 could not make its queue");
        });
    world.run(
        rank -> {
          TaskQueueConfig other = lanes(1 + rank.rank()).depth(8).build();
          Messages.assertNames(
              assertThrows(NcclException.class, () -> TaskQueue.create(comms[rank.rank()], other)),
              "ncclInvalidUsage",
              "rank " + (1 - rank.rank()) + " asks for " + (2 - rank.rank()) + " lanes",
              "depth 8");
        });
    world.run(
        rank -> {
          TaskQueue good = TaskQueue.create(comms[rank.rank()], lanes(4).build());
          Ticket ticket = good.ticket();
          good.barrier(G, 3, ticket);
          good.launch(rank.stream());
          ticket.await(LONG);
        });
    world.run(rank -> comms[rank.rank()].close());
  }

  @Test
  void closedQueueRefusesAllAndKeepsWhatBecameOfItsTasks() {
    TaskRanks other = TaskRanks.open(world, TaskQueueConfig.builder().lanes(2).build());
    Ticket[] done = new Ticket[RANKS];
    Ticket[] never = new Ticket[RANKS];
    world.run(
        rank -> {
          TaskQueue mine = other.of(rank);
          done[rank.rank()] = mine.ticket();
          never[rank.rank()] = mine.ticket();
          mine.barrier(G, 0, done[rank.rank()]);
          mine.launch(rank.stream());
          mine.barrier(G, 0, never[rank.rank()]);
        });
    other.close();
    for (int r = 0; r < RANKS; r++) {
      TaskQueue shut = other.queues[r];
      assertTrue(done[r].isDone());
      assertNull(done[r].failure());
      done[r].await(LONG);
      assertTrue(never[r].isDone());
      assertTrue(never[r].failure() instanceof TaskQueueException);
      assertNull(shut.failure(0));
      shut.close();
      shut.abort();
      illegal(shut::struct, "task queue", "is closed");
      illegal(shut::snapshot, "is closed");
      illegal(() -> shut.stop(LONG), "is closed");
      illegal(() -> shut.placeholder(G, 0, shut.ticket()), "placeholder", "is closed");
    }
  }
}

package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static io.ncclffm.test.TaskRanks.PATIENCE;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.Ticket;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/**
 * A queue, its device communicator and the communicator below, closed in every order: what is
 * closed says so, what is not works on, tickets keep what became of their tasks, nothing stays.
 */
class TaskQueueCloseTest {
  private static final int RANKS = 2;

  private enum Part {
    QUEUE,
    DEVICE_COMMUNICATOR,
    COMMUNICATOR;

    /** What ends with it. */
    Set<Part> ends() {
      return EnumSet.range(QUEUE, this);
    }
  }

  private enum When {
    /** All tasks are done. */
    DONE,
    /** Tasks are launched, and nobody has waited for them: they are done before the end. */
    LAUNCHED,
    /** Tasks were appended and not launched. */
    APPENDED,
    /** The communicator was aborted with tasks on the way. */
    ABORTED
  }

  private final CyclicBarrier everyRank = new CyclicBarrier(RANKS);

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  private void meet() throws Exception {
    everyRank.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
  }

  private static List<List<Part>> orders() {
    List<List<Part>> orders = new ArrayList<>();
    for (Part a : Part.values()) {
      for (Part b : Part.values()) {
        for (Part c : Part.values()) {
          if (EnumSet.of(a, b, c).size() == 3) {
            orders.add(List.of(a, b, c));
          }
        }
      }
    }
    return orders;
  }

  @ParameterizedTest
  @EnumSource
  void everyOrderEndsWell(When when) throws Exception {
    assertEquals(6, orders().size());
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 100)) {
      takeApart(world, x, when, orders().get(0));
      Resources before = Resources.now();
      for (List<Part> order : orders()) {
        takeApart(world, x, when, order);
      }
      before.assertNoMoreThan(5, "after closing in every order, " + when);
      TestRanks.assertWorks(world);
    }
  }

  private void takeApart(LocalWorld world, RankBuffers x, When when, List<Part> order) {
    world.run(
        r -> {
          try {
            takeApart(r, x, when, order);
          } catch (AssertionError | RuntimeException e) {
            throw new AssertionError("closing in the order " + order + ", " + when, e);
          }
        });
  }

  private void takeApart(LocalWorld.Rank r, RankBuffers x, When when, List<Part> order)
      throws Exception {
    Communicator communicator = r.communicator().split(0, r.rank(), CommunicatorConfig.DEFAULT);
    DeviceCommunicator comm = DeviceCommunicator.create(communicator, TaskRanks.small().build());
    TaskQueue queue = TaskQueue.create(comm, TaskQueueConfig.builder().lanes(2).build());
    Ticket[] tickets = new Ticket[20];
    boolean partly = when == When.ABORTED;
    x.of(r).fill((byte) 0, r.stream());
    for (int i = 0; i < tickets.length; i++) {
      tickets[i] = queue.ticket();
      // Where it will be aborted, one rank does not come to the second half.
      if (!partly || i < 10 || r.rank() == 0) {
        queue.allReduce(
            GRADIENTS, i % 2, x.of(r), 0, x.of(r), 2 * i + 2, 2, ReduceOp.SUM, tickets[i]);
      }
    }
    if (when != When.APPENDED) {
      queue.launch(r.stream());
    }
    int waited = when == When.DONE ? tickets.length : partly ? 10 : 0;
    for (int i = 0; i < waited; i++) {
      tickets[i].await(LONG);
    }
    meet();
    if (partly) {
      communicator.abort();
    }
    Set<Part> closed = partly ? EnumSet.allOf(Part.class) : EnumSet.noneOf(Part.class);
    check(queue, comm, communicator, closed);
    for (Part part : order) {
      for (int times = 0; times < 2; times++) {
        switch (part) {
          case QUEUE -> queue.close();
          case DEVICE_COMMUNICATOR -> comm.close();
          default -> communicator.close();
        }
      }
      closed.addAll(part.ends());
      check(queue, comm, communicator, closed);
      meet(); // nothing is enqueued while another rank frees on the same GPU
    }
    for (int i = 0; i < tickets.length; i++) {
      boolean isDone = when != When.APPENDED && (!partly || i < 10);
      if (isDone) {
        assertTrue(tickets[i].isDone(), tickets[i].toString());
        assertNull(tickets[i].failure());
      } else if (!partly || r.rank() == 0) {
        assertTrue(tickets[i].isDone(), tickets[i].toString());
        assertTrue(tickets[i].failure() instanceof TaskQueueException);
      }
    }
  }

  private static void check(
      TaskQueue queue, DeviceCommunicator comm, Communicator communicator, Set<Part> closed) {
    if (closed.contains(Part.QUEUE)) {
      Messages.assertNames(assertThrows(IllegalStateException.class, queue::struct), "closed");
      assertThrows(RuntimeException.class, () -> queue.placeholder(GRADIENTS, 0, queue.ticket()));
      assertThrows(IllegalStateException.class, queue::snapshot);
    } else {
      assertNotNull(queue.struct());
      assertEquals(2, queue.snapshot().lanes().size());
    }
    if (closed.contains(Part.DEVICE_COMMUNICATOR)) {
      assertThrows(IllegalStateException.class, comm::struct);
    } else {
      assertNotNull(comm.struct());
    }
    boolean ready = communicator.state() == Communicator.State.READY;
    assertEquals(!closed.contains(Part.COMMUNICATOR), ready);
  }

  /** Once the queue is closed, its device communicator takes collectives and queues again. */
  @Test
  void deviceCommunicatorWorksOnAfterItsQueue() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
      for (int round = 0; round < 3; round++) {
        world.run(
            rank -> {
              Ticket ticket = tasks.of(rank).ticket();
              tasks.of(rank).barrier(GRADIENTS, 3, ticket);
              tasks.of(rank).launch(rank.stream());
              ticket.await(LONG);
            });
        world.run(rank -> tasks.of(rank).close());
        world.run(
            rank -> {
              float[] values = {1, 2};
              tasks.x(rank).copyFrom(values, rank.stream());
              tasks
                  .of(rank)
                  .deviceCommunicator()
                  .allReduce(tasks.x(rank), tasks.x(rank), ReduceOp.SUM, rank.stream());
              tasks.x(rank).copyTo(values, rank.stream());
              assertEquals(2 * RANKS, values[1]);
            });
        world.run(
            rank ->
                tasks.queues[rank.rank()] = TaskQueue.create(tasks.of(rank).deviceCommunicator()));
      }
    }
  }

  /** A rank that comes to nothing more: the others' close ends their tasks within its bound. */
  @Test
  void closeEndsWhatNobodyWillFinish() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
      Ticket[] ticket = new Ticket[1];
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              TaskQueue queue = tasks.of(rank);
              ticket[0] = queue.ticket();
              queue.barrier(GRADIENTS, 0, ticket[0]);
              queue.launch(rank.stream());
              queue.close();
            }
          });
      Messages.assertNames(ticket[0].failure(), "ncclRemoteError", "aborted", "\"gradients\"");
    }
  }

  /** A stop that cannot come to its end, and does not outlive the queue. */
  @Test
  void stopEndsWhenAnotherThreadClosesTheQueue() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
      RuntimeException[] ended = new RuntimeException[1];
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              TaskQueue queue = tasks.of(rank);
              // A producer that does not end, for on its stream this waits for the other ranks.
              allReduce(rank, tasks);
              queue.producerLaunched(rank.stream());
              Thread stopping =
                  Thread.ofPlatform()
                      .start(
                          () -> {
                            try {
                              queue.stop(LONG);
                            } catch (RuntimeException e) {
                              ended[0] = e;
                            }
                          });
              awaitInside(stopping, "isDrained");
              queue.abort();
              queue.close();
              queue.close();
              assertTrue(stopping.join(PATIENCE), "stop goes on");
            }
          });
      Messages.assertNames(ended[0], "stop", "is closed");
      world.run(
          rank -> {
            if (rank.rank() != 0) {
              allReduce(rank, tasks);
            }
          });
      world.run(rank -> rank.stream().synchronize(LONG));
    }
  }

  private static void allReduce(LocalWorld.Rank rank, TaskRanks tasks) {
    rank.communicator().allReduce(tasks.x(rank), tasks.x(rank), ReduceOp.SUM, rank.stream());
  }

  private static void awaitInside(Thread thread, String method) {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    while (Arrays.stream(thread.getStackTrace())
        .noneMatch(frame -> frame.getMethodName().equals(method))) {
      assertTrue(System.nanoTime() < deadline, thread + " does not come to " + method);
      Thread.onSpinWait();
    }
  }
}

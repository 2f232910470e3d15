package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.logging.Handler;
import java.util.logging.Level;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.jupiter.api.Test;

/** {@link Communicator#watch}: work that does not end is reported, aborted, and wakes who waits. */
class WatchdogTest {
  private static final Duration LIMIT = Duration.ofMillis(500);
  private static final Duration PATIENCE = Duration.ofSeconds(30);

  @Test
  void rankThatNeverComesIsReportedAndTheWaitEnds() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            if (rank.rank() == 1) {
              return; // never comes
            }
            rank.communicator().watch(LIMIT);
            DeviceBuffer own = x.of(rank);
            rank.communicator().allReduce(own, own, ReduceOp.SUM, rank.stream());
            NcclException e =
                assertThrows(NcclException.class, () -> rank.stream().synchronize(PATIENCE));
            Messages.assertNames(
                e, "watchdog", "ncclAllReduce of 1000 x FLOAT32", "ms old", "WatchdogTest");
            assertEquals(Communicator.State.ABORTED, rank.communicator().state());
          });
    }
  }

  @Test
  void workThatEndsInTimeIsLeftAlone() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            rank.communicator().watch(PATIENCE);
            DeviceBuffer own = x.of(rank);
            for (int i = 0; i < 100; i++) {
              rank.communicator().allReduce(own, own, ReduceOp.MAX, rank.stream());
            }
            rank.stream().synchronize(PATIENCE);
            assertEquals(Communicator.State.READY, rank.communicator().state());
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> rank.communicator().watch(PATIENCE)),
                "watched already");
          });
      assertTrue(world.size() == 2);
    }
  }

  /** What the library logs as an error, while open. */
  private static final class ErrorLog extends Handler implements AutoCloseable {
    private final Logger logger = Logger.getLogger("io.ncclffm");
    private final List<String> errors = new CopyOnWriteArrayList<>();

    ErrorLog() {
      logger.addHandler(this);
    }

    @Override
    public void publish(LogRecord record) {
      if (record.getLevel() == Level.SEVERE) {
        errors.add(record.getMessage());
      }
    }

    @Override
    public void flush() {}

    @Override
    public void close() {
      logger.removeHandler(this);
    }
  }

  private interface Hang {
    void enqueue(LocalWorld.Rank rank, DeviceBuffer own);
  }

  /** Rank 0 of two does what waits for rank 1, which does nothing. */
  private static String reportOf(Hang hang) {
    try (ErrorLog log = new ErrorLog();
        LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run( // on a GPU the first message connects the ranks, inside the call
          rank ->
              NcclGroup.run(
                  () -> {
                    rank.communicator().send(x.of(rank), 0, 1, 1 - rank.rank(), rank.stream());
                    rank.communicator().recv(x.of(rank), 9, 1, 1 - rank.rank(), rank.stream());
                  }));
      world.run(rank -> rank.stream().synchronize());
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              rank.communicator().watch(LIMIT);
              hang.enqueue(rank, x.of(rank));
              NcclException e =
                  assertThrows(NcclException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "watchdog", "ms old", "WatchdogTest");
              assertEquals(Communicator.State.ABORTED, rank.communicator().state());
            }
          });
      assertEquals(1, log.errors.size(), log.errors::toString);
      return log.errors.get(0);
    }
  }

  private static void assertReports(String report, String... texts) {
    Messages.assertNames(new AssertionError(report), texts);
  }

  @Test
  void reportHoldsAllThatIsInFlight() {
    String report =
        reportOf(
            (rank, own) -> {
              Communicator comm = rank.communicator();
              comm.allReduce(own, own, ReduceOp.SUM, rank.stream());
              comm.broadcast(own, 0, own, 0, 77, 1, rank.stream());
            });
    assertReports(
        report,
        "watchdog of communicator on rank 0 of 2 (device 0)",
        "in flight: ncclAllReduce of 1000 x FLOAT32 on stream",
        "in flight: ncclBroadcast of 77 x FLOAT32 on stream",
        " ms old, called from io.ncclffm.test.WatchdogTest");
  }

  @Test
  void operationsOfAGroupAreFollowed() {
    String report =
        reportOf(
            (rank, own) ->
                NcclGroup.run(
                    () -> {
                      rank.communicator().send(own, 0, 10, 1, rank.stream());
                      rank.communicator().recv(own, 20, 11, 1, rank.stream());
                    }));
    assertReports(report, "ncclSend of 10 x FLOAT32", "ncclRecv of 11 x FLOAT32");
  }

  @Test
  void waitForASignalThatIsNeverSent() {
    try (LocalWorld world = TestRanks.open(1)) {
      boolean[] supported = new boolean[1];
      world.run(r -> supported[0] = r.communicator().properties().hostRmaSupport());
      assumeTrue(supported[0], "NCCL has no one-sided operations on this host");
    }
    String report = reportOf((rank, own) -> rank.communicator().waitSignal(1, 3, rank.stream()));
    assertReports(report, "ncclWaitSignal of 3 signals on stream");
  }

  @Test
  void operationsOfANonBlockingCommunicatorAreFollowed() {
    NcclUniqueId id = NcclUniqueId.create();
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      Communicator[] made = new Communicator[2];
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceBuffer own = x.of(rank);
            CommunicatorConfig config = CommunicatorConfig.builder().blocking(false).build();
            Communicator comm = Communicator.create(id, 2, r, rank.device(), config);
            made[r] = comm;
            comm.awaitReady(PATIENCE);
            comm.allReduce(own, own, ReduceOp.SUM, rank.stream());
            rank.stream().synchronize(PATIENCE);
            if (r == 0) {
              comm.watch(LIMIT);
              comm.allReduce(own, own, ReduceOp.MIN, rank.stream());
              NcclException e =
                  assertThrows(NcclException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "watchdog", "ncclAllReduce of 1000 x FLOAT32");
              assertEquals(Communicator.State.ABORTED, comm.state());
            }
          });
      made[1].abort();
    }
  }

  // Row 36 of the table of known faults: a rank that fails, while others wait for it.
  @Test
  void failureThatNcclReportsEndsTheWait() {
    TestRanks.assumeCpu("there an abort reaches the other ranks of the process");
    try (ErrorLog log = new ErrorLog();
        LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            if (rank.rank() == 1) {
              rank.communicator().abort();
              return;
            }
            rank.communicator().watch(PATIENCE);
            DeviceBuffer own = x.of(rank);
            assertThrows(
                NcclException.class,
                () -> {
                  rank.communicator().allReduce(own, own, ReduceOp.SUM, rank.stream());
                  rank.stream().synchronize(PATIENCE);
                });
          });
      assertTrue(log.errors.size() <= 1, log.errors::toString);
    }
  }
}

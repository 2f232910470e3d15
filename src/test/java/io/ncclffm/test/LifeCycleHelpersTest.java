package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordingFile;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Ending as befits, configuration, and what a flight recording holds. */
class LifeCycleHelpersTest {
  private static final Duration TIMEOUT = Duration.ofSeconds(60);

  @TempDir private Path folder;

  @BeforeAll
  static void prepareForSeveralRanks() {
    TestRanks.prepare();
  }

  @Test
  void runDestroysOnSuccess() {
    AtomicReference<Communicator> seen = new AtomicReference<>();
    Nccl.run(
        NcclUniqueId.create(),
        1,
        0,
        new CudaDevice(0),
        CommunicatorConfig.DEFAULT,
        TIMEOUT,
        communicator -> {
          assertEquals(Communicator.State.READY, communicator.state());
          seen.set(communicator);
        });
    assertEquals(Communicator.State.CLOSED, seen.get().state());
  }

  @Test
  void runAbortsOnAnExceptionAndThrowsIt() {
    AtomicReference<Communicator> seen = new AtomicReference<>();
    IOException thrown =
        assertThrows(
            IOException.class,
            () ->
                Nccl.run(
                    NcclUniqueId.create(),
                    1,
                    0,
                    new CudaDevice(0),
                    CommunicatorConfig.DEFAULT,
                    TIMEOUT,
                    communicator -> {
                      seen.set(communicator);
                      throw new IOException("no data");
                    }));
    assertEquals("no data", thrown.getMessage());
    assertEquals(Communicator.State.ABORTED, seen.get().state());
  }

  @Test
  void configuredCommunicatorWorksAndShowsWhatIsSet() {
    CommunicatorConfig config =
        CommunicatorConfig.builder().name("a name").maxCtas(4).splitShare(true).build();
    assertEquals("CommunicatorConfig{maxCTAs=4 splitShare=1 commName=a name}", config.toString());
    assertTrue(config.isBlocking());
    assertFalse(CommunicatorConfig.builder().blocking(false).build().isBlocking());
    NcclUniqueId id = NcclUniqueId.create();
    try (Communicator communicator = Communicator.create(id, 1, 0, new CudaDevice(0), config)) {
      communicator.awaitReady(TIMEOUT);
      assertEquals(0, communicator.asyncError());
      assertEquals(1, communicator.size());
    }
  }

  @Test
  void flightRecordingTellsLifeCollectivesAndGroups() throws IOException {
    Path file = folder.resolve("recording.jfr");
    try (Recording recording = new Recording()) {
      for (String name : List.of("Communicator", "Collective", "Group", "Failure")) {
        recording.enable("io.ncclffm." + name).withoutThreshold();
      }
      recording.start();
      try (LocalWorld world = LocalWorld.open(2);
          RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT64, 10)) {
        world.run(
            rank -> {
              DeviceBuffer own = x.of(rank);
              rank.communicator().allReduce(own, own, ReduceOp.MIN, rank.stream());
              rank.stream().synchronize(TIMEOUT);
            });
      }
      recording.stop();
      recording.dump(file);
    }
    assertTrue(Files.size(file) > 0);
    List<RecordedEvent> events = RecordingFile.readAllEvents(file);
    List<RecordedEvent> collectives =
        events.stream()
            .filter(e -> e.getEventType().getName().equals("io.ncclffm.Collective"))
            .toList();
    assertEquals(2, collectives.size());
    for (RecordedEvent e : collectives) {
      assertEquals("ncclAllReduce", e.getString("operation"));
      assertEquals(80, e.getLong("bytes"));
      assertEquals("FLOAT64", e.getString("type"));
      assertEquals("min", e.getString("reduction"));
      assertEquals(2, e.getInt("size"));
    }
    assertEquals(List.of(0, 1), collectives.stream().map(e -> e.getInt("rank")).sorted().toList());
    List<String> steps =
        events.stream()
            .filter(e -> e.getEventType().getName().equals("io.ncclffm.Communicator"))
            .map(e -> e.getString("step"))
            .sorted()
            .toList();
    assertEquals(List.of("create", "create", "ncclCommDestroy", "ncclCommDestroy"), steps);
  }

  /** A blocking communicator whose work never ends, because a rank does not come. */
  @Test
  void finalizationOfABlockingCommunicatorHasADeadlineToo() {
    TestRanks.assumeCpu("NCCL waits inside the abort for a kernel that shares its GPU");
    CountDownLatch refused = new CountDownLatch(1);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            AtomicInteger closed = new AtomicInteger();
            comm.adopt(closed::incrementAndGet);
            if (rank.rank() == 0) {
              comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
              assertThrows(
                  DeadlineException.class, () -> comm.finalizeAndClose(Duration.ofMillis(300)));
              assertEquals(0, closed.get(), "children of a communicator that goes on");
              assertEquals(Communicator.State.READY, comm.state());
              refused.countDown();
            } else {
              assertTrue(refused.await(30, TimeUnit.SECONDS));
            }
            comm.abort();
            assertEquals(1, closed.get());
          });
    }
  }

  @Test
  void finalizationOfAFailedCommunicatorLeavesItsChildrenToTheAbort() {
    TestRanks.assumeCpu("the failure is injected");
    try (LocalWorld world = TestRanks.open(1);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            AtomicInteger closed = new AtomicInteger();
            comm.adopt(closed::incrementAndGet);
            Faults.inject("ncclAllReduce:result=3");
            try {
              assertThrows(
                  NcclException.class,
                  () -> comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream()));
            } finally {
              Faults.clear();
            }
            assertThrows(NcclException.class, () -> comm.finalizeAndClose(TIMEOUT));
            assertEquals(0, closed.get());
            comm.abort();
            assertEquals(1, closed.get());
          });
    }
  }

  @Test
  void revokedCommunicatorIsLeftAloneByItsWatchdogAndCanBeShrunk() {
    TestRanks.assumeCpu("revoking with ranks that share a GPU needs a pause of theirs");
    try (LocalWorld world = TestRanks.open(3)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            comm.watch(Duration.ofMillis(100));
            comm.revoke();
            long end = System.nanoTime() + Duration.ofMillis(400).toNanos(); // eight periods
            while (System.nanoTime() < end) {
              assertEquals(Communicator.State.REVOKED, comm.state());
            }
            if (rank.rank() < 2) {
              try (Communicator rest = comm.shrink(List.of(2), false, CommunicatorConfig.DEFAULT)) {
                assertEquals(2, rest.size());
              }
            }
            comm.abort();
            assertThrows(IllegalStateException.class, () -> comm.watch(TIMEOUT));
          });
    }
  }

  @Test
  void ranksOutsideOfATeamAreRefused() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            for (int bad : new int[] {-1, 1, 99}) {
              assertThrows(
                  IllegalArgumentException.class, () -> comm.rankToWorld(comm.teamWorld(), bad));
              assertThrows(
                  IllegalArgumentException.class, () -> comm.rankToLsa(comm.teamWorld(), bad));
            }
            assertEquals(0, comm.rankToWorld(comm.teamLsa(), 0));
          });
    }
  }
}

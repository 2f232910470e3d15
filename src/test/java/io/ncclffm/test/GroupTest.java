package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicReference;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

/** {@link NcclGroup}: nesting, several ranks of one thread, and what an exception leaves behind. */
class GroupTest {
  private static final int RANKS = 2;

  @Test
  void innerGroupIsCarriedOutWithTheOuterOne() {
    int[][] received = new int[RANKS][1];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers send = RankBuffers.allocate(world, DataType.INT32, 1);
        RankBuffers recv = RankBuffers.allocate(world, DataType.INT32, 1)) {
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(new int[] {10 + r}, rank.stream());
            // Ended by itself, the inner group would wait for a receive that comes after it.
            NcclGroup.run(
                () -> {
                  NcclGroup.run(() -> rank.communicator().send(send.of(r), 1 - r, rank.stream()));
                  rank.communicator().recv(recv.of(r), 1 - r, rank.stream());
                });
            recv.of(r).copyTo(received[r], rank.stream());
          });
    }
    assertArrayEquals(new int[][] {{11}, {10}}, received);
  }

  @Test
  void communicatorsMadeInAGroupAreReadyWhenItEnds() {
    NcclUniqueId id = NcclUniqueId.create();
    List<Communicator> made = new ArrayList<>();
    NcclGroup.run(
        () -> {
          for (int r = 0; r < RANKS; r++) {
            CudaDevice device = new CudaDevice(r % CudaDevice.count());
            Communicator communicator = Communicator.create(id, RANKS, r, device);
            made.add(communicator);
            assertEquals(Communicator.State.INITIALISING, communicator.state());
            assertThrows(
                IllegalStateException.class, () -> communicator.awaitReady(Duration.ofSeconds(1)));
          }
        });
    for (int r = 0; r < RANKS; r++) {
      assertEquals(Communicator.State.READY, made.get(r).state());
      assertEquals(r, made.get(r).rank());
    }
    made.forEach(Communicator::close);
  }

  @Test
  void endingAndRegisteringInsideAGroupIsRefused() {
    try (LocalWorld world = TestRanks.open(RANKS)) {
      world.run(
          rank ->
              NcclGroup.run(
                  () -> {
                    Communicator communicator = rank.communicator();
                    for (Runnable call :
                        List.<Runnable>of(
                            communicator::close,
                            communicator::abort,
                            () -> LsaWindow.create(communicator, 4096))) {
                      Messages.assertNames(
                          assertThrows(IllegalStateException.class, call::run), "group");
                    }
                  }));
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void oneThreadDrivesAllRanks() {
    LocalWorld.Rank[] ranks = new LocalWorld.Rank[RANKS];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT64, 3)) {
      world.run(rank -> ranks[rank.rank()] = rank);
      for (LocalWorld.Rank rank : ranks) {
        x.of(rank).copyFrom(new long[] {1, 2, 3 + rank.rank()}, rank.stream());
      }
      NcclGroup.run(
          () -> {
            for (LocalWorld.Rank rank : ranks) {
              rank.communicator().allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
            }
          });
      for (LocalWorld.Rank rank : ranks) {
        long[] result = new long[3];
        x.of(rank).copyTo(result, rank.stream());
        assertArrayEquals(new long[] {2, 4, 7}, result, "rank " + rank.rank());
      }
    }
  }

  @Test
  void exceptionInTheBodyIsThrownAndFailsTheCommunicatorsUsed() {
    IllegalArgumentException thrown = new IllegalArgumentException("from the body");
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            CudaStream stream = rank.stream();
            RuntimeException e =
                assertThrows(
                    RuntimeException.class,
                    () ->
                        NcclGroup.run(
                            () -> {
                              comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, stream);
                              throw thrown;
                            }));
            assertSame(thrown, e);
            assertEquals(Communicator.State.FAILED, comm.state());

            NcclException again =
                assertThrows(
                    NcclException.class,
                    () -> comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, stream));
            Messages.assertNames(again, "ncclAllReduce", "failed earlier", "from the body");
            assertSame(thrown, again.getCause());
          });
    }
  }

  @Test
  void exceptionInTheBodyEndsTheGroup() {
    try (LocalWorld used = TestRanks.open(RANKS);
        LocalWorld other = TestRanks.open(RANKS)) {
      LocalWorld.Rank[] ranks = new LocalWorld.Rank[RANKS];
      other.run(rank -> ranks[rank.rank()] = rank);
      try (RankBuffers x = RankBuffers.allocate(used, DataType.FLOAT32, 4)) {
        used.run(
            rank -> {
              assertThrows(
                  AssertionError.class,
                  () ->
                      NcclGroup.run(
                          () -> {
                            rank.communicator()
                                .allReduce(x.of(rank), x.of(rank), ReduceOp.MAX, rank.stream());
                            throw new AssertionError("an Error ends it too");
                          }));
              // Outside of any group, on the same thread: at once, and unharmed.
              LocalWorld.Rank there = ranks[rank.rank()];
              there.communicator().allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, there.stream());
              there.stream().synchronize();
              assertEquals(Communicator.State.READY, there.communicator().state());
            });
      }
    }
  }

  @Test
  void refusedOnAVirtualThread() throws Exception {
    AtomicReference<Throwable> thrown = new AtomicReference<>();
    boolean[] ran = new boolean[1];
    Thread thread =
        Thread.ofVirtual()
            .start(
                () -> {
                  try {
                    NcclGroup.run(() -> ran[0] = true);
                  } catch (RuntimeException e) {
                    thrown.set(e);
                  }
                });
    thread.join();
    IllegalStateException e = assertInstanceOf(IllegalStateException.class, thrown.get());
    Messages.assertNames(e, "ncclGroupStart", "virtual thread", "platform thread");
    assertTrue(!ran[0], "the body must not run");
  }

  @Test
  void emptyGroupDoesNothing() {
    try (LocalWorld world = TestRanks.open(RANKS)) {
      world.run(rank -> NcclGroup.run(() -> {}));
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void manyCollectivesOfOneGroupKeepTheirOrder() {
    int steps = 20;
    long[][] results = new long[RANKS][steps];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT64, steps)) {
      world.run(
          rank -> {
            long[] mine = IntStream.range(0, steps).mapToLong(i -> rank.rank() + i).toArray();
            x.of(rank).copyFrom(mine, rank.stream());
            NcclGroup.run(
                () -> {
                  for (int i = 0; i < steps; i++) {
                    rank.communicator()
                        .allReduce(x.of(rank), i, x.of(rank), i, 1, ReduceOp.SUM, rank.stream());
                  }
                });
            x.of(rank).copyTo(results[rank.rank()], rank.stream());
          });
    }
    long[] expected = IntStream.range(0, steps).mapToLong(i -> 1 + 2L * i).toArray();
    for (long[] result : List.of(results[0], results[1])) {
      assertArrayEquals(expected, result);
    }
  }

  @Test
  void simulationTellsATimeAndCarriesNothingOut() {
    int count = 1 << 16;
    float[][] results = new float[RANKS][count];
    float[] estimates = new float[RANKS];
    float[] longer = new float[RANKS];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, count)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            CudaStream stream = rank.stream();
            float[] ones = new float[count];
            Arrays.fill(ones, 1);
            x.of(rank).copyFrom(ones, stream);
            estimates[rank.rank()] =
                NcclGroup.simulate(
                    () -> comm.allReduce(x.of(rank), 0, x.of(rank), 0, 1, ReduceOp.SUM, stream));
            longer[rank.rank()] =
                NcclGroup.simulate(
                    () -> comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, stream));
            x.of(rank).copyTo(results[rank.rank()], stream);
          });
      TestRanks.assertWorks(world);
    }
    for (int r = 0; r < RANKS; r++) {
      assertTrue(estimates[r] > 0, estimates[r] + " us");
      assertTrue(longer[r] > estimates[r], longer[r] + " us");
      assertEquals(1, results[r][0]);
      assertEquals(1, results[r][count - 1]);
    }
  }

  @Test
  void simulationOfNothingAndInsideAGroup() {
    try (LocalWorld world = TestRanks.open(RANKS)) {
      world.run(
          rank -> {
            NcclGroup.simulate(() -> {});
            NcclGroup.run(
                () ->
                    Messages.assertNames(
                        assertThrows(
                            IllegalStateException.class, () -> NcclGroup.simulate(() -> {})),
                        "ncclGroupSimulateEnd",
                        "another group"));
            NcclGroup.simulate(() -> NcclGroup.run(() -> {}));
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void exceptionInASimulatedGroupFailsTheCommunicatorsUsed() {
    IllegalArgumentException thrown = new IllegalArgumentException("from the body");
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            RuntimeException e =
                assertThrows(
                    RuntimeException.class,
                    () ->
                        NcclGroup.simulate(
                            () -> {
                              comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
                              throw thrown;
                            }));
            assertSame(thrown, e);
            assertEquals(Communicator.State.FAILED, comm.state());
          });
    }
  }

  /** As Scala and Kotlin do: a Runnable that throws what it does not declare. */
  @SuppressWarnings("unchecked")
  private static <E extends Throwable> void sneak(Throwable t) throws E {
    throw (E) t;
  }

  @Test
  void checkedExceptionOfTheBodyEndsTheGroupToo() {
    try (LocalWorld world = TestRanks.open(1);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            IOException thrown = new IOException("sneaky");
            assertSame(
                thrown,
                assertThrows(
                    IOException.class,
                    () ->
                        NcclGroup.run(
                            () -> {
                              rank.communicator()
                                  .allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
                              GroupTest.<RuntimeException>sneak(thrown);
                            })));
            assertFalse(NcclGroup.isActive());
            assertEquals(Communicator.State.FAILED, rank.communicator().state());
            rank.communicator().abort();
          });
    }
  }

  @Test
  void innerGroupThatFailedFailsTheWholeThoughTheOuterBodyCaughtIt() {
    try (LocalWorld world = TestRanks.open(1);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 4)) {
      world.run(
          rank -> {
            IllegalStateException thrown = new IllegalStateException("inner");
            assertSame(
                thrown,
                assertThrows(
                    IllegalStateException.class,
                    () ->
                        NcclGroup.run(
                            () -> {
                              try {
                                NcclGroup.run(
                                    () -> {
                                      rank.communicator()
                                          .allReduce(
                                              x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
                                      throw thrown;
                                    });
                              } catch (IllegalStateException e) {
                                assertSame(thrown, e);
                              }
                            })));
            assertEquals(Communicator.State.FAILED, rank.communicator().state());
            rank.communicator().abort();
            NcclGroup.run(() -> {}); // nothing is left over for the next group
          });
    }
  }
}

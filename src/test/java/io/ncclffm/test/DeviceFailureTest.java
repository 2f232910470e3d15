package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.params.provider.Arguments.arguments;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.AdamW;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.OptimizerState;
import io.ncclffm.lsa.LsaProtocol;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/** Kernels that wait in vain end, say for whom they waited, and leave the communicator usable. */
class DeviceFailureTest {
  private static final int RANKS = 2;
  private static final Duration SHORT = Duration.ofMillis(300);
  private static final Duration LONG = Duration.ofSeconds(60);
  private static final Duration PATIENCE = Duration.ofSeconds(20);

  /** Elements of a call that must wait: more than two small slots take. */
  private static final int WAITING = 2000;

  private static final Duration START = Duration.ofSeconds(60);

  /** Small windows, so that making them takes no time. */
  private static DeviceCommunicatorConfig.Builder config(Duration timeout) {
    return DeviceCommunicatorConfig.builder().timeout(timeout).slotBytes(512).channels(2);
  }

  private static DeviceCommunicator create(LocalWorld.Rank rank, Duration timeout) {
    return DeviceCommunicator.create(rank.communicator(), config(timeout).build());
  }

  /** For the tests after which a new device communicator works on the same communicators. */
  private static LocalWorld shared;

  @BeforeAll
  static void openWorld() {
    TestRanks.assumeShim();
    shared = TestRanks.open(RANKS);
  }

  @AfterAll
  static void closeWorld() {
    if (shared != null) {
      shared.close();
    }
  }

  private static void await(CyclicBarrier barrier) throws Exception {
    barrier.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
  }

  private static void assertAllReduces(DeviceCommunicator comm, DeviceBuffer x, LocalWorld.Rank r) {
    x.copyFrom(new float[] {1, 2, 3 + r.rank()}, r.stream());
    comm.allReduce(x, x, ReduceOp.SUM, r.stream());
    float[] result = new float[3];
    x.copyTo(result, r.stream());
    assertArrayEquals(new float[] {2, 4, 7}, result);
  }

  @Test
  void exceptionOfOneRankEndsTheOthersWaitInAKernelAndTheProcessGoesOn() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      IllegalStateException thrown =
          assertThrows(
              IllegalStateException.class,
              () ->
                  world.run(
                      rank -> {
                        DeviceBuffer x = buffers.of(rank);
                        DeviceCommunicator comm =
                            DeviceCommunicator.create(rank.communicator(), LONG);
                        assertAllReduces(comm, x, rank);
                        await(barrier);
                        if (rank.rank() == 0) {
                          throw new IllegalStateException("rank 0 gives up");
                        }
                        comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
                        rank.stream().synchronize(LONG);
                      }));
      assertEquals("rank 0 gives up", thrown.getMessage());
    }
    try (LocalWorld again = TestRanks.open(RANKS)) {
      TestRanks.assertWorks(again);
    }
  }

  @Test
  void rankThatDoesNotLaunchIsNamedAndANewCommunicatorWorks() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator broken = DeviceCommunicator.create(rank.communicator(), SHORT);
            assertAllReduces(broken, x, rank);
            await(barrier);
            if (rank.rank() == 0) {
              broken.allReduce(x, x, ReduceOp.SUM, rank.stream());
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "ncclFfmAllReduce", "rank 0", "rank 1", "ncclTimeout");
              assertEquals("ncclTimeout", NcclException.resultName(e.resultCode()));
              assertEquals("ncclFfmAllReduce", e.operation());
              assertEquals(0, e.rank());
              assertEquals(1, e.peer());
              assertEquals(0, e.channel());
              assertTrue(e.waited().compareTo(SHORT) >= 0, "waited " + e.waited());
              // Lost for good on this rank, at once and without a launch.
              assertThrows(
                  DeviceCommException.class,
                  () -> FusedKernels.scaleAllReduceSqrt(broken, x, 1, 1, rank.stream()));
            }
            await(barrier);
            broken.close();
            assertEquals(Communicator.State.READY, rank.communicator().state());

            DeviceCommunicator fresh = DeviceCommunicator.create(rank.communicator(), LONG);
            assertAllReduces(fresh, x, rank);
            fresh.close();
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void fusedKernelIsNamedInItsFailure() {
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, 3);
        RankBuffers more = RankBuffers.allocate(world, DataType.FLOAT32, 3);
        RankBuffers weight = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      CyclicBarrier barrier = new CyclicBarrier(RANKS);
      world.run(
          rank -> {
            DeviceCommunicator broken = DeviceCommunicator.create(rank.communicator(), SHORT);
            await(barrier);
            if (rank.rank() == 1) {
              FusedKernels.scaleAllReduceSqrt(broken, buffers.of(rank), 2, 1, rank.stream());
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(
                  e, "ncclFfmFusedScaleAllReduceSqrt", "rank 1", "rank 0", "ncclTimeout");
            }
            await(barrier);
            broken.close();
            DeviceCommunicator second = DeviceCommunicator.create(rank.communicator(), SHORT);
            await(barrier);
            if (rank.rank() == 1) {
              DeviceBuffer x = buffers.of(rank);
              FusedKernels.allReduceRmsNorm(
                  second, x, more.of(rank), weight.of(rank), x, 1, 0, rank.stream());
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "ncclFfmFusedRmsNorm", "rank 1", "rank 0", "ncclTimeout");
            }
            await(barrier);
          });
    }
  }

  @Test
  void updateWhoseNumbersDifferFailsAndChangesNoWeight() {
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers gradients = RankBuffers.allocate(world, DataType.FLOAT32, 3);
        RankBuffers weights = RankBuffers.allocate(world, DataType.FLOAT32, 3);
        RankBuffers momentum = RankBuffers.allocate(world, DataType.FLOAT32, 3);
        RankBuffers variance = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      world.run(
          rank -> {
            DeviceCommunicator broken = DeviceCommunicator.create(rank.communicator(), LONG);
            OptimizerState state =
                OptimizerState.ofAdamW(weights.of(rank), momentum.of(rank), variance.of(rank));
            weights.of(rank).copyFrom(new float[] {1, 2, 3}, rank.stream());
            AdamW settings = new AdamW(rank.rank() == 0 ? 0.1f : 0.2f);
            FusedKernels.adamW(broken, gradients.of(rank), state, settings, 1, rank.stream());
            DeviceCommException e =
                assertThrows(DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
            Messages.assertNames(e, "ncclFfmFusedAdamW", "ncclInvalidUsage");
            broken.close(); // so that the stream does not report it again
            float[] result = new float[3];
            weights.of(rank).copyTo(result, rank.stream());
            assertArrayEquals(new float[] {1, 2, 3}, result);
          });
    }
  }

  @Test
  void abortFromAnotherThreadEndsAWaitingKernel() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      world.run(
          rank -> {
            comms[rank.rank()] = DeviceCommunicator.create(rank.communicator(), LONG);
            await(barrier);
            if (rank.rank() == 0) {
              comms[0].allReduce(buffers.of(rank), buffers.of(rank), ReduceOp.SUM, rank.stream());
              assertTrue(!rank.stream().isDone(), "its peer has not launched");
              await(barrier);
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              assertEquals("ncclRemoteError", NcclException.resultName(e.resultCode()));
              assertEquals(0, e.rank());
            } else {
              await(barrier);
              comms[0].abort();
            }
            comms[rank.rank()].close();
          });
      TestRanks.assertWorks(world);
    }
  }

  /** What rank 0 calls while rank 1 does not: more than two slots, so that it must wait. */
  private static void call(
      DeviceCommunicator c, DeviceFunction function, DeviceBuffer x, DeviceBuffer y, CudaStream s) {
    int half = WAITING / 2;
    switch (function) {
      case ALL_REDUCE -> c.allReduce(x, y, ReduceOp.SUM, s);
      case REDUCE_SCATTER -> c.reduceScatter(x, 0, y, 0, half, ReduceOp.SUM, s);
      case ALL_GATHER -> c.allGather(x, 0, y, 0, half, s);
      case BROADCAST -> c.broadcast(x, y, 1, s);
      case REDUCE -> c.reduce(x, y, ReduceOp.SUM, 0, s);
      case ALL_TO_ALL -> c.allToAll(x, y, s);
      case BARRIER -> c.barrier(s);
      case HIERARCHICAL_ALL_REDUCE -> c.hierarchicalAllReduce(x, y, ReduceOp.SUM, 1, s);
      case SEND -> c.send(x, 1, s);
      case RECV -> c.recv(y, 1, s);
      case SEND_RECV -> c.sendRecv(x, 1, y, 1, s);
    }
  }

  @ParameterizedTest
  @EnumSource(LsaProtocol.class)
  void everyFunctionEndsWithoutItsPeerAndIsNamed(LsaProtocol protocol) {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    DeviceCommunicatorConfig config = config(SHORT).protocol(protocol).build();
    LocalWorld world = shared;
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, WAITING);
        RankBuffers y = RankBuffers.allocate(world, DataType.FLOAT32, WAITING)) {
      for (DeviceFunction function : DeviceFunction.values()) {
        world.run(
            rank -> {
              DeviceCommunicator broken = DeviceCommunicator.create(rank.communicator(), config);
              if (rank.rank() == 0) {
                call(broken, function, x.of(0), y.of(0), rank.stream());
                DeviceCommException e =
                    assertThrows(
                        DeviceCommException.class,
                        () -> rank.stream().synchronize(PATIENCE),
                        function + " by " + protocol);
                String name = e.operation().replace("ncclFfm", "").toUpperCase(Locale.ROOT);
                assertEquals(function.name().replace("_", ""), name);
                assertEquals("ncclTimeout", NcclException.resultName(e.resultCode()));
                assertEquals(0, e.rank());
                assertEquals(1, e.peer());
                assertTrue(e.waited().compareTo(SHORT) >= 0, "waited " + e.waited());
                assertTrue(e.waited().compareTo(PATIENCE) < 0, "waited " + e.waited());
              }
              await(barrier);
              broken.close();
            });
      }
      world.run(
          rank -> {
            DeviceCommunicator fresh = create(rank, LONG);
            fresh.allReduce(x.of(rank), y.of(rank), ReduceOp.SUM, rank.stream());
            rank.stream().synchronize();
            fresh.close();
          });
    }
  }

  /** One of four ranks stays away: whom the others name depends on the algorithm. */
  @ParameterizedTest
  @EnumSource(DeviceAlgorithm.class)
  void allLiveRanksEndWithinTheDeadline(DeviceAlgorithm algorithm) {
    int ranks = 4;
    int absent = 2;
    CyclicBarrier barrier = new CyclicBarrier(ranks);
    boolean[] named = new boolean[1];
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, WAITING)) {
      world.run(
          rank -> {
            DeviceCommunicator broken = create(rank, SHORT);
            await(barrier);
            if (rank.rank() != absent) {
              broken.allReduce(
                  x.of(rank),
                  0,
                  x.of(rank),
                  0,
                  WAITING,
                  ReduceOp.SUM,
                  rank.stream(),
                  LaunchChoice.AUTO.with(algorithm));
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "ncclFfmAllReduce", "rank " + rank.rank(), "ncclTimeout");
              synchronized (named) {
                named[0] |= e.peer() == absent;
              }
            }
            await(barrier);
            broken.close();
            DeviceCommunicator fresh = create(rank, LONG);
            fresh.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream());
            rank.stream().synchronize();
            fresh.close();
          });
    }
    assertTrue(named[0], "nobody waited for rank " + absent);
  }

  private interface Mistake {
    void call(DeviceCommunicator comm, DeviceBuffer x, DeviceBuffer y, CudaStream stream);
  }

  private static Mistake allReduce(DataType type, int count, ReduceOp op, LaunchChoice choice) {
    return (c, x, y, s) -> {
      DeviceBuffer from = DeviceBuffer.wrap(x.device(), type, count, x.address(0));
      DeviceBuffer to = DeviceBuffer.wrap(y.device(), type, count, y.address(0));
      c.allReduce(from, 0, to, 0, count, op, s, choice);
    };
  }

  /** Rank 0 makes the first call of a pair, rank 1 the other. */
  static Stream<Arguments> mistakes() {
    LaunchChoice simple = LaunchChoice.AUTO.with(LsaProtocol.SIMPLE);
    LaunchChoice ll = LaunchChoice.AUTO.with(LsaProtocol.LL);
    List<Arguments> all = new ArrayList<>();
    for (LaunchChoice choice : List.of(ll, simple)) {
      Mistake right = allReduce(DataType.FLOAT32, 100, ReduceOp.SUM, choice);
      String by = " by " + choice.protocol();
      all.add(
          arguments("count" + by, right, allReduce(DataType.FLOAT32, 101, ReduceOp.SUM, choice)));
      all.add(arguments("type" + by, right, allReduce(DataType.INT32, 100, ReduceOp.SUM, choice)));
      all.add(
          arguments(
              "operation" + by, right, allReduce(DataType.FLOAT32, 100, ReduceOp.MAX, choice)));
      Mistake gather = (c, x, y, s) -> c.allGather(x, 0, y, 0, 100, s, choice);
      all.add(arguments("function" + by, right, gather));
      Mistake ofZero = (c, x, y, s) -> c.reduce(x, 0, y, 0, 100, ReduceOp.SUM, 0, s, choice);
      Mistake ofOne = (c, x, y, s) -> c.reduce(x, 0, y, 0, 100, ReduceOp.SUM, 1, s, choice);
      all.add(arguments("root" + by, ofZero, ofOne));
      LaunchChoice twoShot = choice.with(DeviceAlgorithm.TWO_SHOT);
      LaunchChoice oneShot = choice.with(DeviceAlgorithm.ONE_SHOT);
      all.add(
          arguments(
              "algorithm" + by,
              allReduce(DataType.FLOAT32, 100, ReduceOp.SUM, oneShot),
              allReduce(DataType.FLOAT32, 100, ReduceOp.SUM, twoShot)));
      Mistake send = (c, x, y, s) -> c.send(x, 0, 50, 1, s, choice);
      Mistake recv = (c, x, y, s) -> c.recv(y, 0, 51, 0, s, choice);
      all.add(arguments("count of a receive" + by, send, recv));
    }
    all.add(
        arguments(
            "protocol",
            allReduce(DataType.FLOAT32, 100, ReduceOp.SUM, ll),
            allReduce(DataType.FLOAT32, 100, ReduceOp.SUM, simple)));
    return all.stream();
  }

  @ParameterizedTest(name = "another {0}")
  @MethodSource("mistakes")
  void ranksThatCallDifferentThingsAreTold(String what, Mistake first, Mistake second) {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    LocalWorld world = shared;
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, WAITING);
        RankBuffers y = RankBuffers.allocate(world, DataType.FLOAT32, WAITING)) {
      int[] told = new int[RANKS];
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceCommunicator broken = create(rank, SHORT);
            await(barrier);
            (r == 0 ? first : second).call(broken, x.of(r), y.of(r), rank.stream());
            try {
              rank.stream().synchronize(PATIENCE);
            } catch (DeviceCommException e) {
              // Who needs nothing of the other, as a sender, may be through before it is noticed.
              if (NcclException.resultName(e.resultCode()).equals("ncclInvalidUsage")) {
                told[r] = 1;
                Messages.assertNames(
                    e, "on rank " + r, "rank " + (1 - r) + " called something else", "count");
                assertEquals(1 - r, e.peer());
              } else {
                Messages.assertNames(e, "ncclTimeout", "rank " + (1 - r));
              }
            }
            await(barrier);
            broken.close();
            DeviceCommunicator fresh = create(rank, LONG);
            assertAllReduces(
                fresh,
                DeviceBuffer.wrap(rank.device(), DataType.FLOAT32, 3, x.of(r).address(0)),
                rank);
            fresh.close();
          });
      assertTrue(told[0] + told[1] > 0, "nobody noticed another " + what);
    }
  }

  @Test
  void twoCollectivesOnOneChannelAreRefused() {
    CyclicBarrier barrier = new CyclicBarrier(RANKS);
    CudaStream[] second = new CudaStream[RANKS];
    LocalWorld world = shared;
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
      world.run(
          rank -> {
            second[rank.rank()] = CudaStream.create(rank.device());
            DeviceCommunicator broken = create(rank, LONG);
            await(barrier);
            if (rank.rank() == 0) {
              broken.allReduce(x.of(0), x.of(0), ReduceOp.SUM, rank.stream());
              broken.broadcast(x.of(0), x.of(0), 1, second[0]);
              DeviceCommException e =
                  assertThrows(DeviceCommException.class, () -> second[0].synchronize(PATIENCE));
              Messages.assertNames(e, "ncclInvalidUsage", "rank 0", "channel 0 is in use");
              assertEquals(-1, e.peer());
              assertTrue(
                  e.operation().equals("ncclFfmBroadcast")
                      || e.operation().equals("ncclFfmAllReduce"),
                  e.operation());
              assertThrows(DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
            }
            await(barrier);
            broken.close();
            DeviceCommunicator fresh = create(rank, LONG);
            assertAllReduces(fresh, x.of(rank), rank);
            fresh.close();
          });
    }
    for (CudaStream stream : second) {
      stream.close();
    }
  }

  @Test
  void ranksThatAskForDifferentChannelsAreRefusedTogether() {
    try (LocalWorld world = TestRanks.open(RANKS)) {
      world.run(
          rank -> {
            DeviceCommunicatorConfig config =
                DeviceCommunicatorConfig.builder().channels(2 + rank.rank()).build();
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> DeviceCommunicator.create(rank.communicator(), config)),
                "the ranks ask for different ones");
          });
      TestRanks.assertWorks(world);
    }
  }

  /** A process that is killed in the midst of collectives leaves the others with an exception. */
  @Test
  void othersOfAKilledProcessEndWithinTheDeadline() throws Exception {
    int ranks = 3;
    List<ChildJvm> children = new ArrayList<>();
    try {
      for (int r = 0; r < ranks; r++) {
        children.add(ChildJvm.of(DeviceProcess.class, "" + r, "" + ranks, "loop").start());
      }
      String id = children.get(0).awaitLine("ID ", START);
      for (int r = 1; r < ranks; r++) {
        children.get(r).send(id);
      }
      for (ChildJvm child : children) {
        child.awaitLine("RUNNING", START);
      }
      children.get(1).kill();
      boolean named = false;
      for (int r = 0; r < ranks; r += 2) {
        String[] over = children.get(r).awaitLine("FAILED ", PATIENCE).split(" ");
        assertEquals("ncclFfmAllReduce", over[0], children.get(r).output());
        named |= over[1].equals("1");
        assertTrue(Long.parseLong(over[2]) < PATIENCE.toMillis(), children.get(r).output());
        assertEquals(0, children.get(r).exitStatus(PATIENCE), children.get(r).output());
      }
      assertTrue(named, children.get(0).output());
    } finally {
      children.forEach(ChildJvm::close);
    }
  }

  @Test
  void negativeTimeoutIsRefused() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          rank ->
              Messages.assertNames(
                  assertThrows(
                      IllegalArgumentException.class,
                      () -> DeviceCommunicator.create(rank.communicator(), Duration.ofSeconds(-1))),
                  "timeout",
                  "negative"));
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.FusedKernels;
import java.time.Duration;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** Kernels that wait in vain end, say for whom they waited, and leave the communicator usable. */
class DeviceFailureTest {
  private static final int RANKS = 2;
  private static final Duration SHORT = Duration.ofMillis(300);
  private static final Duration LONG = Duration.ofSeconds(60);
  private static final Duration PATIENCE = Duration.ofSeconds(20);

  @BeforeAll
  static void needsShim() {
    TestRanks.assumeShim();
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
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, 3)) {
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

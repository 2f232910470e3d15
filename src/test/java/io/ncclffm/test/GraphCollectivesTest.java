package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Graphs of collectives: captured once on every rank, launched again and again. */
class GraphCollectivesTest {
  private static final int LAUNCHES = 200;
  private static final int COUNT = 1031;
  private static final long SEED = 0x6ea9_2026L;
  private static final Duration SHORT = Duration.ofMillis(300);
  private static final Duration PATIENCE = Duration.ofSeconds(20);

  /** Adds up the ranks' x; the stream is the one that is captured. */
  private interface Sum {
    void enqueue(LocalWorld.Rank rank, DeviceBuffer x, CudaStream stream);
  }

  /** Small whole numbers, whose sums are exact, other ones for every rank and launch. */
  private static float[] input(int rank, int launch) {
    float[] values = new float[COUNT];
    for (int i = 0; i < COUNT; i++) {
      values[i] = Inputs.mix(SEED + ((long) launch * 64 + rank) * COUNT + i) & 0xffff;
    }
    return values;
  }

  private static float[] sum(int ranks, int launch) {
    float[] sum = new float[COUNT];
    for (int r = 0; r < ranks; r++) {
      float[] values = input(r, launch);
      for (int i = 0; i < COUNT; i++) {
        sum[i] += values[i];
      }
    }
    return sum;
  }

  private static void await(CyclicBarrier barrier) throws Exception {
    barrier.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
  }

  /** Every launch sums what was written to the buffers before it; other calls come in between. */
  private static void assertReplays(LocalWorld world, Sum sum) {
    int ranks = world.size();
    CyclicBarrier captured = new CyclicBarrier(ranks);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceBuffer mine = x.of(rank);
            CudaStream stream = rank.stream();
            try (CudaStream own = CudaStream.create(rank.device());
                CudaGraph graph = CudaGraph.capture(own, () -> sum.enqueue(rank, mine, own))) {
              await(captured);
              float[] result = new float[COUNT];
              for (int launch = 0; launch < LAUNCHES; launch++) {
                mine.copyFrom(input(rank.rank(), launch), stream);
                if (launch % 5 == 4) {
                  sum.enqueue(rank, mine, stream); // not in the graph
                } else {
                  graph.launch(stream);
                }
                mine.copyTo(result, stream);
                assertArrayEquals(
                    sum(ranks, launch), result, "rank " + rank.rank() + ", launch " + launch);
              }
            }
          });
    }
  }

  @ParameterizedTest(name = "{0} ranks")
  @ValueSource(ints = {1, 2, 3})
  void replayedAllReduceSumsWhatIsInTheBuffersThen(int ranks) {
    try (LocalWorld world = TestRanks.open(ranks)) {
      assertReplays(
          world, (rank, x, stream) -> rank.communicator().allReduce(x, x, ReduceOp.SUM, stream));
    }
  }

  @ParameterizedTest(name = "{0} ranks")
  @ValueSource(ints = {1, 2, 3})
  void replayedDeviceAllReduceSumsWhatIsInTheBuffersThen(int ranks) {
    TestRanks.assumeShim();
    DeviceCommunicator[] comms = new DeviceCommunicator[ranks];
    try (LocalWorld world = TestRanks.open(ranks)) {
      world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator()));
      assertReplays(
          world, (rank, x, stream) -> comms[rank.rank()].allReduce(x, x, ReduceOp.SUM, stream));
    }
  }

  /** First the sum goes to the same buffer, then to another. */
  private static void assertUpdated(LocalWorld world, Sum inPlace, Sum toOther, RankBuffers to) {
    CudaGraph[] graphs = new CudaGraph[world.size()];
    float[] sum = sum(world.size(), 0);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank ->
              graphs[rank.rank()] =
                  CudaGraph.capture(
                      rank.stream(), () -> inPlace.enqueue(rank, x.of(rank), rank.stream())));
      world.run(
          rank -> {
            CudaStream stream = rank.stream();
            x.of(rank).copyFrom(input(rank.rank(), 0), stream);
            graphs[rank.rank()].launch(stream);
            float[] result = new float[COUNT];
            x.of(rank).copyTo(result, stream);
            assertArrayEquals(sum, result, "as captured");
          });
      world.run(
          rank ->
              graphs[rank.rank()].update(
                  rank.stream(), () -> toOther.enqueue(rank, x.of(rank), rank.stream())));
      world.run(
          rank -> {
            CudaStream stream = rank.stream();
            x.of(rank).copyFrom(input(rank.rank(), 0), stream);
            graphs[rank.rank()].launch(stream);
            float[] result = new float[COUNT];
            to.of(rank).copyTo(result, stream);
            assertArrayEquals(sum, result, "updated");
            x.of(rank).copyTo(result, stream);
            assertArrayEquals(input(rank.rank(), 0), result, "what is sent");
          });
      world.run(rank -> graphs[rank.rank()].close());
    }
  }

  @Test
  void updatedAllReducesGoToOtherBuffers() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers to = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      assertUpdated(
          world,
          (rank, x, stream) -> rank.communicator().allReduce(x, x, ReduceOp.SUM, stream),
          (rank, x, stream) -> rank.communicator().allReduce(x, to.of(rank), ReduceOp.SUM, stream),
          to);
    }
  }

  @Test
  void updatedDeviceAllReducesGoToOtherBuffers() {
    TestRanks.assumeShim();
    DeviceCommunicator[] comms = new DeviceCommunicator[2];
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers to = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator()));
      assertUpdated(
          world,
          (rank, x, stream) -> comms[rank.rank()].allReduce(x, x, ReduceOp.SUM, stream),
          (rank, x, stream) -> comms[rank.rank()].allReduce(x, to.of(rank), ReduceOp.SUM, stream),
          to);
    }
  }

  @Test
  void checkedLaunchesCanBeCaptured() {
    TestRanks.assumeShim();
    DeviceCommunicator[] comms = new DeviceCommunicator[2];
    DeviceCommunicatorConfig checked = DeviceCommunicatorConfig.builder().checked(true).build();
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator(), checked));
      assertReplays(
          world, (rank, x, stream) -> comms[rank.rank()].allReduce(x, x, ReduceOp.SUM, stream));
    }
  }

  @Test
  void everyKernelOfAGraphSeesTheOneBefore() {
    TestRanks.assumeShim();
    int ranks = 2;
    CyclicBarrier captured = new CyclicBarrier(ranks);
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
            DeviceBuffer mine = x.of(rank);
            CudaStream stream = rank.stream();
            CudaGraph graph =
                CudaGraph.capture(
                    stream,
                    () -> {
                      mine.fill((byte) 0, stream);
                      // sqrt of the sum of 8 over the ranks: 4; the sum of that: 8; of that: 16
                      FusedKernels.scaleAllReduceSqrt(comm, mine, 0, 8, stream);
                      comm.allReduce(mine, mine, ReduceOp.SUM, stream);
                      comm.allReduce(mine, mine, ReduceOp.SUM, stream);
                    });
            await(captured);
            float[] result = new float[COUNT];
            for (int launch = 0; launch < LAUNCHES; launch++) {
              graph.launch(stream);
              graph.launch(stream);
              mine.copyTo(result, stream);
              for (float value : result) {
                assertEquals(16, value, "rank " + rank.rank() + ", launch " + launch);
              }
            }
          });
    }
  }

  @Test
  void groupOfMessagesCanBeCaptured() {
    try (LocalWorld world = TestRanks.open(2)) {
      CyclicBarrier captured = new CyclicBarrier(2);
      try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 2 * COUNT)) {
        world.run(
            rank -> {
              int peer = 1 - rank.rank();
              Communicator comm = rank.communicator();
              CudaStream stream = rank.stream();
              Runnable swap =
                  () -> {
                    comm.send(x.of(rank), 0, COUNT, peer, stream);
                    comm.recv(x.of(rank), COUNT, COUNT, peer, stream);
                  };
              try (CudaGraph graph = CudaGraph.capture(stream, () -> NcclGroup.run(swap))) {
                await(captured);
                float[] both = new float[2 * COUNT];
                for (int launch = 0; launch < LAUNCHES; launch++) {
                  x.of(rank).copyFrom(input(rank.rank(), launch), stream);
                  graph.launch(stream);
                  x.of(rank).copyTo(both, stream);
                  float[] received = Arrays.copyOfRange(both, COUNT, 2 * COUNT);
                  assertArrayEquals(input(peer, launch), received, "launch " + launch);
                }
              }
            });
      }
    }
  }

  // ------------------------------------------------------------------ failures and ends

  @Test
  void replayWhosePeerNeverComesEndsAtTheDeadline() {
    TestRanks.assumeShim();
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator(), SHORT);
            DeviceBuffer mine = x.of(rank);
            CudaStream own = CudaStream.create(rank.device());
            await(barrier);
            comm.allReduce(mine, mine, ReduceOp.SUM, own);
            own.synchronize(PATIENCE);
            CudaGraph graph =
                CudaGraph.capture(own, () -> comm.allReduce(mine, mine, ReduceOp.SUM, own));
            await(barrier);
            // On a stream that the device communicator itself never saw.
            graph.launch(rank.stream());
            rank.stream().synchronize(PATIENCE);
            await(barrier);
            if (rank.rank() == 0) {
              graph.launch(rank.stream());
              DeviceCommException e =
                  assertThrows(
                      DeviceCommException.class, () -> rank.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "ncclFfmAllReduce", "rank 0", "rank 1", "ncclTimeout");
              assertTrue(e.waited().compareTo(SHORT) >= 0, "waited " + e.waited());
              assertThrows(DeviceCommException.class, () -> graph.launch(rank.stream()));
            }
            await(barrier);
            graph.close();
            comm.close();
            own.close();
            rank.stream().synchronize(PATIENCE); // asks nobody who is gone
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void closedCommunicatorClosesItsGraphs() {
    CudaGraph[] graphs = new CudaGraph[2];
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(rank -> graphs[rank.rank()] = ofAllReduce(rank, x));
    }
    assertAllClosed(graphs);
  }

  @Test
  void abortedCommunicatorClosesItsGraphsAndEndsTheirLaunches() {
    CudaGraph[] graphs = new CudaGraph[2];
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            // Where it was captured: on another stream a first launch may wait for the GPU.
            CudaStream stream = rank.stream();
            CudaGraph graph = ofAllReduce(rank, x);
            graphs[rank.rank()] = graph;
            await(barrier);
            graph.launch(stream);
            stream.synchronize(PATIENCE);
            await(barrier);
            if (rank.rank() == 0) {
              graph.launch(stream); // rank 1 does not
              Thread aborter = Thread.ofPlatform().start(rank.communicator()::abort);
              assertThrows(
                  RuntimeException.class,
                  () -> {
                    stream.synchronize(PATIENCE);
                    graph.launch(stream); // where the abort came before the wait
                  });
              assertTrue(aborter.join(PATIENCE), "the abort ends");
              stream.synchronize(PATIENCE);
            }
            await(barrier);
            rank.communicator().abort();
          });
    }
    assertAllClosed(graphs);
  }

  private static CudaGraph ofAllReduce(LocalWorld.Rank rank, RankBuffers x) {
    DeviceBuffer mine = x.of(rank);
    Communicator comm = rank.communicator();
    return CudaGraph.capture(
        rank.stream(), () -> comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream()));
  }

  private static void assertAllClosed(CudaGraph[] graphs) {
    for (CudaGraph graph : graphs) {
      Messages.assertNames(
          assertThrows(IllegalStateException.class, () -> graph.launch(null)), "is closed");
      graph.close();
    }
  }

  @Test
  void watchdogDoesNotTakeACaptureForAnOperationThatHangs() {
    Duration timeout = Duration.ofMillis(300);
    CyclicBarrier barrier = new CyclicBarrier(2);
    AtomicBoolean last = new AtomicBoolean();
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            rank.communicator().watch(timeout);
            try (CudaGraph graph = ofAllReduce(rank, x)) {
              long end = System.nanoTime() + 3 * timeout.toNanos();
              boolean more = true;
              while (more) {
                if (rank.rank() == 0) {
                  last.set(System.nanoTime() - end >= 0);
                }
                await(barrier);
                more = !last.get();
                graph.launch(rank.stream());
                rank.stream().synchronize(PATIENCE);
              }
            }
            assertEquals(Communicator.State.READY, rank.communicator().state());
          });
    }
  }

  @Test
  void failureOfACommunicatorThatAGraphDoesNotUseIsNoneOfItsOwn() {
    TestRanks.assumeShim();
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceCommunicator broken = DeviceCommunicator.create(rank.communicator(), SHORT);
            DeviceCommunicator whole = DeviceCommunicator.create(rank.communicator());
            DeviceBuffer mine = x.of(rank);
            CudaStream stream = rank.stream();
            await(barrier);
            broken.allReduce(mine, mine, ReduceOp.SUM, stream);
            whole.allReduce(mine, mine, ReduceOp.SUM, stream);
            stream.synchronize(PATIENCE);
            CudaGraph graph =
                CudaGraph.capture(stream, () -> whole.allReduce(mine, mine, ReduceOp.SUM, stream));
            await(barrier);
            broken.abort();
            broken.close();
            await(barrier);
            graph.launch(stream);
            stream.synchronize(PATIENCE);
          });
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmChannel;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.device.AdamW;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.OptimizerState;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.reflect.Field;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Waiting for what the kernels themselves tell: the results are there for another stream, and
 * nothing here waits for the stream that they were launched on.
 */
class HostSignalTest {
  private static final Duration SHORT = Duration.ofMillis(300);
  private static final Duration LONG = Duration.ofSeconds(60);
  private static final int COUNT = 1500; // more than one block's

  @BeforeAll
  static void needsTheShim() {
    TestRanks.assumeShim();
  }

  private static DeviceCommunicatorConfig.Builder config(Duration timeout) {
    return DeviceCommunicatorConfig.builder().timeout(timeout).hostSignal(true).channels(4);
  }

  private static DeviceCommunicator create(LocalWorld.Rank rank, Duration timeout) {
    return DeviceCommunicator.create(rank.communicator(), config(timeout).build());
  }

  private static void await(CyclicBarrier barrier) throws Exception {
    barrier.await(LONG.toSeconds(), TimeUnit.SECONDS);
  }

  private static void fill(DeviceBuffer x, float value, CudaStream stream) {
    float[] values = new float[(int) x.count()];
    Arrays.fill(values, value);
    x.copyFrom(values, stream);
  }

  /** By a stream that knows nothing of the kernel. */
  private static void assertAll(DeviceBuffer x, float value, CudaStream other, String when) {
    float[] expected = new float[(int) x.count()];
    float[] values = new float[expected.length];
    Arrays.fill(expected, value);
    x.copyTo(values, other);
    assertArrayEquals(expected, values, when);
  }

  @ParameterizedTest(name = "{0} ranks")
  @ValueSource(ints = {1, 2, 3, 4, 8})
  void resultsAreThereForAnotherStream(int ranks) {
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(ranks);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            CudaStream stream = rank.stream();
            CudaStream other = CudaStream.create(x.device());
            DeviceCommunicator comm = create(rank, LONG);
            comm.awaitKernels(LONG); // for nothing
            await(barrier);
            for (int i = 1; i <= 100; i++) {
              String when = "rank " + rank.rank() + " of " + ranks + ", step " + i;
              LaunchChoice choice = LaunchChoice.AUTO.withBlocks(i % 3);
              fill(x, i, stream);
              comm.allReduce(x, 0, x, 0, COUNT, ReduceOp.SUM, stream, choice);
              comm.awaitKernels(LONG);
              assertAll(x, ranks * i, other, when);
              FusedKernels.scaleAllReduceSqrt(
                  comm, x, 0, x, 0, COUNT, 0, (float) i * i * ranks, stream, choice);
              comm.barrier(stream);
              comm.allReduce(x, 0, x, 0, 0, ReduceOp.SUM, stream); // launches nothing
              comm.awaitKernels(LONG);
              assertAll(x, (float) ranks * i, other, when + ", fused");
            }
            await(barrier);
            other.close();
            comm.close();
          });
    }
  }

  /** Ten thousand and more, one after the other. */
  @Test
  void everyKernelIsCounted() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.INT32, 1)) {
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator comm = create(rank, LONG);
            for (int i = 0; i < 10_000; i++) {
              comm.allReduce(x, x, ReduceOp.MAX, rank.stream());
              comm.awaitKernels(LONG);
            }
            comm.close(); // right after the wait
          });
    }
  }

  /** As after so many kernels: from the last positive number on, and from the last of all. */
  @ParameterizedTest
  @ValueSource(ints = {Integer.MAX_VALUE - 4, -5})
  @SuppressWarnings("restricted") // to look at what the struct names
  void countOfKernelsWraps(int from) {
    TestRanks.assumeCpu("the test writes the memory of the device");
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator comm = create(rank, LONG);
            MemorySegment struct = comm.struct();
            MemorySegment channel =
                ncclFfmDevComm.channels(struct).reinterpret(ncclFfmChannel.sizeof());
            MemorySegment word = ncclFfmDevComm.hostSignal(struct).reinterpret(Integer.BYTES);
            ncclFfmChannel.finished(channel, (long) from << 32);
            word.set(ValueLayout.JAVA_INT, 0, from);
            Field launched = DeviceCommunicator.class.getDeclaredField("launched");
            launched.setAccessible(true);
            launched.setInt(comm, from);
            for (int i = 1; i <= 10; i++) {
              fill(x, i, rank.stream());
              comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
              comm.awaitKernels(LONG);
              assertEquals(from + i, word.get(ValueLayout.JAVA_INT, 0));
              assertAll(x, 2 * i, rank.stream(), "kernel " + i + " from " + from);
            }
            comm.close();
          });
    }
  }

  @Test
  void updatesAndNormsAreThereToo() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers residual = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers weights = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers mean = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers variance = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            CudaStream stream = rank.stream();
            CudaStream other = CudaStream.create(x.of(rank).device());
            DeviceCommunicator comm = create(rank, LONG);
            await(barrier);
            fill(x.of(rank), 1, stream);
            fill(residual.of(rank), 1, stream);
            fill(weights.of(rank), 2, stream);
            DeviceBuffer in = x.of(rank);
            FusedKernels.allReduceRmsNorm(
                comm, in, residual.of(rank), weights.of(rank), in, 1, 0, stream);
            comm.awaitKernels(LONG);
            assertAll(residual.of(rank), 3, other, "residual");
            assertAll(in, 2, other, "norm");
            fill(in, 4 + 2 * rank.rank(), stream);
            fill(mean.of(rank), 0, stream);
            fill(variance.of(rank), 0, stream);
            OptimizerState state =
                OptimizerState.ofAdamW(weights.of(rank), mean.of(rank), variance.of(rank));
            FusedKernels.adamW(comm, in, state, new AdamW(1, 0.9f, 0.999f, 1e-8f, 0, 0), 1, stream);
            comm.awaitKernels(LONG);
            assertAll(in, 5, other, "average");
            float[] updated = new float[COUNT];
            weights.of(rank).copyTo(updated, other);
            for (float w : updated) {
              assertTrue(Math.abs(w - 1) < 1e-5, "weight " + w);
            }
            await(barrier);
            other.close();
            comm.close();
          });
    }
  }

  /** Two kernels of a rank at a time, which end in any order. */
  @Test
  void sendsBesideACollectiveAreCounted() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers sent = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceBuffer y = sent.of(rank);
            CudaStream second = CudaStream.create(x.device());
            CudaStream other = CudaStream.create(x.device());
            DeviceCommunicator comm = create(rank, LONG);
            LaunchChoice small = LaunchChoice.AUTO.withBlocks(2);
            await(barrier);
            for (int i = 1; i <= 200; i++) {
              fill(x, i, rank.stream());
              fill(y, rank.rank() == 0 ? i : 0, second);
              if (rank.rank() == 0) {
                comm.send(y, 0, COUNT, 1, second, small);
              } else {
                comm.recv(y, 0, COUNT, 0, second, small);
              }
              comm.allReduce(x, 0, x, 0, COUNT, ReduceOp.SUM, rank.stream(), small);
              comm.awaitKernels(LONG);
              assertAll(x, 2 * i, other, "sum " + i);
              assertAll(y, i, other, "sent " + i);
            }
            await(barrier);
            second.close();
            other.close();
            comm.close();
          });
    }
  }

  /** A capture runs nothing; a launch of the graph counts as often as it launches. */
  @Test
  void launchesOfGraphsAreCounted() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            CudaStream stream = rank.stream();
            CudaStream other = CudaStream.create(x.device());
            DeviceCommunicator comm = create(rank, LONG);
            await(barrier);
            Runnable two =
                () -> {
                  comm.allReduce(x, x, ReduceOp.SUM, stream);
                  FusedKernels.scaleAllReduceSqrt(comm, x, 2, 1, stream);
                };
            CudaGraph graph = CudaGraph.capture(stream, two);
            comm.awaitKernels(LONG); // for nothing
            await(barrier);
            for (int i = 1; i <= 50; i++) {
              fill(x, i, stream);
              graph.launch(stream);
              comm.awaitKernels(LONG);
              assertAll(x, (float) Math.sqrt(2 * (2 * 2 * i + 1)), other, "launch " + i);
              fill(x, 1, stream);
              graph.launch(stream);
              graph.launch(stream);
              comm.allReduce(x, x, ReduceOp.SUM, stream);
              comm.awaitKernels(LONG);
              float once = (float) Math.sqrt(2 * (2 * 2 + 1));
              float twice = (float) Math.sqrt(2 * Math.fma(2f, once + once, 1f));
              assertAll(x, 2 * twice, other, "two launches " + i);
            }
            // What was captured and thrown away, or replaced, is not counted.
            assertThrows(
                IllegalStateException.class,
                () ->
                    CudaGraph.capture(
                        stream,
                        () -> {
                          two.run();
                          throw new IllegalStateException("no graph");
                        }));
            await(barrier);
            graph.update(stream, two);
            await(barrier);
            fill(x, 3, stream);
            graph.launch(stream);
            comm.awaitKernels(LONG);
            assertAll(x, (float) Math.sqrt(2 * (2 * 2 * 3 + 1)), other, "after an update");
            await(barrier);
            graph.close();
            other.close();
            comm.close();
          });
    }
  }

  @Test
  void missingPeerIsNamed() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator comm = create(rank, SHORT);
            await(barrier);
            if (rank.rank() == 0) {
              FusedKernels.scaleAllReduceSqrt(comm, x, 2, 1, rank.stream());
              DeviceCommException e =
                  assertThrows(DeviceCommException.class, () -> comm.awaitKernels(LONG));
              Messages.assertNames(
                  e, "ncclFfmFusedScaleAllReduceSqrt", "rank 0", "rank 1", "ncclTimeout");
              long end = System.nanoTime() + LONG.toNanos();
              while (!rank.stream().isDone()) {
                assertTrue(System.nanoTime() - end < 0, "the kernel goes on");
                Thread.onSpinWait();
              }
              assertThrows(DeviceCommException.class, () -> comm.awaitKernels(LONG), "ended");
            }
            await(barrier);
            comm.close();
          });
    }
  }

  @Test
  void abortEndsTheWait() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator comm = create(rank, LONG);
            await(barrier);
            if (rank.rank() == 0) {
              comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
              assertThrows(DeadlineException.class, () -> comm.awaitKernels(SHORT));
              FutureTask<Void> aborting = new FutureTask<>(comm::abort, null);
              Thread.ofPlatform().start(aborting);
              DeviceCommException e =
                  assertThrows(DeviceCommException.class, () -> comm.awaitKernels(LONG));
              Messages.assertNames(e, "rank 0", "ncclRemoteError");
              aborting.get(LONG.toSeconds(), TimeUnit.SECONDS);
              assertThrows(DeviceCommException.class, () -> rank.stream().synchronize(LONG));
            }
            await(barrier);
            comm.close();
          });
    }
  }

  /** It closes the device communicator, and so frees the word, under the wait. */
  @Test
  void abortOfTheCommunicatorEndsTheWait() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator comm = create(rank, LONG);
            await(barrier);
            if (rank.rank() == 0) {
              comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
              FutureTask<Void> aborting = new FutureTask<>(rank.communicator()::abort, null);
              Thread.ofPlatform().start(aborting);
              RuntimeException e =
                  assertThrows(RuntimeException.class, () -> comm.awaitKernels(LONG));
              assertTrue(
                  e instanceof DeviceCommException || e.getMessage().contains("closed"),
                  e.toString());
              aborting.get(LONG.toSeconds(), TimeUnit.SECONDS);
            }
            await(barrier);
            if (rank.rank() == 1) {
              rank.communicator().abort();
            }
          });
    }
  }

  /** The deadline ends only the wait. */
  @Test
  void aWaitThatEndedMayBeTakenUpAgain() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      CyclicBarrier barrier = new CyclicBarrier(2);
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            CudaStream other = CudaStream.create(x.device());
            DeviceCommunicator comm = create(rank, LONG);
            fill(x, 1, rank.stream());
            await(barrier);
            if (rank.rank() == 0) {
              comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
              DeadlineException e =
                  assertThrows(DeadlineException.class, () -> comm.awaitKernels(SHORT));
              Messages.assertNames(e, "awaitKernels", "rank 0");
              Thread.currentThread().interrupt();
              assertThrows(DeadlineException.class, () -> comm.awaitKernels(LONG));
              assertTrue(Thread.interrupted());
            }
            await(barrier);
            if (rank.rank() == 1) {
              comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
            }
            comm.awaitKernels(LONG);
            assertAll(x, 2, other, "at last");
            await(barrier);
            other.close();
            comm.close();
          });
    }
  }

  @Test
  void onlyOneThatWasMadeForItWaits() {
    try (LocalWorld world = TestRanks.open(1);
        RankBuffers buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceBuffer x = buffers.of(rank);
            DeviceCommunicator without = DeviceCommunicator.create(rank.communicator());
            without.allReduce(x, x, ReduceOp.SUM, rank.stream());
            Messages.assertNames(
                assertThrows(IllegalStateException.class, without::awaitKernels),
                "awaitKernels",
                "hostSignal");
            DeviceCommunicator comm = create(rank, LONG);
            assertThrows(IllegalArgumentException.class, () -> comm.awaitKernels(Duration.ZERO));
            comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
            comm.awaitKernels();
            comm.close();
            Messages.assertNames(
                assertThrows(IllegalStateException.class, comm::awaitKernels),
                "awaitKernels",
                "closed");
          });
    }
  }
}

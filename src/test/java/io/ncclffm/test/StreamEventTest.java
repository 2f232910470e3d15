package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.DoubleStream;
import java.util.stream.IntStream;
import java.util.stream.LongStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** Streams, events, and copies between host and device. */
class StreamEventTest {
  /** More than twice the staging buffer of 1 MiB, and not a multiple of it, for every type. */
  private static final int LARGE = 600_011;

  private static LocalWorld world;
  private static CudaDevice device;
  private static CudaStream stream;

  @BeforeAll
  static void openWorld() {
    world = TestRanks.open(2);
    TestRanks.assertWorks(world); // all kernels are loaded from here on
    device = new CudaDevice(0);
    stream = CudaStream.create(device);
  }

  @AfterAll
  static void closeWorld() {
    stream.close();
    world.close();
  }

  // ------------------------------------------------------------------ copies

  @Test
  void floatArrayLargerThanTheStagingBufferComesBack() {
    float[] source = new float[LARGE];
    IntStream.range(0, LARGE).forEach(i -> source[i] = i * 0.5f);
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, LARGE)) {
      x.copyFrom(source, stream);
      float[] target = new float[LARGE];
      x.copyTo(target, stream);
      assertArrayEquals(source, target);
    }
  }

  @Test
  void doubleArrayLargerThanTheStagingBufferComesBack() {
    double[] source = DoubleStream.iterate(0, x -> x + 0.25).limit(LARGE).toArray();
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT64, LARGE)) {
      x.copyFrom(source, stream);
      double[] target = new double[LARGE];
      x.copyTo(target, stream);
      assertArrayEquals(source, target);
    }
  }

  @Test
  void intArrayLargerThanTheStagingBufferComesBack() {
    int[] source = IntStream.range(0, LARGE).map(i -> i * 0x9E3779B1).toArray();
    for (DataType type : new DataType[] {DataType.INT32, DataType.UINT32}) {
      try (DeviceBuffer x = DeviceBuffer.allocate(device, type, LARGE)) {
        x.copyFrom(source, stream);
        int[] target = new int[LARGE];
        x.copyTo(target, stream);
        assertArrayEquals(source, target);
      }
    }
  }

  @Test
  void longArrayLargerThanTheStagingBufferComesBack() {
    long[] source = LongStream.range(0, LARGE).map(Inputs::mix).toArray();
    for (DataType type : new DataType[] {DataType.INT64, DataType.UINT64}) {
      try (DeviceBuffer x = DeviceBuffer.allocate(device, type, LARGE)) {
        x.copyFrom(source, stream);
        long[] target = new long[LARGE];
        x.copyTo(target, stream);
        assertArrayEquals(source, target);
      }
    }
  }

  @Test
  void heapSegmentOfBytesComesBackAtAnOffset() {
    byte[] source = new byte[LARGE * 4];
    IntStream.range(0, source.length).forEach(i -> source[i] = (byte) Inputs.mix(i));
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT8, source.length + 3)) {
      x.copyFrom(MemorySegment.ofArray(source), 3, stream);
      byte[] target = new byte[source.length];
      x.copyTo(MemorySegment.ofArray(target), 3, stream);
      assertArrayEquals(source, target);
    }
  }

  @Test
  void arrayMayBeOverwrittenAsSoonAsTheCopyReturns() {
    float[] source = new float[1000];
    java.util.Arrays.fill(source, 7);
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, 1000)) {
      x.copyFrom(source, stream);
      java.util.Arrays.fill(source, -1);
      float[] target = new float[1000];
      x.copyTo(target, stream);
      assertEquals(7, target[999]);
    }
  }

  @Test
  void pinnedMemoryIsCopiedBothWays() {
    try (HostBuffer source = HostBuffer.allocate(device, 8 * 1000);
        HostBuffer target = HostBuffer.allocate(device, 8 * 1000);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT64, 1000)) {
      assertEquals(-1, target.segment().mismatch(source.segment()), "both begin zeroed");
      for (int i = 0; i < 1000; i++) {
        source.segment().setAtIndex(ValueLayout.JAVA_LONG, i, Inputs.mix(i));
      }
      x.copyFrom(source.segment(), stream);
      x.copyTo(target.segment(), stream);
      stream.synchronize();
      assertEquals(-1, target.segment().mismatch(source.segment()));
    }
  }

  @Test
  void fillSetsEveryByte() {
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.UINT32, 1025)) {
      x.fill((byte) 0xa7, stream);
      int[] target = new int[1025];
      x.copyTo(target, stream);
      for (int value : target) {
        assertEquals(0xa7a7a7a7, value);
      }
    }
  }

  // ------------------------------------------------------------------ work that is not done

  private interface Step {
    void run(LocalWorld.Rank rank) throws Exception;
  }

  /**
   * Rank 0 calls an all-reduce and then does the step, while its work cannot end because rank 1 has
   * not called yet; then rank 1 does, and both end well.
   */
  private static void whileWorkRuns(Step step) {
    CyclicBarrier barrier = new CyclicBarrier(2);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 100)) {
      world.run(
          rank -> {
            DeviceBuffer mine = x.of(rank);
            mine.fill((byte) 0, rank.stream());
            rank.stream().synchronize();
            barrier.await(20, TimeUnit.SECONDS);
            if (rank.rank() == 0) {
              rank.communicator().allReduce(mine, mine, ReduceOp.SUM, rank.stream());
              try {
                step.run(rank);
              } finally {
                barrier.await(20, TimeUnit.SECONDS);
              }
            } else {
              barrier.await(20, TimeUnit.SECONDS);
              rank.communicator().allReduce(mine, mine, ReduceOp.SUM, rank.stream());
            }
            rank.stream().synchronize();
            assertTrue(rank.stream().isDone());
          });
    }
  }

  @Test
  void streamIsNotDoneWhileWorkRuns() {
    whileWorkRuns(rank -> assertFalse(rank.stream().isDone()));
  }

  @Test
  void synchronizeEndsAtItsDeadlineAndTheWorkGoesOn() {
    whileWorkRuns(
        rank -> {
          Duration timeout = Duration.ofMillis(100);
          long start = System.nanoTime();
          DeadlineException e =
              assertThrows(DeadlineException.class, () -> rank.stream().synchronize(timeout));
          assertTrue(System.nanoTime() - start >= timeout.toNanos());
          Messages.assertNames(e, "cudaStreamSynchronize", "device 0", "deadline");
        });
  }

  @Test
  void synchronizeEndsOnInterruption() {
    whileWorkRuns(
        rank -> {
          Thread.currentThread().interrupt();
          DeadlineException e =
              assertThrows(DeadlineException.class, () -> rank.stream().synchronize());
          Messages.assertNames(e, "interrupted");
          assertTrue(Thread.interrupted(), "the interruption is kept for the caller");
        });
  }

  @Test
  void eventIsDoneWhenTheWorkBeforeItIs() throws Exception {
    try (CudaEvent before = CudaEvent.create(device);
        CudaEvent after = CudaEvent.create(device)) {
      assertTrue(after.isDone(), "nothing was recorded");
      whileWorkRuns(
          rank -> {
            before.record(stream);
            before.synchronize(Duration.ofSeconds(20));
            after.record(rank.stream());
            assertTrue(before.isDone());
            assertFalse(after.isDone());
            DeadlineException e =
                assertThrows(
                    DeadlineException.class, () -> after.synchronize(Duration.ofMillis(50)));
            Messages.assertNames(e, "cudaEventSynchronize", "device 0");
          });
      after.synchronize(Duration.ofSeconds(20));
      assertTrue(after.isDone());
      float millis = after.millisSince(before);
      // It was recorded behind work that took at least the 50 ms of the wait in vain.
      assertTrue(millis >= 45 && millis < 60_000, millis + " ms");
    }
  }

  @Test
  void streamWaitsForAnotherStreamsEvent() {
    try (CudaStream second = CudaStream.create(device);
        CudaEvent event = CudaEvent.create(device);
        DeviceBuffer y = DeviceBuffer.allocate(device, DataType.INT32, 1)) {
      y.copyFrom(new int[] {1}, second);
      whileWorkRuns(
          rank -> {
            event.record(rank.stream());
            second.await(event);
            y.fill((byte) 0, second);
            assertFalse(second.isDone(), "it must wait for the event");
          });
      second.synchronize();
      int[] result = new int[1];
      y.copyTo(result, second);
      assertEquals(0, result[0]);
    }
  }

  @Test
  void workOfOneStreamIsDoneInOrder() {
    try (DeviceBuffer x = DeviceBuffer.allocate(device, DataType.UINT8, 1 << 20)) {
      for (int i = 0; i < 200; i++) {
        x.fill((byte) i, stream);
      }
      byte[] content = new byte[1 << 20];
      x.copyTo(MemorySegment.ofArray(content), stream);
      for (byte value : content) {
        assertEquals((byte) 199, value);
      }
    }
  }
}

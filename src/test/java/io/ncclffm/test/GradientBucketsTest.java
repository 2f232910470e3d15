package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.GradientAverager;
import io.ncclffm.device.GradientBuckets;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** How gradients are put into buckets, and when these are averaged. */
class GradientBucketsTest {
  private static final int RANKS = 3;
  private static final int STEPS = 20;
  private static final long SEED = 5;

  private static LocalWorld world;
  private static CudaDevice device;

  /** Writes down what it is asked for. */
  private static class Recorder implements GradientAverager {
    final List<String> calls = new ArrayList<>();

    @Override
    public void average(DeviceBuffer bucket, int index, CudaStream stream) {
      calls.add(index + ":" + bucket.count());
    }

    @Override
    public void finish(CudaStream stream) {
      calls.add("finish");
    }

    @Override
    public void close() {}
  }

  @BeforeAll
  static void openWorld() {
    world = TestRanks.open(RANKS);
    device = new CudaDevice(0);
  }

  @AfterAll
  static void closeWorld() {
    if (world != null) {
      world.close();
    }
  }

  private static GradientBuckets create(long bucketBytes, GradientAverager averager) {
    return GradientBuckets.create(
        device, DataType.FLOAT32, new long[] {100, 10, 20, 70, 5}, bucketBytes, averager);
  }

  @Test
  void bucketsAreFilledFromTheLastGradientAndNoLargerThanAsked() {
    Recorder recorder = new Recorder();
    try (CudaStream stream = CudaStream.create(device);
        GradientBuckets buckets = create(400, recorder)) {
      // 5 + 70 and 20 more are within 100 elements, 10 more are not; 100 and 10 do not fit
      // together.
      assertEquals(3, buckets.buckets());
      assertEquals(205, buckets.all().count());
      assertEquals(buckets.all().address(0), buckets.gradient(4).address(0));
      assertEquals(buckets.all().address(105), buckets.gradient(0).address(0));
      for (int i : new int[] {4, 3, 2, 1, 0}) {
        buckets.ready(i, stream);
      }
      buckets.finish();
      assertEquals(List.of("0:95", "1:10", "2:100", "finish"), recorder.calls);
    }
    try (GradientBuckets one = create(1 << 20, recorder);
        GradientBuckets each = create(1, recorder)) {
      assertEquals(1, one.buckets());
      assertEquals(5, each.buckets());
    }
  }

  @Test
  void bucketWaitsForThoseBeforeIt() {
    Recorder recorder = new Recorder();
    try (CudaStream stream = CudaStream.create(device);
        GradientBuckets buckets = create(400, recorder)) {
      for (int step = 0; step < 2; step++) {
        recorder.calls.clear();
        buckets.ready(0, stream);
        buckets.ready(1, stream);
        buckets.ready(2, stream);
        buckets.ready(4, stream);
        assertEquals(List.of(), recorder.calls);
        buckets.ready(3, stream);
        assertEquals(List.of("0:95", "1:10", "2:100"), recorder.calls);
        buckets.finish();
        assertArrayEquals(new int[] {0, 1, 2, 4, 3}, buckets.observedOrder());
      }
      try (GradientBuckets better =
          GradientBuckets.create(
              device,
              DataType.FLOAT32,
              new long[] {100, 10, 20, 70, 5},
              buckets.observedOrder(),
              400,
              recorder)) {
        recorder.calls.clear();
        better.ready(0, stream);
        better.ready(1, stream);
        assertEquals(List.of("0:100"), recorder.calls, "under way before the last is computed");
      }
    }
  }

  @Test
  void mistakesAreTold() {
    Recorder recorder = new Recorder();
    try (CudaStream stream = CudaStream.create(device);
        CudaStream other = CudaStream.create(device);
        GradientBuckets buckets = create(400, recorder)) {
      Messages.assertNames(
          assertThrows(IllegalStateException.class, buckets::finish), "[0, 1, 2, 3, 4]");
      buckets.ready(4, stream);
      Messages.assertNames(
          assertThrows(IllegalStateException.class, () -> buckets.ready(4, stream)),
          "gradient 4 is ready already");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> buckets.ready(3, other)),
          "gradient 3 on the",
          other.toString());
      assertThrows(IndexOutOfBoundsException.class, () -> buckets.ready(5, stream));
      Messages.assertNames(
          assertThrows(IllegalStateException.class, buckets::finish), "[0, 1, 2, 3]");
      assertEquals(List.of(), recorder.calls);
      for (int i = 3; i >= 0; i--) {
        buckets.ready(i, stream); // nothing was lost
      }
      buckets.finish();
      assertEquals(4, recorder.calls.size());
    }
    refused(new long[] {1, 0}, new int[] {1, 0}, 1, "gradient 1 of 0 elements");
    refused(new long[] {1, 1}, new int[] {1, 1}, 1, "order [1, 1]");
    refused(new long[] {1, 1}, new int[] {0}, 1, "each of the 2 gradients once");
    refused(new long[] {}, new int[] {}, 1, "there must be one");
    refused(new long[] {1}, new int[] {0}, 0, "buckets of 0 bytes");
  }

  /** A bucket that could not be handed over is not forgotten. */
  @Test
  void bucketOfAnAveragerThatThrewIsHandedOverLater() {
    Recorder recorder =
        new Recorder() {
          private boolean thrown;

          @Override
          public void average(DeviceBuffer bucket, int index, CudaStream stream) {
            if (index == 2 && !thrown) {
              thrown = true;
              throw new IllegalStateException("full");
            }
            super.average(bucket, index, stream);
          }
        };
    try (CudaStream stream = CudaStream.create(device);
        GradientBuckets buckets = create(400, recorder)) {
      for (int i = 4; i > 0; i--) {
        buckets.ready(i, stream);
      }
      assertThrows(IllegalStateException.class, () -> buckets.ready(0, stream));
      assertEquals(List.of("0:95", "1:10"), recorder.calls);
      buckets.finish();
      assertEquals(List.of("0:95", "1:10", "2:100", "finish"), recorder.calls);
    }
  }

  private static void refused(long[] counts, int[] order, long bucketBytes, String text) {
    Messages.assertNames(
        assertThrows(
            IllegalArgumentException.class,
            () ->
                GradientBuckets.create(
                    device, DataType.FLOAT32, counts, order, bucketBytes, new Recorder())),
        text);
  }

  /** Ranks whose gradients become ready in different orders average the same ones all the same. */
  @Test
  void everyAveragerAveragesWhateverTheOrderOnEachRank() {
    TestRanks.assumeShim();
    DeviceCommunicator[] comms = new DeviceCommunicator[RANKS];
    DeviceCommunicator[] ofQueues = new DeviceCommunicator[RANKS];
    TaskQueue[] queues = new TaskQueue[RANKS];
    world.run(
        rank -> {
          int r = rank.rank();
          comms[r] = DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build());
          ofQueues[r] = DeviceCommunicator.create(rank.communicator(), TaskRanks.small().build());
          queues[r] = TaskQueue.create(ofQueues[r], TaskQueueConfig.builder().lanes(2).build());
        });
    world.run(rank -> average(rank, GradientAverager.of(rank.communicator())));
    world.run(rank -> average(rank, GradientAverager.of(comms[rank.rank()])));
    TaskSymbol name = TaskSymbol.of("gradients");
    world.run(
        rank -> average(rank, GradientAverager.of(queues[rank.rank()], name, TaskRanks.LONG)));
    world.run(
        rank -> {
          comms[rank.rank()].close();
          ofQueues[rank.rank()].close();
        });
  }

  /** A step that did not end well is not taken for the next one. */
  @Test
  void stepOfTasksThatIsNotFinishedStopsTheNext() {
    TestRanks.assumeShim();
    try (TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
      world.run(
          rank -> {
            TaskSymbol name = TaskSymbol.of("gradients");
            DeviceBuffer x = tasks.x(rank);
            try (GradientAverager averager =
                GradientAverager.of(tasks.of(rank), name, TaskRanks.LONG)) {
              averager.average(x, 0, rank.stream());
              Messages.assertNames(
                  assertThrows(
                      IllegalStateException.class, () -> averager.average(x, 0, rank.stream())),
                  "bucket 0 after 1",
                  "finish");
              averager.finish(rank.stream());
              averager.average(x, 0, rank.stream());
              averager.finish(rank.stream());
            }
          });
    }
  }

  private static void average(LocalWorld.Rank rank, GradientAverager averager) {
    Random random = new Random(SEED + rank.rank());
    long[] counts = {100, 10, 20, 70, 5};
    try (averager;
        GradientBuckets buckets =
            GradientBuckets.create(rank.device(), DataType.FLOAT32, counts, 400, averager)) {
      for (int step = 0; step < STEPS; step++) {
        List<Integer> order = new ArrayList<>(List.of(0, 1, 2, 3, 4));
        Collections.shuffle(order, random);
        for (int i : order) {
          float[] values = new float[(int) counts[i]];
          Arrays.fill(values, 3 * (rank.rank() + 1) * (i + 1) + step);
          buckets.gradient(i).copyFrom(values, rank.stream());
          buckets.ready(i, rank.stream());
        }
        buckets.finish();
        for (int i = 0; i < counts.length; i++) {
          float[] values = new float[(int) counts[i]];
          buckets.gradient(i).copyTo(values, rank.stream());
          float mean = 3 * 2 * (i + 1) + step; // of ranks 0, 1 and 2
          for (float value : values) {
            assertEquals(mean, value, 1e-4f * mean, "seed " + SEED + ", step " + step);
          }
        }
      }
    }
  }
}

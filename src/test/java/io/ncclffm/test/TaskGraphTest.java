package io.ncclffm.test;

import static io.ncclffm.test.TaskRanks.GRADIENTS;
import static io.ncclffm.test.TaskRanks.LONG;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.device.ProducerRun;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskOverlap;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import java.time.Duration;
import java.util.Arrays;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Kernels that append tasks, in graphs. Graphs are made while no rank's kernels run. */
class TaskGraphTest {
  private static final int RANKS = 2;
  private static final int COUNT = 100;

  private final CudaGraph[] graphs = new CudaGraph[RANKS];
  private final ProducerRun[] runs = new ProducerRun[RANKS];

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  private static TaskQueueConfig.Builder lanes(int lanes) {
    return TaskQueueConfig.builder().lanes(lanes).timeout(LONG);
  }

  private static TaskBuckets scaled(DeviceBuffer x, float by) {
    return new TaskBuckets(x, 0, COUNT, 10, by, 0, 2);
  }

  private void capture(TaskRanks tasks) {
    tasks.world.run(
        rank -> {
          int r = rank.rank();
          graphs[r] =
              CudaGraph.capture(
                  rank.stream(),
                  () ->
                      runs[r] =
                          tasks
                              .of(rank)
                              .buckets(GRADIENTS, scaled(tasks.x(rank), 2), rank.stream()));
        });
  }

  private static void fill(LocalWorld.Rank rank, DeviceBuffer x, float value) {
    float[] values = new float[COUNT];
    Arrays.fill(values, value);
    x.copyFrom(values, rank.stream());
  }

  private static void assertAll(LocalWorld.Rank rank, DeviceBuffer x, float value, String when) {
    float[] values = new float[COUNT];
    x.copyTo(values, rank.stream());
    for (float each : values) {
      assertEquals(value, each, when);
    }
  }

  private void close(TaskRanks tasks) {
    tasks.world.run(rank -> graphs[rank.rank()].close());
  }

  /** Data is new in each launch, and the scheduler has ended before some of them. */
  @ParameterizedTest(name = "{0} lanes, depth {1}, {2}")
  @CsvSource({"1, 4, PERSISTENT", "3, 8, PERSISTENT", "2, 4, DRAIN", "1, 1, DEBUG"})
  void bucketsOfAGraphAreReducedAtEachLaunch(int lanes, int depth, TaskQueueConfig.Mode mode) {
    TaskQueueConfig config = lanes(lanes).depth(depth).mode(mode).build();
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      capture(tasks);
      world.run(
          rank -> {
            ProducerRun run = runs[rank.rank()];
            for (int i = 1; i <= 8; i++) {
              fill(rank, tasks.x(rank), i + rank.rank());
              graphs[rank.rank()].launch(rank.stream());
              run.await(LONG);
              assertNull(run.failure());
              assertAll(rank, tasks.x(rank), 2 * (2 * i + 1), "launch " + i);
              if (i % 3 == 0) {
                tasks.of(rank).stop(LONG);
              }
            }
          });
      close(tasks);
    }
  }

  /** Nobody waits between the launches; the last one stands for all. */
  @Test
  void launchesFollowEachOther() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).depth(4).build())) {
      DeviceBuffer[] sums = new DeviceBuffer[RANKS];
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceBuffer x = tasks.x(rank);
            sums[r] = DeviceBuffer.wrap(x.device(), DataType.FLOAT32, 10, x.address(10));
            fill(rank, x, 1);
            TaskOverlap work =
                new TaskOverlap(
                    DeviceBuffer.wrap(x.device(), DataType.FLOAT32, 10, x.address(0)),
                    sums[r],
                    DeviceBuffer.wrap(x.device(), DataType.FLOAT32, 40, x.address(20)),
                    3,
                    1,
                    1,
                    1,
                    2,
                    TaskOverlap.Parts.BOTH);
            graphs[r] =
                CudaGraph.capture(
                    rank.stream(),
                    () -> runs[r] = tasks.of(rank).overlap(GRADIENTS, work, rank.stream()));
          });
      world.run(
          rank -> {
            for (int i = 0; i < 20; i++) {
              graphs[rank.rank()].launch(rank.stream());
            }
            runs[rank.rank()].await(LONG);
            float[] values = new float[10];
            sums[rank.rank()].copyTo(values, rank.stream());
            assertEquals(RANKS * (2 + 3 + 4), values[9]);
            assertEquals(20 * 3 * 2, tasks.of(rank).snapshot().lanes().get(0).done());
          });
      close(tasks);
    }
  }

  @Test
  void updatedGraphComputesWithOtherScalars() {
    try (LocalWorld world = TestRanks.open(RANKS);
        TaskRanks tasks = TaskRanks.open(world, lanes(2).build())) {
      capture(tasks);
      ProducerRun[] first = runs.clone();
      world.run(
          rank -> {
            fill(rank, tasks.x(rank), 1);
            graphs[rank.rank()].launch(rank.stream());
            first[rank.rank()].await(LONG);
            assertAll(rank, tasks.x(rank), 4, "as captured");
          });
      world.run(
          rank ->
              graphs[rank.rank()].update(
                  rank.stream(),
                  () ->
                      runs[rank.rank()] =
                          tasks
                              .of(rank)
                              .buckets(GRADIENTS, scaled(tasks.x(rank), 3), rank.stream())));
      world.run(
          rank -> {
            graphs[rank.rank()].launch(rank.stream());
            runs[rank.rank()].await(LONG);
            assertAll(rank, tasks.x(rank), 24, "updated");
            assertNull(first[rank.rank()].failure());
          });
      close(tasks);
    }
  }

  /** Its own kernel, which appends nothing: only that each launch is counted. */
  @Test
  void ownKernelIsCountedAtEachLaunch() {
    try (LocalWorld world = TestRanks.open(1);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).idle(Duration.ZERO).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            try (CudaGraph graph =
                CudaGraph.capture(rank.stream(), () -> queue.producerLaunched(rank.stream()))) {
              long before = queue.snapshot().schedulerLaunches();
              for (int i = 1; i <= 3; i++) {
                graph.launch(rank.stream());
                queue.stop(LONG);
                assertEquals(before + i, queue.snapshot().schedulerLaunches());
                assertEquals(0, queue.snapshot().producers());
              }
            }
          });
    }
  }

  @Test
  void graphsTakePlacesUntilTheyAreClosed() {
    try (LocalWorld world = TestRanks.open(1);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            TaskBuckets work = scaled(tasks.x(rank), 2);
            CudaGraph[] all = new CudaGraph[TaskQueue.MOST_RUNS];
            Runnable add = () -> runs[0] = queue.buckets(GRADIENTS, work, rank.stream());
            for (int i = 0; i < all.length; i++) {
              all[i] = CudaGraph.capture(rank.stream(), add);
            }
            Messages.assertNames(
                assertThrows(IllegalStateException.class, add::run), "in graphs", "close a graph");
            all[15].launch(rank.stream());
            all[15].close();
            runs[0].await(LONG);
            // A capture that comes to nothing takes no place.
            for (int i = 0; i < 3; i++) {
              assertThrows(
                  ArithmeticException.class,
                  () ->
                      CudaGraph.capture(
                          rank.stream(),
                          () -> {
                            add.run();
                            throw new ArithmeticException();
                          }));
            }
            queue.buckets(GRADIENTS, work, rank.stream()).await(LONG);
            for (CudaGraph graph : all) {
              graph.close();
            }
            queue.buckets(GRADIENTS, work, rank.stream()).await(LONG);
          });
    }
  }

  @Test
  void runsThatNobodyAwaitedLeaveTheirPlacesToACapture() {
    try (LocalWorld world = TestRanks.open(1);
        TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            Runnable add = () -> queue.buckets(GRADIENTS, scaled(tasks.x(rank), 2), rank.stream());
            for (int i = 0; i < TaskQueue.MOST_RUNS; i++) {
              add.run();
            }
            queue.stop(LONG);
            rank.stream().synchronize(LONG); // an event may come after what the queue has seen
            queue.stop(LONG);
            CudaGraph.capture(rank.stream(), add).close();
          });
    }
  }

  @Test
  void whatCannotBeIsRefused() {
    try (LocalWorld world = TestRanks.open(RANKS)) {
      try (TaskRanks tasks = TaskRanks.open(world, lanes(1).build())) {
        capture(tasks);
        Messages.assertNames(
            assertThrows(IllegalStateException.class, runs[0]::isDone),
            "ncclFfmTaskAppendBuckets",
            "was not launched");
      }
      world.run(
          rank -> {
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> graphs[rank.rank()].launch(rank.stream())),
                "ncclFfmTaskAppendBuckets",
                "closed");
            graphs[rank.rank()].close();
            rank.stream().synchronize(LONG);
          });
    }
  }
}

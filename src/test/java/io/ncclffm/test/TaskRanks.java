package io.ncclffm.test;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import java.time.Duration;

/**
 * A device communicator and a task queue for each rank of a world, and a buffer. Made and closed
 * while nothing runs: on a GPU that ranks share, freeing waits for every rank's kernels.
 */
final class TaskRanks implements AutoCloseable {
  static final TaskSymbol GRADIENTS = TaskSymbol.of("gradients");
  static final TaskSymbol OTHER = TaskSymbol.of("another task");
  static final Duration PATIENCE = Duration.ofSeconds(20);
  static final Duration LONG = Duration.ofSeconds(60);
  static final int COUNT = 4096;

  final LocalWorld world;
  final TaskQueue[] queues;
  final RankBuffers x;

  private TaskRanks(LocalWorld world, RankBuffers x) {
    this.world = world;
    this.queues = new TaskQueue[world.size()];
    this.x = x;
  }

  static DeviceCommunicatorConfig.Builder small() {
    return DeviceCommunicatorConfig.builder().channels(4).slotBytes(1024).timeout(LONG);
  }

  static TaskRanks open(LocalWorld world, TaskQueueConfig config) {
    return open(world, small().build(), config);
  }

  static TaskRanks open(
      LocalWorld world, DeviceCommunicatorConfig ofDevice, TaskQueueConfig config) {
    TaskRanks made = new TaskRanks(world, RankBuffers.allocate(world, DataType.FLOAT32, COUNT));
    world.run(
        rank -> {
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator(), ofDevice);
          made.queues[rank.rank()] = TaskQueue.create(comm, config);
        });
    return made;
  }

  TaskQueue of(LocalWorld.Rank rank) {
    return queues[rank.rank()];
  }

  DeviceBuffer x(LocalWorld.Rank rank) {
    return x.of(rank);
  }

  @Override
  public void close() {
    world.run(rank -> of(rank).deviceCommunicator().close()); // and with it the queue
    x.close();
  }
}

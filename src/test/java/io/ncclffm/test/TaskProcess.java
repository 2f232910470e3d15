package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import java.io.IOException;
import java.time.Duration;

/**
 * A child JVM's main class: one rank with a task queue. Meets as {@link DeviceProcess} does.
 * Arguments: rank, size, and what to do: {@code tasks} runs some, then lets the ranks disagree, and
 * prints {@code DISAGREED message} and {@code RIGHT tasks}; {@code loop} goes on until something
 * fails, prints {@code RUNNING} after the first right result and {@code FAILED peer milliseconds
 * message} at the end.
 */
final class TaskProcess {
  private static final Duration TIMEOUT = Duration.ofSeconds(2);
  private static final Duration PATIENCE = Duration.ofSeconds(30);
  private static final int COUNT = 1000;
  private static final int BUCKET = 64;

  private TaskProcess() {}

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    boolean loops = arguments[2].equals("loop");
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id = DeviceProcess.meet(rank);
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, 2 * COUNT);
        Communicator communicator = Communicator.create(id, size, rank, device)) {
      DeviceCommunicator comm =
          DeviceCommunicator.create(
              communicator, TaskRanks.small().timeout(loops ? TIMEOUT : PATIENCE).build());
      TaskQueue queue = TaskQueue.create(comm, TaskQueueConfig.builder().lanes(3).build());
      if (loops) {
        loop(queue, x, stream);
        communicator.abort(); // a peer is gone: a close would wait for it
      } else {
        run(queue, x, stream);
      }
    }
  }

  private static void run(TaskQueue queue, DeviceBuffer x, CudaStream stream) {
    int rank = queue.deviceCommunicator().communicator().rank();
    int size = queue.deviceCommunicator().communicator().size();
    TaskSymbol name = TaskSymbol.of("gradients");
    Ticket ticket = queue.ticket();
    int tasks = 0;
    for (int step = 0; step < 50; step++) {
      float[] values = new float[2 * COUNT];
      for (int i = 0; i < COUNT; i++) {
        values[i] = rank * step + i;
      }
      x.copyFrom(values, stream);
      queue.buckets(name, new TaskBuckets(x, 0, COUNT, BUCKET, 1, 1, 2), stream).await(PATIENCE);
      queue.allReduce(name, step % 3, x, 0, x, COUNT, COUNT, ReduceOp.MAX, ticket);
      queue.launch(stream);
      ticket.await(PATIENCE);
      x.copyTo(values, stream);
      for (int i = 0; i < COUNT; i++) {
        float sum = size * (size - 1) / 2 * step + size * (i + 1);
        if (values[i] != sum || values[COUNT + i] != sum) {
          System.out.println("WRONG step " + step + ", element " + i + ": " + values[i]);
          return;
        }
      }
      tasks += (COUNT + BUCKET - 1) / BUCKET + 1;
    }
    TaskSymbol mine = TaskSymbol.of("of rank " + rank);
    queue.allReduce(mine, 0, x, 0, x, 0, COUNT, ReduceOp.SUM, ticket);
    queue.launch(stream);
    try {
      ticket.await(PATIENCE);
    } catch (TaskQueueException e) {
      System.out.println("DISAGREED " + e.getMessage());
    }
    queue.barrier(name, 1, ticket); // nobody leaves before all have seen it
    queue.launch(stream);
    ticket.await(PATIENCE);
    System.out.println("RIGHT " + tasks);
  }

  private static void loop(TaskQueue queue, DeviceBuffer x, CudaStream stream) {
    int size = queue.deviceCommunicator().communicator().size();
    TaskSymbol name = TaskSymbol.of("gradients");
    Ticket ticket = queue.ticket();
    float[] values = new float[COUNT];
    try {
      for (int step = 0; ; step++) {
        for (int i = 0; i < COUNT; i++) {
          values[i] = step % 1000 + i;
        }
        x.copyFrom(values, stream);
        queue.allReduce(name, 0, x, 0, x, 0, COUNT, ReduceOp.SUM, ticket);
        queue.launch(stream);
        ticket.await(PATIENCE);
        x.copyTo(values, stream);
        if (values[COUNT - 1] != size * (step % 1000 + COUNT - 1)) {
          throw new AssertionError("step " + step + ": " + values[COUNT - 1]);
        }
        if (step == 0) {
          System.out.println("RUNNING");
        }
      }
    } catch (NcclException e) { // the communicator may notice first
      TaskQueueException ofLane = awaitLane(queue);
      System.out.println(
          "FAILED " + ofLane.peer() + " " + ofLane.waited().toMillis() + " " + ofLane.getMessage());
    }
  }

  private static TaskQueueException awaitLane(TaskQueue queue) {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    TaskQueueException failure = queue.failure(0);
    while (failure == null) {
      if (System.nanoTime() - deadline > 0) {
        throw new AssertionError("the lane did not fail: " + queue.snapshot());
      }
      Thread.onSpinWait();
      failure = queue.failure(0);
    }
    return failure;
  }
}

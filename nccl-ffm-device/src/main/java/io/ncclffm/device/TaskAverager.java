package io.ncclffm.device;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.ReduceOp;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/** By the scheduler of a queue. */
final class TaskAverager implements GradientAverager {
  private final TaskQueue queue;
  private final TaskSymbol symbol;
  private final Duration timeout;
  private final List<Ticket> tickets = new ArrayList<>();
  private int appended; // buckets of this step
  private boolean unlaunched; // the last of them

  TaskAverager(TaskQueue queue, TaskSymbol symbol, Duration timeout) {
    this.queue = queue;
    this.symbol = symbol;
    this.timeout = timeout;
  }

  @Override
  public void average(DeviceBuffer bucket, int index, CudaStream stream) {
    if (index == tickets.size()) {
      tickets.add(queue.ticket());
    }
    if (!unlaunched || appended != index + 1) {
      if (appended != index) {
        throw new IllegalStateException(
            "bucket "
                + index
                + " after "
                + appended
                + ": finish must end the step before it first");
      }
      int lane = index % queue.config().lanes();
      queue.allReduce(
          symbol, lane, bucket, 0, bucket, 0, bucket.count(), ReduceOp.AVG, tickets.get(index));
      appended = index + 1;
      unlaunched = true; // should launch throw, the next call launches it
    }
    queue.launch(stream);
    unlaunched = false;
  }

  @Override
  public void finish(CudaStream stream) {
    for (int i = 0; i < appended; i++) {
      tickets.get(i).await(timeout);
    }
    appended = 0;
  }

  @Override
  public void close() {}
}

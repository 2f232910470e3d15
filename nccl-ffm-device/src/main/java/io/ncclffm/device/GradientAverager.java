package io.ncclffm.device;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.ReduceOp;
import java.time.Duration;

/**
 * How {@link GradientBuckets} averages a bucket over the ranks while the backward pass goes on. All
 * ranks take the same one. Threads: that of the buckets.
 */
public interface GradientAverager extends AutoCloseable {
  /**
   * Has a bucket averaged in place, after what was enqueued on a stream so far, and returns at
   * once.
   *
   * @param index of the bucket, 0 to buckets - 1 in each step, in this order
   */
  void average(DeviceBuffer bucket, int index, CudaStream stream);

  /**
   * Has a stream see all averages of the step: what is enqueued on it after this comes after them.
   */
  void finish(CudaStream stream);

  /** Ends it; nothing is closed that it was made of. */
  @Override
  void close();

  /** By {@code ncclAllReduce}, on a stream of its own beside the backward pass. */
  static GradientAverager of(Communicator communicator) {
    return new StreamAverager(
        CudaStream.create(communicator.device()),
        (bucket, stream) -> communicator.allReduce(bucket, bucket, ReduceOp.AVG, stream));
  }

  /** By kernels of the device library, on a stream of its own beside the backward pass. */
  static GradientAverager of(DeviceCommunicator comm) {
    return new StreamAverager(
        CudaStream.create(comm.communicator().device()),
        (bucket, stream) -> comm.allReduce(bucket, bucket, ReduceOp.AVG, stream));
  }

  /**
   * As tasks of a queue, bucket i on lane i modulo lanes; {@link #finish} waits on the host.
   *
   * @param symbol the name of the tasks, the same on every rank
   * @param timeout of the wait for each task
   */
  static GradientAverager of(TaskQueue queue, TaskSymbol symbol, Duration timeout) {
    return new TaskAverager(queue, symbol, timeout);
  }
}

package io.ncclffm.device;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;

/**
 * An iteration that computes while it communicates ({@code ncclFfmTaskOverlap}): {@code out[j]} =
 * the sum over the iterations i and the ranks of f(in[j] + i), where f is {@code x = a * x + b}
 * (one rounding), so many rounds. Each block works on its share of the elements: it appends the
 * all-reduce of iteration i, computes the local part of i + 1, waits for the task, and adds the
 * result to out. The same on every rank but for the buffers.
 *
 * @param in of {@link DataType#FLOAT32}, as all three; the elements are all of it
 * @param out as many elements as in; overwritten
 * @param work four times as many
 * @param iterations 0 or more
 * @param rounds of f, 0 or more: how much there is to compute
 * @param blocks of the kernel, 1 to 1024. They wait for their tasks, so they must all fit on the
 *     GPU beside the scheduler, with those of the ranks that share it
 * @param parts what is done, for measurements; else {@link Parts#BOTH}
 */
public record TaskOverlap(
    DeviceBuffer in,
    DeviceBuffer out,
    DeviceBuffer work,
    int iterations,
    int rounds,
    float a,
    float b,
    int blocks,
    Parts parts) {
  /** What an iteration does. */
  public enum Parts {
    /** Adds up the local parts, and appends nothing. */
    COMPUTE,
    /** All-reduces what is in work. */
    COMMUNICATE,
    BOTH;

    int value() {
      return ordinal() + 1;
    }
  }

  /**
   * @throws IllegalArgumentException if a value is out of range, or a buffer too small
   */
  public TaskOverlap {
    String operation = TaskQueue.OVERLAP;
    TaskQueue.checkFloats(operation, in);
    TaskQueue.checkFloats(operation, out);
    TaskQueue.checkFloats(operation, work);
    TaskQueue.checkBlocks(operation, blocks);
    if (out.count() < in.count() || work.count() / 4 < in.count()) {
      throw new IllegalArgumentException(
          operation
              + ": in "
              + in
              + ", out "
              + out
              + ", work "
              + work
              + ": out must have as many elements as in, and work four times as many");
    }
    long bytes = in.bytes();
    long from = in.address(0).address();
    long to = out.address(0).address();
    long at = work.address(0).address();
    if (from < to + bytes && to < from + bytes
        || from < at + 4 * bytes && at < from + bytes
        || to < at + 4 * bytes && at < to + bytes) {
      throw new IllegalArgumentException(
          operation + ": in " + in + ", out " + out + " and work " + work + " must lie apart");
    }
    if (iterations < 0 || rounds < 0) {
      throw new IllegalArgumentException(
          operation + ": " + iterations + " iterations of " + rounds + " rounds: not negative");
    }
    TaskQueue.checkTasks(operation, (long) iterations * blocks);
  }
}

package io.ncclffm.device;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;

/**
 * Many buckets of a gradient, say, of which each is all-reduced as soon as it has been computed
 * ({@code ncclFfmTaskBuckets}). Bucket k, elements [k * bucketCount, ...) from the offset on,
 * becomes {@code x = a * x + b}, rounded once, then the sum over the ranks, in place. The last
 * bucket may be shorter. The same on every rank but for the buffer, its offset and the blocks.
 *
 * @param x of {@link DataType#FLOAT32}
 * @param offset first element
 * @param count elements
 * @param bucketCount elements of a bucket
 * @param blocks of the kernel that computes and appends, 1 to 1024. They wait for room in the
 *     rings, so they must all fit on the GPU beside the scheduler
 */
public record TaskBuckets(
    DeviceBuffer x, long offset, long count, long bucketCount, float a, float b, int blocks) {
  /**
   * @throws IllegalArgumentException if a value is out of range, or the elements not in the buffer
   */
  public TaskBuckets {
    x.address(TaskQueue.BUCKETS, offset, count);
    TaskQueue.checkFloats(TaskQueue.BUCKETS, x);
    TaskQueue.checkBlocks(TaskQueue.BUCKETS, blocks);
    if (bucketCount < 1) {
      throw new IllegalArgumentException(
          TaskQueue.BUCKETS + ": buckets of " + bucketCount + " elements: must be at least 1");
    }
    TaskQueue.checkTasks(TaskQueue.BUCKETS, (count - 1) / bucketCount + 1);
  }

  /** How many there are. */
  public long buckets() {
    return count == 0 ? 0 : (count - 1) / bucketCount + 1;
  }
}

package io.ncclffm.device;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;

/**
 * The gradients of a model, side by side in one buffer, in buckets that are averaged over the ranks
 * as soon as they are complete: small gradients share an all-reduce, and the first ones are under
 * way while the backward pass still computes the others.
 *
 * <pre>{@code
 * try (GradientAverager averager = GradientAverager.of(communicator);
 *     GradientBuckets gradients =
 *         GradientBuckets.create(device, DataType.FLOAT32, counts, 1 << 20, averager)) {
 *   for (int step = 0; step < steps; step++) {
 *     for (int layer = layers - 1; layer >= 0; layer--) {
 *       backward(layer, gradients.gradient(layer), stream);
 *       gradients.ready(layer, stream);
 *     }
 *     gradients.finish();
 *     update(gradients.all(), stream);
 *   }
 * }
 * }</pre>
 *
 * <p>The gradients lie in the order in which they are expected to become ready, the last one first
 * unless told otherwise, and buckets are handed over in that order on every rank, whatever the
 * order on each: a bucket that is complete waits for those before it. Every rank makes the same
 * buckets.
 *
 * <p>Threads: one at a time. A step allocates nothing on the Java heap.
 */
public final class GradientBuckets implements AutoCloseable {
  private static final String OPERATION = "gradient buckets";

  private final GradientAverager averager;
  private final DeviceBuffer all;
  private final DeviceBuffer[] gradients;
  private final DeviceBuffer[] buckets;
  private final int[] bucketOf; // of each gradient
  private final int[] sizes; // gradients in each bucket
  private final int[] missing; // of each bucket, in this step
  private final boolean[] isReady;
  private final int[] observed; // the order in which they became ready, in this step
  private final int[] lastObserved;
  private int readyCount;
  private int next; // the bucket to be handed over next
  private @Nullable CudaStream stream; // of this step

  private GradientBuckets(
      DeviceBuffer all, long[] counts, int[] order, long bucketBytes, GradientAverager averager) {
    this.averager = averager;
    this.all = all;
    int n = counts.length;
    gradients = new DeviceBuffer[n];
    bucketOf = new int[n];
    isReady = new boolean[n];
    observed = new int[n];
    lastObserved = order.clone();
    List<DeviceBuffer> made = new ArrayList<>();
    long first = 0; // of the bucket
    long end = 0;
    for (int i : order) {
      if (end > first && (end - first + counts[i]) * all.type().bytes() > bucketBytes) {
        made.add(slice(first, end - first));
        first = end;
      }
      gradients[i] = slice(end, counts[i]);
      bucketOf[i] = made.size();
      end += counts[i];
    }
    made.add(slice(first, end - first));
    buckets = made.toArray(new DeviceBuffer[0]);
    sizes = new int[buckets.length];
    for (int bucket : bucketOf) {
      sizes[bucket]++;
    }
    missing = sizes.clone();
  }

  private DeviceBuffer slice(long offset, long count) {
    return DeviceBuffer.wrap(
        all.device(), all.type(), count, all.address(OPERATION, offset, count));
  }

  /** With the gradients expected in reverse, as a backward pass gives them. */
  public static GradientBuckets create(
      CudaDevice device,
      DataType type,
      long[] counts,
      long bucketBytes,
      GradientAverager averager) {
    int[] reverse = IntStream.range(0, counts.length).map(i -> counts.length - 1 - i).toArray();
    return create(device, type, counts, reverse, bucketBytes, averager);
  }

  /**
   * Allocates the gradients, which are 0 nowhere yet.
   *
   * @param counts elements of each gradient, 1 or more of them, each positive
   * @param order the gradients in the order in which they are expected to become ready; the one
   *     that {@link #observedOrder} gave on rank 0, say
   * @param bucketBytes of a bucket at most, unless it is a single gradient that is larger
   * @param averager is not closed by this
   * @throws IllegalArgumentException if an argument is none, or the order not one of all gradients
   */
  public static GradientBuckets create(
      CudaDevice device,
      DataType type,
      long[] counts,
      int[] order,
      long bucketBytes,
      GradientAverager averager) {
    long total = 0;
    for (int i = 0; i < counts.length; i++) {
      if (counts[i] <= 0) {
        throw new IllegalArgumentException(
            OPERATION + ": gradient " + i + " of " + counts[i] + " elements: must be positive");
      }
      total = Math.addExact(total, counts[i]);
    }
    int[] sorted = order.clone();
    Arrays.sort(sorted);
    if (counts.length == 0 || !Arrays.equals(sorted, IntStream.range(0, counts.length).toArray())) {
      throw new IllegalArgumentException(
          OPERATION
              + ": order "
              + Arrays.toString(order)
              + ": must name each of the "
              + counts.length
              + " gradients once, and there must be one");
    }
    if (bucketBytes <= 0) {
      throw new IllegalArgumentException(
          OPERATION + " of " + bucketBytes + " bytes: must be positive");
    }
    DeviceBuffer all = DeviceBuffer.allocate(device, type, total);
    try {
      return new GradientBuckets(all, counts, order, bucketBytes, averager);
    } catch (RuntimeException e) {
      all.close();
      throw e;
    }
  }

  /** All gradients, in the order that was expected: for an update of all at once. */
  public DeviceBuffer all() {
    return all;
  }

  /**
   * One gradient; between {@link #ready} and {@link #finish} it is being averaged.
   *
   * @throws IndexOutOfBoundsException if there is no such gradient
   */
  public DeviceBuffer gradient(int i) {
    return gradients[i];
  }

  /** How many buckets there are. */
  public int buckets() {
    return buckets.length;
  }

  /**
   * Says that a gradient is complete once a stream comes to this point. If with it a bucket is, it
   * is averaged from there on. If that throws, the gradient is ready all the same, and the bucket
   * is handed over with the next one or by {@link #finish}.
   *
   * @param on the same for all gradients of a step
   * @throws IndexOutOfBoundsException if there is no such gradient
   * @throws IllegalStateException if it was said already in this step
   * @throws IllegalArgumentException if the gradients before it were computed on another stream
   */
  public void ready(int i, CudaStream on) {
    if (isReady[i]) {
      throw new IllegalStateException(
          OPERATION + ": gradient " + i + " is ready already; finish ends a step");
    }
    if (stream != null && stream != on) {
      throw new IllegalArgumentException(
          OPERATION + ": gradient " + i + " on the " + on + ", those before it on the " + stream);
    }
    stream = on;
    isReady[i] = true;
    observed[readyCount] = i;
    readyCount++;
    missing[bucketOf[i]]--;
    handOver(on);
  }

  private void handOver(CudaStream on) {
    while (next < buckets.length && missing[next] == 0) {
      averager.average(buckets[next], next, on);
      next++;
    }
  }

  /**
   * Ends a step: what is enqueued on its stream from now on sees the averages.
   *
   * @throws IllegalStateException if a gradient is not ready; it tells which
   */
  public void finish() {
    @Nullable CudaStream on = stream;
    if (on == null || readyCount < gradients.length) {
      int[] late = IntStream.range(0, gradients.length).filter(i -> !isReady[i]).toArray();
      throw new IllegalStateException(
          OPERATION + ": finish, but not ready are the gradients " + Arrays.toString(late));
    }
    handOver(on); // what an exception kept back
    averager.finish(on);
    System.arraycopy(observed, 0, lastObserved, 0, observed.length);
    System.arraycopy(sizes, 0, missing, 0, sizes.length);
    Arrays.fill(isReady, false);
    readyCount = 0;
    next = 0;
    stream = null;
  }

  /**
   * The order in which the gradients became ready in the last step; before the first one, the one
   * that was expected. New buckets in this order, which all ranks must take from one of them, wait
   * for nothing.
   */
  public int[] observedOrder() {
    return lastObserved.clone();
  }

  /** Frees the gradients. The averager stays. */
  @Override
  public void close() {
    all.close();
  }

  @Override
  public String toString() {
    return OPERATION + ": " + gradients.length + " gradients in " + buckets.length + " of " + all;
  }
}

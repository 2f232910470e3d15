package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.Backoff;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/** A point in a stream's work that can be waited for and whose time is known. */
public final class CudaEvent implements AutoCloseable {
  private final CudaDevice device;
  private final MemorySegment handle;
  private CudaGraph.@Nullable Capture capture; // in which it was recorded last
  private boolean closed;

  private CudaEvent(CudaDevice device, MemorySegment handle) {
    this.device = device;
    this.handle = handle;
  }

  /** Creates an event ({@code cudaEventCreateWithFlags}) that takes the time. */
  public static CudaEvent create(CudaDevice device) {
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      int rc = CudartH.cudaEventCreateWithFlags(out, CudartH.cudaEventDefault());
      CudaException.check(rc, "cudaEventCreateWithFlags", device);
      return new CudaEvent(device, out.get(ADDRESS, 0));
    }
  }

  /**
   * The {@code cudaEvent_t}, for the raw bindings.
   *
   * @throws IllegalStateException if the event is closed
   */
  public MemorySegment handle() {
    if (closed) {
      throw new IllegalStateException("event on " + device + " is closed");
    }
    return handle;
  }

  /**
   * Marks the end of what is enqueued on the stream now ({@code cudaEventRecord}). On a stream that
   * is being captured, it only tells other streams what to wait for in the capture.
   */
  public void record(CudaStream stream) {
    device.makeCurrent();
    int rc = CudartH.cudaEventRecord(handle(), stream.handle());
    CudaException.check(rc, "cudaEventRecord", device);
    capture = stream.capture();
  }

  CudaGraph.@Nullable Capture capture() {
    return capture;
  }

  /** Whether the marked work is done; true if nothing was recorded ({@code cudaEventQuery}). */
  public boolean isDone() {
    device.makeCurrent();
    int rc = CudartH.cudaEventQuery(handle());
    if (rc == CudartH.cudaErrorNotReady()) {
      return false;
    }
    CudaException.check(rc, "cudaEventQuery", device);
    return true;
  }

  /**
   * Waits for the marked work.
   *
   * @throws DeadlineException after the timeout or on interruption; the work goes on
   */
  public void synchronize(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    int round = 0;
    while (!isDone()) {
      Backoff.pause(round++, deadline, "cudaEventSynchronize on ", device);
    }
  }

  /**
   * Milliseconds from an earlier event to this one ({@code cudaEventElapsedTime}); about half a
   * microsecond of resolution on a GPU. Both must be done.
   */
  public float millisSince(CudaEvent start) {
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_FLOAT);
      int rc = CudartH.cudaEventElapsedTime(out, start.handle(), handle());
      CudaException.check(rc, "cudaEventElapsedTime", device);
      return out.get(JAVA_FLOAT, 0);
    }
  }

  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    closed = true;
    if (device.isLost()) {
      return;
    }
    device.makeCurrent();
    CudaException.check(CudartH.cudaEventDestroy(handle), "cudaEventDestroy", device);
  }
}

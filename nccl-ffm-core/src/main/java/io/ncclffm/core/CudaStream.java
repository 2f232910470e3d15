package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.Backoff;
import io.ncclffm.core.internal.LeakReport;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * A queue of device work, executed in order. Always a non-blocking stream: it does not synchronise
 * with the legacy default stream, which would let one rank's work wait for another's.
 *
 * <p>Threads: work may be enqueued from any thread, one at a time.
 */
public final class CudaStream implements AutoCloseable {
  /** How long {@link #synchronize()} waits at most. */
  public static final Duration DEFAULT_TIMEOUT = Duration.ofMinutes(10);

  private static final int NOT_READY = CudartH.cudaErrorNotReady();
  private static final long STAGING_BYTES = 1 << 20;

  private final CudaDevice device;
  private final MemorySegment handle;
  private final HostBuffer staging;
  private final LeakReport.Tracker leak;
  private volatile FailureSource[] watched = {};
  private volatile CudaGraph.@Nullable Capture capture;
  private volatile boolean closed;

  private CudaStream(CudaDevice device, MemorySegment handle, HostBuffer staging) {
    this.device = device;
    this.handle = handle;
    this.staging = staging;
    this.leak = LeakReport.track(this, toString());
  }

  /** Creates a stream ({@code cudaStreamCreateWithFlags}, non-blocking) on a device. */
  public static CudaStream create(CudaDevice device) {
    device.makeCurrent();
    MemorySegment handle;
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      int rc = CudartH.cudaStreamCreateWithFlags(out, CudartH.cudaStreamNonBlocking());
      CudaException.check(rc, "cudaStreamCreateWithFlags", device);
      handle = out.get(ADDRESS, 0);
    }
    try {
      return new CudaStream(device, handle, HostBuffer.allocate(device, STAGING_BYTES));
    } catch (RuntimeException e) {
      int rc = CudartH.cudaStreamDestroy(handle);
      if (rc != 0) {
        e.addSuppressed(new CudaException("cudaStreamDestroy", rc, " on " + device));
      }
      throw e;
    }
  }

  /** The device that executes the work. */
  public CudaDevice device() {
    return device;
  }

  /**
   * The {@code cudaStream_t}, for the raw bindings.
   *
   * @throws IllegalStateException if the stream is closed
   */
  public MemorySegment handle() {
    return handle("cudaStream_t");
  }

  MemorySegment handle(String operation) {
    if (closed) {
      throw new IllegalStateException(operation + ": the " + this + " is closed");
    }
    return handle;
  }

  /** Whether {@link #close} was called. */
  public boolean isClosed() {
    return closed;
  }

  /** Whether nothing runs on the stream any more, be it done or failed. */
  boolean isStill() {
    if (closed || device.isLost()) {
      return true;
    }
    device.makeCurrent();
    return CudartH.cudaStreamQuery(handle) != NOT_READY;
  }

  /** Whether all enqueued work is done ({@code cudaStreamQuery}). */
  public boolean isDone() {
    return isDone(watched);
  }

  private boolean isDone(FailureSource[] sources) {
    device.makeCurrent();
    int rc = CudartH.cudaStreamQuery(handle());
    if (rc == NOT_READY) {
      return false;
    }
    if (rc != 0) {
      throwIfFailed(sources); // names the cause where the stream only knows that it failed
      throw CudaException.of("cudaStreamQuery", rc, device);
    }
    return true;
  }

  /** Waits with {@link #DEFAULT_TIMEOUT}. */
  public void synchronize() {
    synchronize(DEFAULT_TIMEOUT);
  }

  /**
   * Waits until all enqueued work is done. Polls {@code cudaStreamQuery} and whatever can fail
   * beside the stream, so that a dead peer or a failed kernel is an exception.
   *
   * @throws NcclException if a communicator or device communicator used on this stream failed
   * @throws IllegalStateException if one was aborted by this process
   * @throws CudaException if the device reports an error
   * @throws DeadlineException after the timeout or on interruption; the work goes on
   */
  public void synchronize(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    // Those of now: a communicator that is aborted during the wait leaves the stream, whose work
    // then counts as done or failed, and must still be asked.
    FailureSource[] sources = watched;
    int round = 0;
    while (!isDone(sources)) {
      // Asking the sources costs more than a query; a failure may be noticed 64 looks later.
      if ((round & 63) == 63) {
        throwIfFailed(sources);
      }
      Backoff.pause(round++, deadline, "cudaStreamSynchronize on ", device);
    }
    throwIfFailed(sources);
  }

  /**
   * Lets work enqueued from now on wait for an event ({@code cudaStreamWaitEvent}). If that was
   * recorded in a {@link CudaGraph#capture capture}, this stream takes part in it until it ends.
   */
  public void await(CudaEvent event) {
    device.makeCurrent();
    int rc = CudartH.cudaStreamWaitEvent(handle(), event.handle(), 0);
    CudaException.check(rc, "cudaStreamWaitEvent", device);
    CudaGraph.@Nullable Capture joined = event.capture();
    if (joined != null) {
      joined.joins(this);
    }
  }

  /**
   * Whether a {@link CudaGraph#capture} keeps what is enqueued here; one begun by the raw bindings
   * is not known.
   */
  public boolean isCapturing() {
    return capture != null;
  }

  CudaGraph.@Nullable Capture capture() {
    return capture;
  }

  void setCapture(CudaGraph.@Nullable Capture next) {
    capture = next;
  }

  /**
   * Makes {@link #synchronize} ask a source of failures too; for code that enqueues work here,
   * which calls it again while {@link #isCapturing}: then every launch of the graph asks it.
   */
  public void watch(FailureSource source) {
    CudaGraph.@Nullable Capture capturing = capture;
    if (capturing != null) {
      capturing.uses(source);
    }
    synchronized (this) {
      if (Arrays.asList(watched).contains(source)) {
        return;
      }
      FailureSource[] more = Arrays.copyOf(watched, watched.length + 1);
      more[more.length - 1] = source;
      watched = more;
    }
  }

  /**
   * Lets work take part in every launch of the graph that what is enqueued here becomes part of;
   * for code that enqueues it.
   *
   * @throws IllegalStateException if the stream is not {@link #isCapturing being captured}
   */
  public void addToGraph(GraphWork work) {
    CudaGraph.@Nullable Capture capturing = capture;
    if (capturing == null) {
      throw new IllegalStateException("the " + this + " is not being captured");
    }
    capturing.adds(work);
  }

  /** Ends {@link #watch}. */
  public synchronized void unwatch(FailureSource source) {
    watched = Arrays.stream(watched).filter(known -> known != source).toArray(FailureSource[]::new);
  }

  private static void throwIfFailed(FailureSource[] sources) {
    for (FailureSource source : sources) {
      source.throwIfFailed();
    }
  }

  /** Pinned memory through which arrays are copied: pageable copies would stall other ranks. */
  HostBuffer staging() {
    return staging;
  }

  /**
   * Destroys the stream once its work is done ({@code cudaStreamDestroy}).
   *
   * @throws IllegalStateException while it is being captured
   */
  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    if (isCapturing()) {
      throw new IllegalStateException(
          "cudaStreamDestroy: the " + this + " is being captured; close it after the capture");
    }
    closed = true;
    leak.closed();
    if (device.isLost()) {
      return;
    }
    device.makeCurrent();
    try {
      CudaException.check(CudartH.cudaStreamDestroy(handle), "cudaStreamDestroy", device);
    } finally {
      staging.close();
    }
  }

  @Override
  public String toString() {
    return "stream on " + device;
  }
}

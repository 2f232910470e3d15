package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaGraphExecUpdateResultInfo_st;
import io.ncclffm.core.internal.LeakReport;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * Work that is enqueued once and then launched as a whole, any number of times, at the price of one
 * call ({@code cudaGraphExec_t}).
 *
 * <p>A graph holds calls with their arguments: addresses, counts, scalars. A launch finds in the
 * buffers what is there then. What it uses must still be there: closing a buffer, a window or a
 * device communicator and launching on is an error that nothing notices before the device does. A
 * communicator closes the graphs that use it.
 *
 * <p>Ranks launch their graphs as they call collectives: in the same order everywhere. Ranks that
 * share a GPU capture before any of them launches, for making a graph can wait for the GPU.
 *
 * <p>Threads: launched from any thread, one at a time.
 */
public final class CudaGraph implements AutoCloseable {
  private final CudaDevice device;
  private final MemorySegment handle;
  private Communicator[] communicators = {};
  private GraphWork[] works = {};
  private final Failures failures = new Failures();
  // Of the last update: what NCCL keeps for its captured work lives as long as the graph it is in.
  private MemorySegment updated = MemorySegment.NULL;
  private final Set<CudaStream> streams = new HashSet<>();
  private final LeakReport.Tracker leak;
  private @Nullable CudaStream lastStream;
  private boolean closed;

  /** A capture under way: the streams that take part, and what works on them. */
  static final class Capture {
    private final Set<CudaStream> streams = new HashSet<>();
    private final Set<Communicator> communicators = new LinkedHashSet<>();
    private final Set<FailureSource> sources = new LinkedHashSet<>();
    private final Set<GraphWork> works = new LinkedHashSet<>();
    private boolean ended;

    void joins(CudaStream stream) {
      if (!ended && streams.add(stream)) {
        stream.setCapture(this);
      }
    }

    void uses(Communicator communicator) {
      communicators.add(communicator);
    }

    void uses(FailureSource source) {
      sources.add(source);
    }

    void adds(GraphWork work) {
      works.add(work);
    }

    /** No graph came of it. */
    void release() {
      works.forEach(GraphWork::release);
    }

    void end() {
      ended = true;
      streams.forEach(stream -> stream.setCapture(null));
    }
  }

  /** What the streams of launches ask. */
  private static final class Failures implements FailureSource {
    private volatile FailureSource[] sources = {};

    @Override
    public void throwIfFailed() {
      for (FailureSource source : sources) {
        source.throwIfFailed();
      }
    }
  }

  private CudaGraph(CudaDevice device, MemorySegment handle, Capture capture) {
    this.device = device;
    this.handle = handle;
    this.leak = LeakReport.track(this, toString());
    use(capture);
  }

  /** From now on this graph holds what was captured so. */
  private void use(Capture capture) {
    for (Communicator communicator : communicators) {
      communicator.disown(this);
    }
    release();
    works = capture.works.toArray(GraphWork[]::new);
    communicators = capture.communicators.toArray(Communicator[]::new);
    failures.sources = capture.sources.toArray(FailureSource[]::new);
    for (Communicator communicator : communicators) {
      communicator.adopt(this);
    }
  }

  private void release() {
    for (GraphWork work : works) {
      work.release();
    }
    works = new GraphWork[0];
  }

  /**
   * Runs code that enqueues work on a stream, and makes a graph of that work instead of carrying it
   * out ({@code cudaStreamBeginCapture} in thread-local mode, {@code cudaStreamEndCapture}, {@code
   * cudaGraphInstantiateWithFlags}, {@code cudaGraphUpload}). The stream is usable again
   * afterwards, also if the code throws.
   *
   * <p>Collectives, kernels, producers of tasks, fills and copies from and to {@link HostBuffer}s
   * can be captured. The code must not wait for the stream or for an event recorded on it,
   * allocate, free, or copy arrays; the first such call spoils the capture. A stream that awaits an
   * event of a captured one takes part too; the captured stream must await an event of it in turn
   * before the end.
   *
   * @param stream any but one that is being captured; what is enqueued on it already is no part
   * @throws CudaException if the work cannot be captured
   * @throws IllegalStateException if the stream is being captured already, inside an {@link
   *     NcclGroup} (put the group into the capture), or on a virtual thread
   */
  public static CudaGraph capture(CudaStream stream, Runnable work) {
    Capture capture = new Capture();
    MemorySegment graph = record(stream, work, capture);
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment handle = instantiate(graph, stream, arena.allocate(ADDRESS));
      return new CudaGraph(stream.device(), handle, capture);
    } catch (RuntimeException | Error e) {
      capture.release();
      throw e;
    }
  }

  /** The {@code cudaGraph_t} of what the code enqueues. */
  private static MemorySegment record(CudaStream stream, Runnable work, Capture capture) {
    String operation = "cudaStreamBeginCapture";
    checkMayCapture(operation, stream);
    MemorySegment captured = stream.handle(operation);
    CudaDevice device = stream.device();
    device.makeCurrent();
    int rc = CudartH.cudaStreamBeginCapture(captured, CudartH.cudaStreamCaptureModeThreadLocal());
    CudaException.check(rc, operation, device);
    capture.joins(stream);
    @Nullable Throwable trouble = null;
    try {
      work.run();
    } catch (Throwable t) { // also a checked one, which Scala and Kotlin let out of a Runnable
      trouble = t;
    }
    capture.end();
    boolean recorded = false;
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      rc = CudartH.cudaStreamEndCapture(captured, out);
      MemorySegment graph = out.get(ADDRESS, 0);
      if (rc != 0) {
        CudaException end = CudaException.of("cudaStreamEndCapture", rc, device, hint(rc));
        trouble = add(trouble, end);
      } else if (trouble == null) {
        recorded = true;
        return graph;
      } else {
        trouble =
            add(trouble, failure(CudartH.cudaGraphDestroy(graph), "cudaGraphDestroy", device));
      }
    } finally {
      if (!recorded) {
        capture.release();
      }
    }
    NcclGroup.<RuntimeException>rethrow(trouble);
    throw new AssertionError();
  }

  private static void checkMayCapture(String operation, @Nullable CudaStream stream) {
    if (stream == null) {
      throw new IllegalArgumentException(
          operation + ": the stream is null; make one with CudaStream.create");
    }
    if (Thread.currentThread().isVirtual()) {
      throw new IllegalStateException(
          operation
              + " on a virtual thread: CUDA keeps captures per OS thread; capture on a platform"
              + " thread");
    }
    if (NcclGroup.isActive()) {
      throw new IllegalStateException(
          operation
              + " inside a group, whose work comes at its end; put the group into the capture");
    }
    if (stream.isCapturing()) {
      throw new IllegalStateException(operation + ": the " + stream + " is being captured already");
    }
  }

  private static String hint(int rc) {
    if (rc == CudartH.cudaErrorStreamCaptureInvalidated()) {
      return "; a call in the capture waited for captured work, allocated, freed, or used what is"
          + " not captured";
    }
    if (rc == CudartH.cudaErrorStreamCaptureUnjoined()) {
      return "; let the captured stream await an event of every other stream that takes part";
    }
    return "";
  }

  private static @Nullable CudaException failure(int rc, String operation, CudaDevice device) {
    return rc == 0 ? null : CudaException.of(operation, rc, device);
  }

  private static @Nullable Throwable add(@Nullable Throwable first, @Nullable Throwable next) {
    if (first == null || next == null) {
      return first == null ? next : first;
    }
    first.addSuppressed(next);
    return first;
  }

  /** Makes the executable graph, and destroys the one that it is made of. */
  private static MemorySegment instantiate(
      MemorySegment graph, CudaStream stream, MemorySegment out) {
    CudaDevice device = stream.device();
    MemorySegment made = MemorySegment.NULL;
    @Nullable Throwable trouble = null;
    try {
      device.makeCurrent();
      int rc = CudartH.cudaGraphInstantiateWithFlags(out, graph, 0);
      CudaException.check(rc, "cudaGraphInstantiateWithFlags", device);
      made = out.get(ADDRESS, 0);
      // The first launch would do it, and wait for the GPU, where another rank's kernel may spin.
      rc = CudartH.cudaGraphUpload(made, stream.handle());
      CudaException.check(rc, "cudaGraphUpload", device);
    } catch (RuntimeException e) {
      trouble = e;
    }
    trouble = add(trouble, failure(CudartH.cudaGraphDestroy(graph), "cudaGraphDestroy", device));
    if (trouble != null) {
      if (made.address() != 0) {
        int rc = CudartH.cudaGraphExecDestroy(made);
        add(trouble, failure(rc, "cudaGraphExecDestroy", device));
      }
      NcclGroup.<RuntimeException>rethrow(trouble);
    }
    return made;
  }

  /**
   * Enqueues the whole ({@code cudaGraphLaunch}), after earlier launches of this graph on whatever
   * stream. {@link CudaStream#synchronize} on the stream reports failures of the communicators and
   * device communicators that the graph uses, which take one thread at a time here too. A {@link
   * Communicator#watch watchdog} sees NCCL's errors, but not how old a launch is.
   *
   * <p>Ranks that share a GPU launch on the stream that was captured: on another, the first launch
   * may wait for the GPU, and so for the other ranks.
   *
   * @param stream of the device that was captured on, not being captured itself
   * @throws IllegalStateException if the graph or a communicator that it uses is closed, or the
   *     stream is being captured
   * @throws NcclException if a communicator or device communicator has failed
   */
  public synchronized void launch(CudaStream stream) {
    check("cudaGraphLaunch", stream);
    int entered = 0;
    try {
      while (entered < communicators.length) {
        communicators[entered].begin("cudaGraphLaunch", stream);
        entered++;
      }
      failures.throwIfFailed();
      launchAmidWorks(stream);
    } finally {
      while (entered > 0) {
        communicators[--entered].end();
      }
    }
  }

  private void launchAmidWorks(CudaStream stream) {
    int begun = 0;
    boolean launched = false;
    @Nullable Throwable trouble = null;
    try {
      while (begun < works.length) {
        works[begun].begin(stream);
        begun++;
      }
      enqueue(stream);
      launched = true;
    } catch (Throwable e) {
      trouble = e;
    }
    while (begun > 0) {
      try {
        works[--begun].end(stream, launched);
      } catch (Throwable e) {
        trouble = add(trouble, e);
      }
    }
    if (trouble != null) {
      NcclGroup.<RuntimeException>rethrow(trouble);
    }
  }

  private void enqueue(CudaStream stream) {
    if (stream != lastStream) {
      streams.removeIf(CudaStream::isClosed);
      stream.watch(failures);
      streams.add(stream);
      lastStream = stream;
    }
    device.makeCurrent();
    int rc = CudartH.cudaGraphLaunch(handle, stream.handle("cudaGraphLaunch"));
    CudaException.check(rc, "cudaGraphLaunch", device);
  }

  /**
   * Puts other work of the same shape into the graph, at less than the price of a new one ({@code
   * cudaGraphExecUpdate}): the same kinds of calls in the same order, with other arguments, as
   * other buffers or scalars. Captures as {@link #capture} does. Launches under way go on with the
   * old work. If the work cannot be captured or is of another shape, the graph is as it was.
   *
   * @param stream of the graph's device, not being captured
   * @throws CudaException if the work cannot be captured, or is of another shape; then make a new
   *     graph
   * @throws IllegalStateException if the graph is closed, and as for {@link #capture}
   */
  public synchronized void update(CudaStream stream, Runnable work) {
    String operation = "cudaGraphExecUpdate";
    check(operation, stream);
    Capture capture = new Capture();
    MemorySegment graph = record(stream, work, capture);
    MemorySegment unused = graph;
    boolean taken = false;
    @Nullable Throwable trouble = null;
    try (Arena arena = Arena.ofConfined()) {
      device.makeCurrent();
      MemorySegment info = cudaGraphExecUpdateResultInfo_st.allocate(arena);
      int rc = CudartH.cudaGraphExecUpdate(handle, graph, info);
      if (rc != 0) {
        int result = cudaGraphExecUpdateResultInfo_st.result(info);
        throw CudaException.of(operation, rc, device, "; " + shapeText(result));
      }
      unused = updated;
      updated = graph;
      taken = true;
      use(capture);
      // The next launch would do it; see instantiate.
      rc = CudartH.cudaGraphUpload(handle, stream.handle());
      CudaException.check(rc, "cudaGraphUpload", device);
    } catch (RuntimeException | Error e) {
      trouble = e;
    }
    if (!taken) {
      capture.release();
    }
    trouble = add(trouble, destroy(unused));
    if (trouble != null) {
      NcclGroup.<RuntimeException>rethrow(trouble);
    }
  }

  private @Nullable CudaException destroy(MemorySegment graph) {
    return graph.address() == 0
        ? null
        : failure(CudartH.cudaGraphDestroy(graph), "cudaGraphDestroy", device);
  }

  private static String shapeText(int result) {
    if (result == CudartH.cudaGraphExecUpdateErrorTopologyChanged()) {
      return "the calls are not as many, or not in the same order; make a new graph";
    }
    if (result == CudartH.cudaGraphExecUpdateErrorNodeTypeChanged()) {
      return "a call is of another kind, as a copy in the place of a kernel; make a new graph";
    }
    return "cudaGraphExecUpdateResult " + result + "; make a new graph";
  }

  private void check(String operation, @Nullable CudaStream stream) {
    if (closed) {
      throw new IllegalStateException(operation + ": the " + this + " is closed");
    }
    if (stream == null) {
      throw new IllegalArgumentException(
          operation + ": the stream is null; make one with CudaStream.create");
    }
    if (stream.device().ordinal() != device.ordinal()) {
      throw new IllegalArgumentException(
          operation + ": the " + stream + " belongs to another device than the " + this);
    }
    if (stream.isCapturing()) {
      throw new IllegalStateException(
          operation
              + ": the "
              + stream
              + " is being captured, and CUDA does not capture launches of graphs");
    }
  }

  /**
   * Destroys the graph ({@code cudaGraphExecDestroy}). Launches under way go on, but what fails in
   * them from then on may not be reported: synchronize first.
   */
  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    closed = true;
    leak.closed();
    for (CudaStream stream : streams) {
      stream.unwatch(failures);
    }
    for (Communicator communicator : communicators) {
      communicator.disown(this);
    }
    release();
    if (device.isLost()) {
      return;
    }
    device.makeCurrent();
    int rc = CudartH.cudaGraphExecDestroy(handle);
    @Nullable Throwable trouble = failure(rc, "cudaGraphExecDestroy", device);
    trouble = add(trouble, destroy(updated));
    if (trouble != null) {
      NcclGroup.<RuntimeException>rethrow(trouble);
    }
  }

  @Override
  public String toString() {
    return "graph on " + device;
  }
}

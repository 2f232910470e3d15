package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.util.ArrayList;
import java.util.BitSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * One rank of a group of ranks that communicate ({@code ncclComm_t}).
 *
 * <p>Collectives are enqueued on a stream and return at once; every rank must call the same ones in
 * the same order. Counts and offsets are in elements. In-place forms are NCCL's: the same buffer
 * and offset, or for gather and scatter forms this rank's part of the larger buffer.
 *
 * <p>Threads: one at a time, checked; {@link #abort} may come from any thread while no other is
 * inside a call. After {@code ncclInvalidArgument} the communicator stays usable; any other failure
 * is final, every later call repeats it, and only {@link #abort} and {@link #close} are left.
 */
public final class Communicator implements AutoCloseable, FailureSource {
  /** Where a communicator is in its life. */
  public enum State {
    READY,
    /** A call or another rank failed. */
    FAILED,
    ABORTED,
    CLOSED
  }

  private static final VarHandle INSIDE;
  private static final Map<NcclUniqueId, BitSet> USED_IDS = new ConcurrentHashMap<>();
  private static final int FIRST_NCCL_WITH_FLOAT8 = 22403;

  static {
    try {
      INSIDE = MethodHandles.lookup().findVarHandle(Communicator.class, "inside", Thread.class);
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  private final MemorySegment handle;
  private final int rank;
  private final int size;
  private final CudaDevice device;
  private final Arena arena = Arena.ofShared();
  private final MemorySegment asyncErrorOut = arena.allocate(JAVA_INT);
  private final List<AutoCloseable> children = new ArrayList<>();
  private final Set<CudaStream> streams = new LinkedHashSet<>();
  private @Nullable CudaStream lastStream;
  private @Nullable Thread inside;
  private volatile State state = State.READY;
  private volatile @Nullable Throwable failure;

  private Communicator(MemorySegment handle, int rank, int size, CudaDevice device) {
    this.handle = handle;
    this.rank = rank;
    this.size = size;
    this.device = device;
  }

  /**
   * Joins ({@code ncclCommInitRank}). Blocks until all ranks have come, so each rank needs a thread
   * or a process of its own.
   *
   * @param id the same on every rank, used for no other communicator
   * @param size number of ranks
   * @param rank this one, 0 to size - 1
   * @throws IllegalArgumentException if the rank is not in the range
   * @throws IllegalStateException if this process joined with this id and rank before: NCCL would
   *     wait for ever
   * @throws NcclException if NCCL refuses, for instance two ranks on one GPU without {@link
   *     DeviceSharing}
   */
  public static Communicator create(NcclUniqueId id, int size, int rank, CudaDevice device) {
    Objects.requireNonNull(id, "id");
    if (size < 1 || rank < 0 || rank >= size) {
      throw new IllegalArgumentException(
          "ncclCommInitRank: rank " + rank + " of " + size + ": ranks go from 0 to size - 1");
    }
    claim(id, rank);
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      int rc = NcclH.ncclCommInitRank(out, size, id.toNative(arena), rank);
      if (rc != 0) {
        throw NcclException.of("ncclCommInitRank", rc, where(rank, size, device));
      }
      return new Communicator(out.get(ADDRESS, 0), rank, size, device);
    }
  }

  private static void claim(NcclUniqueId id, int rank) {
    BitSet ranks = USED_IDS.computeIfAbsent(id, key -> new BitSet());
    synchronized (ranks) {
      if (ranks.get(rank)) {
        throw new IllegalStateException(
            "ncclCommInitRank: this process used "
                + id
                + " for rank "
                + rank
                + " before; an id serves for one communicator, create a new one");
      }
      ranks.set(rank);
    }
  }

  /** This rank, 0 to {@link #size()} - 1 ({@code ncclCommUserRank}). */
  public int rank() {
    return rank;
  }

  /** Number of ranks ({@code ncclCommCount}). */
  public int size() {
    return size;
  }

  /** This rank's device ({@code ncclCommCuDevice}). */
  public CudaDevice device() {
    return device;
  }

  public State state() {
    return state;
  }

  /**
   * The {@code ncclComm_t}, for the raw bindings.
   *
   * @throws IllegalStateException if closed or aborted
   */
  public MemorySegment handle() {
    State now = state;
    if (now == State.CLOSED || now == State.ABORTED) {
      throw new IllegalStateException(
          this + " is " + now.name().toLowerCase(java.util.Locale.ROOT));
    }
    return handle;
  }

  // ------------------------------------------------------------------ collectives

  /** Reduces whole buffers of equal type and count; every rank gets the result. */
  public void allReduce(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    checkCounts("ncclAllReduce", send, send.count(), recv, recv.count());
    allReduce(send, 0, recv, 0, send.count(), op, stream);
  }

  /** Reduces {@code count} elements; every rank gets the result ({@code ncclAllReduce}). */
  public void allReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      CudaStream stream) {
    enter("ncclAllReduce", stream);
    try {
      checkTypes("ncclAllReduce", send, recv);
      int rc =
          NcclH.ncclAllReduce(
              send.address("ncclAllReduce", sendOffset, count),
              recv.address("ncclAllReduce", recvOffset, count),
              count,
              send.type().ncclValue(),
              op.ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclAllReduce");
    } finally {
      leave();
    }
  }

  /** Copies the root's whole buffer to every rank's; the send buffer is only read on the root. */
  public void broadcast(DeviceBuffer send, DeviceBuffer recv, int root, CudaStream stream) {
    checkCounts("ncclBroadcast", send, send.count(), recv, recv.count());
    broadcast(send, 0, recv, 0, send.count(), root, stream);
  }

  /** Copies {@code count} elements of the root to every rank ({@code ncclBroadcast}). */
  public void broadcast(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      int root,
      CudaStream stream) {
    enter("ncclBroadcast", stream);
    try {
      checkTypes("ncclBroadcast", send, recv);
      checkPeer("ncclBroadcast", "root", root);
      int rc =
          NcclH.ncclBroadcast(
              send.address("ncclBroadcast", sendOffset, count),
              recv.address("ncclBroadcast", recvOffset, count),
              count,
              send.type().ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclBroadcast");
    } finally {
      leave();
    }
  }

  /** Reduces whole buffers to the root's; the receive buffer is only written on the root. */
  public void reduce(
      DeviceBuffer send, DeviceBuffer recv, ReduceOp op, int root, CudaStream stream) {
    checkCounts("ncclReduce", send, send.count(), recv, recv.count());
    reduce(send, 0, recv, 0, send.count(), op, root, stream);
  }

  /** Reduces {@code count} elements to the root ({@code ncclReduce}). */
  public void reduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int root,
      CudaStream stream) {
    enter("ncclReduce", stream);
    try {
      checkTypes("ncclReduce", send, recv);
      checkPeer("ncclReduce", "root", root);
      int rc =
          NcclH.ncclReduce(
              send.address("ncclReduce", sendOffset, count),
              recv.address("ncclReduce", recvOffset, count),
              count,
              send.type().ncclValue(),
              op.ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclReduce");
    } finally {
      leave();
    }
  }

  /** Collects every rank's whole send buffer, in rank order; recv has size times the elements. */
  public void allGather(DeviceBuffer send, DeviceBuffer recv, CudaStream stream) {
    checkCounts("ncclAllGather", send, times("ncclAllGather", send.count()), recv, recv.count());
    allGather(send, 0, recv, 0, send.count(), stream);
  }

  /**
   * Collects {@code sendCount} elements of every rank, in rank order ({@code ncclAllGather}).
   *
   * @param sendCount elements a rank; recv takes size times as many
   */
  public void allGather(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long sendCount,
      CudaStream stream) {
    enter("ncclAllGather", stream);
    try {
      checkTypes("ncclAllGather", send, recv);
      int rc =
          NcclH.ncclAllGather(
              send.address("ncclAllGather", sendOffset, sendCount),
              recv.address("ncclAllGather", recvOffset, times("ncclAllGather", sendCount)),
              sendCount,
              send.type().ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclAllGather");
    } finally {
      leave();
    }
  }

  /** Reduces, and leaves part r of the result on rank r; send has size times recv's elements. */
  public void reduceScatter(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    checkCounts(
        "ncclReduceScatter", send, send.count(), recv, times("ncclReduceScatter", recv.count()));
    reduceScatter(send, 0, recv, 0, recv.count(), op, stream);
  }

  /**
   * Reduces size times {@code recvCount} elements and leaves part r of the result on rank r ({@code
   * ncclReduceScatter}).
   *
   * @param recvCount elements a rank receives
   */
  public void reduceScatter(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long recvCount,
      ReduceOp op,
      CudaStream stream) {
    enter("ncclReduceScatter", stream);
    try {
      checkTypes("ncclReduceScatter", send, recv);
      int rc =
          NcclH.ncclReduceScatter(
              send.address("ncclReduceScatter", sendOffset, times("ncclReduceScatter", recvCount)),
              recv.address("ncclReduceScatter", recvOffset, recvCount),
              recvCount,
              send.type().ncclValue(),
              op.ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclReduceScatter");
    } finally {
      leave();
    }
  }

  /** Sends a whole buffer; the peer must receive as many elements. */
  public void send(DeviceBuffer buffer, int peer, CudaStream stream) {
    send(buffer, 0, buffer.count(), peer, stream);
  }

  /**
   * Sends {@code count} elements ({@code ncclSend}). Two ranks that each send and receive must do
   * both in one {@link NcclGroup}.
   */
  public void send(DeviceBuffer buffer, long offset, long count, int peer, CudaStream stream) {
    enter("ncclSend", stream);
    try {
      checkBuffer("ncclSend", buffer);
      checkPeer("ncclSend", "peer", peer);
      int rc =
          NcclH.ncclSend(
              buffer.address("ncclSend", offset, count),
              count,
              buffer.type().ncclValue(),
              peer,
              handle,
              stream.handle());
      check(rc, "ncclSend");
    } finally {
      leave();
    }
  }

  /** Receives a whole buffer; the peer must send as many elements. */
  public void recv(DeviceBuffer buffer, int peer, CudaStream stream) {
    recv(buffer, 0, buffer.count(), peer, stream);
  }

  /** Receives {@code count} elements ({@code ncclRecv}). */
  public void recv(DeviceBuffer buffer, long offset, long count, int peer, CudaStream stream) {
    enter("ncclRecv", stream);
    try {
      checkBuffer("ncclRecv", buffer);
      checkPeer("ncclRecv", "peer", peer);
      int rc =
          NcclH.ncclRecv(
              buffer.address("ncclRecv", offset, count),
              count,
              buffer.type().ncclValue(),
              peer,
              handle,
              stream.handle());
      check(rc, "ncclRecv");
    } finally {
      leave();
    }
  }

  // ------------------------------------------------------------------ checks

  private long times(String operation, long count) {
    if (count < 0 || count > Long.MAX_VALUE / size) {
      throw new IllegalArgumentException(
          operation + ": " + count + " elements for each of " + size + " ranks");
    }
    return count * size;
  }

  private void checkCounts(
      String operation, DeviceBuffer send, long sendCount, DeviceBuffer recv, long recvCount) {
    if (sendCount != recvCount) {
      throw new IllegalArgumentException(
          operation
              + " with "
              + size
              + " ranks: the lengths of send "
              + send
              + " and recv "
              + recv
              + " do not match");
    }
  }

  private void checkTypes(String operation, DeviceBuffer send, DeviceBuffer recv) {
    if (send.type() != recv.type()) {
      throw new IllegalArgumentException(
          operation + ": send " + send + " and recv " + recv + " differ in type");
    }
    checkBuffer(operation, send);
    checkBuffer(operation, recv);
  }

  private void checkBuffer(String operation, DeviceBuffer buffer) {
    if (buffer.device().ordinal() != device.ordinal()) {
      throw new IllegalArgumentException(
          operation + where() + ": the " + buffer + " is on another device");
    }
    if (buffer.type().ncclValue() >= DataType.FLOAT8_E4M3.ncclValue()
        && NativeLibraries.load().ncclVersion() < FIRST_NCCL_WITH_FLOAT8) {
      throw new UnsupportedByLibraryException(
          operation
              + ": "
              + buffer.type()
              + " needs NCCL >= 2.24.3, loaded "
              + NativeLibraries.versionText(NativeLibraries.load().ncclVersion()));
    }
  }

  private void checkPeer(String operation, String role, int peer) {
    if (peer < 0 || peer >= size) {
      throw new IllegalArgumentException(
          operation + where() + ": " + role + " " + peer + ": ranks go from 0 to " + (size - 1));
    }
  }

  /**
   * Runs a call on the raw {@code ncclComm_t} under the rules of this class: one thread at a time,
   * only while ready, the right device current, a failing result code kept. For code that adds
   * operations, as windows.
   */
  public void call(String operation, RawCall call) {
    enter(operation);
    try {
      check(call.invoke(handle), operation);
    } finally {
      leave();
    }
  }

  /** A call of the raw bindings. */
  @FunctionalInterface
  public interface RawCall {
    /** Makes the call; returns the {@code ncclResult_t}. */
    int invoke(MemorySegment comm);
  }

  private void enter(String operation, @Nullable CudaStream stream) {
    enter(operation);
    try {
      if (stream == null) {
        throw new IllegalArgumentException(
            operation + where() + ": the stream is null; make one with CudaStream.create");
      }
      if (stream.device().ordinal() != device.ordinal()) {
        throw new IllegalArgumentException(
            operation + where() + ": the " + stream + " belongs to another device");
      }
      stream.handle(operation);
      if (stream != lastStream) {
        stream.watch(this);
        streams.add(stream);
        lastStream = stream;
      }
    } catch (RuntimeException e) {
      leave();
      throw e;
    }
  }

  private void enter(String operation) {
    Thread other = (Thread) INSIDE.compareAndExchange(this, null, Thread.currentThread());
    if (other != null) {
      throw new IllegalStateException(
          operation
              + where()
              + ": thread "
              + other.getName()
              + " is inside a call; a communicator takes one thread at a time");
    }
    try {
      if (state != State.READY) {
        throwUnusable(operation);
      }
      device.makeCurrent();
      NcclGroup.note(this);
    } catch (RuntimeException e) {
      leave();
      throw e;
    }
  }

  private void leave() {
    INSIDE.setRelease(this, (Thread) null);
  }

  private void throwUnusable(String operation) {
    @Nullable Throwable cause = failure;
    if (cause != null) {
      int code = cause instanceof NcclException nccl ? nccl.resultCode() : NcclH.ncclInvalidUsage();
      NcclException again =
          new NcclException(
              operation, code, where(), "the communicator failed earlier: " + cause.getMessage());
      again.initCause(cause);
      throw again;
    }
    throw new IllegalStateException(
        operation
            + where()
            + ": the communicator is "
            + state.name().toLowerCase(java.util.Locale.ROOT));
  }

  private void check(int rc, String operation) {
    if (rc != 0) {
      NcclException e = NcclException.of(operation, rc, where());
      if (e.isCommunicatorFatal()) {
        fail(e);
      }
      throw e;
    }
  }

  private synchronized void fail(Throwable cause) {
    if (state == State.READY) {
      failure = cause;
      state = State.FAILED;
    }
  }

  void failedInGroup(Throwable cause) {
    fail(cause);
  }

  private String where() {
    return where(rank, size, device);
  }

  private static String where(int rank, int size, CudaDevice device) {
    return " on rank " + rank + " of " + size + " (" + device + ")";
  }

  // ------------------------------------------------------------------ failure and end

  /**
   * Asks NCCL for an asynchronous error ({@code ncclCommGetAsyncError}), such as a dead peer, and
   * throws it; also repeats an earlier failure. Returns at once where there is none or the
   * communicator is closed.
   */
  @Override
  public void throwIfFailed() {
    State now = state;
    if (now == State.CLOSED) {
      return;
    }
    if (now != State.READY) {
      throwUnusable("ncclCommGetAsyncError");
    }
    int error;
    synchronized (asyncErrorOut) {
      if (state != State.READY) {
        return; // ended meanwhile, by another thread
      }
      int rc = NcclH.ncclCommGetAsyncError(handle, asyncErrorOut);
      check(rc, "ncclCommGetAsyncError");
      error = asyncErrorOut.get(JAVA_INT, 0);
    }
    if (error != 0 && error != NcclH.ncclInProgress()) {
      check(error, "a collective");
    }
  }

  /**
   * Gives a resource that lives on this communicator to it: {@link #close} closes it before the
   * communicator, the youngest first.
   */
  public synchronized void adopt(AutoCloseable child) {
    if (state != State.READY) {
      throwUnusable("adopt");
    }
    children.add(child);
  }

  /** Takes a resource back that was closed by itself. */
  public synchronized void disown(AutoCloseable child) {
    children.remove(child);
  }

  /**
   * Ends all work of this communicator now ({@code ncclCommAbort}), from any thread: waiting ranks
   * see a failure. Its resources are released.
   *
   * @throws IllegalStateException if another thread is inside a call, which NCCL does not allow
   */
  public void abort() {
    Thread other = (Thread) INSIDE.compareAndExchange(this, null, Thread.currentThread());
    if (other != null) {
      throw new IllegalStateException(
          "ncclCommAbort" + where() + ": thread " + other.getName() + " is inside a call");
    }
    try {
      synchronized (this) {
        if (state == State.CLOSED || state == State.ABORTED) {
          return;
        }
        state = State.ABORTED;
      }
      release(true);
    } finally {
      leave();
    }
  }

  /**
   * Waits for the enqueued work and ends the communicator ({@code ncclCommDestroy}); one that
   * failed is aborted instead. All ranks must close. Resources that live on it are closed first.
   */
  @Override
  public void close() {
    Thread other = (Thread) INSIDE.compareAndExchange(this, null, Thread.currentThread());
    if (other != null) {
      throw new IllegalStateException(
          "ncclCommDestroy" + where() + ": thread " + other.getName() + " is inside a call");
    }
    boolean failed;
    List<AutoCloseable> owned;
    try {
      synchronized (this) {
        if (state == State.CLOSED || state == State.ABORTED) {
          return;
        }
        failed = state == State.FAILED;
        owned = List.copyOf(children);
      }
    } finally {
      leave();
    }
    RuntimeException trouble = failed ? null : closeAll(owned, null);
    synchronized (this) {
      if (state == State.CLOSED || state == State.ABORTED) {
        return;
      }
      failed = state == State.FAILED;
      state = State.CLOSED;
    }
    try {
      release(failed);
    } catch (RuntimeException e) {
      if (trouble != null) {
        e.addSuppressed(trouble);
      }
      trouble = e;
    }
    if (trouble != null) {
      throw trouble;
    }
  }

  /** The native end. Aborts first and lets the children free their memory after it, or destroys. */
  private void release(boolean abort) {
    device.makeCurrent();
    RuntimeException trouble = null;
    synchronized (asyncErrorOut) { // no look at the async error of a handle that is being freed
      int rc = abort ? NcclH.ncclCommAbort(handle) : NcclH.ncclCommDestroy(handle);
      if (rc != 0) {
        String operation = abort ? "ncclCommAbort" : "ncclCommDestroy";
        trouble = NcclException.of(operation, rc, where());
      }
      arena.close();
    }
    List<AutoCloseable> left;
    synchronized (this) {
      left = List.copyOf(children);
      children.clear();
    }
    trouble = closeAll(left, trouble);
    for (CudaStream stream : streams) {
      stream.unwatch(this);
    }
    if (trouble != null) {
      throw trouble;
    }
  }

  private static @Nullable RuntimeException closeAll(
      List<AutoCloseable> owned, @Nullable RuntimeException first) {
    RuntimeException trouble = first;
    for (int i = owned.size() - 1; i >= 0; i--) {
      try {
        owned.get(i).close();
      } catch (Exception e) {
        if (trouble == null) {
          trouble = e instanceof RuntimeException r ? r : new IllegalStateException(e);
        } else {
          trouble.addSuppressed(e);
        }
      }
    }
    return trouble;
  }

  @Override
  public String toString() {
    return "communicator" + where();
  }
}

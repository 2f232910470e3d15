package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclWaitSignalDesc_t;
import io.ncclffm.core.internal.Backoff;
import io.ncclffm.core.internal.LeakReport;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.lang.ref.WeakReference;
import java.time.Duration;
import java.util.ArrayList;
import java.util.BitSet;
import java.util.Collection;
import java.util.EnumSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
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
    /** Made in a group that has not ended, or non-blocking: see {@link #awaitReady}. */
    INITIALISING,
    READY,
    /** {@link #finalizeAndClose} waits for the enqueued work. */
    FINALIZING,
    /** {@link #revoke} ended its operations; it can be shrunk, aborted and closed. */
    REVOKED,
    /** A call or another rank failed. */
    FAILED,
    ABORTED,
    CLOSED
  }

  private static final VarHandle INSIDE;
  private static final Map<NcclUniqueId, BitSet> USED_IDS = new ConcurrentHashMap<>();
  private static final Set<State> USABLE = EnumSet.of(State.READY);
  private static final int FIRST_NCCL_WITH_FLOAT8 = 22403;
  private static final int IN_PROGRESS = 7;
  private static final Duration KERNELS_END_WITHIN = Duration.ofSeconds(1);
  private static final Duration STREAMS_STILL_WITHIN = Duration.ofSeconds(10);
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  static {
    try {
      INSIDE = MethodHandles.lookup().findVarHandle(Communicator.class, "inside", Thread.class);
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  private final CudaDevice device;
  private final CommunicatorConfig config;
  // NCCL keeps the pointer to the name in it, and gives it on to children; they hold it too.
  private final MemorySegment nativeConfig;
  private final Arena arena = Arena.ofShared();
  private final MemorySegment asyncErrorOut = arena.allocate(JAVA_INT);
  // Split, shrink and grow write it when their job ends, long after the call returned.
  private final MemorySegment handleOut = arena.allocate(ADDRESS);
  private final List<AutoCloseable> children = new ArrayList<>();
  // Closed before NCCL had made them: it may write their handles until this communicator has ended.
  private final List<Communicator> closedUnmade = new ArrayList<>();
  private final Set<CudaStream> streams = new LinkedHashSet<>();
  private final @Nullable Communicator parent;
  private volatile MemorySegment handle = MemorySegment.NULL;
  private volatile int rank;
  private volatile int size;
  private volatile State state = State.INITIALISING;
  private volatile @Nullable Throwable failure;
  private volatile @Nullable Thread settling;
  private volatile @Nullable Watchdog watchdog;
  private final MemorySegment signalOut = ncclWaitSignalDesc_t.allocate(arena);
  private final LeakReport.Tracker leak;
  private boolean released; // NCCL has ended it and works for it no more
  private final FailureSource failures = new Failures(this);
  private boolean inProgress;
  private @Nullable CudaStream lastStream;
  private @Nullable Thread inside;
  private int depth; // how often that thread is inside; touched by it alone

  /** What streams ask. Does not keep a communicator that was dropped from the leak report. */
  private static final class Failures implements FailureSource {
    private final WeakReference<Communicator> communicator;

    Failures(Communicator communicator) {
      this.communicator = new WeakReference<>(communicator);
    }

    @Override
    public void throwIfFailed() {
      @Nullable Communicator alive = communicator.get();
      if (alive != null) {
        alive.throwIfFailed();
      }
    }
  }

  private Communicator(
      int rank,
      int size,
      CudaDevice device,
      CommunicatorConfig config,
      MemorySegment nativeConfig,
      @Nullable Communicator parent) {
    this.rank = rank;
    this.size = size;
    this.device = device;
    this.config = config;
    this.nativeConfig = nativeConfig;
    this.parent = parent;
    this.leak = LeakReport.track(this, "communicator on " + device);
  }

  /** Joins with everything left to NCCL; see the long form. */
  public static Communicator create(NcclUniqueId id, int size, int rank, CudaDevice device) {
    return create(id, size, rank, device, CommunicatorConfig.DEFAULT);
  }

  /** Joins with one unique id; see the long form ({@code ncclCommInitRankConfig}, 2.14.3). */
  public static Communicator create(
      NcclUniqueId id, int size, int rank, CudaDevice device, CommunicatorConfig config) {
    return create(List.of(id), size, rank, device, config);
  }

  /**
   * Joins. Blocks until all ranks have come, so each rank needs a thread or a process of its own;
   * except in a {@link NcclGroup}, where the communicator is initialising until the group ends, and
   * with a non-blocking configuration, where it is until {@link #awaitReady}.
   *
   * @param ids the same on every rank, used for no other communicator; several (NCCL 2.23.4, {@code
   *     ncclCommInitRankScalable}) share the work of leading very many ranks together
   * @param size number of ranks
   * @param rank this one, 0 to size - 1
   * @throws IllegalArgumentException if the rank is not in the range
   * @throws IllegalStateException if this process joined with this id and rank before: NCCL would
   *     wait for ever
   * @throws UnsupportedByLibraryException if the loaded NCCL lacks a field of the configuration
   * @throws NcclException if NCCL refuses, for instance two ranks on one GPU without {@link
   *     DeviceSharing}
   */
  public static Communicator create(
      List<NcclUniqueId> ids, int size, int rank, CudaDevice device, CommunicatorConfig config) {
    if (ids.isEmpty()) {
      throw new IllegalArgumentException("ncclCommInitRank: no unique id");
    }
    if (size < 1 || rank < 0 || rank >= size) {
      throw new IllegalArgumentException(
          "ncclCommInitRank: rank " + rank + " of " + size + ": ranks go from 0 to size - 1");
    }
    NativeLibraries.load();
    if (ids.size() > 1) {
      NativeLibraries.requireNccl("ncclCommInitRankScalable", "2.23.4");
    }
    MemorySegment nativeConfig = config.toNative(Arena.ofAuto());
    device.makeCurrent(); // before an id is used up
    ids.forEach(id -> claimId(id, rank));
    Communicator created = new Communicator(rank, size, device, config, nativeConfig, null);
    device.makeCurrent();
    CommunicatorEvent event = CommunicatorEvent.started();
    try (Arena scratch = Arena.ofConfined()) {
      String operation = ids.size() > 1 ? "ncclCommInitRankScalable" : "ncclCommInitRankConfig";
      int rc;
      if (ids.size() == 1) {
        MemorySegment id = ids.get(0).toNative(scratch);
        rc = NcclH.ncclCommInitRankConfig(created.handleOut, size, id, rank, nativeConfig);
      } else {
        MemorySegment all = scratch.allocate((long) ids.size() * NcclUniqueId.BYTES);
        for (int i = 0; i < ids.size(); i++) {
          MemorySegment.copy(
              ids.get(i).toNative(scratch),
              0,
              all,
              (long) i * NcclUniqueId.BYTES,
              NcclUniqueId.BYTES);
        }
        rc =
            NcclH.ncclCommInitRankScalable(
                created.handleOut, size, rank, ids.size(), all, nativeConfig);
      }
      created.started(operation, rc);
    }
    event.ended("create", rank, size, device);
    return created;
  }

  /**
   * All ranks on one thread ({@code ncclCommInitAll}): rank r on the r-th device. The calls of one
   * step must then stand in one {@link NcclGroup}.
   */
  public static List<Communicator> createAll(List<CudaDevice> devices) {
    if (devices.isEmpty()) {
      throw new IllegalArgumentException("ncclCommInitAll: no device");
    }
    NativeLibraries.load();
    int size = devices.size();
    MemorySegment noConfig = MemorySegment.NULL;
    CommunicatorEvent event = CommunicatorEvent.started();
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(ADDRESS, size);
      MemorySegment ordinals = scratch.allocate(JAVA_INT, size);
      for (int r = 0; r < size; r++) {
        ordinals.setAtIndex(JAVA_INT, r, devices.get(r).ordinal());
      }
      int rc = NcclH.ncclCommInitAll(out, size, ordinals);
      if (rc != 0) {
        throw NcclException.of("ncclCommInitAll", rc, " with " + devices);
      }
      List<Communicator> all = new ArrayList<>();
      for (int r = 0; r < size; r++) {
        Communicator c =
            new Communicator(r, size, devices.get(r), CommunicatorConfig.DEFAULT, noConfig, null);
        c.handle = out.getAtIndex(ADDRESS, r);
        c.state = State.READY;
        all.add(c);
        event.ended("createAll", r, size, c.device);
      }
      return List.copyOf(all);
    }
  }

  /** After a call that makes a communicator: it is there, or will be. */
  private void started(String operation, int rc) {
    if (rc != 0 && rc != IN_PROGRESS) {
      NcclException e = NcclException.of(operation, rc, where());
      discard();
      throw e;
    }
    if (NcclGroup.isActive()) {
      NcclGroup.awaits(this);
    } else {
      try {
        handed(rc == IN_PROGRESS);
      } catch (RuntimeException e) {
        abortAfter(e);
        throw e;
      }
    }
  }

  /** The call that makes the communicator, or the group that it stands in, has returned. */
  private void handed(boolean inProgress) {
    @Nullable Communicator from = parent;
    // A non-blocking parent's NCCL may say that all went well before the child's handle is there.
    boolean isDone = !inProgress && (from == null || from.config.isBlocking());
    if (isDone && config.isBlocking()) {
      completed();
    } else if (from == null) {
      handle = handleOut.get(ADDRESS, 0); // of a new one NCCL writes it in advance
    }
  }

  private void abortAfter(RuntimeException failure) {
    try {
      abort(failure);
    } catch (RuntimeException e) {
      failure.addSuppressed(e);
    }
  }

  /** NCCL has refused to make it. */
  private void discard() {
    state = State.CLOSED;
    leak.closed();
    arena.close();
  }

  /** The handle is written and, in blocking mode, usable. */
  private void completed() {
    MemorySegment made = handleOut.get(ADDRESS, 0);
    if (made.address() == 0) {
      NcclException e =
          new NcclException(
              "communicator",
              NcclH.ncclInternalError(),
              where(),
              "NCCL reported success but made none");
      fail(e);
      throw e;
    }
    handle = made;
    if (rank < 0) {
      rank = query("ncclCommUserRank", NcclH::ncclCommUserRank);
      size = query("ncclCommCount", NcclH::ncclCommCount);
    }
    state = State.READY;
  }

  private interface IntQuery {
    int invoke(MemorySegment comm, MemorySegment out);
  }

  private int query(String operation, IntQuery query) {
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(JAVA_INT);
      int rc = query.invoke(handle, out);
      if (rc != 0) {
        throw NcclException.of(operation, rc, where());
      }
      return out.get(JAVA_INT, 0);
    }
  }

  /** At the end of the outermost group, for a communicator made in it. */
  void groupEnded(@Nullable Throwable trouble, boolean inProgress) {
    if (trouble != null) {
      fail(trouble);
    } else {
      handed(inProgress);
    }
  }

  /**
   * Waits until a communicator that is initialising is ready; returns at once if it is.
   *
   * @throws DeadlineException after the timeout: it is still initialising, and may be waited for
   *     again or aborted
   * @throws NcclException if it could not be made
   */
  public void awaitReady(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("awaitReady" + where() + " inside a group: end it first");
    }
    @Nullable Communicator from = parent;
    if (from != null && state == State.INITIALISING && !takeHandle()) {
      from.awaitMade(this, deadline);
    }
    settle("awaitReady", deadline);
    synchronized (this) {
      if (state == State.INITIALISING) {
        completed();
      }
    }
    if (state != State.READY) {
      throwUnusable("awaitReady");
    }
  }

  /** Looks whether NCCL has written the handle. */
  private synchronized boolean takeHandle() {
    if (handle.address() == 0 && !hasEnded()) {
      handle = handleOut.get(ADDRESS, 0);
    }
    return handle.address() != 0;
  }

  /**
   * Polls until NCCL has made a child. Not {@link #settle}, because a shrink goes on where this
   * communicator has failed.
   */
  private void awaitMade(Communicator child, long deadline) {
    for (int round = 0; !child.takeHandle(); round++) {
      if (child.hasEnded()) {
        child.throwUnusable("awaitReady");
      }
      int error = hasEnded() ? 0 : pollAsyncError();
      if (error != IN_PROGRESS && !child.takeHandle()) {
        NcclException e =
            error == 0
                ? new NcclException(
                    "awaitReady",
                    NcclH.ncclInvalidUsage(),
                    where(),
                    "ended before the child was made")
                : NcclException.of("awaitReady", error, where());
        child.fail(e);
        if (error != 0 && e.isCommunicatorFatal()) {
          fail(e);
        }
        throw e;
      }
      Backoff.pause(round, deadline, "awaitReady of a child of the communicator" + where());
    }
  }

  /**
   * Polls until NCCL is not in progress on this communicator; other threads may abort meanwhile.
   */
  private void settle(String operation, long deadline) {
    settling = Thread.currentThread();
    try {
      for (int round = 0; ; round++) {
        int error;
        if (claim() == null) {
          try {
            if (state != State.READY && state != State.INITIALISING && state != State.FINALIZING) {
              throwUnusable(operation);
            }
            error = pollAsyncError();
          } finally {
            leave();
          }
          if (error != IN_PROGRESS) {
            check(error, operation);
            return;
          }
        }
        Backoff.pause(round, deadline, operation + where());
      }
    } finally {
      settling = null;
    }
  }

  private static void claimId(NcclUniqueId id, int rank) {
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
    requireMade("rank");
    return rank;
  }

  /** Number of ranks ({@code ncclCommCount}). */
  public int size() {
    requireMade("size");
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
      throw new IllegalStateException(this + " is " + now.name().toLowerCase(Locale.ROOT));
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
      op.check("ncclAllReduce", this, send.type());
      int rc =
          NcclCalls.ncclAllReduce(
              send.pointer("ncclAllReduce", sendOffset, count),
              recv.pointer("ncclAllReduce", recvOffset, count),
              count,
              send.type().ncclValue(),
              op.ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclAllReduce");
      enqueued("ncclAllReduce", count, send.type(), op, -1, stream);
    } finally {
      leave();
    }
    conclude("ncclAllReduce");
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
          NcclCalls.ncclBroadcast(
              send.pointer("ncclBroadcast", sendOffset, count),
              recv.pointer("ncclBroadcast", recvOffset, count),
              count,
              send.type().ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclBroadcast");
      enqueued("ncclBroadcast", count, send.type(), null, root, stream);
    } finally {
      leave();
    }
    conclude("ncclBroadcast");
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
      op.check("ncclReduce", this, send.type());
      checkPeer("ncclReduce", "root", root);
      int rc =
          NcclCalls.ncclReduce(
              send.pointer("ncclReduce", sendOffset, count),
              recv.pointer("ncclReduce", recvOffset, count),
              count,
              send.type().ncclValue(),
              op.ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclReduce");
      enqueued("ncclReduce", count, send.type(), op, root, stream);
    } finally {
      leave();
    }
    conclude("ncclReduce");
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
          NcclCalls.ncclAllGather(
              send.pointer("ncclAllGather", sendOffset, sendCount),
              recv.pointer("ncclAllGather", recvOffset, times("ncclAllGather", sendCount)),
              sendCount,
              send.type().ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclAllGather");
      enqueued("ncclAllGather", sendCount, send.type(), null, -1, stream);
    } finally {
      leave();
    }
    conclude("ncclAllGather");
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
      op.check("ncclReduceScatter", this, send.type());
      int rc =
          NcclCalls.ncclReduceScatter(
              send.pointer("ncclReduceScatter", sendOffset, times("ncclReduceScatter", recvCount)),
              recv.pointer("ncclReduceScatter", recvOffset, recvCount),
              recvCount,
              send.type().ncclValue(),
              op.ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclReduceScatter");
      enqueued("ncclReduceScatter", recvCount, send.type(), op, -1, stream);
    } finally {
      leave();
    }
    conclude("ncclReduceScatter");
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
          NcclCalls.ncclSend(
              buffer.pointer("ncclSend", offset, count),
              count,
              buffer.type().ncclValue(),
              peer,
              handle,
              stream.handle());
      check(rc, "ncclSend");
      enqueued("ncclSend", count, buffer.type(), null, peer, stream);
    } finally {
      leave();
    }
    conclude("ncclSend");
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
          NcclCalls.ncclRecv(
              buffer.pointer("ncclRecv", offset, count),
              count,
              buffer.type().ncclValue(),
              peer,
              handle,
              stream.handle());
      check(rc, "ncclRecv");
      enqueued("ncclRecv", count, buffer.type(), null, peer, stream);
    } finally {
      leave();
    }
    conclude("ncclRecv");
  }

  /** Sends part r of the whole send buffer to rank r; both buffers have size times the elements. */
  public void alltoAll(DeviceBuffer send, DeviceBuffer recv, CudaStream stream) {
    checkCounts("ncclAlltoAll", send, send.count(), recv, recv.count());
    if (send.count() % size != 0) {
      throw new IllegalArgumentException(
          "ncclAlltoAll" + where() + ": the " + send + " does not divide by the number of ranks");
    }
    alltoAll(send, 0, recv, 0, send.count() / size, stream);
  }

  /**
   * Sends {@code count} elements to every rank and receives as many from each ({@code
   * ncclAlltoAll}, 2.28.3). Has no in-place form.
   *
   * @param count elements a pair of ranks
   */
  public void alltoAll(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      CudaStream stream) {
    NativeLibraries.requireNccl("ncclAlltoAll", "2.28.3");
    enter("ncclAlltoAll", stream);
    try {
      checkTypes("ncclAlltoAll", send, recv);
      long inAll = times("ncclAlltoAll", count);
      if (send == recv && Math.abs(sendOffset - recvOffset) < inAll) {
        throw new IllegalArgumentException(
            "ncclAlltoAll" + where() + " in place in the " + send + ": take ranges that lie apart");
      }
      int rc =
          NcclCalls.ncclAlltoAll(
              send.pointer("ncclAlltoAll", sendOffset, inAll),
              recv.pointer("ncclAlltoAll", recvOffset, inAll),
              count,
              send.type().ncclValue(),
              handle,
              stream.handle());
      check(rc, "ncclAlltoAll");
      enqueued("ncclAlltoAll", count, send.type(), null, -1, stream);
    } finally {
      leave();
    }
    conclude("ncclAlltoAll");
  }

  /** Collects every rank's whole send buffer on the root; recv is only written there. */
  public void gather(DeviceBuffer send, DeviceBuffer recv, int root, CudaStream stream) {
    checkCounts("ncclGather", send, times("ncclGather", send.count()), recv, recv.count());
    gather(send, 0, recv, 0, send.count(), root, stream);
  }

  /**
   * Collects {@code sendCount} elements of every rank on the root, in rank order ({@code
   * ncclGather}, 2.28.3).
   *
   * @param sendCount elements a rank; the root's recv takes size times as many
   */
  public void gather(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long sendCount,
      int root,
      CudaStream stream) {
    NativeLibraries.requireNccl("ncclGather", "2.28.3");
    enter("ncclGather", stream);
    try {
      checkTypes("ncclGather", send, recv);
      checkPeer("ncclGather", "root", root);
      long recvCount = rank == root ? times("ncclGather", sendCount) : 0;
      int rc =
          NcclCalls.ncclGather(
              send.pointer("ncclGather", sendOffset, sendCount),
              recv.pointer("ncclGather", recvOffset, recvCount),
              sendCount,
              send.type().ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclGather");
      enqueued("ncclGather", sendCount, send.type(), null, root, stream);
    } finally {
      leave();
    }
    conclude("ncclGather");
  }

  /** Gives part r of the root's whole send buffer to rank r; send is only read on the root. */
  public void scatter(DeviceBuffer send, DeviceBuffer recv, int root, CudaStream stream) {
    checkCounts("ncclScatter", send, send.count(), recv, times("ncclScatter", recv.count()));
    scatter(send, 0, recv, 0, recv.count(), root, stream);
  }

  /**
   * Gives {@code recvCount} elements of the root to every rank, in rank order ({@code ncclScatter},
   * 2.28.3).
   *
   * @param recvCount elements a rank; the root's send holds size times as many
   */
  public void scatter(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long recvCount,
      int root,
      CudaStream stream) {
    NativeLibraries.requireNccl("ncclScatter", "2.28.3");
    enter("ncclScatter", stream);
    try {
      checkTypes("ncclScatter", send, recv);
      checkPeer("ncclScatter", "root", root);
      long sendCount = rank == root ? times("ncclScatter", recvCount) : 0;
      int rc =
          NcclCalls.ncclScatter(
              send.pointer("ncclScatter", sendOffset, sendCount),
              recv.pointer("ncclScatter", recvOffset, recvCount),
              recvCount,
              send.type().ncclValue(),
              root,
              handle,
              stream.handle());
      check(rc, "ncclScatter");
      enqueued("ncclScatter", recvCount, recv.type(), null, root, stream);
    } finally {
      leave();
    }
    conclude("ncclScatter");
  }

  // ------------------------------------------------------------------ one-sided

  /**
   * Writes into a peer's window and then signals it ({@code ncclPutSignal}, 2.29.2). When the
   * peer's {@link #waitSignal} returns, the data is there.
   *
   * @param local the buffer of a window of this communicator with {@link
   *     NcclWindow.Flag#COLLECTIVE_SYMMETRIC}
   * @param target the window, registered by all ranks; the peer's part of it is written
   * @param targetOffset in bytes
   */
  public void putSignal(
      DeviceBuffer local,
      long offset,
      long count,
      int peer,
      NcclWindow target,
      long targetOffset,
      CudaStream stream) {
    NativeLibraries.requireNccl("ncclPutSignal", "2.29.2");
    enter("ncclPutSignal", stream);
    try {
      checkBuffer("ncclPutSignal", local);
      checkPeer("ncclPutSignal", "peer", peer);
      long from = local.pointer("ncclPutSignal", offset, count);
      target.checkTarget("ncclPutSignal", this, targetOffset, count * local.type().bytes());
      int rc =
          NcclCalls.ncclPutSignal(
              from,
              count,
              local.type().ncclValue(),
              peer,
              target.handle(),
              targetOffset,
              0,
              0,
              0,
              handle,
              stream.handle());
      check(rc, "ncclPutSignal");
      enqueued("ncclPutSignal", count, local.type(), null, peer, stream);
    } finally {
      leave();
    }
    conclude("ncclPutSignal");
  }

  /** Signals a peer without data ({@code ncclSignal}, 2.29.2). */
  public void signal(int peer, CudaStream stream) {
    NativeLibraries.requireNccl("ncclSignal", "2.29.2");
    enter("ncclSignal", stream);
    try {
      checkPeer("ncclSignal", "peer", peer);
      check(NcclH.ncclSignal(peer, 0, 0, 0, handle, stream.handle()), "ncclSignal");
      enqueued("ncclSignal", 1, null, null, peer, stream);
    } finally {
      leave();
    }
    conclude("ncclSignal");
  }

  /**
   * Lets the stream wait for signals of a peer ({@code ncclWaitSignal}, 2.29.2).
   *
   * @param count how many signals, at least 1
   */
  public void waitSignal(int peer, int count, CudaStream stream) {
    NativeLibraries.requireNccl("ncclWaitSignal", "2.29.2");
    enter("ncclWaitSignal", stream);
    try {
      checkPeer("ncclWaitSignal", "peer", peer);
      if (count < 1) {
        throw new IllegalArgumentException(
            "ncclWaitSignal" + where() + ": " + count + " signals: must be positive");
      }
      // NCCL copies it during the call.
      ncclWaitSignalDesc_t.opCnt(signalOut, count);
      ncclWaitSignalDesc_t.peer(signalOut, peer);
      check(NcclH.ncclWaitSignal(1, signalOut, handle, stream.handle()), "ncclWaitSignal");
      enqueued("ncclWaitSignal", count, null, null, peer, stream);
    } finally {
      leave();
    }
    conclude("ncclWaitSignal");
  }

  // ------------------------------------------------------------------ registration and operators

  /**
   * Registers a buffer so that collectives need not copy it ({@code ncclCommRegister}, 2.19.1). Not
   * collective.
   */
  public RegisteredBuffer register(DeviceBuffer buffer) {
    checkBuffer("ncclCommRegister", buffer);
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(ADDRESS);
      call(
          "ncclCommRegister",
          comm -> NcclH.ncclCommRegister(comm, buffer.address(0), buffer.bytes(), out));
      RegisteredBuffer registered = new RegisteredBuffer(this, buffer, out.get(ADDRESS, 0));
      adopt(registered);
      return registered;
    }
  }

  /**
   * Registers a buffer of {@link DeviceBuffer#allocateForWindow} on every rank as a window ({@code
   * ncclCommWindowRegister}, 2.27.3). Collective. Not in a group.
   *
   * @throws NcclException also where the library reports success without a window, as it does if
   *     the ranks cannot address one another's memory
   */
  public NcclWindow registerWindow(DeviceBuffer buffer, NcclWindow.Flag... flags) {
    return NcclWindow.register(this, buffer, flags);
  }

  /**
   * What kernels compiled from NCCL's device headers need to communicate ({@code
   * ncclDevCommCreate}, 2.28.3; here for headers from 2.29.2 on, see {@link
   * NcclDeviceRequirements.Builder#headerVersion}). Collective. Not in a group.
   *
   * @throws NcclException if the ranks cannot address one another's memory, or what is required is
   *     not there
   */
  public NcclDeviceCommunicator createDeviceCommunicator(NcclDeviceRequirements requirements) {
    return NcclDeviceCommunicator.create(this, requirements);
  }

  /**
   * A sum whose inputs are multiplied first ({@code ncclRedOpCreatePreMulSum}, 2.11.4), with a
   * factor that is read during this call.
   *
   * @param factor converted to the type; integer types take a whole number
   */
  public ReduceOp createPreMulSum(DataType type, double factor) {
    checkType("ncclRedOpCreatePreMulSum", type);
    try (Arena scratch = Arena.ofConfined()) {
      return preMulSum(type, Scalars.write(scratch, type, factor), true);
    }
  }

  /**
   * A sum whose inputs are multiplied first, with a factor in device memory that is read while the
   * collective runs.
   *
   * @param factor one element, of the type of the data; must stay until the last collective is done
   */
  public ReduceOp createPreMulSum(DeviceBuffer factor) {
    checkBuffer("ncclRedOpCreatePreMulSum", factor);
    return preMulSum(factor.type(), factor.address(0), false);
  }

  private ReduceOp preMulSum(DataType type, MemorySegment scalar, boolean onHost) {
    int residence = onHost ? NcclH.ncclScalarHostImmediate() : NcclH.ncclScalarDevice();
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(JAVA_INT);
      call(
          "ncclRedOpCreatePreMulSum",
          comm -> NcclH.ncclRedOpCreatePreMulSum(out, scalar, type.ncclValue(), residence, comm));
      ReduceOp op = new ReduceOp("premulsum", out.get(JAVA_INT, 0), this, type);
      adopt(op);
      return op;
    }
  }

  // ------------------------------------------------------------------ queries

  /** What the communicator is and can do ({@code ncclCommQueryProperties}, 2.29.2). */
  public CommunicatorProperties properties() {
    NativeLibraries.requireNccl("ncclCommQueryProperties", "2.29.2");
    return CommunicatorProperties.query(this);
  }

  /** The team of all ranks ({@code ncclTeamWorld}, 2.28.3). */
  public Team teamWorld() {
    NativeLibraries.requireNccl("ncclTeamWorld", "2.28.3");
    return team("ncclTeamWorld", NcclH::ncclTeamWorld);
  }

  /** The ranks whose memory this one can load from and store to ({@code ncclTeamLsa}, 2.28.3). */
  public Team teamLsa() {
    NativeLibraries.requireNccl("ncclTeamLsa", "2.28.3");
    return team("ncclTeamLsa", NcclH::ncclTeamLsa);
  }

  /** The ranks in the same place of the other LSA teams ({@code ncclTeamRail}, 2.28.3). */
  public Team teamRail() {
    NativeLibraries.requireNccl("ncclTeamRail", "2.28.3");
    return team("ncclTeamRail", NcclH::ncclTeamRail);
  }

  private interface TeamQuery {
    MemorySegment invoke(SegmentAllocator allocator, MemorySegment comm);
  }

  private Team team(String operation, TeamQuery query) {
    Team[] team = new Team[1];
    call(
        operation,
        comm -> {
          try (Arena scratch = Arena.ofConfined()) {
            team[0] = Team.of(query.invoke(scratch, comm));
          }
          return 0;
        });
    return team[0];
  }

  /**
   * The communicator's rank of a team's rank ({@code ncclTeamRankToWorld}, 2.28.3).
   *
   * @throws IllegalArgumentException if the team has no such rank
   */
  public int rankToWorld(Team team, int teamRank) {
    NativeLibraries.requireNccl("ncclTeamRankToWorld", "2.28.3");
    return translate("ncclTeamRankToWorld", team, teamRank, NcclH::ncclTeamRankToWorld);
  }

  /**
   * The LSA team's rank of a team's rank ({@code ncclTeamRankToLsa}, 2.28.3).
   *
   * @throws IllegalArgumentException if the team has no such rank
   */
  public int rankToLsa(Team team, int teamRank) {
    NativeLibraries.requireNccl("ncclTeamRankToLsa", "2.28.3");
    return translate("ncclTeamRankToLsa", team, teamRank, NcclH::ncclTeamRankToLsa);
  }

  private interface Translation {
    int invoke(MemorySegment comm, MemorySegment team, int teamRank);
  }

  private int translate(String operation, Team team, int teamRank, Translation translation) {
    if (teamRank < 0 || teamRank >= team.size()) {
      throw new IllegalArgumentException(
          operation + where() + ": rank " + teamRank + " of a " + team);
    }
    int[] translated = new int[1];
    call(
        operation,
        comm -> {
          try (Arena scratch = Arena.ofConfined()) {
            translated[0] = translation.invoke(comm, team.toNative(scratch), teamRank);
          }
          return 0;
        });
    return translated[0];
  }

  /** Device memory that NCCL holds for a communicator. */
  public enum MemoryStatistic {
    /** Bytes that {@link #suspend} gives back. */
    SUSPENDABLE(0),
    /** 1 while suspended, else 0. */
    SUSPENDED(1),
    /** Bytes that stay. */
    PERSISTENT(2),
    /** Bytes in all. */
    TOTAL(3);

    private final int ncclValue;

    MemoryStatistic(int ncclValue) {
      this.ncclValue = ncclValue;
    }
  }

  /** One number ({@code ncclCommMemStats}, 2.29.7). */
  public long memoryStatistic(MemoryStatistic statistic) {
    NativeLibraries.requireNccl("ncclCommMemStats", "2.29.7");
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(JAVA_LONG);
      call("ncclCommMemStats", comm -> NcclH.ncclCommMemStats(comm, statistic.ncclValue, out));
      return out.get(JAVA_LONG, 0);
    }
  }

  /**
   * Gives device memory back while the communicator is not used ({@code ncclCommSuspend}, 2.29.7).
   * Collective; until {@link #resume} nothing else may be called.
   */
  public void suspend() {
    NativeLibraries.requireNccl("ncclCommSuspend", "2.29.7");
    call("ncclCommSuspend", comm -> NcclH.ncclCommSuspend(comm, NcclH.NCCL_SUSPEND_MEM()));
  }

  /** Ends {@link #suspend} ({@code ncclCommResume}, 2.29.7). Collective. */
  public void resume() {
    NativeLibraries.requireNccl("ncclCommResume", "2.29.7");
    call("ncclCommResume", NcclH::ncclCommResume);
  }

  /**
   * Tells the flight recorder and the watchdog; both cost nothing while off.
   *
   * @param type null for signals
   */
  private void enqueued(
      String operation,
      long count,
      @Nullable DataType type,
      @Nullable ReduceOp op,
      int peer,
      CudaStream stream) {
    if (CollectiveEvent.PROBE.isEnabled()) {
      CollectiveEvent event = new CollectiveEvent();
      event.operation = operation;
      event.bytes = type == null ? 0 : count * type.bytes();
      event.type = type == null ? "" : type.name();
      event.reduction = op == null ? "" : op.toString();
      event.peer = peer;
      event.stream = stream.handle().address();
      event.rank = rank;
      event.size = size;
      event.commit();
    }
    @Nullable Watchdog dog = watchdog;
    if (dog != null && !stream.isCapturing()) { // what is captured does not run
      dog.called(operation, count, type, stream);
    }
  }

  /**
   * Starts a watchdog for the rest of this communicator's life: when NCCL reports an error, or an
   * operation is not done after the timeout, it logs what was in flight (operation, count, type,
   * stream, age, caller), aborts the communicator, and the threads that wait for it get the
   * exception. Its periods are of 50 ms. A thread that is inside NCCL itself, as in a blocking
   * communicator's first collective, cannot be reached: that is logged, and the abort tried again.
   *
   * <p>Do not watch a communicator that is to be shrunk after a failure: it would be aborted first.
   * One that is revoked is left alone.
   */
  public synchronized void watch(Duration timeout) {
    if (watchdog != null) {
      throw new IllegalStateException("watch" + where() + ": is watched already");
    }
    if (state != State.READY) {
      throwUnusable("watch");
    }
    Watchdog dog = new Watchdog(this, timeout);
    watchdog = dog;
    dog.start();
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
              + " do not match: "
              + sendCount
              + " and "
              + recvCount
              + " elements; see the method's shapes, or pass offsets and a count");
    }
  }

  private void checkTypes(String operation, DeviceBuffer send, DeviceBuffer recv) {
    if (send.type() != recv.type()) {
      throw new IllegalArgumentException(
          operation + ": send " + send + " and recv " + recv + " differ in type; take one type");
    }
    checkBuffer(operation, send);
    checkBuffer(operation, recv);
  }

  private void checkBuffer(String operation, DeviceBuffer buffer) {
    if (buffer.device().ordinal() != device.ordinal()) {
      throw new IllegalArgumentException(
          operation
              + where()
              + ": the "
              + buffer
              + " is on another device; allocate it on the communicator's");
    }
    checkType(operation, buffer.type());
  }

  private static void checkType(String operation, DataType type) {
    if (type.ncclValue() >= DataType.FLOAT8_E4M3.ncclValue()
        && NativeLibraries.load().ncclVersion() < FIRST_NCCL_WITH_FLOAT8) {
      throw NativeLibraries.tooOld(operation + ": " + type, FIRST_NCCL_WITH_FLOAT8);
    }
  }

  void checkPeer(String operation, String role, int peer) {
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
    conclude(operation);
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
            operation
                + where()
                + ": the "
                + stream
                + " belongs to another device; make one on the communicator's");
      }
      stream.handle(operation);
      CudaGraph.@Nullable Capture capture = stream.capture();
      if (capture != null) {
        capture.uses(this);
      }
      if (stream != lastStream || capture != null) {
        if (capture != null || !streams.contains(stream)) {
          streams.removeIf(CudaStream::isClosed);
          stream.watch(failures);
          streams.add(stream);
        }
        lastStream = stream;
      }
    } catch (RuntimeException e) {
      leave();
      throw e;
    }
  }

  private void enter(String operation) {
    enter(operation, USABLE);
  }

  private void enter(String operation, Set<State> allowed) {
    @Nullable Thread other = claim();
    @Nullable Thread waiting = settling;
    if (other == null && waiting != null && waiting != Thread.currentThread()) {
      leave();
      other = waiting;
    }
    if (other != null) {
      throw new IllegalStateException(
          operation
              + where()
              + ": thread "
              + other.getName()
              + " is inside a call; a communicator takes one thread at a time");
    }
    try {
      if (!allowed.contains(state)) {
        throwUnusable(operation);
      }
      device.makeCurrent();
      NcclGroup.note(this);
    } catch (RuntimeException e) {
      leave();
      throw e;
    }
  }

  /**
   * Makes the calling thread the one that is inside, also if it is already: a group holds its
   * members until it has ended, and a close holds the communicator while its resources use it.
   *
   * @return null, or the thread that is inside
   */
  private @Nullable Thread claim() {
    Thread me = Thread.currentThread();
    if ((Thread) INSIDE.getAcquire(this) != me) {
      Thread other = (Thread) INSIDE.compareAndExchange(this, null, me);
      if (other != null) {
        return other;
      }
    }
    depth++;
    return null;
  }

  private void leave() {
    if (--depth == 0) {
      INSIDE.setRelease(this, (Thread) null);
    }
  }

  /** The calling thread, which is inside, stays so until its group has ended. */
  void holdForGroup() {
    depth++;
  }

  void releaseAfterGroup() {
    leave();
  }

  /**
   * For code that launches kernels of its own for this communicator: enters as every call here does
   * (one thread at a time, ready, its device current), until {@link #end}.
   *
   * @param stream of the communicator's device; its {@link CudaStream#synchronize} will report this
   *     communicator's failures
   */
  public void begin(String operation, @Nullable CudaStream stream) {
    enter(operation, stream);
  }

  /** Enters for code that does something on the host only; see the other form. */
  public void begin(String operation) {
    enter(operation);
  }

  /** Ends {@link #begin}. */
  public void end() {
    leave();
  }

  private void requireMade(String what) {
    if (size < 0) {
      throw new IllegalStateException(
          what
              + " of a communicator that is still initialising: awaitReady or end the group first");
    }
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
            + state.name().toLowerCase(Locale.ROOT)
            + (state == State.INITIALISING ? "; awaitReady or end the group first" : ""));
  }

  private void check(int rc, String operation) {
    if (rc == IN_PROGRESS) {
      inProgress = true;
      return;
    }
    if (rc != 0) {
      NcclException e = NcclException.of(operation, rc, where());
      if (e.isCommunicatorFatal()) {
        fail(e);
      }
      throw e;
    }
  }

  /**
   * After a call, outside its claim; in a group its end does this. In non-blocking mode nothing may
   * follow, not even a wait for the stream, before NCCL is done.
   */
  private void conclude(String operation) {
    if (NcclGroup.isActive()) {
      return;
    }
    // Not every function of NCCL tells by its result that it goes on: window registration does not.
    if (inProgress || !config.isBlocking()) {
      inProgress = false;
      settle(operation, Backoff.deadline(CudaStream.DEFAULT_TIMEOUT));
    }
    launched();
  }

  /** For a member of a group that ended well. */
  void concludeGroup(boolean groupInProgress) {
    if (groupInProgress || !config.isBlocking()) {
      inProgress = false;
      settle("ncclGroupEnd", Backoff.deadline(CudaStream.DEFAULT_TIMEOUT));
    }
    launched();
  }

  /** What was called is on its stream now. */
  private void launched() {
    @Nullable Watchdog dog = watchdog;
    if (dog != null) {
      dog.launched();
    }
  }

  /**
   * Notes that an operation cannot be completed and never will be: later calls repeat the cause,
   * and closing aborts. For code that adds operations. Nothing happens if it has ended or failed.
   */
  public synchronized void fail(Throwable cause) {
    if (state == State.READY || state == State.INITIALISING || state == State.FINALIZING) {
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

  // ------------------------------------------------------------------ children

  /**
   * Splits ({@code ncclCommSplit}, 2.18.1): ranks of equal color make a new communicator, in the
   * order of their keys. Collective. Blocking, the child is ready at once; in a group or
   * non-blocking it is after the group's end or {@link #awaitReady}. This communicator stays
   * usable; closing it closes the child, and aborting it aborts the child.
   *
   * @param color not negative; ranks that want no part call {@link #leaveSplit}
   * @param childConfig {@link CommunicatorConfig#DEFAULT} takes over this one's
   */
  public Communicator split(int color, int key, CommunicatorConfig childConfig) {
    if (color < 0) {
      throw new IllegalArgumentException(
          "ncclCommSplit" + where() + ": color " + color + ": must not be negative");
    }
    Communicator child =
        derive(
            "ncclCommSplit",
            USABLE,
            childConfig,
            (comm, out, config) -> NcclH.ncclCommSplit(comm, color, key, out, config));
    adopt(child);
    return child;
  }

  /** Takes part in a split without getting a child ({@code NCCL_SPLIT_NOCOLOR}). */
  public void leaveSplit() {
    MemorySegment out = allocateLateWritten(ADDRESS);
    call(
        "ncclCommSplit",
        comm -> NcclH.ncclCommSplit(comm, NcclH.NCCL_SPLIT_NOCOLOR(), 0, out, MemorySegment.NULL));
  }

  /** What NCCL may write long after the call: it lives as long as this communicator. */
  synchronized MemorySegment allocateLateWritten(MemoryLayout layout) {
    return arena.allocate(layout);
  }

  /**
   * A communicator without some of the ranks ({@code ncclCommShrink}, 2.27.3), which takes this
   * one's place: it stays open when this one ends, and is closed by itself. Only the ranks that
   * stay call it, after {@link #revoke} too. Streams that this one used report its failure until it
   * is closed.
   *
   * @param excluded ranks that are left out, at least one, not this one
   * @param afterFailure whether operations in flight are to be ended first ({@code
   *     NCCL_SHRINK_ABORT}); possible on a communicator that has failed, as after a rank died. This
   *     communicator can only be closed then
   */
  public Communicator shrink(
      Collection<Integer> excluded, boolean afterFailure, CommunicatorConfig childConfig) {
    NativeLibraries.requireNccl("ncclCommShrink", "2.27.3");
    if (excluded.isEmpty() || excluded.contains(rank)) {
      throw new IllegalArgumentException(
          "ncclCommShrink" + where() + ": excluded " + excluded + ": name others, not this rank");
    }
    excluded.forEach(r -> checkPeer("ncclCommShrink", "excluded rank", r));
    int flags = afterFailure ? NcclH.NCCL_SHRINK_ABORT() : NcclH.NCCL_SHRINK_DEFAULT();
    try (Arena scratch = Arena.ofConfined()) {
      int[] list = excluded.stream().mapToInt(Integer::intValue).sorted().distinct().toArray();
      MemorySegment ranks = scratch.allocateFrom(JAVA_INT, list);
      return derive(
          "ncclCommShrink",
          afterFailure
              ? EnumSet.of(State.READY, State.REVOKED, State.FAILED)
              : EnumSet.of(State.READY, State.REVOKED),
          childConfig,
          (comm, out, config) ->
              NcclH.ncclCommShrink(comm, ranks, list.length, out, config, flags));
    }
  }

  /**
   * The id by which new ranks join this communicator's growth ({@code ncclCommGetUniqueId},
   * 2.29.2); called on one rank. Serves once, and must be used up before the next is made.
   */
  public NcclUniqueId growthId() {
    NativeLibraries.requireNccl("ncclCommGetUniqueId", "2.29.2");
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment id = scratch.allocate(NcclUniqueId.BYTES);
      call("ncclCommGetUniqueId", comm -> NcclH.ncclCommGetUniqueId(comm, id));
      return NcclUniqueId.fromBytes(id.toArray(JAVA_BYTE));
    }
  }

  /**
   * A larger communicator in which this one's ranks keep theirs ({@code ncclCommGrow}, 2.29.2). It
   * stays open when this one ends, and is closed by itself. Every rank of this one calls it, while
   * the new ranks call {@link #join}.
   *
   * @param newSize number of ranks of the new communicator
   * @param id from {@link #growthId}, on the rank that made it; null on the others
   */
  public Communicator grow(int newSize, @Nullable NcclUniqueId id, CommunicatorConfig childConfig) {
    NativeLibraries.requireNccl("ncclCommGrow", "2.29.2");
    if (newSize <= size) {
      throw new IllegalArgumentException(
          "ncclCommGrow" + where() + ": " + newSize + " ranks: must be more than " + size);
    }
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment nativeId = id == null ? MemorySegment.NULL : id.toNative(scratch);
      return derive(
          "ncclCommGrow",
          USABLE,
          childConfig,
          (comm, out, config) -> NcclH.ncclCommGrow(comm, newSize, nativeId, -1, out, config));
    }
  }

  /**
   * Joins a communicator that grows ({@code ncclCommGrow}, 2.29.2), as one of its new ranks.
   *
   * @param id from {@link #growthId} of the communicator that grows
   * @param rank at least the size of the communicator before
   */
  public static Communicator join(
      NcclUniqueId id, int newSize, int rank, CudaDevice device, CommunicatorConfig config) {
    NativeLibraries.requireNccl("ncclCommGrow", "2.29.2");
    if (rank < 1 || rank >= newSize) {
      throw new IllegalArgumentException(
          "ncclCommGrow: new rank " + rank + " of " + newSize + ": comes after the old ones");
    }
    MemorySegment nativeConfig = config.toNative(Arena.ofAuto());
    claimId(id, rank);
    Communicator created = new Communicator(rank, newSize, device, config, nativeConfig, null);
    device.makeCurrent();
    CommunicatorEvent event = CommunicatorEvent.started();
    try (Arena scratch = Arena.ofConfined()) {
      int rc =
          NcclH.ncclCommGrow(
              MemorySegment.NULL,
              newSize,
              id.toNative(scratch),
              rank,
              created.handleOut,
              nativeConfig);
      created.started("ncclCommGrow", rc);
    }
    event.ended("join", rank, newSize, device);
    return created;
  }

  private interface Derivation {
    int invoke(MemorySegment comm, MemorySegment out, MemorySegment config);
  }

  private Communicator derive(
      String operation, Set<State> allowed, CommunicatorConfig childConfig, Derivation derivation) {
    CommunicatorConfig effective = childConfig.orElse(config);
    MemorySegment childNative =
        effective == config ? nativeConfig : effective.toNative(Arena.ofAuto());
    MemorySegment given = effective == config ? MemorySegment.NULL : childNative;
    Communicator child = new Communicator(-1, -1, device, effective, childNative, this);
    CommunicatorEvent event = CommunicatorEvent.started();
    int rc;
    try {
      enter(operation, allowed);
      try {
        rc = derivation.invoke(handle, child.handleOut, given);
        check(rc, operation);
      } finally {
        leave();
      }
    } catch (RuntimeException e) {
      child.discard();
      throw e;
    }
    inProgress = false; // the parent is busy until the child is there: awaitReady polls it
    child.started(operation, rc);
    event.ended(operation, child.rank, child.size, device);
    return child;
  }

  /**
   * Gives a resource that lives on this communicator to it: {@link #close} closes it before the
   * communicator, the youngest first.
   */
  public synchronized void adopt(AutoCloseable child) {
    children.add(child);
  }

  /** The first resource of a class that lives on this communicator, or null. */
  public synchronized <T extends AutoCloseable> @Nullable T child(Class<T> type) {
    for (AutoCloseable child : children) {
      if (type.isInstance(child)) {
        return type.cast(child);
      }
    }
    return null;
  }

  /**
   * Whether what lives on this communicator is to be ended natively, piece by piece: not after it
   * failed or ended, nor when its device is lost. For code that adds resources.
   */
  public boolean endsResources() {
    return state == State.READY && !device.isLost();
  }

  /**
   * Frees a resource now, or where this communicator has failed at its end: until then a kernel may
   * wait for a rank that never comes, and freeing memory waits for kernels. For code that adds
   * resources.
   */
  public void freeOrKeep(Runnable free) {
    synchronized (this) {
      if (state == State.FAILED && !device.isLost()) {
        children.add(free::run);
        return;
      }
    }
    free.run();
  }

  /** Takes a resource back that was closed by itself. */
  public synchronized void disown(AutoCloseable child) {
    children.remove(child);
  }

  // ------------------------------------------------------------------ failure and end

  /**
   * Asks NCCL for an asynchronous error ({@code ncclCommGetAsyncError}), such as a dead peer, and
   * throws it; also repeats an earlier failure. Returns at once where there is none.
   */
  @Override
  public void throwIfFailed() {
    State now = state;
    if (now == State.INITIALISING || now == State.CLOSED && failure == null) {
      return;
    }
    if (now != State.READY && now != State.FINALIZING) {
      throwUnusable("ncclCommGetAsyncError");
    }
    int error = pollAsyncError();
    if (error != 0 && error != IN_PROGRESS) {
      check(error, "ncclCommGetAsyncError");
    }
  }

  /**
   * NCCL's asynchronous error as it is ({@code ncclCommGetAsyncError}): an {@code ncclResult_t}, 0
   * where all is well, {@code ncclInProgress} while a non-blocking call is under way.
   */
  public int asyncError() {
    State now = state;
    if (now == State.CLOSED || now == State.ABORTED || handle.address() == 0) {
      throwUnusable("ncclCommGetAsyncError");
    }
    return pollAsyncError();
  }

  private int pollAsyncError() {
    synchronized (asyncErrorOut) {
      if (state == State.CLOSED || state == State.ABORTED) {
        return 0; // ended meanwhile, by another thread
      }
      int rc = NcclH.ncclCommGetAsyncError(handle, asyncErrorOut);
      if (rc != 0) {
        return rc;
      }
      return asyncErrorOut.get(JAVA_INT, 0);
    }
  }

  /**
   * Ends the operations in flight on this rank and refuses new ones ({@code ncclCommRevoke},
   * 2.28.7). The communicator can then be shrunk, aborted or closed.
   */
  public void revoke() {
    NativeLibraries.requireNccl("ncclCommRevoke", "2.28.7");
    call("ncclCommRevoke", comm -> NcclH.ncclCommRevoke(comm, NcclH.NCCL_REVOKE_DEFAULT()));
    synchronized (this) {
      if (state == State.READY) {
        state = State.REVOKED;
      }
    }
  }

  /**
   * Ends all work of this communicator now ({@code ncclCommAbort}), from any thread: waiting ranks
   * see a failure. Its resources are released.
   *
   * @throws IllegalStateException if another thread is inside a native call, which NCCL does not
   *     allow; a non-blocking communicator's calls return at once, so that this does not happen
   */
  public void abort() {
    abort(null);
  }

  /** Like {@link #abort()}; later calls repeat the cause. */
  void abort(@Nullable Throwable cause) {
    claimForEnd("ncclCommAbort");
    try {
      synchronized (this) {
        if (hasEnded()) {
          return;
        }
        if (cause != null && failure == null) {
          failure = cause;
        }
        state = State.ABORTED;
      }
      release(true);
    } finally {
      leave();
    }
  }

  private boolean hasEnded() {
    State now = state;
    return now == State.CLOSED || now == State.ABORTED;
  }

  private void claimForEnd(String operation) {
    if (NcclGroup.isActive()) {
      throw new IllegalStateException(operation + where() + " inside a group: end the group first");
    }
    // A non-blocking call and a poll of settle() last microseconds, unless the thread is displaced.
    long deadline = System.nanoTime() + (config.isBlocking() ? 10_000_000L : 1_000_000_000L);
    @Nullable Thread other = claim();
    while (other != null && System.nanoTime() - deadline < 0) {
      Thread.onSpinWait();
      other = claim();
    }
    if (other != null) {
      throw new IllegalStateException(
          operation + where() + ": thread " + other.getName() + " is inside a call");
    }
  }

  /**
   * Waits for the enqueued work and ends the communicator in two steps ({@code ncclCommFinalize},
   * 2.14.3, then {@code ncclCommDestroy}). All ranks must call it. Nothing is closed if the
   * communicator has failed: abort or close it.
   *
   * <p>On a blocking communicator the timeout bounds the wait for the enqueued work; the call of
   * NCCL that follows may wait for ranks that never make it. A non-blocking one is bounded in all.
   *
   * @throws DeadlineException after the timeout: call it again, or abort
   */
  public void finalizeAndClose(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    if (state != State.FINALIZING) {
      enter("ncclCommFinalize");
      try {
        awaitWork(deadline);
        RuntimeException trouble = closeAll(takeChildren(), null);
        if (trouble != null) {
          throw trouble;
        }
        check(NcclH.ncclCommFinalize(handle), "ncclCommFinalize");
        synchronized (this) {
          if (state == State.READY) {
            state = State.FINALIZING;
          }
        }
      } finally {
        leave();
      }
    }
    inProgress = false;
    settle("ncclCommFinalize", deadline);
    close();
  }

  /** Until nothing is enqueued any more, or NCCL reports an error. */
  private void awaitWork(long deadline) {
    for (int round = 0; ; round++) {
      int error = pollAsyncError();
      if (error != IN_PROGRESS) {
        check(error, "ncclCommFinalize");
      }
      if (streams.stream().allMatch(stream -> stream.isClosed() || stream.isStill())) {
        return;
      }
      Backoff.pause(round, deadline, "ncclCommFinalize" + where());
    }
  }

  /**
   * Waits for the enqueued work and ends the communicator ({@code ncclCommDestroy}); one that
   * failed, was revoked, never got ready or has a non-blocking call under way is aborted instead.
   * All ranks must close. Resources that live on it, and communicators split from it, are closed
   * first, the youngest first; with an abort, the splits are aborted.
   */
  @Override
  public void close() {
    if (hasEnded()) {
      return;
    }
    claimForEnd("ncclCommDestroy");
    try {
      if (hasEnded()) {
        return;
      }
      RuntimeException trouble = null;
      if (state == State.READY && canBeDestroyed()) {
        trouble = closeAll(takeChildren(), null);
      }
      boolean destroy = canBeDestroyed();
      synchronized (this) {
        destroy &= state == State.READY || state == State.FINALIZING;
        state = State.CLOSED;
      }
      try {
        release(!destroy);
      } catch (RuntimeException e) {
        if (trouble != null) {
          e.addSuppressed(trouble);
        }
        trouble = e;
      }
      if (trouble != null) {
        throw trouble;
      }
    } finally {
      leave();
    }
  }

  /** A destroy would wait for a peer that died, and NCCL refuses it while a call is under way. */
  private boolean canBeDestroyed() {
    if (state != State.READY && state != State.FINALIZING || device.isLost()) {
      return false;
    }
    int error = pollAsyncError();
    if (error != 0 && error != IN_PROGRESS) {
      fail(NcclException.of("ncclCommGetAsyncError", error, where()));
    }
    return error == 0;
  }

  private synchronized List<AutoCloseable> takeChildren() {
    List<AutoCloseable> owned = new ArrayList<>(children);
    children.clear();
    return owned;
  }

  /**
   * The native end. An abort comes in the order that lets no kernel touch memory that is gone: the
   * kernels of the resources are told, given time, then NCCL ends its own, and the memory is freed
   * when the streams are still.
   */
  private void release(boolean abort) {
    CommunicatorEvent event = CommunicatorEvent.started();
    RuntimeException trouble = null;
    boolean lost = device.isLost(); // nothing native then: NCCL would wait for what never comes
    if (!lost) {
      try {
        device.makeCurrent();
      } catch (CudaException e) {
        trouble = e; // NCCL sets the device itself
      }
    }
    List<AutoCloseable> left = takeChildren();
    if (abort) {
      trouble = abortSplits(left, trouble);
    }
    if (abort && !lost && abortKernels(left)) {
      areStreamsStill(KERNELS_END_WITHIN); // those behind a stuck one of NCCL's end after the abort
    }
    trouble = closeGraphs(left, trouble);
    String operation = abort ? "ncclCommAbort" : "ncclCommDestroy";
    synchronized (asyncErrorOut) { // no look at the async error of a handle that is being freed
      if (handle.address() == 0) {
        handle = handleOut.get(ADDRESS, 0);
      }
      if (handle.address() != 0 && !lost) {
        int rc = abort ? NcclH.ncclCommAbort(handle) : NcclH.ncclCommDestroy(handle);
        if (rc != 0 && rc != IN_PROGRESS) {
          trouble = add(trouble, NcclException.of(operation, rc, where()));
        }
      }
    }
    List<Communicator> late;
    synchronized (this) {
      late = List.copyOf(closedUnmade);
      closedUnmade.clear();
      released = true;
    }
    for (Communicator child : late) {
      trouble = child.endLate(trouble);
    }
    if (left.isEmpty() || areStreamsStill(STREAMS_STILL_WITHIN)) {
      trouble = closeAll(left, trouble);
    } else {
      LOG.log(
          System.Logger.Level.WARNING,
          "nccl-ffm: {0}: device work did not end after {1}; the memory of {2} resources stays"
              + " taken",
          this,
          operation,
          left.size());
    }
    for (CudaStream stream : streams) {
      stream.unwatch(failures);
    }
    @Nullable Watchdog dog = watchdog;
    if (dog != null) {
      dog.stop();
    }
    leak.closed();
    @Nullable Communicator from = parent;
    if (from != null) {
      from.disown(this);
    }
    if (handle.address() != 0 || from == null || !from.endsLater(this)) {
      trouble = endLate(trouble);
    }
    event.ended(operation, rank, size, device);
    if (trouble != null) {
      throw trouble;
    }
  }

  /** Takes over a child that NCCL may still be making; false if this communicator has ended. */
  private synchronized boolean endsLater(Communicator child) {
    if (released) {
      return false;
    }
    closedUnmade.add(child);
    return true;
  }

  /** Ends what NCCL made after the close. From here on it writes nothing more. */
  private @Nullable RuntimeException endLate(@Nullable RuntimeException first) {
    if (device.isLost()) {
      return first; // NCCL was not ended, and might still write
    }
    MemorySegment made = handle.address() == 0 ? handleOut.get(ADDRESS, 0) : MemorySegment.NULL;
    RuntimeException trouble = first;
    if (made.address() != 0) {
      int rc = NcclH.ncclCommAbort(made);
      if (rc != 0 && rc != IN_PROGRESS) {
        trouble = add(first, NcclException.of("ncclCommAbort", rc, where()));
      }
    }
    arena.close();
    return trouble;
  }

  private static RuntimeException add(@Nullable RuntimeException first, RuntimeException next) {
    if (first == null) {
      return next;
    }
    first.addSuppressed(next);
    return first;
  }

  /** NCCL's end, an abort too, waits until no graph holds its work any more. */
  private static @Nullable RuntimeException closeGraphs(
      List<AutoCloseable> resources, @Nullable RuntimeException first) {
    List<AutoCloseable> graphs =
        resources.stream().filter(resource -> resource instanceof CudaGraph).toList();
    resources.removeAll(graphs);
    return closeAll(graphs, first);
  }

  /** Their other ranks may never come to a destroy. */
  private static @Nullable RuntimeException abortSplits(
      List<AutoCloseable> resources, @Nullable RuntimeException first) {
    RuntimeException trouble = first;
    for (int i = resources.size() - 1; i >= 0; i--) {
      if (resources.get(i) instanceof Communicator split) {
        try {
          split.abort();
        } catch (RuntimeException e) {
          trouble = add(trouble, e);
        }
      }
    }
    return trouble;
  }

  /** Makes the kernels that wait for peers give up; frees nothing. From any thread. */
  void abortKernels() {
    List<AutoCloseable> now;
    synchronized (this) {
      now = List.copyOf(children);
    }
    abortKernels(now);
  }

  private static boolean abortKernels(List<AutoCloseable> resources) {
    boolean any = false;
    for (AutoCloseable resource : resources) {
      if (resource instanceof AbortableResource abortable) {
        abortable.abort();
        any = true;
      }
    }
    return any;
  }

  private boolean areStreamsStill(Duration within) {
    long deadline = Backoff.deadline(within);
    try {
      for (CudaStream stream : streams) {
        for (int round = 0; !stream.isStill(); round++) {
          Backoff.pause(round, deadline, "device work of " + this);
        }
      }
      return true;
    } catch (DeadlineException e) {
      return false;
    } catch (CudaException e) {
      return true; // a device that cannot even be made current runs nothing
    }
  }

  private static @Nullable RuntimeException closeAll(
      List<AutoCloseable> owned, @Nullable RuntimeException first) {
    RuntimeException trouble = first;
    for (int i = owned.size() - 1; i >= 0; i--) {
      try {
        owned.get(i).close();
      } catch (Exception e) {
        trouble = add(trouble, e instanceof RuntimeException r ? r : new IllegalStateException(e));
      }
    }
    return trouble;
  }

  @Override
  public String toString() {
    return "communicator" + where();
  }
}

package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.AbortableResource;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.FailureSource;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclFfmChannel;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.core.bindings.shim.ncclFfmStatus;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.MemoryLayout.PathElement;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.VarHandle;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.HashSet;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * What kernels of one rank need to communicate ({@code ncclFfmDevComm}): channels, the addresses of
 * the peers' windows, and a status record through which a failed kernel tells what happened.
 *
 * <p>Creating and closing are collective over the communicator, which closes it too. Its kernels
 * are launched in the same order on every rank, one stream at a time: a second collective on a busy
 * channel is an error. Threads: one at a time.
 */
public final class DeviceCommunicator implements AbortableResource, FailureSource {
  /** Blocks that may work on one collective. */
  private static final int CHANNELS = 16;

  /** LL lines a peer has in flight on a channel: 4096 of 8 bytes payload are a chunk of 32 KiB. */
  private static final int LINES_PER_SLOT = 4096;

  private static final Duration SETUP_TIMEOUT = Duration.ofMinutes(1);
  private static final Duration ABORT_TIMEOUT = Duration.ofSeconds(1);
  private static final int REMOTE_ERROR = 6;
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  private static final VarHandle READY =
      ncclFfmStatus.layout().varHandle(PathElement.groupElement("ready"));
  private static final VarHandle ABORT =
      ncclFfmStatus.layout().varHandle(PathElement.groupElement("abort"));

  private final Communicator communicator;
  private final Deque<AutoCloseable> resources;
  private final MemorySegment status;
  private final MemorySegment abortCode;
  private final DeviceBuffer channels;
  private final CudaStream ownStream;
  private final LsaWindow window;
  private final boolean checked;
  // Guards closed, aborted and the status record: a thread that waits for a stream reads the record
  // while another may abort and close.
  private final Object lock = new Object();
  private final Arena arena = Arena.ofShared();
  private final MemorySegment struct = ncclFfmDevComm.allocate(arena);
  private final Set<CudaStream> streams = new HashSet<>();
  private @Nullable CudaStream lastStream;
  private boolean aborted;
  private boolean closed;

  private DeviceCommunicator(
      Communicator communicator,
      Deque<AutoCloseable> resources,
      MemorySegment pinned,
      DeviceBuffer channels,
      CudaStream ownStream,
      LsaWindow window,
      boolean checked) {
    this.communicator = communicator;
    this.window = window;
    this.checked = checked;
    this.resources = resources;
    this.status = pinned.asSlice(0, ncclFfmStatus.sizeof());
    this.abortCode = pinned.asSlice(ncclFfmStatus.sizeof(), Integer.BYTES);
    this.channels = channels;
    this.ownStream = ownStream;
    abortCode.set(JAVA_INT, 0, REMOTE_ERROR);
    resources.push(arena::close);
  }

  /** Creates one whose kernels wait 30 seconds at most for a peer. Collective. */
  public static DeviceCommunicator create(Communicator communicator) {
    return create(communicator, DeviceCommunicatorConfig.DEFAULT);
  }

  /** Creates one whose kernels wait as long as said for a peer; see the long form. */
  public static DeviceCommunicator create(Communicator communicator, Duration timeout) {
    return create(communicator, DeviceCommunicatorConfig.builder().timeout(timeout).build());
  }

  /**
   * Creates one. Collective: every rank calls it. Loads and runs every kernel once, so that none
   * has to be loaded while another rank's waits.
   *
   * @throws io.ncclffm.core.NativeLibraryException if the CUDA shim was not built
   * @throws io.ncclffm.lsa.LsaException if the ranks cannot address one another's memory
   */
  public static DeviceCommunicator create(
      Communicator communicator, DeviceCommunicatorConfig config) {
    NativeLibraries.requireShim();
    CudaDevice device = communicator.device();
    // The ranks meet in a kernel of NCCL here, for the last time if they are threads. From now on
    // none is launched until all have loaded their kernels and allocated, which would wait for a
    // spinning kernel of another rank on the same device.
    LsaWindow.prepare(communicator);
    Deque<AutoCloseable> resources = new ArrayDeque<>();
    try {
      long words = CHANNELS * ncclFfmChannel.sizeof() / Integer.BYTES;
      DeviceBuffer channels = DeviceBuffer.allocate(device, DataType.UINT32, words);
      resources.push(channels);
      HostBuffer status = HostBuffer.allocate(device, ncclFfmStatus.sizeof() + Integer.BYTES);
      resources.push(status);
      CudaStream stream = CudaStream.create(device);
      resources.push(stream);
      channels.fill((byte) 0, stream);
      checkShim(ShimH.ncclFfmPrime(stream.handle()), "ncclFfmPrime");
      stream.synchronize(SETUP_TIMEOUT);
      // When this returns, every rank has come to the end of it: nothing that loads or allocates
      // may follow here.
      LsaWindow window =
          LsaWindow.create(communicator, windowBytes(communicator.size()), config.provider());
      resources.push(window);
      communicator.disown(window); // closed by this object from now on, in its order
      if (window.team().size() < communicator.size()) {
        throw new NcclException(
            "device communicator",
            NcclH.ncclInvalidUsage(),
            " on " + communicator,
            "its window joins only the " + window.team());
      }
      DeviceCommunicator created =
          new DeviceCommunicator(
              communicator,
              resources,
              status.segment(),
              channels,
              stream,
              window,
              config.isChecked());
      created.fillStruct(config.timeout(), channels, window.lsa().peers(), status);
      communicator.adopt(created);
      return created;
    } catch (RuntimeException e) {
      communicator.freeOrKeep(() -> closeAll(resources, e));
      throw e;
    }
  }

  private static void closeAll(Deque<AutoCloseable> resources) {
    @Nullable RuntimeException trouble = closeAll(resources, null);
    if (trouble != null) {
      throw trouble;
    }
  }

  private static @Nullable RuntimeException closeAll(
      Deque<AutoCloseable> resources, @Nullable RuntimeException first) {
    RuntimeException trouble = first;
    while (!resources.isEmpty()) {
      try {
        resources.pop().close();
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

  private static long windowBytes(int size) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_LONG);
      int rc = ShimH.ncclFfmGetWindowBytes(size, CHANNELS, LINES_PER_SLOT, out);
      checkShim(rc, "ncclFfmGetWindowBytes");
      return out.get(JAVA_LONG, 0);
    }
  }

  private void fillStruct(
      Duration timeout, DeviceBuffer channels, DeviceBuffer peers, HostBuffer statusBuffer) {
    ncclFfmDevComm.magic(struct, ShimH.NCCLFFM_DEVCOMM_MAGIC());
    ncclFfmDevComm.version(struct, ShimH.NCCLFFM_ABI_VERSION());
    ncclFfmDevComm.rank(struct, communicator.rank());
    ncclFfmDevComm.nRanks(struct, communicator.size());
    ncclFfmDevComm.nChannels(struct, CHANNELS);
    ncclFfmDevComm.linesPerSlot(struct, LINES_PER_SLOT);
    ncclFfmDevComm.timeoutNs(struct, timeout.toNanos());
    ncclFfmDevComm.channels(struct, channels.address(0));
    ncclFfmDevComm.peers(struct, peers.address(0));
    ncclFfmDevComm.status(struct, statusBuffer.deviceAddress());
  }

  /** The communicator that this one lives on. */
  public Communicator communicator() {
    return communicator;
  }

  /**
   * The {@code ncclFfmDevComm} in host memory, to be passed to a kernel by value; valid until
   * closed.
   *
   * @throws IllegalStateException if closed
   */
  public MemorySegment struct() {
    synchronized (lock) {
      if (closed) {
        throw new IllegalStateException("device communicator of " + communicator + " is closed");
      }
      return struct.asReadOnly();
    }
  }

  /**
   * All-reduces whole buffers in one kernel (LL protocol, one-shot): every rank stores its data
   * with a flag into every peer's window and sums what arrives, in rank order, so that the result
   * is the same on all. Asynchronous; for now {@link DataType#FLOAT32} and {@link ReduceOp#SUM}.
   *
   * @param send may be the same buffer as recv
   */
  public void allReduce(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    checkCounts("ncclFfmAllReduce", send, recv);
    allReduce(send, 0, recv, 0, send.count(), op, stream);
  }

  /** All-reduces {@code count} elements from any offsets; see the short form. */
  public void allReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      CudaStream stream) {
    checkBuffer("ncclFfmAllReduce", send);
    checkBuffer("ncclFfmAllReduce", recv);
    if (send.type() != recv.type()) {
      throw new IllegalArgumentException(
          "ncclFfmAllReduce: send " + send + " and recv " + recv + " differ in type");
    }
    communicator.begin("ncclFfmAllReduce", stream);
    try {
      synchronized (lock) {
        checkUsable("ncclFfmAllReduce", stream);
        int rc =
            ShimH.ncclFfmAllReduce(
                struct,
                send.address("ncclFfmAllReduce", sendOffset, count),
                recv.address("ncclFfmAllReduce", recvOffset, count),
                count,
                send.type().ncclValue(),
                op.ncclValue(),
                stream.handle());
        checkShim(rc, "ncclFfmAllReduce");
      }
    } finally {
      communicator.end();
    }
  }

  /** See {@link FusedKernels#scaleAllReduceSqrt}. */
  void scaleAllReduceSqrt(
      DeviceBuffer x, long offset, long count, float a, float b, CudaStream stream) {
    String operation = "ncclFfmFusedScaleAllReduceSqrt";
    checkBuffer(operation, x);
    if (x.type() != DataType.FLOAT32) {
      throw new IllegalArgumentException(
          operation + ": the " + x + " is not of type FLOAT32, the only one so far");
    }
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        checkUsable(operation, stream);
        int rc =
            ShimH.ncclFfmFusedScaleAllReduceSqrt(
                struct, x.address(operation, offset, count), count, a, b, stream.handle());
        checkShim(rc, operation);
      }
    } finally {
      communicator.end();
    }
  }

  /** Before a launch, under the lock: open, not failed, and the stream knows whom to ask. */
  private void checkUsable(String operation, CudaStream stream) {
    if (closed) {
      throw new IllegalStateException(
          operation + ": the device communicator of " + communicator + " is closed");
    }
    throwIfFailed();
    boolean captured = stream.isCapturing();
    if (checked && !captured) {
      verify(operation);
    }
    if (stream != lastStream || captured) {
      streams.removeIf(known -> known.isClosed());
      stream.watch(this);
      streams.add(stream);
      lastStream = stream;
    }
  }

  /** The window under this device communicator; closed with it. */
  public LsaWindow window() {
    return window;
  }

  /**
   * Looks whether what a kernel would be given is what it says: this is open, the struct is whole
   * and of this rank, and the window passes {@link LsaWindow#verify}. For a kernel of one's own;
   * the launches here do it by themselves if so configured. Not collective.
   *
   * @param operation who asks, for the message
   * @throws IllegalStateException if closed
   * @throws io.ncclffm.lsa.LsaException if an address does not lead where it should
   */
  public void verify(String operation) {
    synchronized (lock) {
      verify(operation, struct());
      window.check(operation, communicator);
      window.verify(operation);
    }
  }

  /**
   * Looks whether a struct that is to be handed to a kernel is this device communicator's.
   *
   * @throws IllegalArgumentException if it is another rank's, an old one's or was written over
   * @throws IllegalStateException if closed
   */
  public void verify(String operation, MemorySegment candidate) {
    MemorySegment mine = struct();
    if (candidate.byteSize() != mine.byteSize()
        || ncclFfmDevComm.magic(candidate) != ShimH.NCCLFFM_DEVCOMM_MAGIC()
        || ncclFfmDevComm.version(candidate) != ShimH.NCCLFFM_ABI_VERSION()) {
      throw new IllegalArgumentException(
          operation + " on " + communicator + ": the struct is no ncclFfmDevComm of this version");
    }
    if (ncclFfmDevComm.rank(candidate) != communicator.rank()) {
      throw new IllegalArgumentException(
          operation
              + " on "
              + communicator
              + ": the struct is rank "
              + ncclFfmDevComm.rank(candidate)
              + "'s");
    }
    if (candidate.mismatch(mine) != -1) {
      throw new IllegalArgumentException(
          operation
              + " on "
              + communicator
              + ": the struct is another device communicator's, or was written over");
    }
  }

  private static void checkCounts(String operation, DeviceBuffer send, DeviceBuffer recv) {
    if (send.count() != recv.count()) {
      throw new IllegalArgumentException(
          operation + ": the lengths of send " + send + " and recv " + recv + " do not match");
    }
  }

  private void checkBuffer(String operation, DeviceBuffer buffer) {
    if (buffer.device().ordinal() != communicator.device().ordinal()) {
      throw new IllegalArgumentException(
          operation
              + " on "
              + communicator
              + ": the "
              + buffer
              + " is on another device; allocate it on the communicator's");
    }
  }

  private static void checkShim(int rc, String operation) {
    if (rc != 0) {
      String text = NativeText.copy(ShimH.ncclFfmGetLastError());
      throw new NcclException(operation, rc, "", text);
    }
  }

  /**
   * Throws what a kernel reported, if one failed; also asked by {@link CudaStream#synchronize} on
   * every stream used, until this is closed.
   *
   * @throws DeviceCommException with function, rank, peer, channel, epoch and waited time
   */
  @Override
  public void throwIfFailed() {
    synchronized (lock) {
      if (!closed && (int) READY.getAcquire(status, 0L) != 0) {
        throw new DeviceCommException(
            functionName(ncclFfmStatus.function(status)),
            ncclFfmStatus.code(status),
            ncclFfmStatus.rank(status),
            ncclFfmStatus.peer(status),
            ncclFfmStatus.channel(status),
            ncclFfmStatus.epoch(status),
            Duration.ofNanos(ncclFfmStatus.waitedNs(status)));
      }
      if (aborted) {
        throw new DeviceCommException(
            "device communicator", REMOTE_ERROR, communicator.rank(), -1, -1, 0, Duration.ZERO);
      }
    }
  }

  private static String functionName(int function) {
    if (function == ShimH.ncclFfmFunctionAllReduce()) {
      return "ncclFfmAllReduce";
    }
    if (function == ShimH.ncclFfmFunctionFusedScaleAllReduceSqrt()) {
      return "ncclFfmFusedScaleAllReduceSqrt";
    }
    return "device function " + function;
  }

  /**
   * Makes every kernel of this rank that waits give up with {@code ncclRemoteError}, and those
   * still enqueued do nothing; from any thread. The communicator itself stays usable.
   */
  @Override
  public void abort() {
    synchronized (lock) {
      if (closed || aborted) {
        return;
      }
      aborted = true;
      ABORT.setRelease(status, 0L, 1); // kernels that wait look here
      // Kernels that start look at this word in device memory.
      long failedWord = ncclFfmChannel.failed$offset() / Integer.BYTES;
      channels.copyFrom(abortCode, failedWord, ownStream);
      try {
        ownStream.synchronize(ABORT_TIMEOUT);
      } catch (RuntimeException e) {
        LOG.log(System.Logger.Level.WARNING, "nccl-ffm: abort of a device communicator", e);
      }
    }
  }

  /**
   * Ends it. Collective where the communicator is ready. The kernels launched must have ended, as
   * after {@link CudaStream#synchronize}.
   */
  @Override
  public void close() {
    synchronized (lock) {
      if (closed) {
        return;
      }
    }
    boolean ready = communicator.endsResources();
    if (ready) {
      communicator.begin("close of a device communicator", ownStream);
    }
    try {
      closeResources();
    } finally {
      if (ready) {
        communicator.end();
      }
    }
  }

  private void closeResources() {
    synchronized (lock) {
      if (closed) {
        return;
      }
      closed = true;
    }
    streams.forEach(stream -> stream.unwatch(this));
    communicator.disown(this);
    Deque<AutoCloseable> ends = new ArrayDeque<>();
    ends.push(() -> communicator.freeOrKeep(() -> closeAll(resources)));
    ends.push(window);
    closeAll(ends);
  }
}

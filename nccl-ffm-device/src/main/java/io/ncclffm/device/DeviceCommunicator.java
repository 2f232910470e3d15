package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.AbortableResource;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.FailureSource;
import io.ncclffm.core.GraphWork;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclFfmCall;
import io.ncclffm.core.bindings.shim.ncclFfmChannel;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.core.bindings.shim.ncclFfmOptimizer;
import io.ncclffm.core.bindings.shim.ncclFfmPair;
import io.ncclffm.core.bindings.shim.ncclFfmRmsNorm;
import io.ncclffm.core.bindings.shim.ncclFfmStatus;
import io.ncclffm.core.bindings.shim.ncclLsaBuffer;
import io.ncclffm.core.internal.Backoff;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import io.ncclffm.lsa.LsaPath;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaProvider;
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
 * the peers' windows, and a status record through which a failed kernel tells what happened. And
 * the collectives that are a kernel of their own ({@code ncclFfmLaunch}).
 *
 * <p>Every collective is called by all ranks, in the same order, with the same arguments but for
 * buffers, buffers' offsets and streams. It is enqueued on a stream and returns at once; a failure
 * in the kernel is thrown by {@link CudaStream#synchronize} and by every later call. Counts and
 * offsets in buffers are in elements, offsets in windows in bytes, both as small or odd as they
 * come. All types of {@link DataType} but the 8-bit floats; the sum, product, minimum, maximum and
 * average of {@link ReduceOp}. Results are bit-identical on all ranks. In place and otherwise as
 * {@link Communicator}'s: buffers are equal or apart, or this rank's part of the larger one.
 *
 * <p>Collectives run one at a time: a second one on a busy channel is an error, which the stream
 * reports. {@link #send} and {@link #recv} may run beside one on other streams, also several at
 * once if with different peers; then all their blocks must fit on the GPU at the same time, or they
 * wait for one another until the deadline: {@link LaunchChoice#blocks} keeps them small. A
 * collective by {@link DeviceAlgorithm#RING} is made of sends, and takes none to or from a
 * neighbour beside it.
 *
 * <p>The forms on windows ("zero-copy") take memory that every rank reaches: kernels load from and
 * store to the peers' windows, and nothing is staged. All ranks name the same windows and the same
 * offsets, but for this rank's part of the larger buffer in place. Peers touch a rank's memory only
 * while its own kernel runs.
 *
 * <p>Creating and closing are collective over the communicator, which closes it too. Threads: one
 * at a time; {@link #abort} from any. No call here allocates on the Java heap.
 */
public final class DeviceCommunicator implements AbortableResource, FailureSource {
  private static final Duration SETUP_TIMEOUT = Duration.ofMinutes(1);
  private static final Duration ABORT_TIMEOUT = Duration.ofSeconds(1);
  private static final int REMOTE_ERROR = 6;
  private static final String AWAIT = "awaitKernels";
  private static final long SIGNAL_OFFSET = 128; // in the pinned memory: behind what else is there
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  private static final VarHandle READY =
      ncclFfmStatus.layout().varHandle(PathElement.groupElement("ready"));
  private static final VarHandle ABORT =
      ncclFfmStatus.layout().varHandle(PathElement.groupElement("abort"));
  private static final VarHandle SIGNAL = JAVA_INT.varHandle();

  private final Communicator communicator;
  private final Deque<AutoCloseable> resources;
  private final MemorySegment status;
  private final MemorySegment abortCode;
  private final MemorySegment signal; // how many kernels have finished
  private final DeviceBuffer channels;
  private final CudaStream ownStream;
  private final LsaWindow window;
  private final boolean checked;
  private final boolean hostSignal;
  // Guards closed, aborted and the status record: a thread that waits for a stream reads the record
  // while another may abort and close.
  private final Object lock = new Object();
  private final Arena arena = Arena.ofShared();
  private final MemorySegment struct = ncclFfmDevComm.allocate(arena);
  private MemorySegment asMade = MemorySegment.NULL; // a copy that no native code is given
  // Filled anew for every launch, under the lock: nothing is allocated for one.
  private final MemorySegment call = ncclFfmCall.allocate(arena);
  private final MemorySegment sendWindow = ncclFfmCall.send(call);
  private final MemorySegment recvWindow = ncclFfmCall.recv(call);
  private final MemorySegment rmsNorm = ncclFfmRmsNorm.allocate(arena);
  private final MemorySegment optimizer = ncclFfmOptimizer.allocate(arena);
  private final int rank;
  private final int size;
  private final Set<CudaStream> streams = new HashSet<>();
  private @Nullable CudaStream lastStream;
  private @Nullable TaskQueue queue;
  private int launched; // kernels that signal the host; wraps
  private boolean aborted;
  private boolean closed;

  private DeviceCommunicator(
      Communicator communicator,
      Deque<AutoCloseable> resources,
      MemorySegment pinned,
      DeviceBuffer channels,
      CudaStream ownStream,
      LsaWindow window,
      DeviceCommunicatorConfig config) {
    this.communicator = communicator;
    this.rank = communicator.rank();
    this.size = communicator.size();
    this.window = window;
    this.checked = config.isChecked();
    this.hostSignal = config.hostSignal();
    this.resources = resources;
    this.status = pinned.asSlice(0, ncclFfmStatus.sizeof());
    this.abortCode = pinned.asSlice(ncclFfmStatus.sizeof(), Integer.BYTES);
    this.signal = pinned.asSlice(SIGNAL_OFFSET, Integer.BYTES);
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
   * @throws IllegalArgumentException if {@code NCCLFFM_PROTO} or {@code NCCLFFM_ALGO} is set to
   *     what is none
   * @throws io.ncclffm.core.NativeLibraryException if the CUDA shim was not built
   * @throws io.ncclffm.lsa.LsaException if the ranks cannot address one another's memory
   */
  public static DeviceCommunicator create(
      Communicator communicator, DeviceCommunicatorConfig config) {
    NativeLibraries.requireShim();
    // Before anything is made: what the environment says may be no protocol.
    int protocol = LaunchChoice.valueOf(config.protocol());
    int algorithm = DeviceAlgorithm.valueOf(config.algorithm());
    CudaDevice device = communicator.device();
    // The ranks meet in a kernel of NCCL here, for the last time if they are threads. From now on
    // none is launched until all have loaded their kernels and allocated, which would wait for a
    // spinning kernel of another rank on the same device.
    LsaWindow.prepare(communicator);
    Deque<AutoCloseable> resources = new ArrayDeque<>();
    try {
      // Closed last: to free memory of the device waits for kernels, which may still store here.
      HostBuffer status = HostBuffer.allocate(device, SIGNAL_OFFSET + Integer.BYTES);
      resources.push(status);
      long words = config.channels() * ncclFfmChannel.sizeof() / Integer.BYTES;
      DeviceBuffer channels = DeviceBuffer.allocate(device, DataType.UINT32, words);
      resources.push(channels);
      long pairBytes = (long) config.channels() * communicator.size() * ncclFfmPair.sizeof();
      DeviceBuffer pairs = DeviceBuffer.allocate(device, DataType.UINT8, pairBytes);
      resources.push(pairs);
      CudaStream stream = CudaStream.create(device);
      resources.push(stream);
      channels.fill((byte) 0, stream);
      pairs.fill((byte) 0, stream);
      checkShim(ShimH.ncclFfmPrime(stream.handle()), "ncclFfmPrime");
      stream.synchronize(SETUP_TIMEOUT);
      // When this returns, every rank has come to the end of it: nothing that loads or allocates
      // may follow here.
      LsaWindow window =
          LsaWindow.create(
              communicator, windowBytes(communicator.size(), config), config.provider());
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
              communicator, resources, status.segment(), channels, stream, window, config);
      ncclFfmDevComm.protocol(created.struct, protocol);
      ncclFfmDevComm.algorithm(created.struct, algorithm);
      created.fillStruct(config, pairs, status.deviceAddress());
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

  /** Closes all, the youngest first, whatever they throw. */
  static @Nullable RuntimeException closeAll(
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

  private static long windowBytes(int size, DeviceCommunicatorConfig config) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_LONG);
      int rc = ShimH.ncclFfmGetWindowBytes(size, config.channels(), config.slotBytes(), out);
      checkShim(rc, "ncclFfmGetWindowBytes");
      return out.get(JAVA_LONG, 0);
    }
  }

  private void fillStruct(
      DeviceCommunicatorConfig config, DeviceBuffer pairs, MemorySegment deviceStatus) {
    ncclFfmDevComm.magic(struct, ShimH.NCCLFFM_DEVCOMM_MAGIC());
    ncclFfmDevComm.version(struct, ShimH.NCCLFFM_ABI_VERSION());
    ncclFfmDevComm.rank(struct, rank);
    ncclFfmDevComm.nRanks(struct, size);
    ncclFfmDevComm.nChannels(struct, config.channels());
    ncclFfmDevComm.slotBytes(struct, config.slotBytes());
    ncclFfmDevComm.timeoutNs(struct, config.timeout().toNanos());
    ncclFfmDevComm.channels(struct, channels.address(0));
    ncclFfmDevComm.pairs(struct, pairs.address(0));
    ncclFfmDevComm.peers(struct, window.lsa().peers().address(0));
    ncclFfmDevComm.status(struct, deviceStatus);
    ncclFfmDevComm.lsa(struct, window.lsa().struct());
    ncclFfmDevComm.path(struct, pathOf(window));
    ncclFfmDevComm.ranksPerDevice(struct, window.ranksPerDevice());
    if (hostSignal) {
      long address = deviceStatus.address() + SIGNAL_OFFSET;
      ncclFfmDevComm.hostSignal(struct, MemorySegment.ofAddress(address));
    }
    asMade = MemorySegment.ofArray(struct.toArray(JAVA_BYTE));
  }

  /** The {@code ncclFfmPath} between any two ranks. */
  private static int pathOf(LsaWindow window) {
    if (window.provider() == LsaProvider.CPU) {
      return ShimH.ncclFfmPathSameGpu(); // one host's memory, whatever devices are emulated on it
    }
    LsaPath path = window.poorestPath();
    switch (path) {
      case SELF:
      case SAME_GPU:
        return ShimH.ncclFfmPathSameGpu();
      case NVLINK:
        return ShimH.ncclFfmPathNvLink();
      case PCIE_P2P:
        return ShimH.ncclFfmPathPcie();
      case HOST_STAGED:
        return ShimH.ncclFfmPathHostStaged();
      default:
        throw new IllegalStateException("no kernel reaches a rank over " + path);
    }
  }

  /** The communicator that this one lives on. */
  public Communicator communicator() {
    return communicator;
  }

  int ranksPerDevice() {
    return window.ranksPerDevice();
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
   * How a call would run ({@code ncclFfmChoose}): protocol, algorithm and blocks, where the choice
   * given, the device communicator's defaults and the table leave them. Not collective.
   *
   * @param count elements as the function counts them: of a buffer, or of one rank's part
   * @throws NcclException if the function cannot run so
   */
  public LaunchChoice choose(
      DeviceFunction function, DataType type, long count, LaunchChoice choice) {
    return choose(function, type, count, choice, 0);
  }

  /** The same of a call on windows. */
  public LaunchChoice chooseOnWindows(
      DeviceFunction function, DataType type, long count, LaunchChoice choice) {
    checkChoice(function.operation, choice);
    return choose(function, type, count, choice, window.lsa().peers().address(0).address());
  }

  private LaunchChoice choose(
      DeviceFunction function, DataType type, long count, LaunchChoice choice, long peers) {
    checkType(function, type);
    long all = times(function, count);
    if (all > Long.MAX_VALUE / 4 / type.bytes()) {
      throw new IllegalArgumentException(function.operation + ": " + count + " x " + type);
    }
    int other = rank == 0 ? 1 : 0;
    boolean isGrouped = function == DeviceFunction.HIERARCHICAL_ALL_REDUCE;
    boolean isPair = function.value >= DeviceFunction.SEND.value;
    synchronized (lock) {
      checkOpen(function.operation);
      // Buffers that nothing is read from: what will run does not depend on where they are.
      long near = peers == 0 ? 1 << 20 : 0;
      long far = near + all * type.bytes() + (1 << 20) & -512L;
      fill(function, type, 0, isGrouped ? size : isPair ? other : 0, other, count, choice);
      place(sendWindow, ncclFfmCall.sendbuff$offset(), peers, Long.MAX_VALUE, near);
      place(recvWindow, ncclFfmCall.recvbuff$offset(), peers, Long.MAX_VALUE, far);
      communicator.device().makeCurrent();
      checkShim(ShimH.ncclFfmChoose(struct, call), function.operation);
      return LaunchChoice.of(
          ncclFfmCall.protocol(call), ncclFfmCall.algorithm(call), ncclFfmCall.blocks(call));
    }
  }

  /** All of the call but the buffers. */
  private void fill(
      DeviceFunction function,
      DataType type,
      int op,
      int root,
      int source,
      long count,
      LaunchChoice choice) {
    ncclFfmCall.function(call, function.value);
    ncclFfmCall.datatype(call, type.ncclValue());
    ncclFfmCall.op(call, op);
    ncclFfmCall.root(call, root);
    ncclFfmCall.source(call, source);
    ncclFfmCall.protocol(call, LaunchChoice.valueOf(choice.protocol()));
    ncclFfmCall.algorithm(call, DeviceAlgorithm.valueOf(choice.algorithm()));
    ncclFfmCall.blocks(call, choice.blocks());
    ncclFfmCall.count(call, count);
  }

  /** A buffer at an address, or where there is a table of peers at an offset of a window. */
  private void place(
      MemorySegment ofWindow, long buffOffset, long peers, long bytes, long addressOrOffset) {
    boolean isWindow = peers != 0;
    call.set(JAVA_LONG, buffOffset, isWindow ? 0 : addressOrOffset);
    ofWindow.set(JAVA_LONG, ncclLsaBuffer.peers$offset(), peers);
    ncclLsaBuffer.bytes(ofWindow, isWindow ? bytes : 0);
    ncclLsaBuffer.offset(ofWindow, isWindow ? addressOrOffset : 0);
  }

  private void launch(
      DeviceFunction function,
      DataType type,
      int op,
      int root,
      int source,
      long count,
      long send,
      long recv,
      CudaStream stream,
      LaunchChoice choice) {
    communicator.begin(function.operation, stream);
    try {
      synchronized (lock) {
        checkUsable(function.operation, stream);
        fill(function, type, op, root, source, count, choice);
        place(sendWindow, ncclFfmCall.sendbuff$offset(), 0, 0, send);
        place(recvWindow, ncclFfmCall.recvbuff$offset(), 0, 0, recv);
        checkShim(ShimH.ncclFfmLaunch(struct, call, stream.handle()), function.operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  private void launch(
      DeviceFunction function,
      DataType type,
      int op,
      int root,
      long count,
      LsaWindow send,
      long sendOffset,
      long sendCount,
      LsaWindow recv,
      long recvOffset,
      long recvCount,
      CudaStream stream,
      LaunchChoice choice) {
    checkType(function, type);
    checkChoice(function.operation, choice);
    communicator.begin(function.operation, stream);
    try {
      checkWindow(function.operation, send, sendOffset, type, sendCount);
      checkWindow(function.operation, recv, recvOffset, type, recvCount);
      long sendPeers = send.lsa().peers().pointer(function.operation, 0, 0);
      long recvPeers = recv.lsa().peers().pointer(function.operation, 0, 0);
      synchronized (lock) {
        checkUsable(function.operation, stream);
        fill(function, type, op, root, 0, count, choice);
        place(sendWindow, ncclFfmCall.sendbuff$offset(), sendPeers, send.bytes(), sendOffset);
        place(recvWindow, ncclFfmCall.recvbuff$offset(), recvPeers, recv.bytes(), recvOffset);
        checkShim(ShimH.ncclFfmLaunch(struct, call, stream.handle()), function.operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  /** Windows have no wire protocol: their data is where it belongs when it is stored. */
  private static void checkChoice(String operation, LaunchChoice choice) {
    if (choice.protocol() != null && choice.protocol() != LsaProtocol.SIMPLE) {
      throw new IllegalArgumentException(
          operation
              + " on windows: "
              + choice
              + ": windows take SIMPLE only; leave the protocol open");
    }
  }

  /** Reduces whole buffers of equal type and count; every rank gets the result. */
  public void allReduce(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    checkCounts(DeviceFunction.ALL_REDUCE, send, send.count(), recv, recv.count());
    allReduce(send, 0, recv, 0, send.count(), op, stream);
  }

  /**
   * Reduces {@code count} elements; every rank gets the result ({@code ncclFfmFunctionAllReduce}).
   */
  public void allReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      CudaStream stream) {
    allReduce(send, sendOffset, recv, recvOffset, count, op, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void allReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.ALL_REDUCE, send, recv);
    launch(
        DeviceFunction.ALL_REDUCE,
        send.type(),
        opValue(DeviceFunction.ALL_REDUCE, op),
        0,
        0,
        count,
        send.pointer(DeviceFunction.ALL_REDUCE.operation, sendOffset, count),
        recv.pointer(DeviceFunction.ALL_REDUCE.operation, recvOffset, count),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void allReduce(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      ReduceOp op,
      CudaStream stream) {
    allReduce(send, sendOffset, recv, recvOffset, type, count, op, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void allReduce(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      ReduceOp op,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.ALL_REDUCE,
        type,
        opValue(DeviceFunction.ALL_REDUCE, op),
        0,
        count,
        send,
        sendOffset,
        count,
        recv,
        recvOffset,
        count,
        stream,
        choice);
  }

  /** Reduces, and leaves part r of the result on rank r; send has size times recv's elements. */
  public void reduceScatter(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    checkCounts(
        DeviceFunction.REDUCE_SCATTER,
        send,
        send.count(),
        recv,
        times(DeviceFunction.REDUCE_SCATTER, recv.count()));
    reduceScatter(send, 0, recv, 0, recv.count(), op, stream);
  }

  /**
   * Reduces size times {@code recvCount} elements and leaves part r of the result on rank r ({@code
   * ncclFfmFunctionReduceScatter}).
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
    reduceScatter(send, sendOffset, recv, recvOffset, recvCount, op, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void reduceScatter(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long recvCount,
      ReduceOp op,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.REDUCE_SCATTER, send, recv);
    launch(
        DeviceFunction.REDUCE_SCATTER,
        send.type(),
        opValue(DeviceFunction.REDUCE_SCATTER, op),
        0,
        0,
        recvCount,
        send.pointer(
            DeviceFunction.REDUCE_SCATTER.operation,
            sendOffset,
            times(DeviceFunction.REDUCE_SCATTER, recvCount)),
        recv.pointer(DeviceFunction.REDUCE_SCATTER.operation, recvOffset, recvCount),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void reduceScatter(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long recvCount,
      ReduceOp op,
      CudaStream stream) {
    reduceScatter(
        send, sendOffset, recv, recvOffset, type, recvCount, op, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void reduceScatter(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long recvCount,
      ReduceOp op,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.REDUCE_SCATTER,
        type,
        opValue(DeviceFunction.REDUCE_SCATTER, op),
        0,
        recvCount,
        send,
        sendOffset,
        times(DeviceFunction.REDUCE_SCATTER, recvCount),
        recv,
        recvOffset,
        recvCount,
        stream,
        choice);
  }

  /** Collects every rank's whole send buffer, in rank order; recv has size times the elements. */
  public void allGather(DeviceBuffer send, DeviceBuffer recv, CudaStream stream) {
    checkCounts(
        DeviceFunction.ALL_GATHER,
        send,
        times(DeviceFunction.ALL_GATHER, send.count()),
        recv,
        recv.count());
    allGather(send, 0, recv, 0, send.count(), stream);
  }

  /**
   * Collects {@code sendCount} elements of every rank, in rank order ({@code
   * ncclFfmFunctionAllGather}).
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
    allGather(send, sendOffset, recv, recvOffset, sendCount, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void allGather(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long sendCount,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.ALL_GATHER, send, recv);
    launch(
        DeviceFunction.ALL_GATHER,
        send.type(),
        0,
        0,
        0,
        sendCount,
        send.pointer(DeviceFunction.ALL_GATHER.operation, sendOffset, sendCount),
        recv.pointer(
            DeviceFunction.ALL_GATHER.operation,
            recvOffset,
            times(DeviceFunction.ALL_GATHER, sendCount)),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void allGather(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long sendCount,
      CudaStream stream) {
    allGather(send, sendOffset, recv, recvOffset, type, sendCount, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void allGather(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long sendCount,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.ALL_GATHER,
        type,
        0,
        0,
        sendCount,
        send,
        sendOffset,
        sendCount,
        recv,
        recvOffset,
        times(DeviceFunction.ALL_GATHER, sendCount),
        stream,
        choice);
  }

  /** Copies the root's whole buffer to every rank's; the send buffer is only read on the root. */
  public void broadcast(DeviceBuffer send, DeviceBuffer recv, int root, CudaStream stream) {
    checkCounts(DeviceFunction.BROADCAST, send, send.count(), recv, recv.count());
    broadcast(send, 0, recv, 0, send.count(), root, stream);
  }

  /** Copies {@code count} elements of the root to every rank ({@code ncclFfmFunctionBroadcast}). */
  public void broadcast(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      int root,
      CudaStream stream) {
    broadcast(send, sendOffset, recv, recvOffset, count, root, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void broadcast(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      int root,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.BROADCAST, send, recv);
    launch(
        DeviceFunction.BROADCAST,
        send.type(),
        0,
        checkRoot(DeviceFunction.BROADCAST, root),
        0,
        count,
        send.pointer(DeviceFunction.BROADCAST.operation, sendOffset, count),
        recv.pointer(DeviceFunction.BROADCAST.operation, recvOffset, count),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void broadcast(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      int root,
      CudaStream stream) {
    broadcast(send, sendOffset, recv, recvOffset, type, count, root, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void broadcast(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      int root,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.BROADCAST,
        type,
        0,
        checkRoot(DeviceFunction.BROADCAST, root),
        count,
        send,
        sendOffset,
        count,
        recv,
        recvOffset,
        count,
        stream,
        choice);
  }

  /** Reduces whole buffers to the root's; the receive buffer is only written on the root. */
  public void reduce(
      DeviceBuffer send, DeviceBuffer recv, ReduceOp op, int root, CudaStream stream) {
    checkCounts(DeviceFunction.REDUCE, send, send.count(), recv, recv.count());
    reduce(send, 0, recv, 0, send.count(), op, root, stream);
  }

  /** Reduces {@code count} elements to the root ({@code ncclFfmFunctionReduce}). */
  public void reduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int root,
      CudaStream stream) {
    reduce(send, sendOffset, recv, recvOffset, count, op, root, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void reduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int root,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.REDUCE, send, recv);
    launch(
        DeviceFunction.REDUCE,
        send.type(),
        opValue(DeviceFunction.REDUCE, op),
        checkRoot(DeviceFunction.REDUCE, root),
        0,
        count,
        send.pointer(DeviceFunction.REDUCE.operation, sendOffset, count),
        recv.pointer(DeviceFunction.REDUCE.operation, recvOffset, count),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void reduce(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      ReduceOp op,
      int root,
      CudaStream stream) {
    reduce(send, sendOffset, recv, recvOffset, type, count, op, root, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void reduce(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      ReduceOp op,
      int root,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.REDUCE,
        type,
        opValue(DeviceFunction.REDUCE, op),
        checkRoot(DeviceFunction.REDUCE, root),
        count,
        send,
        sendOffset,
        count,
        recv,
        recvOffset,
        count,
        stream,
        choice);
  }

  /** Sends part r of the whole send buffer to rank r; both buffers have size times the elements. */
  public void allToAll(DeviceBuffer send, DeviceBuffer recv, CudaStream stream) {
    checkCounts(DeviceFunction.ALL_TO_ALL, send, send.count(), recv, recv.count());
    if (send.count() % size != 0) {
      throw new IllegalArgumentException(
          DeviceFunction.ALL_TO_ALL.operation
              + " on "
              + communicator
              + ": the "
              + send
              + " does not divide by the number of ranks");
    }
    allToAll(send, 0, recv, 0, send.count() / size, stream);
  }

  /**
   * Sends {@code count} elements to every rank and receives as many from each ({@code
   * ncclFfmFunctionAllToAll}). Has no in-place form.
   *
   * @param count elements a pair of ranks
   */
  public void allToAll(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      CudaStream stream) {
    allToAll(send, sendOffset, recv, recvOffset, count, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void allToAll(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      CudaStream stream,
      LaunchChoice choice) {
    checkTypes(DeviceFunction.ALL_TO_ALL, send, recv);
    launch(
        DeviceFunction.ALL_TO_ALL,
        send.type(),
        0,
        0,
        0,
        count,
        send.pointer(
            DeviceFunction.ALL_TO_ALL.operation,
            sendOffset,
            times(DeviceFunction.ALL_TO_ALL, count)),
        recv.pointer(
            DeviceFunction.ALL_TO_ALL.operation,
            recvOffset,
            times(DeviceFunction.ALL_TO_ALL, count)),
        stream,
        choice);
  }

  /**
   * The same on windows.
   *
   * @param sendOffset in bytes, as recvOffset; see the class for what must be equal on all ranks
   */
  public void allToAll(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      CudaStream stream) {
    allToAll(send, sendOffset, recv, recvOffset, type, count, stream, LaunchChoice.AUTO);
  }

  /** The same on windows, run as said. */
  public void allToAll(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      CudaStream stream,
      LaunchChoice choice) {
    launch(
        DeviceFunction.ALL_TO_ALL,
        type,
        0,
        0,
        count,
        send,
        sendOffset,
        times(DeviceFunction.ALL_TO_ALL, count),
        recv,
        recvOffset,
        times(DeviceFunction.ALL_TO_ALL, count),
        stream,
        choice);
  }

  /**
   * Reduces whole buffers in groups of neighbouring ranks, then across the groups.
   *
   * @param ranksPerGroup divides the number of ranks
   */
  public void hierarchicalAllReduce(
      DeviceBuffer send, DeviceBuffer recv, ReduceOp op, int ranksPerGroup, CudaStream stream) {
    checkCounts(DeviceFunction.HIERARCHICAL_ALL_REDUCE, send, send.count(), recv, recv.count());
    hierarchicalAllReduce(send, 0, recv, 0, send.count(), op, ranksPerGroup, stream);
  }

  /**
   * Reduces {@code count} elements in groups of neighbouring ranks, then across the groups, and
   * hands the result back the same way ({@code ncclFfmFunctionHierarchicalAllReduce}): groups
   * exchange 1 / ranksPerGroup of the data. In one kernel, so within what windows reach; {@link
   * HierarchicalAllReduce} goes beyond.
   *
   * @param ranksPerGroup divides the number of ranks
   */
  public void hierarchicalAllReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int ranksPerGroup,
      CudaStream stream) {
    hierarchicalAllReduce(
        send, sendOffset, recv, recvOffset, count, op, ranksPerGroup, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void hierarchicalAllReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int ranksPerGroup,
      CudaStream stream,
      LaunchChoice choice) {
    DeviceFunction function = DeviceFunction.HIERARCHICAL_ALL_REDUCE;
    checkTypes(function, send, recv);
    checkGroup(function, ranksPerGroup);
    launch(
        function,
        send.type(),
        opValue(function, op),
        ranksPerGroup,
        0,
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        stream,
        choice);
  }

  /**
   * What follows on the stream runs after all ranks' kernels of this call have begun, and so after
   * what came before it on all ranks' streams ({@code ncclFfmFunctionBarrier}).
   */
  public void barrier(CudaStream stream) {
    barrier(stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public void barrier(CudaStream stream, LaunchChoice choice) {
    launch(DeviceFunction.BARRIER, DataType.INT8, 0, 0, 0, 0, 0, 0, stream, choice);
  }

  /** Sends a whole buffer; the peer must receive as many elements. */
  public void send(DeviceBuffer buffer, int peer, CudaStream stream) {
    send(buffer, 0, buffer.count(), peer, stream);
  }

  /**
   * Sends {@code count} elements ({@code ncclFfmFunctionSend}). Ends on the stream when the buffer
   * may be overwritten: before the peer receives if it fits two slots on each channel ({@link
   * DeviceCommunicatorConfig.Builder#slotBytes}), else the kernel waits for it. Ranks that each
   * send and receive take {@link #sendRecv}, or two streams.
   *
   * @param peer another rank
   */
  public void send(DeviceBuffer buffer, long offset, long count, int peer, CudaStream stream) {
    send(buffer, offset, count, peer, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said; the receiver says the same. */
  public void send(
      DeviceBuffer buffer,
      long offset,
      long count,
      int peer,
      CudaStream stream,
      LaunchChoice choice) {
    DeviceFunction function = DeviceFunction.SEND;
    checkTypes(function, buffer, buffer);
    launch(
        function,
        buffer.type(),
        0,
        checkPeer(function, peer),
        0,
        count,
        buffer.pointer(function.operation, offset, count),
        0,
        stream,
        choice);
  }

  /** Receives a whole buffer; the peer must send as many elements. */
  public void recv(DeviceBuffer buffer, int peer, CudaStream stream) {
    recv(buffer, 0, buffer.count(), peer, stream);
  }

  /**
   * Receives {@code count} elements ({@code ncclFfmFunctionRecv}).
   *
   * @param peer another rank
   */
  public void recv(DeviceBuffer buffer, long offset, long count, int peer, CudaStream stream) {
    recv(buffer, offset, count, peer, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said; the sender says the same. */
  public void recv(
      DeviceBuffer buffer,
      long offset,
      long count,
      int peer,
      CudaStream stream,
      LaunchChoice choice) {
    DeviceFunction function = DeviceFunction.RECV;
    checkTypes(function, buffer, buffer);
    launch(
        function,
        buffer.type(),
        0,
        0,
        checkPeer(function, peer),
        count,
        0,
        buffer.pointer(function.operation, offset, count),
        stream,
        choice);
  }

  /** Sends one whole buffer and receives another of the same type and count. */
  public void sendRecv(DeviceBuffer send, int to, DeviceBuffer recv, int from, CudaStream stream) {
    checkCounts(DeviceFunction.SEND_RECV, send, send.count(), recv, recv.count());
    sendRecv(send, 0, to, recv, 0, from, send.count(), stream);
  }

  /**
   * Sends {@code count} elements to one rank and receives as many from another or the same one, in
   * one kernel ({@code ncclFfmFunctionSendRecv}), so that ranks which all do so never stand still.
   * The others may also call {@link #send} and {@link #recv}.
   *
   * @param to another rank
   * @param from another rank
   */
  public void sendRecv(
      DeviceBuffer send,
      long sendOffset,
      int to,
      DeviceBuffer recv,
      long recvOffset,
      int from,
      long count,
      CudaStream stream) {
    sendRecv(send, sendOffset, to, recv, recvOffset, from, count, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said; the peers say the same. */
  public void sendRecv(
      DeviceBuffer send,
      long sendOffset,
      int to,
      DeviceBuffer recv,
      long recvOffset,
      int from,
      long count,
      CudaStream stream,
      LaunchChoice choice) {
    DeviceFunction function = DeviceFunction.SEND_RECV;
    checkTypes(function, send, recv);
    launch(
        function,
        send.type(),
        0,
        checkPeer(function, to),
        checkPeer(function, from),
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        stream,
        choice);
  }

  /**
   * The all-reduce of a fused kernel, under the lock: the shim knows its function and operation.
   */
  private void fillFused(
      String operation,
      DataType type,
      long count,
      long send,
      long recv,
      CudaStream stream,
      LaunchChoice choice) {
    checkUsable(operation, stream);
    fill(DeviceFunction.ALL_REDUCE, type, 0, 0, 0, count, choice);
    place(sendWindow, ncclFfmCall.sendbuff$offset(), 0, 0, send);
    place(recvWindow, ncclFfmCall.recvbuff$offset(), 0, 0, recv);
  }

  /** The same on windows. */
  private void fillFused(
      String operation,
      DataType type,
      long count,
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      CudaStream stream,
      LaunchChoice choice) {
    checkChoice(operation, choice);
    checkWindow(operation, send, sendOffset, type, count);
    checkWindow(operation, recv, recvOffset, type, count);
    checkUsable(operation, stream);
    fill(DeviceFunction.ALL_REDUCE, type, 0, 0, 0, count, choice);
    long sendPeers = send.lsa().peers().pointer(operation, 0, 0);
    long recvPeers = recv.lsa().peers().pointer(operation, 0, 0);
    place(sendWindow, ncclFfmCall.sendbuff$offset(), sendPeers, send.bytes(), sendOffset);
    place(recvWindow, ncclFfmCall.recvbuff$offset(), recvPeers, recv.bytes(), recvOffset);
  }

  /** See {@link FusedKernels#scaleAllReduceSqrt}. */
  void scaleAllReduceSqrt(
      DataType type,
      long send,
      long recv,
      long count,
      float a,
      float b,
      CudaStream stream,
      LaunchChoice choice) {
    String operation = FusedKernels.SCALE;
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        fillFused(operation, type, count, send, recv, stream, choice);
        checkShim(
            ShimH.ncclFfmFusedScaleAllReduceSqrt(struct, call, a, b, stream.handle()), operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  /** The same on windows. */
  void scaleAllReduceSqrt(
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      float a,
      float b,
      CudaStream stream,
      LaunchChoice choice) {
    String operation = FusedKernels.SCALE;
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        fillFused(operation, type, count, send, sendOffset, recv, recvOffset, stream, choice);
        checkShim(
            ShimH.ncclFfmFusedScaleAllReduceSqrt(struct, call, a, b, stream.handle()), operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  /** See {@link FusedKernels#allReduceRmsNorm}. */
  void allReduceRmsNorm(
      DataType type,
      long x,
      long residual,
      long weight,
      long out,
      long tokens,
      long hidden,
      float eps,
      CudaStream stream,
      LaunchChoice choice) {
    String operation = FusedKernels.RMS_NORM;
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        fillFused(operation, type, tokens * hidden, x, residual, stream, choice);
        ncclFfmRmsNorm.tokens(rmsNorm, tokens);
        ncclFfmRmsNorm.hidden(rmsNorm, hidden);
        rmsNorm.set(JAVA_LONG, ncclFfmRmsNorm.weight$offset(), weight);
        rmsNorm.set(JAVA_LONG, ncclFfmRmsNorm.out$offset(), out);
        ncclFfmRmsNorm.eps(rmsNorm, eps);
        checkShim(ShimH.ncclFfmFusedRmsNorm(struct, call, rmsNorm, stream.handle()), operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  /** The buffers of an update, under the lock. */
  private void fillState(String operation, OptimizerState state, long count) {
    optimizer.set(
        JAVA_LONG, ncclFfmOptimizer.weights$offset(), state.weights().pointer(operation, 0, count));
    optimizer.set(
        JAVA_LONG,
        ncclFfmOptimizer.momentum$offset(),
        state.momentum().pointer(operation, 0, count));
    optimizer.set(
        JAVA_LONG,
        ncclFfmOptimizer.variance$offset(),
        pointerOrNull(operation, state.variance(), count));
    optimizer.set(
        JAVA_LONG,
        ncclFfmOptimizer.weightCopy$offset(),
        pointerOrNull(operation, state.weightCopy(), count));
    optimizer.set(
        JAVA_LONG, ncclFfmOptimizer.steps$offset(), pointerOrNull(operation, state.steps(), 1));
  }

  private static long pointerOrNull(String operation, @Nullable DeviceBuffer buffer, long count) {
    return buffer == null ? 0 : buffer.pointer(operation, 0, count);
  }

  /** What the numbers of an update are, under the lock. */
  private void fillSettings(Sgd settings) {
    ncclFfmOptimizer.learningRate(optimizer, settings.learningRate());
    ncclFfmOptimizer.beta1(optimizer, settings.momentum());
    ncclFfmOptimizer.weightDecay(optimizer, settings.weightDecay());
    ncclFfmOptimizer.maxNorm(optimizer, settings.maxNorm());
  }

  private void fillSettings(AdamW settings, int step) {
    ncclFfmOptimizer.step(optimizer, step);
    ncclFfmOptimizer.learningRate(optimizer, settings.learningRate());
    ncclFfmOptimizer.beta1(optimizer, settings.beta1());
    ncclFfmOptimizer.beta2(optimizer, settings.beta2());
    ncclFfmOptimizer.eps(optimizer, settings.eps());
    ncclFfmOptimizer.weightDecay(optimizer, settings.weightDecay());
    ncclFfmOptimizer.maxNorm(optimizer, settings.maxNorm());
  }

  /** See {@link FusedKernels#sgd}: gradients in a buffer, or if that is null in a window. */
  void sgd(
      @Nullable DeviceBuffer gradients,
      @Nullable LsaWindow window,
      long offset,
      DataType type,
      OptimizerState state,
      Sgd settings,
      CudaStream stream,
      LaunchChoice choice) {
    String operation = FusedKernels.SGD;
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        fillGradients(operation, gradients, window, offset, type, state, stream, choice);
        fillSettings(settings);
        checkShim(ShimH.ncclFfmFusedSgd(struct, call, optimizer, stream.handle()), operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  /** See {@link FusedKernels#adamW}; as {@link #sgd}. */
  void adamW(
      @Nullable DeviceBuffer gradients,
      @Nullable LsaWindow window,
      long offset,
      DataType type,
      OptimizerState state,
      AdamW settings,
      int step,
      CudaStream stream,
      LaunchChoice choice) {
    String operation = FusedKernels.ADAMW;
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        fillGradients(operation, gradients, window, offset, type, state, stream, choice);
        fillSettings(settings, step);
        checkShim(ShimH.ncclFfmFusedAdamW(struct, call, optimizer, stream.handle()), operation);
        countLaunch(stream);
      }
    } finally {
      communicator.end();
    }
  }

  private void fillGradients(
      String operation,
      @Nullable DeviceBuffer gradients,
      @Nullable LsaWindow window,
      long offset,
      DataType type,
      OptimizerState state,
      CudaStream stream,
      LaunchChoice choice) {
    long count = state.weights().count();
    if (window != null) {
      fillFused(operation, type, count, window, offset, window, offset, stream, choice);
    } else {
      long address = gradients.pointer(operation, 0, count);
      fillFused(operation, type, count, address, address, stream, choice);
    }
    fillState(operation, state, count);
  }

  /**
   * Enters for a launch of a kernel that takes the struct, as for one of those here; {@link
   * Communicator#end} ends it.
   */
  void beginKernel(String operation, CudaStream stream) {
    communicator.begin(operation, stream);
    try {
      synchronized (lock) {
        checkUsable(operation, stream);
      }
    } catch (RuntimeException | Error e) {
      communicator.end();
      throw e;
    }
  }

  /** After a launch of the call, under the lock. */
  private void countLaunch(CudaStream stream) {
    // The shim launches nothing for a call of nothing.
    if (ncclFfmCall.count(call) != 0
        || ncclFfmCall.function(call) == DeviceFunction.BARRIER.value) {
      countKernel(stream);
    }
  }

  /** A kernel that signals the host was launched, or captured. */
  void countKernel(CudaStream stream) {
    if (!hostSignal) {
      return;
    }
    if (stream.isCapturing()) {
      stream.addToGraph(new CapturedKernel());
      return;
    }
    synchronized (lock) {
      launched++;
    }
  }

  /** A kernel in a graph, counted at each launch. */
  private final class CapturedKernel implements GraphWork {
    @Override
    public void begin(CudaStream stream) {}

    @Override
    public void end(CudaStream stream, boolean isLaunched) {
      if (isLaunched) {
        synchronized (lock) {
          launched++;
        }
      }
    }

    @Override
    public void release() {}
  }

  /** Waits with {@link CudaStream#DEFAULT_TIMEOUT}. */
  public void awaitKernels() {
    awaitKernels(CudaStream.DEFAULT_TIMEOUT);
  }

  /**
   * Waits until all kernels that were launched with this device communicator have finished:
   * collectives, sends and receives, {@link FusedKernels}, kernels of one's own, and those in
   * launches of graphs. What they wrote is there then, for work on any stream. Not waited for:
   * copies, kernels without this device communicator, a task queue's scheduler, whatever else is on
   * the streams.
   *
   * <p>The kernels tell it themselves, in pinned memory, at which this looks: nothing asks CUDA,
   * whose lock ranks in one process fight for. So a short step is over sooner than by {@link
   * CudaStream#synchronize}. Of use where the host needs the result of a single step; not where it
   * enqueues the next one anyway.
   *
   * <p>Threads: that which launches. Nothing may be launched until this returns, on whatever
   * stream; {@link #abort} may come from any thread. A virtual thread keeps its carrier for the
   * first moments of the wait.
   *
   * @throws IllegalStateException if {@link DeviceCommunicatorConfig.Builder#hostSignal} was not
   *     set, or this is closed
   * @throws DeviceCommException if a kernel has failed or this was aborted; kernels may still run
   * @throws io.ncclffm.core.CudaException if the device reports an error
   * @throws io.ncclffm.core.DeadlineException after the timeout or on interruption; the kernels go
   *     on
   */
  public void awaitKernels(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    int number;
    synchronized (lock) {
      if (!hostSignal) {
        throw new IllegalStateException(
            AWAIT
                + ": the device communicator of "
                + communicator
                + " was not made for it; set hostSignal in its DeviceCommunicatorConfig");
      }
      number = launched;
    }
    for (int round = 0; !haveFinished(number); round++) {
      if ((round & 63) == 63) {
        throwIfFailed();
      }
      // A kernel that the device has ended tells nothing. After about 100 ms, and then every 200.
      if ((round & 4095) == 4095) {
        synchronized (lock) { // an abort closes the stream
          checkOpen(AWAIT);
          ownStream.isDone();
        }
      }
      Backoff.pause(round, deadline, AWAIT + " on ", communicator);
    }
    throwIfFailed();
  }

  /** Under the lock, so that nobody frees the word meanwhile. */
  private boolean haveFinished(int number) {
    synchronized (lock) {
      checkOpen(AWAIT);
      return (int) SIGNAL.getAcquire(signal, 0L) - number >= 0;
    }
  }

  /** Before a launch, under the lock: open, not failed, and the stream knows whom to ask. */
  private void checkUsable(String operation, CudaStream stream) {
    checkOpen(operation);
    throwIfFailed();
    if (queue != null) {
      throw new IllegalStateException(
          operation
              + ": the device communicator of "
              + communicator
              + " has a task queue, whose scheduler holds its channels; append a task to that, or"
              + " make another device communicator");
    }
    boolean captured = stream.isCapturing();
    if (checked && !captured) {
      verify(operation);
    }
    if (stream != lastStream || captured) {
      if (captured || !streams.contains(stream)) {
        streams.removeIf(CudaStream::isClosed);
        stream.watch(this);
        streams.add(stream);
      }
      lastStream = stream;
    }
  }

  /**
   * Looks at all that a task will be run with, as before a launch.
   *
   * @throws NcclException what the shim refuses
   */
  void checkTask(
      DeviceFunction function,
      DataType type,
      int op,
      int root,
      int source,
      long count,
      long send,
      long recv) {
    synchronized (lock) {
      checkOpen(function.operation);
      throwIfFailed();
      fill(function, type, op, root, source, count, LaunchChoice.AUTO);
      place(sendWindow, ncclFfmCall.sendbuff$offset(), 0, 0, send);
      place(recvWindow, ncclFfmCall.recvbuff$offset(), 0, 0, recv);
      checkShim(ShimH.ncclFfmChoose(struct, call), function.operation);
    }
  }

  /** Before something is launched that uses this: open, not failed, and checked where asked for. */
  void checkBeforeTasks(String operation, CudaStream stream) {
    synchronized (lock) {
      checkOpen(operation);
      throwIfFailed();
      if (checked && !stream.isCapturing()) {
        verify(operation);
      }
    }
  }

  /** Blocks that may work side by side. */
  int channels() {
    return ncclFfmDevComm.nChannels(struct);
  }

  /** The struct for the shim's own functions, while this is open. */
  MemorySegment pointer() {
    return struct;
  }

  /** For short copies; nothing that waits for a peer is ever enqueued on it. */
  CudaStream ownStream() {
    return ownStream;
  }

  /** What every rank brings, for what is made on this communicator; see {@link LsaWindow#meet}. */
  byte[][] meet(String step, byte[] record) {
    return window.meet(step, record);
  }

  /** A queue is about to be made. */
  void checkHasNoQueue() {
    synchronized (lock) {
      checkOpen("task queue");
      if (queue != null) {
        throw new IllegalStateException(
            "the device communicator of "
                + communicator
                + " has a task queue, whose scheduler holds its channels; make another device"
                + " communicator, or a queue with more lanes");
      }
    }
  }

  /** From now on, until null is set, a queue has the channels. */
  void setQueue(@Nullable TaskQueue next) {
    synchronized (lock) {
      queue = next;
    }
  }

  private @Nullable TaskQueue openQueue() {
    synchronized (lock) {
      return queue;
    }
  }

  private void checkOpen(String operation) {
    if (closed) {
      throw new IllegalStateException(
          operation + ": the device communicator of " + communicator + " is closed");
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
    if (candidate.mismatch(asMade) != -1) {
      throw new IllegalArgumentException(
          operation
              + " on "
              + communicator
              + ": the struct is another device communicator's, or was written over");
    }
  }

  private static void checkCounts(
      DeviceFunction function,
      DeviceBuffer send,
      long sendCount,
      DeviceBuffer recv,
      long recvCount) {
    if (sendCount != recvCount) {
      throw new IllegalArgumentException(
          function.operation
              + ": the lengths of send "
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

  void checkTypes(DeviceFunction function, DeviceBuffer send, DeviceBuffer recv) {
    if (send.type() != recv.type()) {
      throw new IllegalArgumentException(
          function.operation
              + ": send "
              + send
              + " and recv "
              + recv
              + " differ in type; take one type");
    }
    checkBuffer(function.operation, send);
    checkBuffer(function.operation, recv);
    checkType(function, send.type());
  }

  private static void checkType(DeviceFunction function, DataType type) {
    if (type.ncclValue() > DataType.BFLOAT16.ncclValue()) {
      throw new IllegalArgumentException(
          function.operation
              + ": "
              + type
              + " is not supported inside kernels; the communicator's own collectives take it");
    }
  }

  static int opValue(DeviceFunction function, ReduceOp op) {
    if (op.ncclValue() > ReduceOp.AVG.ncclValue()) {
      throw new IllegalArgumentException(
          function.operation
              + ": the operator "
              + op
              + " is NCCL's own; kernels take sum, prod, max, min and avg");
    }
    return op.ncclValue();
  }

  int checkRoot(DeviceFunction function, int root) {
    if (root < 0 || root >= size) {
      throw new IllegalArgumentException(
          function.operation
              + " on "
              + communicator
              + ": root "
              + root
              + ": ranks go from 0 to "
              + (size - 1));
    }
    return root;
  }

  int checkGroup(DeviceFunction function, int ranksPerGroup) {
    if (ranksPerGroup < 1 || size % ranksPerGroup != 0) {
      throw new IllegalArgumentException(
          function.operation
              + " on "
              + communicator
              + ": groups of "
              + ranksPerGroup
              + ": must divide the "
              + size
              + " ranks");
    }
    return ranksPerGroup;
  }

  int checkPeer(DeviceFunction function, int peer) {
    if (peer < 0 || peer >= size || peer == rank) {
      throw new IllegalArgumentException(
          function.operation
              + " on "
              + communicator
              + ": peer "
              + peer
              + ": must be another rank, from 0 to "
              + (size - 1));
    }
    return peer;
  }

  long times(DeviceFunction function, long count) {
    if (count < 0 || count > Long.MAX_VALUE / size) {
      throw new IllegalArgumentException(
          function.operation + ": " + count + " elements for each of " + size + " ranks");
    }
    return count * size;
  }

  private void checkWindow(
      String operation, LsaWindow given, long offset, DataType type, long count) {
    given.check(operation, communicator);
    if (given.team().size() < size) {
      throw new IllegalArgumentException(
          operation + ": the " + given + " joins only the " + given.team());
    }
    if (count < 0
        || offset < 0
        || offset > given.bytes()
        || count > (given.bytes() - offset) / type.bytes()
        || offset % type.bytes() != 0) {
      throw new IllegalArgumentException(
          operation
              + ": "
              + count
              + " x "
              + type
              + " at byte "
              + offset
              + " of the "
              + given
              + ": they must lie in it, at a multiple of "
              + type.bytes());
    }
    if (checked) {
      given.verify(operation);
    }
  }

  void checkBuffer(String operation, DeviceBuffer buffer) {
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

  static void checkShim(int rc, String operation) {
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
            DeviceFunction.nameOf(ncclFfmStatus.function(status)),
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

  /**
   * Makes every kernel of this rank that waits give up with {@code ncclRemoteError}, and those
   * still enqueued do nothing; its task queue too; from any thread. The communicator itself stays
   * usable.
   */
  @Override
  public void abort() {
    @Nullable TaskQueue open = openQueue();
    if (open != null) {
      open.abort();
    }
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
   * Ends it, with its task queue. Collective where the communicator is ready. The kernels launched
   * must have ended, as after {@link CudaStream#synchronize} or {@link #awaitKernels}.
   */
  @Override
  public void close() {
    synchronized (lock) {
      if (closed) {
        return;
      }
    }
    @Nullable TaskQueue open = openQueue();
    if (open != null) {
      open.close();
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

package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.AbortableResource;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.GraphWork;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclFfmStatus;
import io.ncclffm.core.bindings.shim.ncclFfmTask;
import io.ncclffm.core.bindings.shim.ncclFfmTaskBatch;
import io.ncclffm.core.bindings.shim.ncclFfmTaskBuckets;
import io.ncclffm.core.bindings.shim.ncclFfmTaskControl;
import io.ncclffm.core.bindings.shim.ncclFfmTaskLane;
import io.ncclffm.core.bindings.shim.ncclFfmTaskOverlap;
import io.ncclffm.core.bindings.shim.ncclFfmTaskQueue;
import io.ncclffm.core.bindings.shim.ncclFfmTaskShared;
import io.ncclffm.core.bindings.shim.ncclFfmTaskSlot;
import io.ncclffm.core.bindings.shim.ncclFfmTicket;
import io.ncclffm.core.internal.Backoff;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.VarHandle;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.locks.ReentrantLock;
import org.jspecify.annotations.Nullable;

/**
 * The task route: kernels and the host hand communication over as tasks, a scheduler kernel runs
 * them, and whoever needs a result waits for its ticket ({@code ncclFfmTaskQueue}).
 *
 * <pre>{@code
 * try (TaskQueue queue = TaskQueue.create(deviceCommunicator, TaskQueueConfig.DEFAULT)) {
 *   Ticket ticket = queue.ticket();
 *   queue.allReduce(GRADIENTS, 0, send, 0, recv, 0, count, ReduceOp.SUM, ticket);
 *   queue.launch(stream);
 *   ticket.await(Duration.ofSeconds(10));
 * }
 * }</pre>
 *
 * <p>A queue has lanes. A lane runs its tasks one after the other in the order of their numbers;
 * lanes do not wait for each other. <b>Every rank appends the same tasks to a lane, in the same
 * order</b>; ranks that do not are told so ({@link TaskQueueException} with both tasks), by name.
 * Where the host and kernels, or several kernels, append to one lane, who is first differs from
 * rank to rank: give each its own lane.
 *
 * <p>The methods named as collectives append a task on the host; nothing native is called before
 * {@link #launch}, which hands all of them over in the order of a stream: each sees what was
 * enqueued there before. Counts and offsets are in elements, as {@link DeviceCommunicator}'s;
 * buffers stay as they are until the task has ended. Types and operations are those of {@link
 * DeviceCommunicator}. A kernel of your own takes {@link #struct} by value and calls {@code
 * ncclTaskAppend} and its kin ({@code task_queue.h}); tell the queue by {@link #producerLaunched}.
 *
 * <p>The scheduler runs on a stream of the queue's own. It ends when it is idle and no producer is
 * queued or running, and the next launch starts it again ({@link TaskQueueConfig.Mode}). While the
 * queue is open its device communicator takes no collectives, because the scheduler holds the
 * channels: make another one for those. Producers can be captured into a {@link
 * io.ncclffm.core.CudaGraph}: each launch of it takes new numbers, and keeps the scheduler running.
 * Tasks of the host cannot.
 *
 * <p>Where ranks are threads of one process and share a GPU, a call that waits for the whole device
 * ({@code cudaFree}, {@code cudaDeviceSynchronize}, a first module load) between one rank's launch
 * and another's stands until the deadline, because the first rank's scheduler waits for the
 * second's. With {@link TaskQueueConfig.Builder#idle} after the last task, it goes on.
 *
 * <p>A lane fails by itself, for good; the others go on. Creating is collective; the device
 * communicator closes the queue, as its communicator does, and aborts it. Threads: one at a time;
 * {@link #abort} and tickets from any. Appending, launching and looking at a ticket allocate
 * nothing on the Java heap.
 */
public final class TaskQueue implements AbortableResource {
  static final int QUEUE_FULL = 1000; // ncclFfmQueueFull, as a constant for switch
  static final int QUEUE_BROKEN = 1001;
  static final String BUCKETS = "ncclFfmTaskAppendBuckets";
  static final String OVERLAP = "ncclFfmTaskIterate";
  static final TaskSymbol NO_SYMBOL = TaskSymbol.ofHash(0);

  /** Tasks of the host that may be on their way to the rings, each with a place for its ticket. */
  public static final int MOST_ON_THE_WAY = 1024;

  /** Launches of {@link #buckets} and {@link #overlap} that may be unfinished, or in graphs. */
  public static final int MOST_RUNS = 16;

  private static final String CREATE = "task queue";
  private static final String LAUNCH = "ncclFfmTaskAppendOnStream";
  private static final String PRODUCER_END = "ncclFfmTaskProducerEnd";
  private static final String SNAPSHOT = "snapshot of the ";
  private static final String STOP = "stop of the ";
  private static final String PRODUCERS = "producers of the ";
  private static final int MOST_BLOCKS = 1024;
  private static final long MOST_COUNT = 1L << 40;
  private static final long MOST_TASKS = 1L << 30;
  private static final int REMOTE_ERROR = 6;
  private static final long LINE = 128;
  private static final Duration SETUP_TIMEOUT = Duration.ofSeconds(30); // before the others give up
  private static final Duration COPY_TIMEOUT = Duration.ofSeconds(10);
  private static final Duration DRAIN_TIMEOUT = Duration.ofSeconds(10);
  private static final Duration ABORT_TIMEOUT = Duration.ofSeconds(5);

  /** How long after the result that a kernel got the record of its lane may come. */
  private static final long RECORD_NANOS = 1_000_000_000;

  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  private static final VarHandle INT = JAVA_INT.varHandle();

  private final DeviceCommunicator comm;
  private final Communicator communicator;
  private final TaskQueueConfig config;
  private final int rank;
  private final int lanes;
  private final Deque<AutoCloseable> resources;
  private final CudaStream schedulerStream;
  private final DeviceBuffer memory;
  private final Arena arena = Arena.ofShared();
  private final MemorySegment struct = ncclFfmTaskQueue.allocate(arena);
  private final MemorySegment batch = ncclFfmTaskBatch.allocate(arena);
  private final MemorySegment buckets = ncclFfmTaskBuckets.allocate(arena);
  private final MemorySegment overlap = ncclFfmTaskOverlap.allocate(arena);
  private final MemorySegment tasks = ncclFfmTask.allocateArray(MOST_ON_THE_WAY, arena);

  // Pinned memory that kernels reach, and where in it each part is.
  private final MemorySegment pinned;
  private final long pinnedAtDevice;
  private final long progressAt;
  private final long controlAt;
  private final long ticketsAt;
  private final long runsAt;
  private final long runBytes;
  private final long imageAt;

  // In the order in which they are taken. Of who launches kernels, which may block until others
  // have ended:
  private final ReentrantLock launching = new ReentrantLock();
  // of who copies from device memory, and waits for that:
  private final Object imageLock = new Object();
  // of tickets and runs, and of all below that is not said to be another's;
  private final Object lock = new Object();
  // that of abort, which no launch keeps waiting.
  private final Object endLock = new Object();
  private final @Nullable Ticket[] onTheWay = new Ticket[MOST_ON_THE_WAY];
  private final @Nullable ProducerRun[] runs = new ProducerRun[MOST_RUNS];
  private final CudaEvent[] runEnds = new CudaEvent[MOST_RUNS];
  private final @Nullable TaskQueueException[] failures;
  private final int[] lastProgress;
  // How many tasks the host has appended and launched, and below which all have been answered.
  private long appended;
  private long launched;
  private long answered;
  private volatile int producers; // written by who launches
  private volatile long schedulerLaunches; // likewise
  private volatile boolean aborted; // written under endLock
  private volatile boolean closing; // written by who launches
  private volatile boolean closed; // written under lock and endLock

  private TaskQueue(
      DeviceCommunicator comm,
      TaskQueueConfig config,
      CudaStream schedulerStream,
      Deque<AutoCloseable> resources) {
    this.comm = comm;
    this.communicator = comm.communicator();
    this.config = config;
    this.rank = communicator.rank();
    this.lanes = config.lanes();
    this.resources = resources;
    this.schedulerStream = schedulerStream;
    this.failures = new TaskQueueException[lanes];
    this.lastProgress = new int[lanes];
    resources.push(arena::close);
    if (lanes * config.blocksPerLane() > comm.channels()) {
      throw new IllegalArgumentException(
          CREATE
              + " on "
              + communicator
              + ": "
              + config
              + ": the device communicator has "
              + comm.channels()
              + " channels, and each block takes one; DeviceCommunicatorConfig.channels makes more");
    }
    CudaDevice device = communicator.device();
    this.memory = DeviceBuffer.allocate(device, DataType.UINT8, queueBytes());
    resources.push(memory);
    progressAt = lines(lanes * ncclFfmStatus.sizeof());
    controlAt = progressAt + lines(lanes * (long) Integer.BYTES);
    ticketsAt = controlAt + lines(ncclFfmTaskControl.sizeof());
    runsAt = ticketsAt + MOST_ON_THE_WAY * ncclFfmTicket.sizeof();
    runBytes = lines(lanes * ncclFfmTicket.sizeof() + MOST_BLOCKS * (long) Integer.BYTES);
    imageAt = runsAt + MOST_RUNS * runBytes;
    HostBuffer host = HostBuffer.allocate(device, imageAt + imageBytes() + lanes * LINE);
    resources.push(host);
    pinned = host.segment();
    pinnedAtDevice = host.deviceAddress().address();
    for (int i = 0; i < MOST_RUNS; i++) {
      runEnds[i] = CudaEvent.create(device);
      resources.push(runEnds[i]);
    }
  }

  private static long lines(long bytes) {
    return (bytes + LINE - 1) / LINE * LINE;
  }

  private long queueBytes() {
    MemorySegment out = arena.allocate(JAVA_LONG);
    int rc = ShimH.ncclFfmTaskQueueBytes(lanes, config.depth(), out);
    DeviceCommunicator.checkShim(rc, "ncclFfmTaskQueueBytes");
    return out.get(JAVA_LONG, 0);
  }

  /** What the lanes share, and the lanes. */
  private long imageBytes() {
    return ncclFfmTaskShared.sizeof() + lanes * ncclFfmTaskLane.sizeof();
  }

  /** Creates a queue with {@link TaskQueueConfig#DEFAULT}. Collective. */
  public static TaskQueue create(DeviceCommunicator comm) {
    return create(comm, TaskQueueConfig.DEFAULT);
  }

  /**
   * Creates an empty queue. Collective; the ranks meet on the host. Ranks that ask for different
   * shapes, or of which one cannot make its queue, all get an exception.
   *
   * @throws IllegalArgumentException if the device communicator has fewer channels than the
   *     scheduler has blocks
   * @throws IllegalStateException if the device communicator has a queue
   * @throws NcclException if the scheduler's blocks do not fit on the device with those of the
   *     ranks that share it, or another rank could not make its queue or asks for another shape
   * @throws DeadlineException if a rank does not come within a minute
   * @throws DeviceCommException if the device communicator has failed
   */
  public static TaskQueue create(DeviceCommunicator comm, TaskQueueConfig config) {
    comm.checkHasNoQueue();
    Communicator communicator = comm.communicator();
    Deque<AutoCloseable> resources = new ArrayDeque<>();
    try {
      @Nullable TaskQueue made = null;
      @Nullable RuntimeException trouble = null;
      try {
        comm.throwIfFailed();
        CudaStream stream = CudaStream.create(communicator.device());
        resources.push(stream);
        made = new TaskQueue(comm, config, stream, resources);
        made.init();
      } catch (RuntimeException e) {
        trouble = e;
      }
      // Nothing that allocates or loads may follow, which would have to wait for kernels of other
      // ranks on the same device.
      long shape = made == null || trouble != null ? 0 : shape(config);
      byte[] record = ByteBuffer.allocate(Long.BYTES).putLong(shape).array();
      byte[][] records = meet(comm, record, trouble);
      checkShapes(communicator, records);
      communicator.begin(CREATE, made.schedulerStream); // its end waits for what runs there
      communicator.end();
      comm.setQueue(made);
      communicator.adopt(made);
      return made;
    } catch (RuntimeException e) {
      communicator.freeOrKeep(
          () -> {
            RuntimeException more = DeviceCommunicator.closeAll(resources, null);
            if (more != null) {
              e.addSuppressed(more);
            }
          });
      throw e;
    }
  }

  private static byte[][] meet(
      DeviceCommunicator comm, byte[] record, @Nullable RuntimeException trouble) {
    try {
      byte[][] records = comm.meet("makes a task queue", record);
      if (trouble == null) {
        return records;
      }
    } catch (RuntimeException e) {
      if (trouble == null) {
        throw e;
      }
      trouble.addSuppressed(e);
    }
    throw trouble;
  }

  /** All that ranks must agree on; never 0. */
  private static long shape(TaskQueueConfig config) {
    return ((long) config.lanes() << 48)
        + ((long) config.blocksPerLane() << 32)
        + ((long) config.depth() << 8)
        + config.mode().value;
  }

  private static String shapeText(long shape) {
    return (shape >>> 48)
        + " lanes of "
        + (shape >>> 32 & 0xffff)
        + " blocks and depth "
        + (shape >>> 8 & 0xffffff)
        + ", "
        + TaskQueueConfig.Mode.values()[(int) (shape & 0xff)];
  }

  private static void checkShapes(Communicator communicator, byte[][] records) {
    long mine = ByteBuffer.wrap(records[communicator.rank()]).getLong();
    for (int r = 0; r < records.length; r++) {
      long other = ByteBuffer.wrap(records[r]).getLong();
      if (other != mine) {
        throw new NcclException(
            CREATE,
            NcclH.ncclInvalidUsage(),
            " on " + communicator,
            other == 0
                ? "rank " + r + " could not make its queue; see its exception"
                : "rank "
                    + r
                    + " asks for "
                    + shapeText(other)
                    + ", this rank for "
                    + shapeText(mine)
                    + "; every rank must ask for the same");
      }
    }
  }

  private void init() {
    ncclFfmTaskQueue.magic(struct, ShimH.NCCLFFM_QUEUE_MAGIC());
    ncclFfmTaskQueue.version(struct, ShimH.NCCLFFM_ABI_VERSION());
    ncclFfmTaskQueue.rank(struct, rank);
    ncclFfmTaskQueue.nLanes(struct, lanes);
    ncclFfmTaskQueue.depth(struct, config.depth());
    ncclFfmTaskQueue.blocksPerLane(struct, config.blocksPerLane());
    ncclFfmTaskQueue.timeoutNs(struct, config.timeout().toNanos());
    ncclFfmTaskQueue.idleNs(struct, config.idle().toNanos());
    ncclFfmTaskQueue.status(struct, atDevice(0));
    ncclFfmTaskQueue.progress(struct, atDevice(progressAt));
    ncclFfmTaskQueue.control(struct, atDevice(controlAt));
    communicator.device().makeCurrent();
    int rc = ShimH.ncclFfmTaskQueueInit(struct, memory.address(0), 0, schedulerStream.handle());
    DeviceCommunicator.checkShim(rc, "ncclFfmTaskQueueInit");
    // With nothing to do it ends at once: a shape that does not fit is refused here, not later.
    startScheduler(ShimH.ncclFfmSchedulerDrain());
    schedulerStream.synchronize(SETUP_TIMEOUT);
  }

  private MemorySegment atDevice(long offset) {
    return MemorySegment.ofAddress(pinnedAtDevice + offset);
  }

  /** What it was made with. */
  public TaskQueueConfig config() {
    return config;
  }

  /** The device communicator that the scheduler communicates by. */
  public DeviceCommunicator deviceCommunicator() {
    return comm;
  }

  /**
   * The {@code ncclFfmTaskQueue} in host memory, to be passed to a kernel by value; valid until
   * closed. Call {@link #producerLaunched} after each launch of the kernel.
   *
   * @throws IllegalStateException if closed
   */
  public MemorySegment struct() {
    synchronized (lock) {
      checkOpen("struct");
      return struct.asReadOnly();
    }
  }

  /** A new ticket for tasks of this queue. */
  public Ticket ticket() {
    return new Ticket(this);
  }

  // ------------------------------------------------------------------ appending

  /**
   * Appends an all-reduce of {@code count} elements ({@code ncclFfmFunctionAllReduce}).
   *
   * @param symbol the name of the task, the same on every rank
   * @param lane 0 to lanes - 1
   * @param ticket of this queue, whose last task has ended; it stands for this one from now on
   * @throws IllegalArgumentException if an argument is none, or the elements are not in the buffers
   * @throws NcclException {@code ncclInvalidArgument} if the buffers overlap in part, or the like
   * @throws IllegalStateException if the ticket's task has not ended, or the queue is closed
   * @throws TaskQueueException if the lane has failed
   * @throws QueueFullException if {@link #MOST_ON_THE_WAY} tasks are; launch them, or wait until
   *     the stream has come to them
   */
  public void allReduce(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.ALL_REDUCE;
    comm.checkTypes(function, send, recv);
    append(
        function,
        symbol,
        lane,
        send.type(),
        DeviceCommunicator.opValue(function, op),
        0,
        0,
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        ticket);
  }

  /**
   * Appends a reduction of size times {@code recvCount} elements, of which rank r gets part r
   * ({@code ncclFfmFunctionReduceScatter}); see {@link #allReduce} for the rest.
   */
  public void reduceScatter(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long recvCount,
      ReduceOp op,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.REDUCE_SCATTER;
    comm.checkTypes(function, send, recv);
    long all = comm.times(function, recvCount);
    append(
        function,
        symbol,
        lane,
        send.type(),
        DeviceCommunicator.opValue(function, op),
        0,
        0,
        recvCount,
        send.pointer(function.operation, sendOffset, all),
        recv.pointer(function.operation, recvOffset, recvCount),
        ticket);
  }

  /**
   * Appends a collection of {@code sendCount} elements of every rank, in rank order ({@code
   * ncclFfmFunctionAllGather}); see {@link #allReduce} for the rest.
   */
  public void allGather(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long sendCount,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.ALL_GATHER;
    comm.checkTypes(function, send, recv);
    long all = comm.times(function, sendCount);
    append(
        function,
        symbol,
        lane,
        send.type(),
        0,
        0,
        0,
        sendCount,
        send.pointer(function.operation, sendOffset, sendCount),
        recv.pointer(function.operation, recvOffset, all),
        ticket);
  }

  /**
   * Appends a copy of {@code count} elements of the root to every rank ({@code
   * ncclFfmFunctionBroadcast}); see {@link #allReduce} for the rest.
   */
  public void broadcast(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      int root,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.BROADCAST;
    comm.checkTypes(function, send, recv);
    append(
        function,
        symbol,
        lane,
        send.type(),
        0,
        comm.checkRoot(function, root),
        0,
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        ticket);
  }

  /**
   * Appends a reduction of {@code count} elements to the root ({@code ncclFfmFunctionReduce}); see
   * {@link #allReduce} for the rest.
   */
  public void reduce(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int root,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.REDUCE;
    comm.checkTypes(function, send, recv);
    append(
        function,
        symbol,
        lane,
        send.type(),
        DeviceCommunicator.opValue(function, op),
        comm.checkRoot(function, root),
        0,
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        ticket);
  }

  /**
   * Appends an exchange in which part r of send goes to rank r ({@code ncclFfmFunctionAllToAll});
   * see {@link #allReduce} for the rest.
   *
   * @param count elements of a part; each buffer holds size of them
   */
  public void allToAll(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.ALL_TO_ALL;
    comm.checkTypes(function, send, recv);
    long all = comm.times(function, count);
    append(
        function,
        symbol,
        lane,
        send.type(),
        0,
        0,
        0,
        count,
        send.pointer(function.operation, sendOffset, all),
        recv.pointer(function.operation, recvOffset, all),
        ticket);
  }

  /**
   * Appends an all-reduce in groups of neighbouring ranks, then across the groups ({@code
   * ncclFfmFunctionHierarchicalAllReduce}); see {@link #allReduce} for the rest.
   *
   * @param ranksPerGroup divides the number of ranks
   */
  public void hierarchicalAllReduce(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      int ranksPerGroup,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.HIERARCHICAL_ALL_REDUCE;
    comm.checkTypes(function, send, recv);
    append(
        function,
        symbol,
        lane,
        send.type(),
        DeviceCommunicator.opValue(function, op),
        comm.checkGroup(function, ranksPerGroup),
        0,
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        ticket);
  }

  /** Appends a task that ends when all ranks have come to it ({@code ncclFfmFunctionBarrier}). */
  public void barrier(TaskSymbol symbol, int lane, Ticket ticket) {
    append(DeviceFunction.BARRIER, symbol, lane, DataType.INT8, 0, 0, 0, 0, 0, 0, ticket);
  }

  /**
   * Appends a send of {@code count} elements ({@code ncclFfmFunctionSend}); see {@link #allReduce}
   * for the rest. At the same place of the lane the peer appends a receive with the same name, and
   * every other rank a {@link #placeholder}.
   *
   * @param peer another rank
   */
  public void send(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer buffer,
      long offset,
      long count,
      int peer,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.SEND;
    comm.checkTypes(function, buffer, buffer);
    append(
        function,
        symbol,
        lane,
        buffer.type(),
        0,
        comm.checkPeer(function, peer),
        0,
        count,
        buffer.pointer(function.operation, offset, count),
        0,
        ticket);
  }

  /**
   * Appends a receive of {@code count} elements ({@code ncclFfmFunctionRecv}); see {@link #send}.
   *
   * @param peer another rank
   */
  public void recv(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer buffer,
      long offset,
      long count,
      int peer,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.RECV;
    comm.checkTypes(function, buffer, buffer);
    append(
        function,
        symbol,
        lane,
        buffer.type(),
        0,
        0,
        comm.checkPeer(function, peer),
        count,
        0,
        buffer.pointer(function.operation, offset, count),
        ticket);
  }

  /**
   * Appends a send to one rank and a receive of as much from another or the same one ({@code
   * ncclFfmFunctionSendRecv}); see {@link #send}.
   *
   * @param to another rank
   * @param from another rank
   */
  public void sendRecv(
      TaskSymbol symbol,
      int lane,
      DeviceBuffer send,
      long sendOffset,
      int to,
      DeviceBuffer recv,
      long recvOffset,
      int from,
      long count,
      Ticket ticket) {
    DeviceFunction function = DeviceFunction.SEND_RECV;
    comm.checkTypes(function, send, recv);
    append(
        function,
        symbol,
        lane,
        send.type(),
        0,
        comm.checkPeer(function, to),
        comm.checkPeer(function, from),
        count,
        send.pointer(function.operation, sendOffset, count),
        recv.pointer(function.operation, recvOffset, count),
        ticket);
  }

  /**
   * Appends a task that does nothing ({@code ncclFfmFunctionNone}): for ranks without a part in
   * what others send and receive at this place of the lane, so that all keep in step.
   */
  public void placeholder(TaskSymbol symbol, int lane, Ticket ticket) {
    append(null, symbol, lane, DataType.INT8, 0, 0, 0, 0, 0, 0, ticket);
  }

  private void append(
      @Nullable DeviceFunction function,
      TaskSymbol symbol,
      int lane,
      DataType type,
      int op,
      int root,
      int source,
      long count,
      long send,
      long recv,
      Ticket ticket) {
    String operation = function == null ? "placeholder" : function.operation;
    if (lane < 0 || lane >= lanes) {
      throw new IllegalArgumentException(
          operation + " on the " + this + ": lane " + lane + ": must be from 0 to " + (lanes - 1));
    }
    if (count > MOST_COUNT) {
      throw new IllegalArgumentException(
          operation + " on the " + this + ": " + count + " elements: at most " + MOST_COUNT);
    }
    communicator.begin(operation);
    try {
      synchronized (lock) {
        checkOpen(operation);
        throwIfFailed(lane);
        checkFree(operation, ticket);
        if (function != null) {
          comm.checkTask(function, type, op, root, source, count, send, recv);
        }
        int slot = takeSlot(operation, lane);
        int functionValue = function == null ? ShimH.ncclFfmFunctionNone() : function.value;
        long at = slot * ncclFfmTask.sizeof();
        tasks.set(JAVA_INT, at + ncclFfmTask.symbol$offset(), symbol.hash());
        tasks.set(JAVA_INT, at + ncclFfmTask.function$offset(), functionValue);
        tasks.set(JAVA_INT, at + ncclFfmTask.datatype$offset(), type.ncclValue());
        tasks.set(JAVA_INT, at + ncclFfmTask.op$offset(), op);
        tasks.set(JAVA_INT, at + ncclFfmTask.root$offset(), root);
        tasks.set(JAVA_INT, at + ncclFfmTask.source$offset(), source);
        tasks.set(JAVA_INT, at + ncclFfmTask.lane$offset(), lane);
        tasks.set(JAVA_LONG, at + ncclFfmTask.count$offset(), count);
        tasks.set(JAVA_LONG, at + ncclFfmTask.sendbuff$offset(), send);
        tasks.set(JAVA_LONG, at + ncclFfmTask.recvbuff$offset(), recv);
        ticket.begin(appended, symbol, operation, type, count, lane);
        onTheWay[slot] = ticket;
        appended++;
      }
    } finally {
      communicator.end();
    }
  }

  private void checkFree(String operation, Ticket ticket) {
    if (ticket.queue != this) {
      throw new IllegalArgumentException(
          operation + " on the " + this + ": the ticket is of the " + ticket.queue);
    }
    // Its place is in use until the kernel that appends has answered, also if the lane has failed.
    if (ticket.position >= 0
        && (!isOver(ticket)
            || onTheWay[slotOf(ticket.position)] == ticket && !readAnswer(ticket))) {
      throw new IllegalStateException(
          operation
              + " on the "
              + this
              + ": the ticket stands for an unfinished task, the "
              + ticket
              + "; await it, or take another ticket");
    }
  }

  private boolean isOver(Ticket ticket) {
    lookLocked(ticket);
    return ticket.isOver();
  }

  /** A place for the ticket of the next task. */
  private int takeSlot(String operation, int lane) {
    if (appended - answered == MOST_ON_THE_WAY) {
      collectAnswers();
    }
    if (appended - answered == MOST_ON_THE_WAY) {
      throw new QueueFullException(
          operation,
          rank,
          MOST_ON_THE_WAY
              + " tasks of the host are on their way to the "
              + this
              + (launched == answered
                  ? ", and none of them was launched; launch them"
                  : "; the stream of the oldest has not come to it"));
    }
    return slotOf(appended);
  }

  private static int slotOf(long position) {
    return (int) (position % MOST_ON_THE_WAY);
  }

  /** Frees the places of tickets that have been answered. */
  private void collectAnswers() {
    while (answered < launched) {
      @Nullable Ticket ticket = onTheWay[slotOf(answered)];
      if (ticket != null && !readAnswer(ticket)) {
        return;
      }
      answered++;
    }
  }

  /** Whether the kernel that appends a task has said what became of it. */
  private boolean readAnswer(Ticket ticket) {
    if (ticket.position >= launched) {
      return false;
    }
    int slot = slotOf(ticket.position);
    long at = ticketsAt + slot * ncclFfmTicket.sizeof();
    if ((int) INT.getAcquire(pinned, at + ncclFfmTicket.ready$offset()) == 0) {
      return false;
    }
    ticket.answered = true;
    ticket.sequence = pinned.get(JAVA_INT, at + ncclFfmTicket.sequence$offset());
    ticket.result = pinned.get(JAVA_INT, at + ncclFfmTicket.result$offset());
    ticket.answeredAt = ticket.result == 0 ? 0 : System.nanoTime();
    onTheWay[slot] = null;
    if (ticket.result == QUEUE_FULL) {
      QueueFullException full =
          new QueueFullException(
              ticket.operation,
              rank,
              "the ring of "
                  + config.depth()
                  + " tasks stayed full for "
                  + config.timeout().toMillis()
                  + " ms before the "
                  + ticket
                  + " could be appended; it was not, and the lane goes on: see what its oldest task"
                  + " waits for");
      ticket.failure = full;
      TaskFailureEvent.emit(full, ticket.lane, rank);
    }
    return true;
  }

  // ------------------------------------------------------------------ launching

  /**
   * Hands the appended tasks over, in the order of a stream, and has them run: a kernel puts them
   * into the rings of their lanes when the stream comes to it ({@code ncclFfmTaskAppendOnStream}, a
   * launch for every {@code NCCLFFM_MAX_BATCH} tasks), where it waits for room if need be. Does
   * nothing if nothing was appended. If it throws, the tasks that it did not hand over stay
   * appended.
   *
   * @param stream of the communicator's device; not one that is being captured
   * @throws IllegalStateException if the queue or device communicator is closed, or the stream is
   *     being captured
   */
  public void launch(CudaStream stream) {
    beginLaunch(LAUNCH, stream);
    try {
      if (stream.isCapturing()) {
        throw new IllegalStateException(
            LAUNCH
                + " on the "
                + this
                + ": the "
                + stream
                + " is being captured; tasks of the host are launched one by one, those of kernels"
                + " by a graph, too");
      }
      for (int n = fillBatch(); n > 0; n = fillBatch()) {
        launchBatch(n, stream);
      }
    } finally {
      endLaunch();
    }
  }

  /** Keeps the queue as it is, and its communicator, while a kernel of it is being launched. */
  void beginLaunch(String operation, CudaStream stream) {
    communicator.begin(operation, stream);
    launching.lock();
    try {
      checkOpen(operation);
      comm.checkBeforeTasks(operation, stream);
    } catch (RuntimeException | Error e) {
      endLaunch();
      throw e;
    }
  }

  void endLaunch() {
    launching.unlock();
    communicator.end();
  }

  /** The next tasks to be handed over, at most as many as a launch takes; how many. */
  private int fillBatch() {
    synchronized (lock) {
      int first = slotOf(launched);
      int n = (int) Math.min(appended - launched, ShimH.NCCLFFM_MAX_BATCH());
      n = Math.min(n, MOST_ON_THE_WAY - first);
      long at = ticketsAt + first * ncclFfmTicket.sizeof();
      for (int i = 0; i < n; i++) {
        pinned.set(JAVA_INT, at + i * ncclFfmTicket.sizeof() + ncclFfmTicket.ready$offset(), 0);
      }
      ncclFfmTaskBatch.nTasks(batch, n);
      batch.set(JAVA_LONG, ncclFfmTaskBatch.tickets$offset(), pinnedAtDevice + at);
      long bytes = ncclFfmTask.sizeof();
      MemorySegment.copy(tasks, first * bytes, batch, ncclFfmTaskBatch.tasks$offset(), n * bytes);
      return n;
    }
  }

  private void launchBatch(int n, CudaStream stream) {
    int rc = ShimH.ncclFfmTaskAppendOnStream(struct, batch, stream.handle());
    DeviceCommunicator.checkShim(rc, LAUNCH);
    synchronized (lock) {
      int first = slotOf(launched);
      launched += n;
      if (TaskEvent.PROBE.isEnabled()) {
        for (int i = 0; i < n; i++) {
          record(first + i, stream);
        }
      }
    }
    countProducer();
  }

  private void record(int slot, CudaStream stream) {
    @Nullable Ticket ticket = onTheWay[slot];
    if (ticket == null) {
      return; // answered already
    }
    MemorySegment task = tasks.asSlice(slot * ncclFfmTask.sizeof(), ncclFfmTask.sizeof());
    @Nullable ReduceOp op = TaskRecord.ofTask(task).op();
    emit(
        ticket.symbol,
        ticket.operation,
        ticket.count * ticket.type.bytes(),
        ticket.type,
        op,
        ticket.lane,
        stream);
  }

  private void emit(
      TaskSymbol symbol,
      String operation,
      long bytes,
      DataType type,
      @Nullable ReduceOp op,
      int lane,
      CudaStream stream) {
    TaskEvent event = new TaskEvent();
    event.symbol = symbol.toString();
    event.operation = operation;
    event.bytes = bytes;
    event.type = type.name();
    event.reduction = op == null ? "" : op.toString();
    event.lane = lane;
    event.stream = stream.handle().address();
    event.rank = rank;
    event.size = communicator.size();
    event.commit();
  }

  /**
   * A producer was launched: from now on the scheduler stays until it has ended, and is started if
   * it is not running. The order is that of ncclFfmTaskControl.
   */
  private void countProducer() {
    int counted = producers + 1;
    producers = counted;
    INT.setRelease(pinned, controlAt + ncclFfmTaskControl.producers$offset(), counted);
    VarHandle.fullFence();
    if (saidOfTheLast() >= -1) { // it has announced its end, or ended
      startScheduler(config.mode().value);
    }
  }

  /** What the schedulers say, less what the last of them says at its end. */
  private int saidOfTheLast() {
    int said = (int) INT.getAcquire(pinned, controlAt + ncclFfmTaskControl.state$offset());
    return said - 2 * (int) schedulerLaunches;
  }

  private boolean hasStopped() {
    return saidOfTheLast() == 0;
  }

  private TaskQueueSnapshot.Scheduler schedulerState() {
    int said = saidOfTheLast();
    if (said == 0) {
      return TaskQueueSnapshot.Scheduler.STOPPED;
    }
    return said == -1 ? TaskQueueSnapshot.Scheduler.STOPPING : TaskQueueSnapshot.Scheduler.RUNNING;
  }

  private void startScheduler(int mode) {
    communicator.device().makeCurrent();
    int rc = ShimH.ncclFfmLaunchScheduler(comm.pointer(), struct, mode, schedulerStream.handle());
    DeviceCommunicator.checkShim(rc, "ncclFfmLaunchScheduler");
    schedulerLaunches = schedulerLaunches + 1;
  }

  /**
   * A scheduler that drains may have ended before a producer came to its tasks; and one may not
   * have been launched, for a reason that has gone.
   */
  private void keepRunning() {
    if (closing || !launching.tryLock()) {
      return; // who launches starts it
    }
    try {
      if (!closing && !aborted && hasStopped()) {
        startScheduler(config.mode().value);
      }
    } finally {
      launching.unlock();
    }
  }

  // ------------------------------------------------------------------ producers

  /**
   * Says that a kernel which takes {@link #struct} was launched on a stream just now, or captured:
   * then each launch of the graph counts. The scheduler then runs until the kernel has ended, and
   * the kernel can wait for its tasks. Enqueues {@code ncclFfmTaskProducerEnd} behind it, so the
   * kernel does not call {@code ncclTaskProducerEnd} itself.
   *
   * <p>A kernel of your own that shares the GPU with those of other ranks must have been launched
   * once, with nothing to do, before any rank uses the queue: a first launch may wait for the
   * device. If it waits for its tasks, it leaves room for the scheduler, which is launched after
   * it: a processor for each of the lanes times blocks of every rank on the GPU.
   */
  public void producerLaunched(CudaStream stream) {
    beginLaunch(PRODUCER_END, stream);
    try {
      countLaunched(stream);
    } finally {
      endLaunch();
    }
  }

  /**
   * Between {@link #beginLaunch} and {@link #endLaunch}: the kernel is there, whatever failed
   * since.
   */
  void countLaunched(CudaStream stream) {
    int rc = ShimH.ncclFfmTaskProducerEnd(struct, stream.handle());
    DeviceCommunicator.checkShim(rc, PRODUCER_END);
    if (stream.isCapturing()) {
      stream.addToGraph(new CapturedProducer(PRODUCER_END, null));
    } else {
      countProducer();
    }
  }

  /** A producer in a graph, counted at each launch. */
  private final class CapturedProducer implements GraphWork {
    private final String operation;
    private final @Nullable ProducerRun run; // null: a kernel of the user's

    CapturedProducer(String operation, @Nullable ProducerRun run) {
      this.operation = operation;
      this.run = run;
    }

    @Override
    public void begin(CudaStream stream) {
      beginLaunch(operation, stream);
    }

    @Override
    public void end(CudaStream stream, boolean launched) {
      try {
        if (launched && run == null) {
          countProducer();
        } else if (launched) {
          started(run, stream);
        }
      } finally {
        endLaunch();
      }
    }

    @Override
    public void release() {
      synchronized (lock) {
        if (run != null) {
          run.inGraph = false;
          if ((!run.launched || run.ended) && runs[run.place] == run) {
            runs[run.place] = null;
          }
        }
      }
    }
  }

  /**
   * Launches the kernel that computes buckets and appends the all-reduce of each as soon as it is
   * ready ({@code ncclFfmTaskAppendBuckets}): bucket k goes to lane k modulo lanes. Returns at
   * once. No other producer may append to any lane until the kernel has taken its numbers, in the
   * order of the stream. Where the stream is being captured, nothing is launched before the graph
   * is, and the queue keeps a place of its {@link #MOST_RUNS} for it until that is closed.
   *
   * @throws IllegalArgumentException if the buffer is on another device
   * @throws IllegalStateException if {@link #MOST_RUNS} are unfinished or in graphs, as for {@link
   *     #launch}
   * @throws TaskQueueException if a lane has failed
   */
  public ProducerRun buckets(TaskSymbol symbol, TaskBuckets work, CudaStream stream) {
    comm.checkBuffer(BUCKETS, work.x());
    beginLaunch(BUCKETS, stream);
    try {
      ProducerRun run = takeRun(BUCKETS, work.buckets(), work.blocks(), false, stream);
      ncclFfmTaskBuckets.buff(buckets, work.x().address(BUCKETS, work.offset(), work.count()));
      ncclFfmTaskBuckets.count(buckets, work.count());
      ncclFfmTaskBuckets.bucketCount(buckets, work.bucketCount());
      ncclFfmTaskBuckets.a(buckets, work.a());
      ncclFfmTaskBuckets.b(buckets, work.b());
      ncclFfmTaskBuckets.symbol(buckets, symbol.hash());
      ncclFfmTaskBuckets.blocks(buckets, work.blocks());
      ncclFfmTaskBuckets.first(buckets, atDevice(runAt(run)));
      int rc = ShimH.ncclFfmTaskAppendBuckets(struct, buckets, stream.handle());
      started(run, rc, symbol, work.count(), stream);
      return run;
    } finally {
      endLaunch();
    }
  }

  /**
   * Launches the kernel that computes iteration i + 1 while iteration i is all-reduced ({@code
   * ncclFfmTaskIterate}); otherwise as {@link #buckets}.
   */
  public ProducerRun overlap(TaskSymbol symbol, TaskOverlap work, CudaStream stream) {
    comm.checkBuffer(OVERLAP, work.in());
    comm.checkBuffer(OVERLAP, work.out());
    comm.checkBuffer(OVERLAP, work.work());
    long count = work.in().count();
    long n =
        work.parts() == TaskOverlap.Parts.COMPUTE ? 0 : (long) work.iterations() * work.blocks();
    beginLaunch(OVERLAP, stream);
    try {
      ProducerRun run = takeRun(OVERLAP, n, work.blocks(), true, stream);
      ncclFfmTaskOverlap.in(overlap, work.in().address(OVERLAP, 0, count));
      ncclFfmTaskOverlap.out(overlap, work.out().address(OVERLAP, 0, count));
      ncclFfmTaskOverlap.work(overlap, work.work().address(OVERLAP, 0, 4 * count));
      ncclFfmTaskOverlap.count(overlap, count);
      ncclFfmTaskOverlap.iterations(overlap, work.iterations());
      ncclFfmTaskOverlap.rounds(overlap, work.rounds());
      ncclFfmTaskOverlap.a(overlap, work.a());
      ncclFfmTaskOverlap.b(overlap, work.b());
      ncclFfmTaskOverlap.symbol(overlap, symbol.hash());
      ncclFfmTaskOverlap.blocks(overlap, work.blocks());
      ncclFfmTaskOverlap.parts(overlap, work.parts().value());
      ncclFfmTaskOverlap.first(overlap, atDevice(runAt(run)));
      ncclFfmTaskOverlap.results(overlap, atDevice(resultsAt(run)));
      int rc = ShimH.ncclFfmTaskIterate(struct, overlap, stream.handle());
      started(run, rc, symbol, count, stream);
      return run;
    } finally {
      endLaunch();
    }
  }

  static void checkFloats(String operation, DeviceBuffer buffer) {
    if (buffer.type() != DataType.FLOAT32) {
      throw new IllegalArgumentException(
          operation + ": the " + buffer + " is not of type FLOAT32, the only one");
    }
  }

  static void checkBlocks(String operation, int blocks) {
    if (blocks < 1 || blocks > MOST_BLOCKS) {
      throw new IllegalArgumentException(
          operation + ": " + blocks + " blocks: must be from 1 to " + MOST_BLOCKS);
    }
  }

  static void checkTasks(String operation, long n) {
    if (n > MOST_TASKS) {
      throw new IllegalArgumentException(
          operation + ": " + n + " tasks: at most " + MOST_TASKS + " at a time");
    }
  }

  private long runAt(ProducerRun run) {
    return runsAt + run.place * runBytes;
  }

  private long resultsAt(ProducerRun run) {
    return runAt(run) + lanes * ncclFfmTicket.sizeof();
  }

  private ProducerRun takeRun(
      String operation, long n, int blocks, boolean hasResults, CudaStream stream) {
    synchronized (lock) {
      for (int l = 0; l < lanes; l++) {
        throwIfFailed(l);
      }
      if (!stream.isCapturing()) { // a capture allows no question about an event
        forgetRunsThatEnded();
      }
      for (int place = 0; place < MOST_RUNS; place++) {
        if (runs[place] == null) {
          return new ProducerRun(this, operation, place, n, blocks, hasResults);
        }
      }
    }
    throw new IllegalStateException(
        operation
            + " on the "
            + this
            + ": "
            + MOST_RUNS
            + " kernels that append tasks are unfinished or in graphs; await one of them, or close"
            + " a graph");
  }

  private void forgetRunsThatEnded() {
    for (@Nullable ProducerRun run : runs) {
      if (run != null && !run.inGraph) {
        hasEnded(run);
      }
    }
  }

  private void started(ProducerRun run, int rc, TaskSymbol symbol, long count, CudaStream stream) {
    DeviceCommunicator.checkShim(rc, run.operation);
    if (stream.isCapturing()) {
      synchronized (lock) {
        run.inGraph = true;
        runs[run.place] = run;
      }
      stream.addToGraph(new CapturedProducer(run.operation, run));
      return;
    }
    started(run, stream);
    if (TaskEvent.PROBE.isEnabled()) {
      emit(symbol, run.operation, count * Float.BYTES, DataType.FLOAT32, ReduceOp.SUM, -1, stream);
    }
  }

  private void started(ProducerRun run, CudaStream stream) {
    try {
      runEnds[run.place].record(stream);
      synchronized (lock) {
        run.begin();
        runs[run.place] = run;
      }
    } finally {
      countProducer(); // it was launched
    }
  }

  /** Whether the kernel has ended; what it left in memory is kept then. */
  private boolean hasEnded(ProducerRun run) {
    if (run.ended) {
      return true;
    }
    if (!run.launched || closed || !runEnds[run.place].isDone()) {
      return false;
    }
    run.ended = true;
    run.endedAt = System.nanoTime();
    for (int l = 0; l < lanes; l++) {
      long first = runAt(run) + l * ncclFfmTicket.sizeof();
      long ofLane = (run.tasks + lanes - 1 - l) / lanes;
      run.ends[l] = pinned.get(JAVA_INT, first + ncclFfmTicket.sequence$offset()) + (int) ofLane;
      if (run.result == 0) {
        run.result = pinned.get(JAVA_INT, first + ncclFfmTicket.result$offset());
      }
    }
    for (int b = 0; run.hasResults && b < run.blocks; b++) {
      int result = pinned.get(JAVA_INT, resultsAt(run) + b * (long) Integer.BYTES);
      // A full ring is the cause where other blocks only learn that the lane has failed.
      if (run.result == 0 || result == QUEUE_FULL) {
        run.result = result;
      }
    }
    if (!run.inGraph) {
      runs[run.place] = null;
    }
    return true;
  }

  /** How it has ended; null if it has not. */
  ProducerRun.@Nullable Outcome look(ProducerRun run) {
    synchronized (lock) {
      lookLocked(run);
      if (run.isOver()) {
        return new ProducerRun.Outcome(run.failure);
      }
    }
    keepRunning();
    return null;
  }

  private void lookLocked(ProducerRun run) {
    if (run.isOver()) {
      return;
    }
    if (!run.launched) {
      throw new IllegalStateException("the graph with the " + run + " was not launched");
    }
    if (!hasEnded(run)) {
      if (closed) {
        run.failure = ofResult(REMOTE_ERROR, 0);
      }
      return;
    }
    boolean all = true;
    for (int l = 0; l < lanes; l++) {
      // The failure first: what was done before it is done.
      @Nullable TaskQueueException failed = failureOf(l);
      if (progressOf(l) - run.ends[l] >= 0 && run.result == 0) {
        continue;
      }
      all = false;
      if (failed != null) {
        run.failure = run.result == QUEUE_FULL ? fullRing(run, failed) : failed;
        return;
      }
    }
    run.done = all;
    if (isWithoutRecord(run.result, run.endedAt)) {
      run.failure = ofResult(run.result, 0);
    } else if (!all && closed) {
      run.failure = ofResult(REMOTE_ERROR, 0);
    }
  }

  private QueueFullException fullRing(ProducerRun run, TaskQueueException failed) {
    QueueFullException full =
        new QueueFullException(
            run.operation,
            rank,
            "a block of the "
                + run
                + " found no room in a ring of "
                + config.depth()
                + " tasks; the lane has failed: "
                + failed.getMessage());
    full.initCause(failed);
    return full;
  }

  // ------------------------------------------------------------------ waiting

  boolean look(Ticket ticket) {
    synchronized (lock) {
      lookLocked(ticket);
      if (ticket.isOver()) {
        return true;
      }
      if (ticket.position >= launched) {
        return false;
      }
    }
    keepRunning();
    return false;
  }

  private void lookLocked(Ticket ticket) {
    if (ticket.isOver()) {
      return;
    }
    if (ticket.position < 0) {
      throw new IllegalStateException("a ticket of the " + this + ": no task was appended with it");
    }
    // The failure first: what was done before it is done.
    @Nullable TaskQueueException failed = failureOf(ticket.lane);
    boolean answer = ticket.answered || !closed && readAnswer(ticket);
    if (ticket.failure != null) {
      return; // it found no room
    }
    if (answer && ticket.result == 0) {
      if (progressOf(ticket.lane) - ticket.sequence > 0) {
        ticket.done = true;
        return;
      }
      // What came before the task that failed is done; the word that says so is on its way.
      @Nullable TaskRecord at = failed == null ? null : failed.task();
      if (at != null && (int) at.sequence() - ticket.sequence > 0 && !closed) {
        return;
      }
    }
    if (failed != null) {
      ticket.failure = failed;
    } else if (isWithoutRecord(ticket.result, ticket.answeredAt)) {
      ticket.failure = ofResult(ticket.result, ticket.lane);
    } else if (closed) {
      ticket.failure = ofResult(REMOTE_ERROR, ticket.lane);
    }
  }

  void checkLaunched(Ticket ticket) {
    synchronized (lock) {
      if (ticket.position >= launched && !ticket.isOver()) {
        throw new IllegalStateException("the " + ticket + " was not launched");
      }
    }
  }

  void checkCommunicator() {
    synchronized (lock) {
      if (closed) {
        return;
      }
    }
    communicator.throwIfFailed();
  }

  /** Tasks of a lane that are complete: those before this number. */
  private int progressOf(int lane) {
    return closed
        ? lastProgress[lane]
        : (int) INT.getAcquire(pinned, progressAt + lane * (long) Integer.BYTES);
  }

  private long statusAt(int lane) {
    return lane * ncclFfmStatus.sizeof();
  }

  private @Nullable TaskQueueException failureOf(int lane) {
    @Nullable TaskQueueException known = failures[lane];
    if (known != null) {
      return known;
    }
    if (!closed
        && (int) INT.getAcquire(pinned, statusAt(lane) + ncclFfmStatus.ready$offset()) != 0) {
      known = readStatus(lane);
    } else if (aborted) {
      known = ofResult(REMOTE_ERROR, lane);
    } else {
      return null;
    }
    failures[lane] = known;
    TaskFailureEvent.emit(known, lane, rank);
    return known;
  }

  /** A kernel was refused, and no lane has failed: what else there is to know was not kept. */
  private static boolean isWithoutRecord(int result, long sinceNanos) {
    return result != 0 && System.nanoTime() - sinceNanos > RECORD_NANOS;
  }

  private TaskQueueException ofResult(int code, int lane) {
    long number = Integer.toUnsignedLong(progressOf(lane));
    return new TaskQueueException(code, rank, -1, lane, number, Duration.ZERO, null, null);
  }

  private TaskQueueException readStatus(int lane) {
    MemorySegment status = pinned.asSlice(statusAt(lane), ncclFfmStatus.sizeof());
    return new TaskQueueException(
        ncclFfmStatus.code(status),
        ncclFfmStatus.rank(status),
        ncclFfmStatus.peer(status),
        lane,
        Integer.toUnsignedLong(ncclFfmStatus.epoch(status)),
        Duration.ofNanos(ncclFfmStatus.waitedNs(status)),
        TaskRecord.ofRecord(ncclFfmStatus.task(status)),
        TaskRecord.ofRecord(ncclFfmStatus.peerTask(status)));
  }

  /**
   * What a lane has failed with, or null. For lanes that kernels append to; a {@link Ticket} tells
   * by itself.
   *
   * @throws IllegalArgumentException if there is no such lane
   */
  public @Nullable TaskQueueException failure(int lane) {
    if (lane < 0 || lane >= lanes) {
      throw new IllegalArgumentException(
          "failure on the " + this + ": lane " + lane + ": must be from 0 to " + (lanes - 1));
    }
    synchronized (lock) {
      return failureOf(lane);
    }
  }

  private void throwIfFailed(int lane) {
    @Nullable TaskQueueException failed = failureOf(lane);
    if (failed != null) {
      throw failed.again();
    }
  }

  /** The same, to be thrown again: each has the stack of where it was. */
  static NcclException again(NcclException failure) {
    return failure instanceof TaskQueueException ofLane
        ? ofLane.again()
        : ((QueueFullException) failure).again();
  }

  private void checkOpen(String operation) {
    if (closed || closing) {
      throw new IllegalStateException(operation + ": the " + this + " is closed");
    }
  }

  // ------------------------------------------------------------------ snapshot, stop, end

  /**
   * How far this rank's lanes are, by small copies from device memory, while the scheduler goes on.
   *
   * @throws IllegalStateException if closed
   * @throws DeadlineException if the copies do not come within 10 seconds
   */
  public TaskQueueSnapshot snapshot() {
    synchronized (imageLock) {
      synchronized (lock) {
        checkOpen("snapshot");
      }
      long deadline = Backoff.deadline(COPY_TIMEOUT);
      copyImage(SNAPSHOT, deadline);
      copyOldest(SNAPSHOT, deadline);
      synchronized (lock) {
        List<TaskQueueSnapshot.Lane> all = new ArrayList<>();
        for (int l = 0; l < lanes; l++) {
          all.add(snapshotOf(l));
        }
        return new TaskQueueSnapshot(
            schedulerState(),
            schedulerLaunches,
            Math.max(0, producers - finishedInImage()),
            List.copyOf(all));
      }
    }
  }

  private TaskQueueSnapshot.Lane snapshotOf(int l) {
    MemorySegment lane = laneInImage(l);
    int head = ncclFfmTaskLane.head(lane);
    int done = ncclFfmTaskLane.done(lane);
    MemorySegment slot = pinned.asSlice(oldestAt(l), ncclFfmTaskSlot.sizeof());
    return new TaskQueueSnapshot.Lane(
        l,
        Integer.toUnsignedLong(head),
        Integer.toUnsignedLong(ncclFfmTaskLane.launched(lane)),
        Integer.toUnsignedLong(done),
        Integer.toUnsignedLong(head) / config.depth(),
        head == done ? null : TaskRecord.ofSlot(slot, l, done),
        failureOf(l));
  }

  /** Copies what the lanes share, and the lanes. Under the lock of the image. */
  private void copyImage(String what, long deadline) {
    communicator.device().makeCurrent();
    memory.copyTo(pinned.asSlice(imageAt, imageBytes()), 0, comm.ownStream());
    awaitCopy(what, deadline);
  }

  private void awaitCopy(String what, long deadline) {
    for (int round = 0; !comm.ownStream().isDone(); round++) {
      Backoff.pause(round, deadline, what, this);
    }
  }

  private void copyOldest(String what, long deadline) {
    for (int l = 0; l < lanes; l++) {
      int place = ncclFfmTaskLane.done(laneInImage(l)) & config.depth() - 1;
      long at = imageBytes() + ((long) l * config.depth() + place) * ncclFfmTaskSlot.sizeof();
      memory.copyTo(pinned.asSlice(oldestAt(l), ncclFfmTaskSlot.sizeof()), at, comm.ownStream());
    }
    awaitCopy(what, deadline);
  }

  private long oldestAt(int lane) {
    return imageAt + imageBytes() + lane * LINE;
  }

  private MemorySegment laneInImage(int lane) {
    long size = ncclFfmTaskLane.sizeof();
    return pinned.asSlice(imageAt + ncclFfmTaskShared.sizeof() + lane * size, size);
  }

  private int finishedInImage() {
    return pinned.get(JAVA_INT, imageAt + ncclFfmTaskShared.finished$offset());
  }

  /**
   * Waits until every producer has ended and all that was launched is done or has failed, and ends
   * the scheduler. Tasks that were appended and not launched stay so. The queue may be used on,
   * which starts the scheduler again.
   *
   * @throws IllegalStateException if closed
   * @throws DeadlineException after the timeout or on interruption; the work goes on
   */
  public void stop(Duration timeout) {
    synchronized (lock) {
      checkOpen("stop");
    }
    drain(Backoff.deadline(timeout));
  }

  private void drain(long deadline) {
    while (!isDrained(deadline)) {
      Backoff.pause(
          Integer.MAX_VALUE, deadline, STOP, this); // a look is a copy: it looks at the clock
    }
    setStop(1);
    try {
      awaitScheduler(deadline);
    } finally {
      setStop(0);
    }
    synchronized (lock) {
      forgetRunsThatEnded();
    }
  }

  private void setStop(int value) {
    synchronized (lock) {
      if (!closed) {
        INT.setRelease(pinned, controlAt + ncclFfmTaskControl.stop$offset(), value);
      }
    }
  }

  private void awaitScheduler(long deadline) {
    for (int round = 0; !schedulerStream.isDone(); round++) {
      Backoff.pause(round, deadline, "end of the scheduler of the ", this);
    }
  }

  /** Whether nothing is to be done any more; if something is, the scheduler is kept running. */
  private boolean isDrained(long deadline) {
    boolean allFailed = true;
    boolean quiet;
    boolean stopped;
    synchronized (imageLock) {
      if (closed) {
        throw new IllegalStateException("stop: the " + this + " is closed");
      }
      stopped =
          hasStopped(); // before the copy, so that what it shows is not what that one has done
      copyImage(STOP, deadline);
      quiet = haveProducersEnded();
      for (int l = 0; l < lanes; l++) {
        MemorySegment lane = laneInImage(l);
        boolean failed = ncclFfmTaskLane.failed(lane) != 0;
        allFailed &= failed;
        quiet &= failed || ncclFfmTaskLane.done(lane) - ncclFfmTaskLane.launched(lane) >= 0;
      }
    }
    if (stopped && !quiet && !allFailed && launching.tryLock()) {
      try {
        synchronized (imageLock) { // it is not closed meanwhile
          if (!closed && hasStopped()) {
            startScheduler(config.mode().value);
          }
        }
      } finally {
        launching.unlock();
      }
    }
    return quiet;
  }

  /** Under the lock of the image, which says so. */
  private boolean haveProducersEnded() {
    return finishedInImage() - producers >= 0;
  }

  /**
   * Makes the lanes of this rank fail with {@code ncclRemoteError} at once, and every kernel that
   * waits for one of them give up; from any thread. Tickets whose tasks are not done fail. Buffers
   * may be in use until {@link #close} has returned. Peers that wait for this rank in a task do so
   * until their deadline, unless they abort too.
   */
  @Override
  public void abort() {
    synchronized (endLock) {
      if (closed || aborted) {
        return;
      }
      aborted = true;
      for (int l = 0; l < lanes; l++) {
        INT.setRelease(pinned, statusAt(l) + ncclFfmStatus.abort$offset(), 1);
      }
    }
  }

  /**
   * Ends it: as {@link #stop} within 10 seconds, then as {@link #abort}, and frees its memory.
   * Tickets keep what became of their tasks; those whose tasks were not done have failed. Where the
   * device communicator has failed or the communicator has, it is aborted at once.
   */
  @Override
  public void close() {
    launching.lock(); // what is being launched is seen by the end
    boolean another = closing;
    closing = true;
    launching.unlock();
    if (another) {
      awaitClosed();
      return;
    }
    boolean ended = communicator.device().isLost() || end();
    synchronized (imageLock) {
      synchronized (lock) {
        for (int l = 0; l < lanes; l++) {
          lastProgress[l] = progressOf(l);
          if ((int) INT.getAcquire(pinned, statusAt(l) + ncclFfmStatus.ready$offset()) != 0) {
            failureOf(l); // kept
          }
        }
        keepOutcomes();
        synchronized (endLock) {
          closed = true;
        }
      }
    }
    comm.setQueue(null);
    communicator.disown(this);
    Runnable free =
        () -> {
          @Nullable RuntimeException trouble = DeviceCommunicator.closeAll(resources, null);
          if (trouble != null) {
            throw trouble;
          }
        };
    if (ended) {
      communicator.freeOrKeep(free);
    } else {
      LOG.log(
          System.Logger.Level.WARNING,
          "nccl-ffm: kernels of the {0} did not end; its memory stays taken until the communicator"
              + " ends",
          this);
      communicator.adopt(free::run);
    }
  }

  /** Another thread is closing it, in bounded steps: what it uses stays until then. */
  private void awaitClosed() {
    long deadline = Backoff.deadline(DRAIN_TIMEOUT.plus(ABORT_TIMEOUT).plus(COPY_TIMEOUT));
    try {
      for (int round = 0; !closed; round++) {
        Backoff.pause(round, deadline, "close of the ", this);
      }
    } catch (DeadlineException e) {
      LOG.log(System.Logger.Level.WARNING, "nccl-ffm: " + e.getMessage());
    }
  }

  /** What tickets and runs will be asked for, once the memory is gone. */
  private void keepOutcomes() {
    for (@Nullable Ticket ticket : onTheWay) {
      if (ticket != null) {
        readAnswer(ticket);
      }
    }
    for (@Nullable ProducerRun run : runs.clone()) {
      try {
        if (run != null) {
          hasEnded(run);
        }
      } catch (RuntimeException e) {
        LOG.log(System.Logger.Level.DEBUG, "nccl-ffm: close of the " + this, e);
      }
    }
  }

  /** Whether no kernel uses the queue any more. */
  private boolean end() {
    if (!aborted && communicator.endsResources()) {
      try {
        comm.throwIfFailed();
        long deadline = Backoff.deadline(DRAIN_TIMEOUT);
        drain(deadline);
        awaitRuns(deadline);
        return true;
      } catch (RuntimeException e) {
        LOG.log(
            e instanceof DeadlineException
                ? System.Logger.Level.WARNING
                : System.Logger.Level.DEBUG,
            "nccl-ffm: close of the " + this + ": it is aborted: " + e.getMessage());
      }
    }
    abort();
    try {
      long deadline = Backoff.deadline(ABORT_TIMEOUT);
      awaitScheduler(deadline);
      synchronized (imageLock) {
        copyImage(PRODUCERS, deadline);
        for (int round = 0; !haveProducersEnded(); round++) {
          Backoff.pause(round, deadline, PRODUCERS, this);
          copyImage(PRODUCERS, deadline);
        }
      }
      return true;
    } catch (RuntimeException e) {
      LOG.log(System.Logger.Level.DEBUG, "nccl-ffm: close of the " + this, e);
      return false;
    }
  }

  /** The events behind kernels that have said their end. */
  private void awaitRuns(long deadline) {
    for (@Nullable ProducerRun run : runs.clone()) {
      for (int round = 0; run != null && run.launched && look(run) == null; round++) {
        Backoff.pause(round, deadline, "wait for ", run);
      }
    }
  }

  @Override
  public String toString() {
    return "task queue of " + config.lanes() + " lanes on " + communicator;
  }
}

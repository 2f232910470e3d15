package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaPointerAttributes;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicBoolean;
import org.jspecify.annotations.Nullable;

/**
 * A load/store-accessible window: memory that every rank provides, and that kernels of every rank
 * can address on every other.
 *
 * <p>Which {@link LsaProvider} maps it the ranks agree on when they create it: the first that works
 * on all of them, or every rank gets the same exception. Creating and closing are collective over
 * the communicator; closing the communicator closes its windows. Threads: as the communicator.
 */
public final class LsaWindow implements AutoCloseable {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  /** Protocol buffers, windows' sizes and halves are multiples of it. */
  static final int LINE = 128;

  private static final long STAMP = 0x57415354_4646434eL;

  private final Communicator communicator;
  private final Exchange exchange;
  private final LsaProvider provider;
  private final WindowMemory memory;
  private final DeviceBuffer local;
  private final long bytes;
  private final long[] bases;
  private final LsaPath[] paths;
  private final int ranksPerDevice;
  private LsaPath poorestPath;
  private final long token;
  private @Nullable Lsa lsa;
  private final AtomicBoolean closed = new AtomicBoolean();

  LsaWindow(
      Communicator communicator,
      Exchange exchange,
      LsaProvider provider,
      WindowMemory memory,
      long[] bases,
      List<Card> ranks) {
    this.communicator = communicator;
    this.exchange = exchange;
    this.provider = provider;
    this.memory = memory;
    this.bytes = ranks.get(0).bytes();
    this.bases = bases;
    this.token = ranks.get(0).token();
    this.local =
        DeviceBuffer.wrap(communicator.device(), DataType.UINT8, bytes, memory.local().address(0));
    this.paths = new LsaPath[bases.length];
    for (int r = 0; r < paths.length; r++) {
      paths[r] =
          bases[r] == 0
              ? LsaPath.NETWORK
              : Paths.between(ranks.get(communicator.rank()), ranks.get(r), provider);
    }
    paths[communicator.rank()] = LsaPath.SELF;
    this.poorestPath = Collections.max(Arrays.asList(paths));
    this.ranksPerDevice = Card.mostOnOneDevice(ranks);
  }

  /**
   * Makes what the ranks of a communicator agree over, as the first window does otherwise.
   * Collective. The ranks meet in a kernel of NCCL this once, and on the host from then on where
   * they are threads of one process: for code that loads kernels or allocates between the two,
   * which would wait for such a kernel.
   */
  public static void prepare(Communicator communicator) {
    checkReady(communicator);
    Exchange.alone(communicator, "LSA window", () -> Exchange.of(communicator));
  }

  /** Makes a window by the best provider that the ranks have; see the long form. */
  public static LsaWindow create(Communicator communicator, long bytes) {
    return create(communicator, bytes, null);
  }

  /**
   * Allocates zeroed memory on every rank and makes it addressable on all. Collective: every rank
   * calls it with the same arguments. Not in a group.
   *
   * @param bytes size on each rank, more than 0
   * @param forced the only provider to take, or null for the best that there is
   * @throws IllegalArgumentException on every rank, if the arguments differ or the size is not
   *     positive
   * @throws IllegalStateException in a group, while another thread makes or closes a window of the
   *     communicator, or if that is closed
   * @throws LsaException on every rank, if no provider works on all of them; it tells why
   */
  public static LsaWindow create(
      Communicator communicator, long bytes, @Nullable LsaProvider forced) {
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("LSA window inside a group: end it first");
    }
    checkReady(communicator);
    return Exchange.alone(
        communicator, "LSA window", () -> createAlone(communicator, bytes, forced));
  }

  private static void checkReady(Communicator communicator) {
    communicator.begin("LSA window");
    communicator.end();
  }

  private static LsaWindow createAlone(
      Communicator communicator, long bytes, @Nullable LsaProvider forced) {
    LsaWindowEvent event = new LsaWindowEvent();
    event.begin();
    Exchange exchange = Exchange.of(communicator);
    String noNcclWindow = NcclWindowMemory.refusal(communicator);
    List<Card> ranks = new ArrayList<>();
    for (byte[] record :
        exchange.allGather(
            "asks for a window", Card.of(communicator, bytes, forced, noNcclWindow).encode())) {
      ranks.add(Card.decode(record));
    }
    checkArguments(ranks);
    List<String> refusals = new ArrayList<>();
    for (LsaProvider provider : forced == null ? LsaProvider.values() : one(forced)) {
      String refusal = Paths.refusal(provider, ranks);
      if (refusal.isEmpty()) {
        Attempt attempt = new Attempt(communicator, exchange, provider, ranks);
        @Nullable LsaWindow made = attempt.make();
        if (made != null) {
          event.end();
          made.tell(event, refusals);
          return made;
        }
        refusal = attempt.refusal;
      }
      refusals.add("  " + provider + ": " + refusal);
    }
    throw new LsaException(
        "no LSA window of "
            + bytes
            + " bytes for "
            + ranks.size()
            + " ranks:\n"
            + String.join("\n", refusals));
  }

  private static LsaProvider[] one(LsaProvider provider) {
    return new LsaProvider[] {provider};
  }

  private static void checkArguments(List<Card> ranks) {
    Card first = ranks.get(0);
    for (int r = 1; r < ranks.size(); r++) {
      Card other = ranks.get(r);
      if (other.bytes() != first.bytes() || other.forced() != first.forced()) {
        throw new IllegalArgumentException(
            "LSA window: the ranks ask for different ones: rank 0 for "
                + describe(first)
                + ", rank "
                + r
                + " for "
                + describe(other));
      }
    }
    if (first.bytes() <= 0 || first.bytes() > Long.MAX_VALUE / 2) {
      throw new IllegalArgumentException(
          "LSA window of " + first.bytes() + " bytes: must be positive");
    }
  }

  /** Which of all windows, the same on every rank. */
  long token() {
    return token;
  }

  private static String describe(Card card) {
    return card.bytes()
        + " bytes by "
        + (card.forced() < 0 ? "any provider" : LsaProvider.values()[card.forced()]);
  }

  /** One provider's try; every step ends with the ranks telling one another how it went. */
  private static final class Attempt implements AutoCloseable {
    private final Communicator communicator;
    private final Exchange exchange;
    private final LsaProvider provider;
    private final List<Card> ranks;
    private final WindowMemory memory;
    private @Nullable LsaWindow made;
    private boolean ended;
    private boolean handedOver;
    String refusal = "";

    Attempt(Communicator communicator, Exchange exchange, LsaProvider provider, List<Card> ranks) {
      this.communicator = communicator;
      this.exchange = exchange;
      this.provider = provider;
      this.ranks = ranks;
      long total = stampOffset(ranks.get(0).bytes()) + LINE;
      this.memory =
          switch (provider) {
            case NCCL_WINDOW, CPU -> new NcclWindowMemory(communicator, total);
            case CUDA_IPC -> new CudaIpcMemory(communicator, total);
            case HOST_STAGED -> new HostStagedMemory(communicator, total);
          };
    }

    private interface Step {
      byte[] take();
    }

    /** Null if it failed on some rank; then everything is undone, and {@link #refusal} is set. */
    @Nullable LsaWindow make() {
      communicator.adopt(this); // whatever ends the communicator meanwhile ends this too
      try {
        byte @Nullable [][] offers = agree("allocates", this::allocate);
        if (offers == null) {
          undo();
          return null;
        }
        long[][] bases = new long[1][];
        boolean opened =
            agree(
                    "opens",
                    () -> {
                      bases[0] = memory.open(ranks, offers);
                      return new byte[0];
                    })
                != null;
        memory.opened();
        if (!opened) {
          undo();
          return null;
        }
        byte @Nullable [][] poorest =
            agree(
                "verifies",
                () -> {
                  LsaWindow window =
                      new LsaWindow(communicator, exchange, provider, memory, bases[0], ranks);
                  made = window;
                  window.lsa = Lsa.create(window);
                  window.verify("LSA window");
                  return new byte[] {(byte) window.poorestPath.ordinal()};
                });
        if (poorest == null) {
          closeTable();
          undo();
          return null;
        }
        return handOver(poorest);
      } catch (RuntimeException e) { // the ranks cannot agree any more
        exchange.giveUp("rank " + communicator.rank() + ": " + e.getMessage());
        throw e; // the communicator still has this, and ends it when its kernels have ended
      }
    }

    /** From here on the communicator has the window, and not this. */
    private synchronized LsaWindow handOver(byte[][] poorest) {
      checkGoesOn();
      LsaWindow window = Objects.requireNonNull(made);
      for (byte[] ofRank : poorest) {
        LsaPath path = LsaPath.values()[ofRank[0]];
        window.poorestPath = Collections.max(List.of(window.poorestPath, path));
      }
      communicator.adopt(window);
      communicator.disown(this);
      handedOver = true;
      return window;
    }

    private void checkGoesOn() {
      if (ended) {
        throw new IllegalStateException(
            "LSA window: " + communicator + " ended while the window was being made");
      }
    }

    private void closeTable() {
      if (made != null && made.lsa != null) {
        made.lsa.close();
      }
    }

    private byte[] allocate() {
      byte[] offer = memory.offer();
      long stampOffset = stampOffset(ranks.get(0).bytes());
      DeviceBuffer used = // a provider may round up
          DeviceBuffer.wrap(
              communicator.device(), DataType.UINT8, stampOffset + LINE, memory.local().address(0));
      used.fill((byte) 0, exchange.stream());
      byte[] stamp = stamp(ranks.get(0).token(), communicator.rank());
      used.copyFrom(MemorySegment.ofArray(stamp), stampOffset, exchange.stream());
      return offer;
    }

    /**
     * Takes a step and tells the others.
     *
     * @return what the step gave on every rank, or null if it failed on one
     */
    private byte @Nullable [][] agree(String what, Step step) {
      ByteBuffer record = ByteBuffer.allocate(Exchange.RECORD);
      try {
        byte[] result;
        synchronized (this) { // the communicator may end meanwhile, in another thread
          checkGoesOn();
          result = step.take();
        }
        record.put((byte) 0).put(result, 0, Math.min(result.length, record.remaining()));
      } catch (RuntimeException e) {
        LOG.log(System.Logger.Level.DEBUG, "nccl-ffm: LSA window by " + provider, e);
        if (communicator.state() != Communicator.State.READY) {
          throw e;
        }
        record.clear();
        Card.put(record.put((byte) 1), String.valueOf(e.getMessage()));
      }
      byte[][] all =
          exchange.allGather(
              what + " the window " + Long.toHexString(ranks.get(0).token()), record.array());
      for (int r = 0; r < all.length; r++) {
        if (all[r][0] != 0) {
          ByteBuffer failed = ByteBuffer.wrap(all[r]).position(1);
          refusal = "rank " + r + ": " + Card.text(failed);
          return null;
        }
        all[r] = Arrays.copyOfRange(all[r], 1, all[r].length);
      }
      return all;
    }

    /** On every rank, after a step that failed on one. */
    private void undo() {
      communicator.disown(this);
      closeTogether(communicator, exchange, memory, ranks.get(0).token(), List.of());
    }

    /** By the communicator, which ends, maybe in another thread; after the step under way. */
    @Override
    public synchronized void close() {
      ended = true;
      if (handedOver) {
        Objects.requireNonNull(made).close();
        return;
      }
      communicator.disown(this);
      List<Runnable> steps = new ArrayList<>(); // run from the last to the first
      steps.add(memory::closeLocal);
      steps.add(memory::closePeers);
      steps.add(this::closeTable);
      Cleanup.runAll(steps);
    }
  }

  /**
   * Unmaps and frees; where the communicator is ready all ranks do it together. Nobody frees what
   * another has mapped, and nobody goes on to start a kernel while another frees, which would wait
   * for it on a GPU that they share. If the ranks do not come together within the deadline, the
   * communicator frees what is left when it ends.
   */
  private static void closeTogether(
      Communicator communicator,
      Exchange exchange,
      WindowMemory memory,
      long token,
      List<Runnable> first) {
    boolean together = communicator.endsResources();
    List<Runnable> steps = new ArrayList<>(); // run from the last to the first
    if (together) {
      steps.add(() -> exchange.barrier("freed the window " + Long.toHexString(token)));
    }
    steps.add(() -> communicator.freeOrKeep(memory::closeLocal));
    if (together) {
      steps.add(() -> exchange.barrier("closes the window " + Long.toHexString(token)));
    }
    steps.add(() -> communicator.freeOrKeep(memory::closePeers));
    first.forEach(step -> steps.add(() -> communicator.freeOrKeep(step)));
    Cleanup.runAll(steps);
  }

  /** The first choice on a communicator is of interest; the others will be the same. */
  private void tell(LsaWindowEvent event, List<String> refusals) {
    System.Logger.Level level =
        exchange.isFirstChoice() && provider == LsaProvider.HOST_STAGED
            ? System.Logger.Level.WARNING
            : System.Logger.Level.DEBUG;
    LOG.log(
        level,
        "nccl-ffm: LSA windows of {0} by {1}{2}, paths {3}{4}",
        communicator,
        provider,
        provider == LsaProvider.HOST_STAGED ? " (slow: through host memory)" : "",
        Arrays.toString(paths),
        refusals.isEmpty() ? "" : "; instead of\n" + String.join("\n", refusals));
    if (event.shouldCommit()) {
      event.provider = provider.name();
      event.bytes = bytes;
      event.rank = communicator.rank();
      event.size = bases.length;
      event.commit();
    }
  }

  /** Size on each rank, in bytes. */
  public long bytes() {
    return bytes;
  }

  /** This rank's memory. Closed with the window. */
  public DeviceBuffer local() {
    return local;
  }

  Exchange exchange() {
    return exchange;
  }

  /** The communicator that the window belongs to. */
  public Communicator communicator() {
    return communicator;
  }

  /** How it is mapped. */
  public LsaProvider provider() {
    return provider;
  }

  /** The ranks that it joins. */
  public LsaTeam team() {
    return memory.team();
  }

  /**
   * What lies between this rank and another's memory.
   *
   * @param rank of the communicator
   */
  public LsaPath path(int rank) {
    return paths[Objects.checkIndex(rank, paths.length)];
  }

  /** The poorest that lies between any two ranks ({@link LsaPath} counts down). Of all ranks. */
  public LsaPath poorestPath() {
    return poorestPath;
  }

  /** The most ranks that share one device; the same on every rank. */
  public int ranksPerDevice() {
    return ranksPerDevice;
  }

  /**
   * What kernels take: the windows of the ring neighbours, and the table of all ranks' addresses.
   * Closed with the window.
   */
  public Lsa lsa() {
    checkOpen("lsa");
    return Objects.requireNonNull(lsa);
  }

  /** The {@code ncclWindow_t} where NCCL made the window, else a null pointer. */
  public MemorySegment handle() {
    checkOpen("handle");
    return memory.handle();
  }

  /**
   * Where a rank's memory is, as kernels of this rank address it.
   *
   * @param rank of the communicator, not of the team
   * @param offset in bytes
   * @param length bytes that must lie in the window from there
   * @throws IndexOutOfBoundsException if there is no such rank or the range leaves the window
   * @throws IllegalArgumentException if the rank is outside the team: {@link LsaPath#NETWORK}
   * @throws IllegalStateException if the window is closed
   */
  public long address(int rank, long offset, long length) {
    checkOpen("address");
    Objects.checkIndex(rank, bases.length);
    Objects.checkFromIndexSize(offset, length, bytes);
    if (bases[rank] == 0) {
      throw new IllegalArgumentException(
          "rank " + rank + " is not in the " + team() + ": only the network reaches it");
    }
    return bases[rank] + offset;
  }

  /**
   * Which protocols and vector width data at an offset of this window can use.
   *
   * @param offset in bytes
   * @param count elements
   * @throws IndexOutOfBoundsException if they leave the window
   */
  public AlignmentReport alignmentReport(long offset, long count, DataType type) {
    long address = address(communicator.rank(), offset, Math.multiplyExact(count, type.bytes()));
    return AlignmentReport.of(address, count, type, offset).on(provider, paths);
  }

  private void checkOpen(String operation) {
    if (closed.get()) {
      throw new IllegalStateException(
          operation + ": the LSA window of " + bytes + " bytes is closed");
    }
  }

  /**
   * Refuses a window that is closed or belongs to another communicator.
   *
   * @param operation who asks, for the message
   */
  public void check(String operation, Communicator user) {
    checkOpen(operation);
    if (user != communicator) {
      throw new IllegalArgumentException(
          operation + ": the LSA window belongs to " + communicator + ", not to " + user);
    }
  }

  /**
   * Looks whether everything that a kernel would be given is what it says: the window is open, this
   * rank's memory is on its device, which is the calling thread's current one, and at each address
   * lies the memory of that very rank (a stamp behind the window's last byte). Copies 128 bytes a
   * rank. Not collective; for checked runs and for finding out what an illegal memory access came
   * from.
   *
   * @param operation who asks, for the message
   * @throws LsaException if something is not; it says what
   */
  public void verify(String operation) {
    checkOpen(operation);
    checkDevice(operation);
    CudaStream stream = exchange.stream();
    long[] table = new long[bases.length];
    Objects.requireNonNull(lsa).peers().copyTo(table, stream);
    if (!Arrays.equals(table, bases)) {
      throw new LsaException(
          operation + ": the table of the ranks' addresses in device memory was written over");
    }
    for (int r = 0; r < bases.length; r++) {
      if (bases[r] != 0) {
        verifyStamp(operation, r, stream);
      }
    }
  }

  /**
   * Looks whether a struct that is to be handed to a kernel is this window's {@link Lsa#struct}.
   *
   * @throws IllegalArgumentException if it is another window's or rank's, or was written over
   * @throws IllegalStateException if the window is closed
   */
  public void verify(String operation, MemorySegment candidate) {
    MemorySegment mine = lsa().struct();
    if (!candidate.scope().isAlive() || candidate.mismatch(mine) != -1) {
      throw new IllegalArgumentException(
          operation
              + ": the struct is not the ncclLsa of the "
              + this
              + ": it is another window's or a closed one's, or was written over");
    }
  }

  private void checkDevice(String operation) {
    CudaDevice device = communicator.device();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment current = arena.allocate(ValueLayout.JAVA_INT);
      CudaException.check(CudartH.cudaGetDevice(current), "cudaGetDevice", device);
      if (current.get(ValueLayout.JAVA_INT, 0) != device.ordinal()) {
        throw new LsaException(
            operation
                + ": the current device of this thread is "
                + current.get(ValueLayout.JAVA_INT, 0)
                + ", but the window is on "
                + device
                + ": call its makeCurrent before the launch");
      }
    }
    if (provider == LsaProvider.HOST_STAGED) {
      return; // host memory is on no device
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment attributes = cudaPointerAttributes.allocate(arena);
      CudaException.check(
          CudartH.cudaPointerGetAttributes(attributes, local.address(0)),
          "cudaPointerGetAttributes",
          device);
      int on = cudaPointerAttributes.device(attributes);
      if (on != device.ordinal()) {
        throw new LsaException(
            operation + ": the window's memory is on device " + on + ", not on " + device);
      }
    }
  }

  private void verifyStamp(String operation, int rank, CudaStream stream) {
    MemorySegment address = MemorySegment.ofAddress(bases[rank] + stampOffset(bytes));
    byte[] found = new byte[LINE];
    try {
      DeviceBuffer.wrap(communicator.device(), DataType.UINT8, LINE, address)
          .copyTo(MemorySegment.ofArray(found), stream);
    } catch (CudaException e) {
      throw new LsaException(
          operation + ": nothing is at rank " + rank + "'s address: " + e.getMessage());
    }
    if (!Arrays.equals(found, stamp(token, rank))) {
      ByteBuffer read = ByteBuffer.wrap(found);
      long magic = read.getLong();
      long tokenFound = read.getLong();
      throw new LsaException(
          operation
              + ": the memory at rank "
              + rank
              + "'s address is not that rank's window: "
              + (magic != STAMP
                  ? "its stamp is gone, something wrote behind the window's end"
                  : tokenFound != token
                      ? "it is another window's"
                      : "it is rank " + read.getInt() + "'s"));
    }
  }

  private static long stampOffset(long bytes) {
    return Math.ceilDiv(bytes, LINE) * LINE;
  }

  private static byte[] stamp(long token, int rank) {
    return ByteBuffer.allocate(LINE).putLong(STAMP).putLong(token).putInt(rank).array();
  }

  /** Bytes of a record of {@link #meet}. */
  public static final int MOST_OF_RECORD = Exchange.RECORD;

  /**
   * Tells every rank of the communicator a record of this one, and returns when all have come: on
   * the host where they are threads of one process, by NCCL between processes. For what ranks agree
   * on before their kernels meet: a rank that waited in a kernel instead would keep another one on
   * the same device from allocating. Collective, on windows that were made together.
   *
   * @param step what the rank is doing ("makes a queue"), the same on all
   * @param record at most {@link #MOST_OF_RECORD} bytes
   * @return a record of {@link #MOST_OF_RECORD} bytes of each rank, filled up with 0
   * @throws IllegalArgumentException if the record is too long
   * @throws IllegalStateException in a group, or if the window or its communicator is closed
   * @throws LsaException on every rank, if they are not in the same step, or one has given up
   * @throws io.ncclffm.core.DeadlineException if a rank does not come within a minute
   */
  public byte[][] meet(String step, byte[] record) {
    if (record.length > MOST_OF_RECORD) {
      throw new IllegalArgumentException(
          step + ": a record of " + record.length + " bytes: at most " + MOST_OF_RECORD);
    }
    if (closed.get()) {
      throw new IllegalStateException(step + ": the " + this + " is closed");
    }
    checkReady(communicator);
    return Exchange.alone(communicator, step, () -> exchange.allGather(step, record));
  }

  /**
   * Unmaps and frees. Collective where the communicator is ready, and in the same order on every
   * rank.
   */
  @Override
  public void close() {
    if (communicator.endsResources() && !closed.get()) {
      Exchange.alone(
          communicator,
          "close of an LSA window",
          () -> {
            closeOnce();
            return null;
          });
    } else {
      closeOnce(); // by the end of the communicator, from whichever thread that is
    }
  }

  private void closeOnce() {
    if (!closed.compareAndSet(false, true)) {
      return;
    }
    local.close();
    communicator.disown(this);
    if (communicator.device().isLost()) {
      // CUDA would refuse every call, but other ranks of this process wait or use the memory too.
      exchange.giveUp("rank " + communicator.rank() + " has lost its device");
    }
    @Nullable Lsa given = lsa;
    List<Runnable> first = given == null ? List.of() : List.of(given::close);
    closeTogether(communicator, exchange, memory, token, first);
  }

  @Override
  public String toString() {
    return "LSA window of " + bytes + " bytes by " + provider + " on " + communicator;
  }
}

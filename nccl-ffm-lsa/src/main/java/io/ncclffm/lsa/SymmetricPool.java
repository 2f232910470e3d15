package io.ncclffm.lsa;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import org.jspecify.annotations.Nullable;

/**
 * Parts of one window, at the same offset on every rank: ranks that allocate and free the same in
 * the same order get the same offsets, without talking to one another.
 *
 * <p>A checked pool does talk: allocating and freeing are then collective, and a rank that does
 * something else than the others makes all of them throw. Without the checks {@link #verify} finds
 * out later. Threads: any if not checked, else as the communicator.
 */
public final class SymmetricPool {
  /** Alignment of {@link #allocate}, and the unit of all sizes. */
  public static final long LINE = LsaWindow.LINE;

  /** Alignment of {@link #allocateForWindow}: NCCL registers whole pages. */
  public static final long PAGE = 4096;

  private enum Action {
    ALLOCATES,
    FREES,
    FINDS_NO_ROOM_FOR,
    ASKS_WRONGLY_FOR
  }

  private final LsaWindow window;
  private final boolean checked;
  private final TreeMap<Long, Long> free = new TreeMap<>(); // offset to size; neighbours are joined
  private long serial;
  private long history;

  private SymmetricPool(LsaWindow window, boolean checked) {
    this.window = window;
    this.checked = checked;
    long usable = window.bytes() / LINE * LINE;
    if (usable > 0) {
      free.put(0L, usable);
    }
  }

  /**
   * A pool over a whole window; nothing else may use that.
   *
   * @param checked whether the ranks compare every step; the same on all of them
   */
  public static SymmetricPool over(LsaWindow window, boolean checked) {
    return new SymmetricPool(window, checked);
  }

  /** A part of the window. Closing frees it; its memory must then be in no kernel's use. */
  public final class Block implements AutoCloseable {
    private final long offset;
    private final long size;
    private boolean closed;

    private Block(long offset, long size) {
      this.offset = offset;
      this.size = size;
    }

    /** Where it begins in the window, in bytes; the same on every rank. */
    public long offset() {
      return offset;
    }

    /** Its size in bytes: what was asked for, rounded up. */
    public long bytes() {
      return size;
    }

    /** Where a rank's is; see {@link LsaWindow#address}. */
    public long address(int rank) {
      checkOpen();
      return window.address(rank, offset, size);
    }

    /** This rank's, as elements of a type. Must not be used after the block is closed. */
    public DeviceBuffer local(DataType type) {
      return DeviceBuffer.wrap(
          window.communicator().device(),
          type,
          size / type.bytes(),
          MemorySegment.ofAddress(address(window.communicator().rank())));
    }

    private void checkOpen() {
      if (closed) {
        throw new IllegalStateException("the block of " + size + " bytes is freed");
      }
    }

    /**
     * @throws LsaException in a checked pool on every rank, if not all of them free this one; it is
     *     then still there
     */
    @Override
    public void close() {
      synchronized (SymmetricPool.this) {
        if (closed) {
          return;
        }
        step(Action.FREES, offset, size);
        closed = true;
        release(offset, size);
      }
    }
  }

  /**
   * Takes a part that begins at a multiple of 128 bytes, as protocol buffers need.
   *
   * @param bytes more than 0
   * @throws IllegalArgumentException if the size is not positive
   * @throws OutOfWindowException if the pool has no room; nothing changes
   * @throws LsaException in a checked pool on every rank, if they do not all take this; nothing
   *     changes
   */
  public Block allocate(long bytes) {
    return allocate(bytes, LINE);
  }

  /** Takes a part that begins at a multiple of 4096 bytes; see {@link #allocate}. */
  public Block allocateForWindow(long bytes) {
    return allocate(bytes, PAGE);
  }

  private synchronized Block allocate(long bytes, long alignment) {
    if (bytes <= 0) {
      step(Action.ASKS_WRONGLY_FOR, 0, bytes);
      throw new IllegalArgumentException("block of " + bytes + " bytes: must be positive");
    }
    long size =
        bytes > Long.MAX_VALUE - alignment
            ? Long.MAX_VALUE
            : Math.ceilDiv(bytes, alignment) * alignment;
    Map.@Nullable Entry<Long, Long> range = find(size, alignment);
    if (range == null) {
      step(Action.FINDS_NO_ROOM_FOR, 0, size);
      throw new OutOfWindowException(size, window.bytes(), freeBytes(), largest());
    }
    long offset = alignUp(range.getKey(), alignment);
    step(Action.ALLOCATES, offset, size);
    take(range.getKey(), range.getValue(), offset, size);
    return new Block(offset, size);
  }

  /** The first that has room. */
  private Map.@Nullable Entry<Long, Long> find(long size, long alignment) {
    for (Map.Entry<Long, Long> range : free.entrySet()) {
      long skipped = alignUp(range.getKey(), alignment) - range.getKey();
      if (range.getValue() - skipped >= size) {
        return Map.entry(range.getKey(), range.getValue());
      }
    }
    return null;
  }

  private static long alignUp(long offset, long alignment) {
    return Math.ceilDiv(offset, alignment) * alignment;
  }

  private void take(long from, long length, long offset, long size) {
    free.remove(from);
    if (offset > from) {
      free.put(from, offset - from);
    }
    long rest = from + length - (offset + size);
    if (rest > 0) {
      free.put(offset + size, rest);
    }
  }

  private void release(long offset, long size) {
    long from = offset;
    long length = size;
    Map.@Nullable Entry<Long, Long> below = free.lowerEntry(offset);
    if (below != null && below.getKey() + below.getValue() == offset) {
      from = below.getKey();
      length += below.getValue();
    }
    @Nullable Long above = free.remove(offset + size);
    if (above != null) {
      length += above;
    }
    free.put(from, length);
  }

  /** Bytes that are not taken; not necessarily in one piece. */
  public synchronized long freeBytes() {
    return free.values().stream().mapToLong(Long::longValue).sum();
  }

  private long largest() {
    return free.values().stream().mapToLong(Long::longValue).max().orElse(0);
  }

  /** Notes what comes next, after comparing it with the other ranks in a checked pool. */
  private void step(Action action, long offset, long size) {
    long next = serial + 1;
    if (checked) {
      byte[] mine =
          ByteBuffer.allocate(5 * Long.BYTES)
              .putLong(next)
              .putLong(action.ordinal())
              .putLong(offset)
              .putLong(size)
              .putLong(window.token())
              .array();
      compare(agree("allocates or frees in a pool", mine));
    }
    if (action == Action.ALLOCATES || action == Action.FREES) {
      serial = next;
      history = mix(mix(mix(history + action.ordinal()) + offset) + size);
    }
  }

  private byte[][] agree(String what, byte[] mine) {
    return Exchange.alone(
        window.communicator(), "symmetric pool", () -> window.exchange().allGather(what, mine));
  }

  /** Spreads every bit over all 64 (the finalizer of splitmix64). */
  private static long mix(long value) {
    long z = value + 0x9e3779b97f4a7c15L;
    z = (z ^ z >>> 30) * 0xbf58476d1ce4e5b9L;
    z = (z ^ z >>> 27) * 0x94d049bb133111ebL;
    return z ^ z >>> 31;
  }

  private static void compare(byte[][] steps) {
    String first = describe(steps[0]);
    for (int r = 1; r < steps.length; r++) {
      String other = describe(steps[r]);
      if (!other.equals(first)) {
        throw new LsaException(
            "symmetric pool: the ranks differ first here: rank 0 "
                + first
                + ", rank "
                + r
                + " "
                + other);
      }
    }
  }

  private static String describe(byte[] step) {
    ByteBuffer in = ByteBuffer.wrap(step);
    long serial = in.getLong();
    Action action = Action.values()[(int) in.getLong()];
    long offset = in.getLong();
    long size = in.getLong();
    boolean placed = action == Action.ALLOCATES || action == Action.FREES;
    String what = size + " bytes" + (placed ? " at " + offset : "");
    return action.name().toLowerCase(Locale.ROOT).replace('_', ' ')
        + " "
        + what
        + " in step "
        + serial
        + " of the pool in window "
        + Long.toHexString(in.getLong());
  }

  /**
   * Looks whether all ranks have done the same so far. Collective.
   *
   * @throws LsaException on every rank, if not; a checked pool tells at which step
   */
  public synchronized void verify() {
    byte[] mine =
        ByteBuffer.allocate(2 * Long.BYTES)
            .putLong(serial)
            .putLong(mix(history + window.token()))
            .array();
    byte[][] all = agree("verifies a pool", mine);
    for (int r = 1; r < all.length; r++) {
      ByteBuffer first = ByteBuffer.wrap(all[0]);
      ByteBuffer other = ByteBuffer.wrap(all[r]);
      long firstSerial = first.getLong();
      long otherSerial = other.getLong();
      if (firstSerial != otherSerial || first.getLong() != other.getLong()) {
        throw new LsaException(
            "symmetric pool: rank 0 after "
                + firstSerial
                + " steps and rank "
                + r
                + " after "
                + otherSerial
                + " have not done the same; a checked pool tells which differs");
      }
    }
  }

  @Override
  public String toString() {
    return "symmetric pool over the " + window + ", " + freeBytes() + " bytes free";
  }
}

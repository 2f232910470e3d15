package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.bindings.shim.ncclLsa;
import io.ncclffm.core.bindings.shim.ncclLsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * What a kernel needs to reach the other ranks through a window: the pairs for the ring neighbours
 * ({@code ncclLsa}), and a table of every rank's base address.
 *
 * <p>{@code x} leads to the previous rank of the ring, {@code y} to the next. Index 0 is inbound,
 * the half of this rank's window that the neighbour writes; index 1 is outbound, the half of the
 * neighbour's that this rank writes. The previous rank writes the first half, the next the second,
 * so that the two do not meet even where they are the same rank. A half is a multiple of 128 bytes
 * long.
 */
public final class Lsa {
  private final Arena arena = Arena.ofShared();
  private final MemorySegment struct = ncclLsa.allocate(arena);
  private final DeviceBuffer peers;

  private Lsa(DeviceBuffer peers) {
    this.peers = peers;
  }

  static Lsa create(LsaWindow window) {
    Communicator communicator = window.communicator();
    int size = communicator.size();
    DeviceBuffer peers = DeviceBuffer.allocate(communicator.device(), DataType.INT64, size);
    Lsa lsa = new Lsa(peers);
    try {
      long[] bases = new long[size];
      for (int r = 0; r < size; r++) {
        bases[r] = base(window, r);
      }
      peers.copyFrom(bases, window.exchange().stream());
      int previous = Math.floorMod(communicator.rank() - 1, size);
      int next = (communicator.rank() + 1) % size;
      lsa.fill(window, previous, next);
      return lsa;
    } catch (RuntimeException e) {
      lsa.close();
      throw e;
    }
  }

  private static long base(LsaWindow window, int rank) {
    return window.path(rank) == LsaPath.NETWORK ? 0 : window.address(rank, 0, window.bytes());
  }

  private void fill(LsaWindow window, int previous, int next) {
    int self = window.communicator().rank();
    long half = window.bytes() / 2 / LsaWindow.LINE * LsaWindow.LINE;
    set(ncclLsa.x(struct, 0), window, self, 0, half);
    set(ncclLsa.x(struct, 1), window, previous, half, half);
    set(ncclLsa.y(struct, 0), window, self, half, half);
    set(ncclLsa.y(struct, 1), window, next, 0, half);
  }

  private static void set(
      MemorySegment part, LsaWindow window, int rank, long offset, long length) {
    long base = base(window, rank);
    ncclLsaWindow.base(part, MemorySegment.ofAddress(base == 0 ? 0 : base + offset));
    ncclLsaWindow.bytes(part, base == 0 ? 0 : length);
    ncclLsaWindow.handle(part, window.handle());
  }

  /**
   * The {@code ncclLsa} in host memory, to be passed to a kernel by value. A neighbour that the
   * window does not reach has a null base and no bytes.
   *
   * @throws IllegalStateException if the window is closed
   */
  public MemorySegment struct() {
    if (!arena.scope().isAlive()) {
      throw new IllegalStateException("ncclLsa: its window is closed");
    }
    return struct.asReadOnly();
  }

  /** The base address of every rank's window in device memory, 0 where there is none. */
  public DeviceBuffer peers() {
    return peers;
  }

  void close() {
    if (arena.scope().isAlive()) {
      arena.close();
      peers.close();
    }
  }
}

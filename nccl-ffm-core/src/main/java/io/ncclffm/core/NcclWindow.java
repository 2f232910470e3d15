package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * Memory of every rank that the others can read and write ({@code ncclWindow_t}, 2.27.3), from
 * {@link Communicator#registerWindow}. Closing is collective; the buffer stays.
 */
public final class NcclWindow implements AutoCloseable {
  /** What the program promises or asks of a window. */
  public enum Flag {
    /** Collectives use the same offset in the window on every rank. */
    COLLECTIVE_SYMMETRIC(1, "NCCL_WIN_COLL_SYMMETRIC", 22703),
    /** Remote accesses keep their order (NCCL 2.29.7). */
    STRICT_ORDERING(2, "NCCL_WIN_STRICT_ORDERING", 22907);

    private final int bit;
    private final String cName;
    private final int since;

    Flag(int bit, String cName, int since) {
      this.bit = bit;
      this.cName = cName;
      this.since = since;
    }
  }

  private final Communicator communicator;
  private final DeviceBuffer buffer;
  private final MemorySegment handle;
  private boolean closed;

  private NcclWindow(Communicator communicator, DeviceBuffer buffer, MemorySegment handle) {
    this.communicator = communicator;
    this.buffer = buffer;
    this.handle = handle;
  }

  static NcclWindow register(Communicator communicator, DeviceBuffer buffer, Flag... flags) {
    NativeLibraries.requireNccl("ncclCommWindowRegister", "2.27.3");
    if (NcclGroup.isActive()) {
      throw new IllegalStateException(
          "ncclCommWindowRegister inside a group: the window would exist only after its end;"
              + " register outside");
    }
    int bits = NcclH.NCCL_WIN_DEFAULT();
    int loaded = NativeLibraries.load().ncclVersion();
    for (Flag flag : flags) {
      if (loaded < flag.since) {
        throw NativeLibraries.tooOld("ncclCommWindowRegister: " + flag.cName, flag.since);
      }
      bits |= flag.bit;
    }
    int windowFlags = bits;
    MemorySegment out = communicator.allocateLateWritten(ADDRESS);
    communicator.call(
        "ncclCommWindowRegister",
        comm ->
            NcclH.ncclCommWindowRegister(
                comm, buffer.address(0), buffer.bytes(), out, windowFlags));
    MemorySegment handle = out.get(ADDRESS, 0);
    if (handle.address() == 0) {
      // NCCL reports success and no window where symmetric memory is not supported.
      throw new NcclException(
          "ncclCommWindowRegister",
          NcclH.ncclInvalidUsage(),
          " on " + communicator,
          "the library returned no window: the ranks cannot address one another's memory");
    }
    NcclWindow window = new NcclWindow(communicator, buffer, handle);
    communicator.adopt(window);
    return window;
  }

  /** This rank's memory. */
  public DeviceBuffer buffer() {
    return buffer;
  }

  /**
   * The {@code ncclWindow_t}, for kernels and the raw bindings: a device pointer, not to be
   * followed on the host.
   *
   * @throws IllegalStateException if the window is closed
   */
  public MemorySegment handle() {
    if (closed) {
      throw new IllegalStateException("window of the " + buffer + " is closed");
    }
    return handle;
  }

  /** The registered memory, as NCCL knows it ({@code ncclWinGetUserPtr}, 2.29.2). */
  public MemorySegment userPointer() {
    NativeLibraries.requireNccl("ncclWinGetUserPtr", "2.29.2");
    return pointer(
        "ncclWinGetUserPtr", (comm, out) -> NcclH.ncclWinGetUserPtr(comm, handle(), out));
  }

  /**
   * Where a rank of the LSA team has this window, as this rank's kernels address it ({@code
   * ncclGetLsaDevicePointer}, 2.29.2).
   *
   * @param lsaRank counted in {@link Communicator#teamLsa}, not in the communicator
   */
  public MemorySegment lsaPointer(int lsaRank, long offset) {
    NativeLibraries.requireNccl("ncclGetLsaDevicePointer", "2.29.2");
    checkOffset("ncclGetLsaDevicePointer", offset);
    return pointer(
        "ncclGetLsaDevicePointer",
        (comm, out) -> NcclH.ncclGetLsaDevicePointer(handle(), offset, lsaRank, out));
  }

  /**
   * Where a rank of the communicator has this window, or a null pointer if its memory is out of
   * reach ({@code ncclGetPeerDevicePointer}, 2.29.2).
   */
  public MemorySegment peerPointer(int peer, long offset) {
    NativeLibraries.requireNccl("ncclGetPeerDevicePointer", "2.29.2");
    checkOffset("ncclGetPeerDevicePointer", offset);
    communicator.checkPeer("ncclGetPeerDevicePointer", "peer", peer);
    return pointer(
        "ncclGetPeerDevicePointer",
        (comm, out) -> NcclH.ncclGetPeerDevicePointer(handle(), offset, peer, out));
  }

  /**
   * The multicast address of the window in the LSA team ({@code ncclGetLsaMultimemDevicePointer},
   * 2.29.2); only where {@link CommunicatorProperties#multimemSupport}.
   */
  public MemorySegment lsaMultimemPointer(long offset) {
    NativeLibraries.requireNccl("ncclGetLsaMultimemDevicePointer", "2.29.2");
    checkOffset("ncclGetLsaMultimemDevicePointer", offset);
    return pointer(
        "ncclGetLsaMultimemDevicePointer",
        (comm, out) -> NcclH.ncclGetLsaMultimemDevicePointer(handle(), offset, out));
  }

  private interface PointerCall {
    int invoke(MemorySegment comm, MemorySegment out);
  }

  private MemorySegment pointer(String operation, PointerCall call) {
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment out = scratch.allocate(ADDRESS);
      communicator.call(operation, comm -> call.invoke(comm, out));
      return out.get(ADDRESS, 0);
    }
  }

  private void checkOffset(String operation, long offset) {
    if (offset < 0 || offset >= buffer.bytes()) {
      throw new IllegalArgumentException(
          operation + ": offset " + offset + " does not lie in the window of the " + buffer);
    }
  }

  /** Refuses a closed window, one of another communicator, and a range of bytes that leaves it. */
  void checkTarget(String operation, Communicator user, long offset, long bytes) {
    if (closed) {
      throw new IllegalStateException(operation + ": the window of the " + buffer + " is closed");
    }
    if (user != communicator) {
      throw new IllegalArgumentException(
          operation
              + ": the window of the "
              + buffer
              + " belongs to "
              + communicator
              + ", not to "
              + user);
    }
    if (offset < 0 || offset > buffer.bytes() - bytes) {
      throw new IllegalArgumentException(
          operation
              + ": "
              + bytes
              + " bytes at byte "
              + offset
              + " do not lie in the window of the "
              + buffer);
    }
  }

  /** Deregisters ({@code ncclCommWindowDeregister}). Collective. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    communicator.disown(this);
    if (communicator.endsResources()) {
      communicator.call(
          "ncclCommWindowDeregister", comm -> NcclH.ncclCommWindowDeregister(comm, handle));
    }
  }
}

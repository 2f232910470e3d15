package io.ncclffm.lsa;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclTeam;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Objects;

/**
 * A load/store-accessible window: memory that every rank provides, and that kernels of every rank
 * can address on every other. Made by NCCL's symmetric windows ({@code ncclCommWindowRegister},
 * NCCL 2.27; peer addresses by {@code ncclGetLsaDevicePointer}, 2.29.2).
 *
 * <p>Creating and closing are collective over the communicator; closing the communicator closes its
 * windows. Threads: as the communicator.
 */
public final class LsaWindow implements AutoCloseable {
  private final Communicator communicator;
  private final DeviceBuffer buffer;
  private final MemorySegment handle;
  private final MemorySegment[] bases;
  private boolean closed;

  private LsaWindow(
      Communicator communicator, DeviceBuffer buffer, MemorySegment handle, MemorySegment[] bases) {
    this.communicator = communicator;
    this.buffer = buffer;
    this.handle = handle;
    this.bases = bases;
  }

  /**
   * Allocates zeroed memory and registers it as a window. Collective: every rank calls it with the
   * same size.
   *
   * @param bytes size on each rank, more than 0
   * @throws io.ncclffm.core.UnsupportedByLibraryException if the loaded NCCL cannot do it
   * @throws NcclException if the ranks cannot address one another's memory
   */
  public static LsaWindow create(Communicator communicator, long bytes) {
    NativeLibraries.requireNccl("ncclCommWindowRegister", "2.27.3");
    if (communicator.size() > 1) {
      NativeLibraries.requireNccl("ncclGetLsaDevicePointer", "2.29.2");
    }
    DeviceBuffer buffer =
        DeviceBuffer.allocateForWindow(communicator.device(), DataType.UINT8, bytes);
    try {
      zero(buffer);
      MemorySegment handle = register(communicator, buffer);
      LsaWindow window =
          new LsaWindow(communicator, buffer, handle, new MemorySegment[communicator.size()]);
      communicator.adopt(window);
      window.collectAddresses();
      return window;
    } catch (RuntimeException e) {
      if (communicator.state() != Communicator.State.FAILED) {
        closeAfter(buffer, e);
      } // else memory that peers may have mapped goes with the communicator, when it is aborted
      throw e;
    }
  }

  private static void zero(DeviceBuffer buffer) {
    try (io.ncclffm.core.CudaStream stream = io.ncclffm.core.CudaStream.create(buffer.device())) {
      buffer.fill((byte) 0, stream);
      stream.synchronize();
    }
  }

  private static void closeAfter(DeviceBuffer buffer, RuntimeException failure) {
    try {
      buffer.close();
    } catch (RuntimeException e) {
      failure.addSuppressed(e);
    }
  }

  private static MemorySegment register(Communicator communicator, DeviceBuffer buffer) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      communicator.call(
          "ncclCommWindowRegister",
          comm ->
              NcclH.ncclCommWindowRegister(
                  comm, buffer.address(0), buffer.bytes(), out, NcclH.NCCL_WIN_COLL_SYMMETRIC()));
      MemorySegment handle = out.get(ADDRESS, 0);
      if (handle.address() == 0) {
        // NCCL reports success and no window where symmetric memory is not supported.
        throw new NcclException(
            "ncclCommWindowRegister",
            NcclH.ncclInvalidUsage(),
            " on " + communicator,
            "the library returned no window: the ranks cannot address one another's memory");
      }
      return handle;
    }
  }

  private void collectAddresses() {
    int self = communicator.rank();
    bases[self] = buffer.address(0);
    if (communicator.size() == 1) {
      return;
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment team = NcclH.ncclTeamLsa(arena, communicator.handle());
      int lsaSize = ncclTeam.nRanks(team);
      if (lsaSize != communicator.size()) {
        throw new NcclException(
            "ncclTeamLsa",
            NcclH.ncclInvalidUsage(),
            " on " + communicator,
            "only " + lsaSize + " of the ranks can address one another's memory");
      }
      MemorySegment out = arena.allocate(ADDRESS);
      for (int r = 0; r < communicator.size(); r++) {
        if (r == self) {
          continue;
        }
        int lsaRank = r; // one LSA team: the team's ranks are the communicator's
        communicator.call(
            "ncclGetLsaDevicePointer",
            comm -> NcclH.ncclGetLsaDevicePointer(handle, 0, lsaRank, out));
        bases[r] = out.get(ADDRESS, 0);
      }
    }
  }

  /** Size on each rank, in bytes. */
  public long bytes() {
    return buffer.bytes();
  }

  /** This rank's memory. */
  public DeviceBuffer local() {
    return buffer;
  }

  /**
   * Where a rank's memory is, as kernels of this rank address it.
   *
   * @param offset in bytes
   * @param length bytes that must lie in the window from there
   * @throws IndexOutOfBoundsException if there is no such rank or the range leaves the window
   * @throws IllegalStateException if the window is closed
   */
  public long address(int rank, long offset, long length) {
    if (closed) {
      throw new IllegalStateException("window of " + bytes() + " bytes is closed");
    }
    Objects.checkIndex(rank, bases.length);
    Objects.checkFromIndexSize(offset, length, bytes());
    return bases[rank].address() + offset;
  }

  /** Deregisters ({@code ncclCommWindowDeregister}) and frees the memory. Collective. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    communicator.disown(this);
    try {
      if (communicator.state() == Communicator.State.READY) {
        communicator.call(
            "ncclCommWindowDeregister", comm -> NcclH.ncclCommWindowDeregister(comm, handle));
      }
    } finally {
      buffer.close();
    }
  }
}

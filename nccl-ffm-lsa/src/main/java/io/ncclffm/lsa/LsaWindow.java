package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
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
  private final NcclWindow window;
  private final long[] bases;
  private boolean closed;

  private LsaWindow(Communicator communicator, DeviceBuffer buffer, NcclWindow window) {
    this.communicator = communicator;
    this.buffer = buffer;
    this.window = window;
    this.bases = new long[communicator.size()];
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
    LsaWindow window = null;
    try {
      zero(buffer);
      NcclWindow registered =
          communicator.registerWindow(buffer, NcclWindow.Flag.COLLECTIVE_SYMMETRIC);
      communicator.disown(registered); // closed by this object from now on, before its memory
      window = new LsaWindow(communicator, buffer, registered);
      communicator.adopt(window);
      window.collectAddresses();
      return window;
    } catch (RuntimeException e) {
      closeAfter(window != null ? window : buffer, e);
      throw e;
    }
  }

  private static void zero(DeviceBuffer buffer) {
    try (CudaStream stream = CudaStream.create(buffer.device())) {
      buffer.fill((byte) 0, stream);
      stream.synchronize();
    }
  }

  private static void closeAfter(AutoCloseable made, RuntimeException failure) {
    try {
      made.close();
    } catch (Exception e) {
      failure.addSuppressed(e);
    }
  }

  private void collectAddresses() {
    int self = communicator.rank();
    bases[self] = buffer.address(0).address();
    if (communicator.size() == 1) {
      return;
    }
    int lsaSize = communicator.teamLsa().size();
    if (lsaSize != communicator.size()) {
      throw new NcclException(
          "ncclTeamLsa",
          NcclH.ncclInvalidUsage(),
          " on " + communicator,
          "only " + lsaSize + " of the ranks can address one another's memory");
    }
    for (int r = 0; r < bases.length; r++) {
      if (r != self) {
        // One LSA team: the team's ranks are the communicator's.
        bases[r] = window.lsaPointer(r, 0).address();
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
    return bases[rank] + offset;
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
      window.close();
    } finally {
      buffer.close();
    }
  }
}

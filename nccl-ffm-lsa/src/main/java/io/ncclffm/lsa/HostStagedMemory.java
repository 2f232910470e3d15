package io.ncclffm.lsa;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.SharedMemory;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * {@link LsaProvider#HOST_STAGED}: pinned host memory. Ranks of one process use one mapping, other
 * processes map the same file without a name.
 */
final class HostStagedMemory implements WindowMemory {
  private final Communicator communicator;
  private final long bytes;
  private final List<Runnable> peers = new ArrayList<>();
  private @Nullable SharedMemory memory;
  private @Nullable DeviceBuffer local;
  private @Nullable Shared own;

  HostStagedMemory(Communicator communicator, long bytes) {
    this.communicator = communicator;
    this.bytes = bytes;
  }

  @Override
  public byte[] offer() {
    try {
      SharedMemory made = SharedMemory.create(bytes);
      memory = made;
      MemorySegment base = pin(made);
      own = Shared.create(made.segment().address(), () -> unpin(made));
      local = DeviceBuffer.wrap(communicator.device(), DataType.UINT8, bytes, base);
      return ByteBuffer.allocate(Exchange.RECORD)
          .putLong(made.segment().address())
          .putInt(made.fd())
          .array();
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  /** The device's address of it. */
  private MemorySegment pin(SharedMemory mapped) {
    CudaDevice device = communicator.device();
    device.makeCurrent();
    int flags = CudartH.cudaHostRegisterMapped() | CudartH.cudaHostRegisterPortable();
    CudaException.check(
        CudartH.cudaHostRegister(mapped.segment(), bytes, flags), "cudaHostRegister", device);
    try {
      return deviceAddress(mapped.segment());
    } catch (RuntimeException e) {
      unpin(mapped);
      throw e;
    }
  }

  private MemorySegment deviceAddress(MemorySegment pinned) {
    communicator.device().makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      CudaException.check(
          CudartH.cudaHostGetDevicePointer(out, pinned, 0),
          "cudaHostGetDevicePointer",
          communicator.device());
      return out.get(ADDRESS, 0);
    }
  }

  private void unpin(SharedMemory mapped) {
    if (communicator.device().isLost()) {
      return; // what is pinned for good must stay mapped: its addresses could not be pinned again
    }
    communicator.device().makeCurrent();
    try {
      CudaException.check(
          CudartH.cudaHostUnregister(mapped.segment()),
          "cudaHostUnregister",
          communicator.device());
    } finally {
      mapped.close();
    }
  }

  @Override
  public DeviceBuffer local() {
    return Objects.requireNonNull(local);
  }

  @Override
  public long[] open(List<Card> ranks, byte[][] offers) {
    int self = communicator.rank();
    long[] bases = new long[ranks.size()];
    for (int r = 0; r < bases.length; r++) {
      ByteBuffer offer = ByteBuffer.wrap(offers[r]);
      long address = offer.getLong();
      int fd = offer.getInt();
      if (r == self) {
        bases[r] = local().address(0).address();
      } else if (ranks.get(r).isSameProcess(ranks.get(self))) {
        peers.add(Shared.join(address)::leave);
        bases[r] = deviceAddress(MemorySegment.ofAddress(address)).address();
      } else {
        bases[r] = map(ranks.get(r).pid(), fd).address();
      }
    }
    return bases;
  }

  private MemorySegment map(long pid, int fd) {
    try {
      SharedMemory mapped = SharedMemory.open(pid, fd, bytes);
      MemorySegment base;
      try {
        base = pin(mapped);
      } catch (RuntimeException e) {
        mapped.close();
        throw e;
      }
      peers.add(() -> unpin(mapped));
      return base;
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  @Override
  public void opened() {
    if (memory != null) {
      memory.closeFile();
    }
  }

  @Override
  public LsaTeam team() {
    return LsaTeam.ofAll(communicator);
  }

  @Override
  public void closePeers() {
    Cleanup.runAll(peers);
  }

  @Override
  public void closeLocal() {
    @Nullable Shared mine = own;
    if (mine != null) {
      own = null;
      mine.leave();
    } else if (memory != null) {
      memory.close();
    }
  }
}

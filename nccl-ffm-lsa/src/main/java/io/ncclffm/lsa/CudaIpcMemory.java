package io.ncclffm.lsa;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaIpcMemHandle_t;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * {@link LsaProvider#CUDA_IPC}: {@code cudaMalloc} memory, opened by other processes through a
 * handle, and used by its address in the same one.
 */
final class CudaIpcMemory implements WindowMemory {
  /** Smaller allocations of a process lie in one block, and a handle opens the whole block. */
  private static final long BLOCK = 2 << 20;

  private final Communicator communicator;
  private final long bytes;
  private final List<Runnable> peers = new ArrayList<>();
  private @Nullable DeviceBuffer local;
  private @Nullable Shared own;

  CudaIpcMemory(Communicator communicator, long bytes) {
    this.communicator = communicator;
    this.bytes = bytes;
  }

  @Override
  public byte[] offer() {
    CudaDevice device = communicator.device();
    long rounded = Math.ceilDiv(bytes, BLOCK) * BLOCK;
    DeviceBuffer buffer = DeviceBuffer.allocate(device, DataType.UINT8, rounded);
    local = buffer;
    MemorySegment address = buffer.address(0);
    own = Shared.create(address.address(), buffer::close);
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment handle = cudaIpcMemHandle_t.allocate(arena);
      CudaException.check(
          CudartH.cudaIpcGetMemHandle(handle, address), "cudaIpcGetMemHandle", device);
      return ByteBuffer.allocate(Exchange.RECORD)
          .putLong(address.address())
          .put(handle.toArray(JAVA_BYTE))
          .array();
    }
  }

  @Override
  public DeviceBuffer local() {
    return Objects.requireNonNull(local);
  }

  @Override
  public long[] open(List<Card> ranks, byte[][] offers) {
    int self = communicator.rank();
    CudaDevice device = communicator.device();
    long[] bases = new long[ranks.size()];
    for (int r = 0; r < bases.length; r++) {
      ByteBuffer offer = ByteBuffer.wrap(offers[r]);
      long address = offer.getLong();
      if (r == self) {
        bases[r] = address;
      } else if (ranks.get(r).isSameProcess(ranks.get(self))) {
        joinInProcess(new CudaDevice(ranks.get(r).ordinal()), address);
        bases[r] = address;
      } else {
        byte[] handle = new byte[(int) cudaIpcMemHandle_t.sizeof()];
        offer.get(handle);
        @Nullable CudaDevice peer = find(ranks.get(r).busId());
        if (peer != null) {
          allowAccess(peer); // counted; opening the handle would switch it on as well, uncounted
        }
        device.makeCurrent();
        bases[r] = openHandle(handle);
      }
    }
    return bases;
  }

  /** This process's device at a place on the bus, or null if it does not see it. */
  private static @Nullable CudaDevice find(String busId) {
    for (int i = 0; i < CudaDevice.count(); i++) {
      CudaDevice device = new CudaDevice(i);
      if (device.pciBusId().equals(busId)) {
        return device;
      }
    }
    return null;
  }

  private void joinInProcess(CudaDevice peer, long address) {
    allowAccess(peer);
    peers.add(Shared.join(address)::leave);
  }

  private void allowAccess(CudaDevice peer) {
    CudaDevice device = communicator.device();
    if (!peer.equals(device)) {
      if (!device.canAccess(peer)) {
        throw new LsaException(device + " has no peer access to " + peer);
      }
      PeerAccess.acquire(device, peer);
      peers.add(() -> PeerAccess.release(device, peer));
    }
  }

  private long openHandle(byte[] bytes) {
    CudaDevice device = communicator.device();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment handle = cudaIpcMemHandle_t.allocate(arena);
      handle.copyFrom(MemorySegment.ofArray(bytes));
      MemorySegment out = arena.allocate(ADDRESS);
      int rc = CudartH.cudaIpcOpenMemHandle(out, handle, CudartH.cudaIpcMemLazyEnablePeerAccess());
      CudaException.check(rc, "cudaIpcOpenMemHandle", device);
      MemorySegment address = out.get(ADDRESS, 0);
      peers.add(
          () -> {
            if (device.isLost()) {
              return;
            }
            device.makeCurrent();
            CudaException.check(
                CudartH.cudaIpcCloseMemHandle(address), "cudaIpcCloseMemHandle", device);
          });
      return address.address();
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
    } else if (local != null) {
      local.close();
    }
  }
}

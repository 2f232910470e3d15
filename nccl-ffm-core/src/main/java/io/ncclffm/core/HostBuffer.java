package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.bindings.cudart.CudartH;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * Pinned host memory that the device can read and write, zeroed. Copies from and to it are really
 * asynchronous.
 */
public final class HostBuffer implements AutoCloseable {
  private final CudaDevice device;
  private final MemorySegment segment;
  private final MemorySegment deviceAddress;
  private boolean closed;

  private HostBuffer(CudaDevice device, MemorySegment segment, MemorySegment deviceAddress) {
    this.device = device;
    this.segment = segment;
    this.deviceAddress = deviceAddress;
  }

  /**
   * Allocates ({@code cudaHostAlloc}, mapped and portable).
   *
   * @param bytes more than 0
   */
  @SuppressWarnings("restricted") // the size is the one just allocated
  public static HostBuffer allocate(CudaDevice device, long bytes) {
    if (bytes <= 0) {
      throw new IllegalArgumentException("cudaHostAlloc: " + bytes + " bytes: must be positive");
    }
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      int flags = CudartH.cudaHostAllocMapped() | CudartH.cudaHostAllocPortable();
      CudaException.check(CudartH.cudaHostAlloc(out, bytes, flags), "cudaHostAlloc", device);
      MemorySegment base = out.get(ADDRESS, 0);
      int rc = CudartH.cudaHostGetDevicePointer(out, base, 0);
      if (rc != 0) {
        CudaException failure = new CudaException("cudaHostGetDevicePointer", rc, " on " + device);
        int free = CudartH.cudaFreeHost(base);
        if (free != 0) {
          failure.addSuppressed(new CudaException("cudaFreeHost", free, " on " + device));
        }
        throw failure;
      }
      MemorySegment segment = base.reinterpret(bytes);
      segment.fill((byte) 0);
      return new HostBuffer(device, segment, out.get(ADDRESS, 0));
    }
  }

  /**
   * The memory as the host sees it. Must not be used after {@link #close()}.
   *
   * @throws IllegalStateException if closed
   */
  public MemorySegment segment() {
    checkOpen();
    return segment;
  }

  /** The same memory as a kernel sees it. */
  public MemorySegment deviceAddress() {
    checkOpen();
    return deviceAddress;
  }

  /** Size in bytes. */
  public long bytes() {
    return segment.byteSize();
  }

  private void checkOpen() {
    if (closed) {
      throw new IllegalStateException("host buffer of " + bytes() + " bytes is closed");
    }
  }

  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    closed = true;
    if (device.isLost()) {
      return;
    }
    device.makeCurrent();
    CudaException.check(CudartH.cudaFreeHost(segment), "cudaFreeHost", device);
  }
}

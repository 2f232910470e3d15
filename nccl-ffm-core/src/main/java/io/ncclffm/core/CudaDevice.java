package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaDeviceProp;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;

/**
 * A GPU of this process, or an emulated one on the CPU backend. A value: equal when the ordinals
 * are. Safe for use by any thread.
 *
 * @param ordinal 0 to {@link #count()} - 1, in CUDA's order
 */
public record CudaDevice(int ordinal) {
  private static final int PCI_BUS_ID_BYTES = 32;
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  // Devices of which CUDA answers every call with one error until the process ends.
  private static final Map<Integer, CudaException> LOST = new ConcurrentHashMap<>();
  private static volatile boolean anyLost;

  /**
   * @throws IllegalArgumentException if there is no such device
   */
  public CudaDevice {
    int count = count();
    if (ordinal < 0 || ordinal >= count) {
      throw new IllegalArgumentException(
          "device "
              + ordinal
              + ": this process has "
              + count
              + (count == 0 ? ", take -Dncclffm.backend=cpu" : ", take 0 to " + (count - 1)));
    }
  }

  /** The number of devices ({@code cudaGetDeviceCount}). */
  public static int count() {
    NativeLibraries.load();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaGetDeviceCount(out);
      if (rc != 0) {
        throw new CudaException("cudaGetDeviceCount", rc, "");
      }
      return out.get(JAVA_INT, 0);
    }
  }

  /**
   * Makes this the device of the calling OS thread ({@code cudaSetDevice}). Every call of this
   * library that needs a device does it itself; only users of the raw bindings need it.
   *
   * @throws CudaException at once, without a call, if a kernel has made the device unusable for
   *     this process ({@code cudaErrorIllegalAddress}, {@code cudaErrorLaunchFailure} and their
   *     like)
   */
  public void makeCurrent() {
    if (isLost()) {
      throw CudaException.ofLost(this, LOST.get(ordinal));
    }
    CudaException.check(CudartH.cudaSetDevice(ordinal), "cudaSetDevice", this);
  }

  /** Whether CUDA can do nothing more with the device, not even free what is on it. */
  public boolean isLost() {
    return anyLost && LOST.containsKey(ordinal);
  }

  /**
   * Looks whether an error is the device's from now on: then a stream that nobody used gives it
   * too. The device is current.
   */
  void noteError(CudaException error) {
    if (error.isOfContext()
        && CudartH.cudaStreamQuery(MemorySegment.NULL) == error.errorCode()
        && LOST.putIfAbsent(ordinal, error) == null) {
      anyLost = true;
      LOG.log(
          System.Logger.Level.ERROR,
          "nccl-ffm: {0} is lost for this process, what is closed from now on stays taken: {1}",
          this,
          error.getMessage());
    }
  }

  /** The product name ({@code cudaGetDeviceProperties}). */
  public String name() {
    try (Arena arena = Arena.ofConfined()) {
      return NativeText.copy(cudaDeviceProp.name(properties(arena)));
    }
  }

  /** The GPU's identity, the same in every process ({@code cudaGetDeviceProperties}). */
  public UUID uuid() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment bytes = cudaDeviceProp.uuid(properties(arena));
      ByteBuffer order = bytes.asByteBuffer().order(ByteOrder.BIG_ENDIAN);
      return new UUID(order.getLong(), order.getLong());
    }
  }

  private MemorySegment properties(Arena arena) {
    // CUDA 12's struct differs after the first fields; slack keeps either inside the segment.
    MemorySegment properties = arena.allocate(2 * cudaDeviceProp.sizeof(), 8);
    int rc = CudartH.cudaGetDeviceProperties(properties, ordinal);
    CudaException.check(rc, "cudaGetDeviceProperties", this);
    return properties;
  }

  /** Where the GPU sits, as {@code 0000:19:00.0} ({@code cudaDeviceGetPCIBusId}). */
  public String pciBusId() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment text = arena.allocate(PCI_BUS_ID_BYTES);
      int rc = CudartH.cudaDeviceGetPCIBusId(text, PCI_BUS_ID_BYTES, ordinal);
      CudaException.check(rc, "cudaDeviceGetPCIBusId", this);
      return text.getString(0);
    }
  }

  /**
   * Whether kernels on this device can load from and store to the other's memory ({@code
   * cudaDeviceCanAccessPeer}); true for the device itself.
   */
  public boolean canAccess(CudaDevice peer) {
    if (peer.ordinal == ordinal) {
      return true;
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaDeviceCanAccessPeer(out, ordinal, peer.ordinal);
      CudaException.check(rc, "cudaDeviceCanAccessPeer(" + peer + ")", this);
      return out.get(JAVA_INT, 0) != 0;
    }
  }

  /** Streaming multiprocessors; what the CPU backend reports is a stand-in. */
  public int multiProcessorCount() {
    return attribute(CudartH.cudaDevAttrMultiProcessorCount());
  }

  /**
   * One number ({@code cudaDeviceGetAttribute}).
   *
   * @param attribute a {@code cudaDeviceAttr}
   */
  public int attribute(int attribute) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaDeviceGetAttribute(out, attribute, ordinal);
      CudaException.check(rc, "cudaDeviceGetAttribute(" + attribute + ")", this);
      return out.get(JAVA_INT, 0);
    }
  }

  /** Waits for everything enqueued on the device ({@code cudaDeviceSynchronize}). */
  void synchronizeAll() {
    makeCurrent();
    CudaException.check(CudartH.cudaDeviceSynchronize(), "cudaDeviceSynchronize", this);
  }

  @Override
  public String toString() {
    return "device " + ordinal;
  }
}

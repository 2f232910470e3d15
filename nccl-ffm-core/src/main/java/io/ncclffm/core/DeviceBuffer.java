package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.LeakReport;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * Typed device memory with 64-bit counts. Offsets and counts are in elements unless a name says
 * bytes. Contents are undefined until written.
 *
 * <p>Copies are enqueued on a stream. From and to native segments they are asynchronous, and the
 * segment must live and stay unchanged until the stream got there; arrays are copied through pinned
 * memory, and the call returns when the array may be used again.
 *
 * <p>Threads: any, but whoever closes must know that no work on the buffer is still enqueued.
 */
public final class DeviceBuffer implements AutoCloseable {
  private enum Allocator {
    CUDA,
    NCCL,
    /** The memory belongs to someone else. */
    NONE
  }

  private final CudaDevice device;
  private final DataType type;
  private final long count;
  private final MemorySegment base;
  private final Allocator allocator;
  private final LeakReport.@Nullable Tracker leak;
  private volatile boolean closed;

  private DeviceBuffer(
      CudaDevice device, DataType type, long count, MemorySegment base, Allocator allocator) {
    this.device = device;
    this.type = type;
    this.count = count;
    this.base = base;
    this.allocator = allocator;
    this.leak = allocator == Allocator.NONE ? null : LeakReport.track(this, toString());
  }

  /**
   * Allocates with {@code cudaMalloc}.
   *
   * @param count elements, more than 0
   * @throws IllegalArgumentException if the count is not positive or its bytes overflow 64 bits
   * @throws CudaException {@code cudaErrorMemoryAllocation} if the device has not that much left
   */
  public static DeviceBuffer allocate(CudaDevice device, DataType type, long count) {
    return allocate(device, type, count, Allocator.CUDA);
  }

  /**
   * Allocates with {@code ncclMemAlloc} (NCCL 2.19), whose memory can be registered as a window.
   * Rounded up to NCCL's granularity, usually 2 MiB.
   */
  public static DeviceBuffer allocateForWindow(CudaDevice device, DataType type, long count) {
    return allocate(device, type, count, Allocator.NCCL);
  }

  /**
   * Memory that something else allocated and will free: a part of a window, or another library's.
   * Closing the buffer only ends its use.
   *
   * @param address a device pointer, as the device's kernels use it
   * @throws IllegalArgumentException if it is null or the count is not positive
   */
  public static DeviceBuffer wrap(
      CudaDevice device, DataType type, long count, MemorySegment address) {
    checkCount(type, count);
    if (address.address() == 0) {
      throw new IllegalArgumentException("buffer of " + count + " x " + type + " at address 0");
    }
    return new DeviceBuffer(device, type, count, address, Allocator.NONE);
  }

  private static void checkCount(DataType type, long count) {
    if (count <= 0 || count > Long.MAX_VALUE / type.bytes()) {
      throw new IllegalArgumentException(
          "buffer of " + count + " x " + type + ": take 1 to " + Long.MAX_VALUE / type.bytes());
    }
  }

  private static DeviceBuffer allocate(
      CudaDevice device, DataType type, long count, Allocator allocator) {
    checkCount(type, count);
    NativeLibraries.load();
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      long bytes = count * type.bytes();
      if (allocator == Allocator.NCCL) {
        int rc = NcclH.ncclMemAlloc(out, bytes);
        if (rc != 0) {
          throw NcclException.of("ncclMemAlloc(" + bytes + " bytes)", rc, " on " + device);
        }
      } else {
        int rc = CudartH.cudaMalloc(out, bytes);
        CudaException.check(rc, "cudaMalloc(" + bytes + " bytes)", device);
      }
      return new DeviceBuffer(device, type, count, out.get(ADDRESS, 0), allocator);
    }
  }

  public CudaDevice device() {
    return device;
  }

  public DataType type() {
    return type;
  }

  /** Elements. */
  public long count() {
    return count;
  }

  /** Size in bytes. */
  public long bytes() {
    return count * type.bytes();
  }

  /**
   * The device pointer to an element, for the raw bindings and for kernels.
   *
   * @param offset 0 to {@link #count()}
   * @throws IllegalStateException if the buffer is closed
   */
  public MemorySegment address(long offset) {
    Objects.checkIndex(offset, count + 1);
    return address("device pointer", offset);
  }

  private void checkOpen(String operation) {
    if (closed) {
      throw new IllegalStateException(operation + ": the " + this + " is closed");
    }
  }

  private MemorySegment address(String operation, long offset) {
    checkOpen(operation);
    // Always a new one: where some are the field's, the compiler cannot remove the allocation.
    return MemorySegment.ofAddress(base.address() + offset * type.bytes());
  }

  /**
   * The device pointer to the first of some elements that all lie in this buffer.
   *
   * @param operation who asks, for the message
   * @throws IllegalArgumentException if they do not
   * @throws IllegalStateException if the buffer is closed
   */
  public MemorySegment address(String operation, long offset, long elements) {
    checkRange(operation, offset, elements);
    return address(operation, offset);
  }

  /** The same as a number, which takes no heap memory however the compiler sees the caller. */
  public long pointer(String operation, long offset, long elements) {
    checkRange(operation, offset, elements);
    checkOpen(operation);
    return base.address() + offset * type.bytes();
  }

  private void checkRange(String operation, long offset, long elements) {
    if (elements < 0 || offset < 0 || offset > count - elements) {
      throw new IllegalArgumentException(
          operation
              + ": "
              + elements
              + " elements from offset "
              + offset
              + " do not lie in the "
              + this);
    }
  }

  /** Copies from host memory to the start of this buffer; the segment may be shorter. */
  public void copyFrom(MemorySegment source, CudaStream stream) {
    copyFrom(source, 0, stream);
  }

  /**
   * Copies from host memory ({@code cudaMemcpyAsync}).
   *
   * @param offset the first element written
   */
  public void copyFrom(MemorySegment source, long offset, CudaStream stream) {
    MemorySegment target = checkCopy(source, offset, stream);
    if (source.isNative()) {
      copy(target, source, source.byteSize(), CudartH.cudaMemcpyHostToDevice(), stream);
      return;
    }
    MemorySegment pinned = stream.staging().segment();
    for (long done = 0; done < source.byteSize(); ) {
      long chunk = Math.min(pinned.byteSize(), source.byteSize() - done);
      MemorySegment.copy(source, done, pinned, 0, chunk);
      MemorySegment to = MemorySegment.ofAddress(target.address() + done);
      copy(to, pinned, chunk, CudartH.cudaMemcpyHostToDevice(), stream);
      stream.synchronize();
      done += chunk;
    }
  }

  /** Copies from the start of this buffer to host memory; the segment may be shorter. */
  public void copyTo(MemorySegment target, CudaStream stream) {
    copyTo(target, 0, stream);
  }

  /**
   * Copies to host memory ({@code cudaMemcpyAsync}).
   *
   * @param offset the first element read
   */
  public void copyTo(MemorySegment target, long offset, CudaStream stream) {
    MemorySegment source = checkCopy(target, offset, stream);
    if (target.isReadOnly()) {
      throw new IllegalArgumentException("copy from " + this + ": the target is read-only");
    }
    if (target.isNative()) {
      copy(target, source, target.byteSize(), CudartH.cudaMemcpyDeviceToHost(), stream);
      return;
    }
    MemorySegment pinned = stream.staging().segment();
    for (long done = 0; done < target.byteSize(); ) {
      long chunk = Math.min(pinned.byteSize(), target.byteSize() - done);
      MemorySegment from = MemorySegment.ofAddress(source.address() + done);
      copy(pinned, from, chunk, CudartH.cudaMemcpyDeviceToHost(), stream);
      stream.synchronize();
      MemorySegment.copy(pinned, 0, target, done, chunk);
      done += chunk;
    }
  }

  /** Copies an array to the start of this {@link DataType#FLOAT32} buffer. */
  public void copyFrom(float[] source, CudaStream stream) {
    checkType("float[]", DataType.FLOAT32, DataType.FLOAT32);
    copyFrom(MemorySegment.ofArray(source), stream);
  }

  /** Copies an array to the start of this {@link DataType#FLOAT64} buffer. */
  public void copyFrom(double[] source, CudaStream stream) {
    checkType("double[]", DataType.FLOAT64, DataType.FLOAT64);
    copyFrom(MemorySegment.ofArray(source), stream);
  }

  /** Copies an array to the start of this 32-bit integer buffer. */
  public void copyFrom(int[] source, CudaStream stream) {
    checkType("int[]", DataType.INT32, DataType.UINT32);
    copyFrom(MemorySegment.ofArray(source), stream);
  }

  /** Copies an array to the start of this 64-bit integer buffer. */
  public void copyFrom(long[] source, CudaStream stream) {
    checkType("long[]", DataType.INT64, DataType.UINT64);
    copyFrom(MemorySegment.ofArray(source), stream);
  }

  /** Copies the start of this {@link DataType#FLOAT32} buffer to an array. */
  public void copyTo(float[] target, CudaStream stream) {
    checkType("float[]", DataType.FLOAT32, DataType.FLOAT32);
    copyTo(MemorySegment.ofArray(target), stream);
  }

  /** Copies the start of this {@link DataType#FLOAT64} buffer to an array. */
  public void copyTo(double[] target, CudaStream stream) {
    checkType("double[]", DataType.FLOAT64, DataType.FLOAT64);
    copyTo(MemorySegment.ofArray(target), stream);
  }

  /** Copies the start of this 32-bit integer buffer to an array. */
  public void copyTo(int[] target, CudaStream stream) {
    checkType("int[]", DataType.INT32, DataType.UINT32);
    copyTo(MemorySegment.ofArray(target), stream);
  }

  /** Copies the start of this 64-bit integer buffer to an array. */
  public void copyTo(long[] target, CudaStream stream) {
    checkType("long[]", DataType.INT64, DataType.UINT64);
    copyTo(MemorySegment.ofArray(target), stream);
  }

  /** Sets every byte ({@code cudaMemsetAsync}), asynchronously. */
  public void fill(byte value, CudaStream stream) {
    checkStream(stream);
    int rc = CudartH.cudaMemsetAsync(address(0), value & 0xff, bytes(), stream.handle());
    CudaException.check(rc, "cudaMemsetAsync", device);
  }

  private void checkType(String array, DataType signed, DataType unsigned) {
    if (type != signed && type != unsigned) {
      throw new IllegalArgumentException(
          "copy between " + this + " and " + array + ": take a MemorySegment for " + type);
    }
  }

  private MemorySegment checkCopy(MemorySegment host, long offset, CudaStream stream) {
    checkStream(stream);
    if (host.byteSize() % type.bytes() != 0) {
      throw new IllegalArgumentException(
          "copy between "
              + this
              + " and "
              + host.byteSize()
              + " bytes: not a whole number of elements");
    }
    if (!host.isNative() && stream.isCapturing()) {
      throw new IllegalStateException(
          "copy between "
              + this
              + " and an array: that waits for the stream, which is being captured; take a"
              + " HostBuffer");
    }
    return address("copy", offset, host.byteSize() / type.bytes());
  }

  private void checkStream(@Nullable CudaStream stream) {
    if (stream == null) {
      throw new IllegalArgumentException(
          "work on the " + this + ": the stream is null; make one with CudaStream.create");
    }
    if (!stream.device().equals(device)) {
      throw new IllegalArgumentException(
          this + " with a " + stream + ": take a stream of the buffer's device");
    }
    stream.handle("work on the " + this);
    device.makeCurrent();
  }

  private void copy(MemorySegment to, MemorySegment from, long bytes, int kind, CudaStream stream) {
    int rc = CudartH.cudaMemcpyAsync(to, from, bytes, kind, stream.handle());
    CudaException.check(rc, "cudaMemcpyAsync(" + bytes + " bytes)", device);
  }

  /** Frees the memory ({@code cudaFree}, {@code ncclMemFree}) that this class allocated. */
  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    closed = true;
    if (leak != null) {
      leak.closed();
    }
    if (allocator == Allocator.NONE || device.isLost()) {
      return;
    }
    device.makeCurrent();
    if (allocator == Allocator.NCCL) {
      int rc = NcclH.ncclMemFree(base);
      if (rc != 0) {
        throw NcclException.of("ncclMemFree", rc, " on " + device);
      }
    } else {
      CudaException.check(CudartH.cudaFree(base), "cudaFree", device);
    }
  }

  @Override
  public String toString() {
    return "buffer of " + count + " x " + type + " on " + device;
  }
}

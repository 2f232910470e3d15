package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.CudaException;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaFuncAttributes;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/** A kernel of a {@link KernelModule} ({@code cudaKernel_t}); usable until that is closed. */
public final class Kernel {
  private final KernelModule module;
  private final String name;
  private final MemorySegment handle;
  private final int mostThreads;
  private final int registers;
  private final long localBytes;
  private final int @Nullable [] sizes;
  private int allowedShared;

  Kernel(KernelModule module, String name, MemorySegment handle) {
    this.module = module;
    this.name = name;
    this.handle = handle;
    try (Arena arena = Arena.ofConfined()) {
      module.device().makeCurrent();
      // Also makes CUDA load the kernel now, where it would be loaded with the first launch.
      MemorySegment attributes = cudaFuncAttributes.allocate(arena);
      int rc = CudartH.cudaFuncGetAttributes(attributes, handle);
      CudaException.check(rc, "cudaFuncGetAttributes of " + this, module.device());
      mostThreads = cudaFuncAttributes.maxThreadsPerBlock(attributes);
      registers = cudaFuncAttributes.numRegs(attributes);
      localBytes = cudaFuncAttributes.localSizeBytes(attributes);
      sizes = sizes(arena, handle);
    }
  }

  private static int @Nullable [] sizes(Arena arena, MemorySegment handle) {
    if (NativeLibraries.load().cudart().find("cudaFuncGetParamInfo").isEmpty()) {
      return null; // before CUDA 12.4
    }
    MemorySegment offset = arena.allocate(JAVA_LONG);
    MemorySegment size = arena.allocate(JAVA_LONG);
    int[] found = new int[16];
    int n = 0;
    int rc;
    while ((rc = CudartH.cudaFuncGetParamInfo(handle, n, offset, size)) == 0) {
      if (n == found.length) {
        found = Arrays.copyOf(found, 2 * n);
      }
      found[n++] = (int) size.get(JAVA_LONG, 0);
    }
    int unused = CudartH.cudaGetLastError(); // the end of the list is an error, which CUDA keeps
    return rc == CudartH.cudaErrorInvalidValue() ? Arrays.copyOf(found, n) : null;
  }

  public String name() {
    return name;
  }

  KernelModule module() {
    return module;
  }

  /** The {@code cudaKernel_t}, for the raw bindings. */
  public MemorySegment handle() {
    module.checkOpen(name);
    return handle;
  }

  /** Threads that a block may have at most. */
  public int mostThreads() {
    return mostThreads;
  }

  /** Registers of a thread. */
  public int registers() {
    return registers;
  }

  /** Local memory of a thread, in bytes: what does not fit into registers. */
  public long localBytes() {
    return localBytes;
  }

  /**
   * Blocks that can run at the same time on a device with nothing else to do ({@code
   * cudaOccupancyMaxActiveBlocksPerMultiprocessor}, on all multiprocessors). Ranks that share the
   * GPU share them.
   *
   * @param threads of a block
   * @param sharedBytes dynamic shared memory of a block; more than 48 KiB only after {@link
   *     KernelLaunch#sharedBytes} has asked for it
   * @throws IllegalStateException if the module is closed
   * @throws CudaException if CUDA cannot tell
   */
  public int residentBlocks(int threads, int sharedBytes) {
    long use = module.beginUse(name);
    try (Arena arena = Arena.ofConfined()) {
      module.device().makeCurrent();
      MemorySegment blocks = arena.allocate(JAVA_INT);
      int rc =
          CudartH.cudaOccupancyMaxActiveBlocksPerMultiprocessor(
              blocks, handle, threads, sharedBytes);
      CudaException.check(rc, "occupancy of " + this, module.device());
      return blocks.get(JAVA_INT, 0) * module.device().multiProcessorCount();
    } finally {
      module.endUse(use);
    }
  }

  /**
   * Binds arguments to the kernel's parameters, in their order: a {@link
   * io.ncclffm.core.DeviceBuffer} (its first element's address), {@code int}, {@code long}, {@code
   * float}, {@code double}; by value a {@link DeviceCommunicator} ({@code ncclFfmDevComm}), a
   * {@link TaskQueue} ({@code ncclFfmTaskQueue}), an {@link io.ncclffm.lsa.Lsa} ({@code ncclLsa}),
   * an {@link io.ncclffm.core.NcclDeviceCommunicator} ({@code ncclDevComm}), an {@link
   * io.ncclffm.core.NcclWindow} ({@code ncclWindow_t}), or the bytes of a {@link MemorySegment},
   * for structs of your own. A device address that is a number is a {@code long}.
   *
   * @throws IllegalArgumentException naming the argument, if it is none of these, on another
   *     device, or (from CUDA 12.4 on, which tells) not of its parameter's size
   */
  public KernelLaunch prepare(Object... arguments) {
    module.checkOpen(name);
    return new KernelLaunch(
        this, new KernelArguments(toString(), module.device(), sizes, arguments));
  }

  /** The most that a launch has asked for: it is the kernel's, not the launch's. */
  synchronized void allowShared(int bytes) {
    long use = module.beginUse(name);
    try {
      if (bytes <= allowedShared) {
        return;
      }
      int rc =
          CudartH.cudaKernelSetAttributeForDevice(
              handle,
              CudartH.cudaFuncAttributeMaxDynamicSharedMemorySize(),
              bytes,
              module.device().ordinal());
      CudaException.check(rc, bytes + " bytes of shared memory for " + this, module.device());
      allowedShared = bytes;
    } finally {
      module.endUse(use);
    }
  }

  @Override
  public String toString() {
    return "kernel " + name;
  }
}

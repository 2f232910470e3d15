package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclDeviceCommunicator;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.cudart.cudaLaunchAttribute_st;
import io.ncclffm.core.bindings.cudart.cudaLaunchConfig_st;
import io.ncclffm.core.bindings.cudart.dim3;
import io.ncclffm.lsa.Lsa;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import org.jspecify.annotations.Nullable;

/**
 * A kernel with its grid and arguments ({@code cudaLaunchConfig_t}), to be launched any number of
 * times; from {@link Kernel#prepare}. A launch takes the arguments as they are then, and copies
 * them. Launching, and setting an argument anew, allocates nothing.
 *
 * <p>Threads: one at a time.
 */
public final class KernelLaunch {
  private static final int FREE_SHARED_BYTES = 48 << 10; // that need not be asked for

  private final Kernel kernel;
  private final String operation;
  private final KernelArguments arguments;
  private final Arena arena = Arena.ofAuto();
  private final MemorySegment config = cudaLaunchConfig_st.allocate(arena);
  private long blocks = 1;
  private long threads = 1;
  private int sharedBytes;
  private int resident = -1; // blocks of this shape; -1: to be asked for
  private boolean gridSet;

  KernelLaunch(Kernel kernel, KernelArguments arguments) {
    this.kernel = kernel;
    this.operation = "cudaLaunchKernelExC of " + kernel;
    this.arguments = arguments;
    MemorySegment attribute = cudaLaunchAttribute_st.allocate(arena);
    cudaLaunchAttribute_st.id(attribute, CudartH.cudaLaunchAttributeCooperative());
    cudaLaunchAttribute_st.val(attribute).set(JAVA_INT, 0, 1);
    cudaLaunchConfig_st.attrs(config, attribute);
    set(cudaLaunchConfig_st.gridDim(config), 1, 1, 1);
    set(cudaLaunchConfig_st.blockDim(config), 1, 1, 1);
  }

  private static void set(MemorySegment dim, int x, int y, int z) {
    dim3.x(dim, x);
    dim3.y(dim, y);
    dim3.z(dim, z);
  }

  /** Blocks. */
  public KernelLaunch grid(int x) {
    return grid(x, 1, 1);
  }

  /** Blocks in each direction. */
  public KernelLaunch grid(int x, int y, int z) {
    if (x < 1 || y < 1 || z < 1 || y > 65535 || z > 65535) {
      throw new IllegalArgumentException(
          operation
              + ": a grid of "
              + x
              + " x "
              + y
              + " x "
              + z
              + " blocks: take 1 to 2147483647,"
              + " 65535 and 65535");
    }
    set(cudaLaunchConfig_st.gridDim(config), x, y, z);
    blocks = (long) x * y * z;
    gridSet = true;
    return this;
  }

  /** Threads of a block. */
  public KernelLaunch block(int x) {
    return block(x, 1, 1);
  }

  /** Threads of a block in each direction. */
  public KernelLaunch block(int x, int y, int z) {
    if (x < 1
        || y < 1
        || z < 1
        || (long) x * y > Integer.MAX_VALUE
        || (long) x * y * z > kernel.mostThreads()) {
      throw new IllegalArgumentException(
          operation
              + ": a block of "
              + x
              + " x "
              + y
              + " x "
              + z
              + " threads: this kernel takes 1 to "
              + kernel.mostThreads());
    }
    set(cudaLaunchConfig_st.blockDim(config), x, y, z);
    threads = (long) x * y * z;
    resident = -1;
    return this;
  }

  /**
   * Dynamic shared memory of a block. More than 48 KiB is asked for here ({@code
   * cudaKernelSetAttributeForDevice}).
   *
   * @throws CudaException if the device has not so much
   */
  public KernelLaunch sharedBytes(int bytes) {
    if (bytes < 0) {
      throw new IllegalArgumentException(operation + ": " + bytes + " bytes of shared memory");
    }
    if (bytes > FREE_SHARED_BYTES) {
      kernel.allowShared(bytes);
    }
    cudaLaunchConfig_st.dynamicSmemBytes(config, bytes);
    sharedBytes = bytes;
    resident = -1;
    return this;
  }

  /**
   * Whether all blocks must run at the same time, so that the grid can be synchronized. With a
   * {@link DeviceCommunicator} among the arguments, those of all ranks that share the GPU must.
   */
  public KernelLaunch cooperative(boolean value) {
    cudaLaunchConfig_st.numAttrs(config, value ? 1 : 0);
    return this;
  }

  /** Sets an argument anew; index from 0. The same for the other types. */
  public KernelLaunch set(int index, DeviceBuffer buffer) {
    return set(index, buffer, 0);
  }

  /**
   * @param offset of the first element
   */
  public KernelLaunch set(int index, DeviceBuffer buffer, long offset) {
    arguments.set(index, buffer, offset);
    return this;
  }

  public KernelLaunch set(int index, int value) {
    arguments.set(index, value);
    return this;
  }

  public KernelLaunch set(int index, long value) {
    arguments.set(index, value);
    return this;
  }

  public KernelLaunch set(int index, float value) {
    arguments.set(index, value);
    return this;
  }

  public KernelLaunch set(int index, double value) {
    arguments.set(index, value);
    return this;
  }

  /**
   * Enqueues it ({@code cudaLaunchKernelExC}), or adds it to the capture of the stream. What an
   * argument is made of must be open. A {@link DeviceCommunicator} among them is used as by its own
   * collectives: one thread at a time, not failed, and {@link CudaStream#synchronize} reports what
   * the kernel fails with; one that waits for {@link DeviceCommunicatorConfig.Builder#hostSignal
   * signals} expects one of this kernel. A {@link TaskQueue} counts the kernel as a producer.
   *
   * @param stream of the module's device
   * @throws IllegalArgumentException if it is cooperative and the blocks of all ranks on the device
   *     cannot run at the same time
   * @throws IllegalStateException if the module or an argument is closed, or a device communicator
   *     has a task queue
   * @throws io.ncclffm.core.NcclException if a communicator or device communicator has failed
   * @throws CudaException if the kernel cannot be launched so
   */
  public void run(CudaStream stream) {
    CudaDevice device = kernel.module().device();
    if (!gridSet) {
      throw new IllegalStateException(operation + ": no grid was set; call grid and block");
    }
    if (stream.device().ordinal() != device.ordinal()) {
      throw new IllegalArgumentException(
          operation + ": the " + stream + " belongs to another device than the " + device);
    }
    long use = kernel.module().beginUse(operation);
    int entered = 0;
    try {
      while (entered < arguments.count()) {
        enter(arguments.owner(entered), stream);
        entered++;
      }
      checkResident();
      device.makeCurrent();
      cudaLaunchConfig_st.stream(config, stream.handle());
      int rc = CudartH.cudaLaunchKernelExC(config, kernel.handle(), arguments.table());
      if (rc != 0) {
        throw CudaException.of(operation, rc, device, hint(rc));
      }
      for (int i = 0; i < arguments.count(); i++) {
        if (arguments.owner(i) instanceof TaskQueue queue) {
          queue.countLaunched(stream);
        } else if (arguments.owner(i) instanceof DeviceCommunicator comm) {
          comm.countKernel(stream);
        }
      }
    } finally {
      kernel.module().endUse(use);
      while (entered > 0) {
        leave(arguments.owner(--entered));
      }
    }
  }

  /** CUDA looks at one rank's launch only, and then the kernels would wait for each other. */
  private void checkResident() {
    if (cudaLaunchConfig_st.numAttrs(config) == 0) {
      return;
    }
    for (int i = 0; i < arguments.count(); i++) {
      if (arguments.owner(i) instanceof DeviceCommunicator comm && comm.ranksPerDevice() > 1) {
        if (resident < 0) {
          resident = kernel.residentBlocks((int) threads, sharedBytes);
        }
        if (blocks > resident / comm.ranksPerDevice()) {
          throw new IllegalArgumentException(
              operation
                  + ": "
                  + blocks
                  + " blocks on each of "
                  + comm.ranksPerDevice()
                  + " ranks cannot run on one device at the same time, only "
                  + resident
                  + " blocks in all");
        }
      }
    }
  }

  private void enter(@Nullable Object owner, CudaStream stream) {
    if (owner instanceof DeviceBuffer buffer) {
      buffer.pointer(operation, 0, 0);
    } else if (owner instanceof DeviceCommunicator comm) {
      comm.beginKernel(operation, stream);
    } else if (owner instanceof TaskQueue queue) {
      queue.beginLaunch(operation, stream);
    } else if (owner instanceof NcclDeviceCommunicator comm) {
      comm.struct();
      comm.communicator().begin(operation, stream);
    } else if (owner instanceof NcclWindow window) {
      window.handle();
    } else if (owner instanceof Lsa lsa) {
      lsa.struct();
    }
  }

  private static void leave(@Nullable Object owner) {
    if (owner instanceof DeviceCommunicator comm) {
      comm.communicator().end();
    } else if (owner instanceof TaskQueue queue) {
      queue.endLaunch();
    } else if (owner instanceof NcclDeviceCommunicator comm) {
      comm.communicator().end();
    }
  }

  private String hint(int rc) {
    if (rc == CudartH.cudaErrorCooperativeLaunchTooLarge()) {
      return "; fewer blocks, or smaller ones, fit on the device at the same time";
    }
    if (rc == CudartH.cudaErrorLaunchOutOfResources()) {
      return "; "
          + threads
          + " threads of this kernel take more registers or shared memory than a"
          + " multiprocessor has";
    }
    return "";
  }

  @Override
  public String toString() {
    return "launch of " + kernel;
  }
}

package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_DOUBLE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclDeviceCommunicator;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.lsa.Lsa;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;
import java.util.StringJoiner;
import org.jspecify.annotations.Nullable;

/**
 * The arguments of a launch in native memory, each in a place of its own, and the table of their
 * addresses that {@code cudaLaunchKernelExC} takes.
 */
final class KernelArguments {
  private static final long ALIGNMENT = 16;
  private static final long MOST_BYTES = 32764; // that a kernel's parameters can take

  private final String kernel;
  private final CudaDevice device;
  private final int @Nullable [] sizes;
  private final Arena arena = Arena.ofAuto();
  private final MemorySegment table;
  private final MemorySegment[] places;
  // What an argument was made of, where that can be closed; else null.
  private final @Nullable Object[] owners;

  /**
   * @param sizes of the kernel's parameters in bytes, null where CUDA does not tell
   */
  KernelArguments(String kernel, CudaDevice device, int @Nullable [] sizes, Object[] values) {
    this.kernel = kernel;
    this.device = device;
    this.sizes = sizes;
    if (sizes != null && sizes.length != values.length) {
      throw new IllegalArgumentException(
          kernel
              + " takes "
              + sizes.length
              + " arguments, of "
              + Arrays.toString(sizes)
              + " bytes; given are "
              + values.length
              + ": "
              + typesOf(values));
    }
    this.table = arena.allocate(ADDRESS, Math.max(1, values.length));
    this.places = new MemorySegment[values.length];
    Arrays.fill(places, MemorySegment.NULL);
    this.owners = new @Nullable Object[values.length];
    for (int i = 0; i < values.length; i++) {
      setAny(i, values[i]);
    }
  }

  private static String typesOf(@Nullable Object[] values) {
    StringJoiner types = new StringJoiner(", ", "(", ")");
    for (@Nullable Object value : values) {
      types.add(value == null ? "null" : value.getClass().getSimpleName());
    }
    return types.toString();
  }

  private void setAny(int index, @Nullable Object value) {
    if (value instanceof DeviceBuffer buffer) {
      set(index, buffer, 0);
    } else if (value instanceof Integer number) {
      set(index, (int) number);
    } else if (value instanceof Long number) {
      set(index, (long) number);
    } else if (value instanceof Float number) {
      set(index, (float) number);
    } else if (value instanceof Double number) {
      set(index, (double) number);
    } else if (value instanceof DeviceCommunicator comm) {
      checkDevice(index, comm.communicator().device(), comm);
      setStruct(index, comm.struct(), comm);
    } else if (value instanceof TaskQueue queue) {
      checkDevice(index, queue.deviceCommunicator().communicator().device(), queue);
      setStruct(index, queue.struct(), queue);
    } else if (value instanceof NcclDeviceCommunicator comm) {
      checkDevice(index, comm.communicator().device(), comm);
      setStruct(index, comm.struct(), comm);
    } else if (value instanceof Lsa lsa) {
      setStruct(index, lsa.struct(), lsa);
    } else if (value instanceof NcclWindow window) {
      place(index, Long.BYTES, "a window's handle", window).set(ADDRESS, 0, window.handle());
    } else if (value instanceof MemorySegment struct) {
      setStruct(index, struct, null);
    } else {
      throw new IllegalArgumentException(
          where(index)
              + (value == null ? "is null" : "is of " + value.getClass())
              + "; take a DeviceBuffer, an int, long, float or double, a DeviceCommunicator, a"
              + " TaskQueue, an NcclDeviceCommunicator, an NcclWindow, an Lsa, or a MemorySegment,"
              + " whose bytes are the argument");
    }
  }

  private void setStruct(int index, MemorySegment struct, @Nullable Object owner) {
    String what = owner == null ? "a segment" : "a " + owner.getClass().getSimpleName();
    MemorySegment place = place(index, struct.byteSize(), what, owner);
    MemorySegment.copy(struct, 0, place, 0, struct.byteSize());
  }

  void set(int index, DeviceBuffer buffer, long offset) {
    checkDevice(index, buffer.device(), buffer);
    long pointer = buffer.pointer(kernel, offset, 0);
    place(index, Long.BYTES, "a DeviceBuffer", buffer).set(JAVA_LONG, 0, pointer);
  }

  void set(int index, int value) {
    place(index, Integer.BYTES, "an int", null).set(JAVA_INT, 0, value);
  }

  void set(int index, long value) {
    place(index, Long.BYTES, "a long", null).set(JAVA_LONG, 0, value);
  }

  void set(int index, float value) {
    place(index, Float.BYTES, "a float", null).set(JAVA_FLOAT, 0, value);
  }

  void set(int index, double value) {
    place(index, Double.BYTES, "a double", null).set(JAVA_DOUBLE, 0, value);
  }

  private void checkDevice(int index, CudaDevice its, Object what) {
    if (its.ordinal() != device.ordinal()) {
      throw new IllegalArgumentException(
          where(index) + "the " + what + " is on " + its + ", the kernel on " + device);
    }
  }

  /** Where an argument of this size goes, which is now its owner's. */
  private MemorySegment place(int index, long bytes, String what, @Nullable Object owner) {
    if (index < 0 || index >= places.length) {
      throw new IllegalArgumentException(
          kernel + ": argument " + index + ": they go from 0 to " + (places.length - 1));
    }
    if (bytes == 0 || bytes > MOST_BYTES || sizes != null && bytes != sizes[index]) {
      throw new IllegalArgumentException(
          where(index)
              + what
              + " takes "
              + bytes
              + " bytes, "
              + (sizes == null
                  ? "which no kernel's parameter can"
                  : "the kernel's parameter " + sizes[index]));
    }
    if (places[index].byteSize() != bytes) {
      if (places[index].address() != 0) { // CUDA does not tell the kernel's: the first was right
        throw new IllegalArgumentException(
            where(index)
                + what
                + " takes "
                + bytes
                + " bytes, before it were "
                + places[index].byteSize());
      }
      places[index] = arena.allocate(bytes, ALIGNMENT);
      table.setAtIndex(ADDRESS, index, places[index]);
    }
    owners[index] = owner;
    return places[index];
  }

  private String where(int index) {
    return kernel + ": argument " + index + " (of 0 to " + (places.length - 1) + "): ";
  }

  /** The {@code void **} of all. */
  MemorySegment table() {
    return table;
  }

  int count() {
    return owners.length;
  }

  @Nullable Object owner(int index) {
    return owners[index];
  }
}

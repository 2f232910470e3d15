package io.ncclffm.core.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import org.jspecify.annotations.Nullable;

/**
 * The one question that only NVML (the driver's {@code libnvidia-ml.so.1}) can answer. Without it,
 * or where it fails, the answer is null: not known.
 */
@SuppressWarnings("restricted") // downcalls to a library that has no generated bindings here
public final class Nvml {
  private static final int P2P_CAPS_INDEX_NVLINK = 2;
  private static final int P2P_STATUS_OK = 0;

  private static final @Nullable Nvml INSTANCE = open();

  private final MethodHandle deviceByPciBusId;
  private final MethodHandle p2pStatus;

  private Nvml(MethodHandle deviceByPciBusId, MethodHandle p2pStatus) {
    this.deviceByPciBusId = deviceByPciBusId;
    this.p2pStatus = p2pStatus;
  }

  private static @Nullable Nvml open() {
    @Nullable MemorySegment library = Libc.open("libnvidia-ml.so.1").handle();
    if (library == null) {
      return null;
    }
    @Nullable MethodHandle init = handle(library, "nvmlInit_v2", FunctionDescriptor.of(JAVA_INT));
    @Nullable MethodHandle byId =
        handle(
            library,
            "nvmlDeviceGetHandleByPciBusId_v2",
            FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS));
    @Nullable MethodHandle status =
        handle(
            library,
            "nvmlDeviceGetP2PStatus",
            FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS, JAVA_INT, ADDRESS));
    if (init == null || byId == null || status == null) {
      return null;
    }
    try {
      return (int) init.invokeExact() == 0 ? new Nvml(byId, status) : null;
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  private static @Nullable MethodHandle handle(
      MemorySegment library, String name, FunctionDescriptor descriptor) {
    @Nullable MemorySegment address = Libc.symbol(library, name);
    return address == null ? null : Linker.nativeLinker().downcallHandle(address, descriptor);
  }

  /**
   * Whether NVLink joins two GPUs ({@code nvmlDeviceGetP2PStatus}).
   *
   * @param busId PCI bus ids as CUDA writes them
   * @return null if NVML is not there or does not know
   */
  public static @Nullable Boolean isNvLinked(String busId, String otherBusId) {
    @Nullable Nvml nvml = INSTANCE;
    if (nvml == null) {
      return null;
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      if ((int) nvml.deviceByPciBusId.invokeExact(arena.allocateFrom(busId), out) != 0) {
        return null;
      }
      MemorySegment device = out.get(ADDRESS, 0);
      if ((int) nvml.deviceByPciBusId.invokeExact(arena.allocateFrom(otherBusId), out) != 0) {
        return null;
      }
      MemorySegment other = out.get(ADDRESS, 0);
      MemorySegment status = arena.allocate(JAVA_INT);
      int rc = (int) nvml.p2pStatus.invokeExact(device, other, P2P_CAPS_INDEX_NVLINK, status);
      return rc == 0 ? status.get(JAVA_INT, 0) == P2P_STATUS_OK : null;
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }
}

package io.ncclffm.core.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.bindings.cudart.cudaDeviceProp;
import io.ncclffm.core.bindings.cudart.cudaPointerAttributes;
import io.ncclffm.core.bindings.nccl.ncclCommProperties;
import io.ncclffm.core.bindings.nccl.ncclConfig_t;
import io.ncclffm.core.bindings.nccl.ncclTeam;
import io.ncclffm.core.bindings.nccl.ncclUniqueId;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclFfmCall;
import io.ncclffm.core.bindings.shim.ncclFfmChannel;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.core.bindings.shim.ncclFfmLayout;
import io.ncclffm.core.bindings.shim.ncclFfmPair;
import io.ncclffm.core.bindings.shim.ncclFfmStatus;
import io.ncclffm.core.bindings.shim.ncclFfmTask;
import io.ncclffm.core.bindings.shim.ncclFfmTaskBatch;
import io.ncclffm.core.bindings.shim.ncclFfmTaskBuckets;
import io.ncclffm.core.bindings.shim.ncclFfmTaskControl;
import io.ncclffm.core.bindings.shim.ncclFfmTaskLane;
import io.ncclffm.core.bindings.shim.ncclFfmTaskOverlap;
import io.ncclffm.core.bindings.shim.ncclFfmTaskQueue;
import io.ncclffm.core.bindings.shim.ncclFfmTaskRecord;
import io.ncclffm.core.bindings.shim.ncclFfmTaskShared;
import io.ncclffm.core.bindings.shim.ncclFfmTaskSlot;
import io.ncclffm.core.bindings.shim.ncclFfmTicket;
import io.ncclffm.core.bindings.shim.ncclLsa;
import io.ncclffm.core.bindings.shim.ncclLsaBuffer;
import io.ncclffm.core.bindings.shim.ncclLsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemoryLayout.PathElement;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * Compares, once at load, the generated struct layouts with what the shim's compiler saw: a binding
 * that writes a field to the wrong place would corrupt memory without a word.
 */
final class StructLayouts {
  private static final Map<String, MemoryLayout> JAVA =
      Map.ofEntries(
          Map.entry("ncclFfmDevComm", ncclFfmDevComm.layout()),
          Map.entry("ncclFfmStatus", ncclFfmStatus.layout()),
          Map.entry("ncclFfmChannel", ncclFfmChannel.layout()),
          Map.entry("ncclLsaWindow", ncclLsaWindow.layout()),
          Map.entry("ncclLsa", ncclLsa.layout()),
          Map.entry("ncclFfmPair", ncclFfmPair.layout()),
          Map.entry("ncclLsaBuffer", ncclLsaBuffer.layout()),
          Map.entry("ncclFfmCall", ncclFfmCall.layout()),
          Map.entry("ncclFfmTaskRecord", ncclFfmTaskRecord.layout()),
          Map.entry("ncclFfmTask", ncclFfmTask.layout()),
          Map.entry("ncclFfmTaskSlot", ncclFfmTaskSlot.layout()),
          Map.entry("ncclFfmTaskLane", ncclFfmTaskLane.layout()),
          Map.entry("ncclFfmTaskShared", ncclFfmTaskShared.layout()),
          Map.entry("ncclFfmTaskControl", ncclFfmTaskControl.layout()),
          Map.entry("ncclFfmTaskQueue", ncclFfmTaskQueue.layout()),
          Map.entry("ncclFfmTicket", ncclFfmTicket.layout()),
          Map.entry("ncclFfmTaskBatch", ncclFfmTaskBatch.layout()),
          Map.entry("ncclFfmTaskBuckets", ncclFfmTaskBuckets.layout()),
          Map.entry("ncclFfmTaskOverlap", ncclFfmTaskOverlap.layout()),
          Map.entry("ncclUniqueId", ncclUniqueId.layout()),
          Map.entry("ncclConfig_t", ncclConfig_t.layout()),
          Map.entry("ncclCommProperties_t", ncclCommProperties.layout()),
          Map.entry("ncclTeam_t", ncclTeam.layout()),
          Map.entry("cudaPointerAttributes", cudaPointerAttributes.layout()),
          Map.entry("cudaDeviceProp", cudaDeviceProp.layout()));

  private static final Set<String> SHARED =
      Set.of(
          "ncclFfmDevComm",
          "ncclFfmStatus",
          "ncclFfmChannel",
          "ncclLsaWindow",
          "ncclLsa",
          "ncclFfmPair",
          "ncclLsaBuffer",
          "ncclFfmCall",
          "ncclFfmTaskRecord",
          "ncclFfmTask",
          "ncclFfmTaskSlot",
          "ncclFfmTaskLane",
          "ncclFfmTaskShared",
          "ncclFfmTaskControl",
          "ncclFfmTaskQueue",
          "ncclFfmTicket",
          "ncclFfmTaskBatch",
          "ncclFfmTaskBuckets",
          "ncclFfmTaskOverlap");

  private StructLayouts() {}

  /**
   * Compares version and layouts; before the bindings can be used, so by handles of its own.
   *
   * @throws NativeLibraryException with every difference
   */
  static void verify(@Nullable Library shim) {
    if (shim == null) {
      return;
    }
    int version = NativeLibraries.callIntOut(shim, "ncclFfmGetAbiVersion");
    if (version != ShimH.NCCLFFM_ABI_VERSION()) {
      throw new NativeLibraryException(
          shim.file()
              + " has ABI "
              + version
              + ", this version of nccl-ffm needs "
              + ShimH.NCCLFFM_ABI_VERSION()
              + ". Remedy: take the nccl-ffm-native jar of the same build.");
    }
    List<String> differences = new ArrayList<>();
    Set<String> seen = new HashSet<>();
    MemorySegment rows = rows(shim);
    for (long i = 0; i < rows.byteSize() / ncclFfmLayout.sizeof(); i++) {
      MemorySegment row = ncclFfmLayout.asSlice(rows, i);
      String struct = NativeText.copy(ncclFfmLayout.structName(row));
      String field = NativeText.copy(ncclFfmLayout.fieldName(row));
      seen.add(struct);
      @Nullable MemoryLayout layout = JAVA.get(struct);
      if (layout != null) {
        compare(layout, struct, field, row, differences);
      }
    }
    for (String struct : SHARED) {
      if (!seen.contains(struct)) {
        differences.add(struct + " is not reported");
      }
    }
    if (!differences.isEmpty()) {
      throw new NativeLibraryException(
          shim.file()
              + " does not match this version of nccl-ffm: "
              + String.join("; ", differences)
              + ". Remedy: take the nccl-ffm-native jar of the same build.");
    }
  }

  @SuppressWarnings("restricted") // the shim says how many rows there are
  private static MemorySegment rows(Library shim) {
    MemorySegment function =
        shim.find("ncclFfmGetLayouts")
            .orElseThrow(
                () -> new NativeLibraryException(shim.file() + " has no ncclFfmGetLayouts"));
    MethodHandle handle =
        Linker.nativeLinker()
            .downcallHandle(function, FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS));
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      MemorySegment count = arena.allocate(JAVA_LONG);
      int rc = (int) handle.invokeExact(out, count);
      if (rc != 0) {
        throw new NativeLibraryException(shim.file() + ": ncclFfmGetLayouts returned " + rc);
      }
      return out.get(ADDRESS, 0).reinterpret(count.get(JAVA_LONG, 0) * ncclFfmLayout.sizeof());
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  private static void compare(
      MemoryLayout layout,
      String struct,
      String field,
      MemorySegment row,
      List<String> differences) {
    long size = ncclFfmLayout.size(row);
    if (field.isEmpty()) {
      if (layout.byteSize() != size) {
        differences.add(struct + ": " + layout.byteSize() + " bytes in Java, " + size + " in C");
      }
      return;
    }
    long offset = ncclFfmLayout.offset(row);
    PathElement path = PathElement.groupElement(field);
    long javaOffset;
    try {
      javaOffset = layout.byteOffset(path);
    } catch (IllegalArgumentException e) {
      differences.add(struct + "." + field + " is unknown in Java");
      return;
    }
    long javaSize = layout.select(path).byteSize();
    if (javaOffset != offset || javaSize != size) {
      differences.add(
          String.format(
              "%s.%s: offset %d size %d in Java, %d and %d in C",
              struct, field, javaOffset, javaSize, offset, size));
    }
  }
}

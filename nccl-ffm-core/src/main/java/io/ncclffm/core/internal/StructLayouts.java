package io.ncclffm.core.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.bindings.cudart.cudaDeviceProp;
import io.ncclffm.core.bindings.cudart.cudaPointerAttributes;
import io.ncclffm.core.bindings.nccl.ncclCommProperties;
import io.ncclffm.core.bindings.nccl.ncclConfig_t;
import io.ncclffm.core.bindings.nccl.ncclTeam;
import io.ncclffm.core.bindings.nccl.ncclUniqueId;
import io.ncclffm.core.bindings.shim.ncclFfmChannel;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.core.bindings.shim.ncclFfmLayout;
import io.ncclffm.core.bindings.shim.ncclFfmStatus;
import java.lang.foreign.Arena;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemoryLayout.PathElement;
import java.lang.foreign.MemorySegment;
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
      Map.of(
          "ncclFfmDevComm", ncclFfmDevComm.layout(),
          "ncclFfmStatus", ncclFfmStatus.layout(),
          "ncclFfmChannel", ncclFfmChannel.layout(),
          "ncclUniqueId", ncclUniqueId.layout(),
          "ncclConfig_t", ncclConfig_t.layout(),
          "ncclCommProperties_t", ncclCommProperties.layout(),
          "ncclTeam_t", ncclTeam.layout(),
          "cudaPointerAttributes", cudaPointerAttributes.layout(),
          "cudaDeviceProp", cudaDeviceProp.layout());

  private static final Set<String> SHARED =
      Set.of("ncclFfmDevComm", "ncclFfmStatus", "ncclFfmChannel");

  private StructLayouts() {}

  static void verify(NativeLibraries.Loaded loaded) {
    @Nullable Library shim = loaded.shim();
    if (shim == null) {
      return;
    }
    List<String> differences = new ArrayList<>();
    Set<String> seen = new HashSet<>();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      MemorySegment countOut = arena.allocate(JAVA_LONG);
      int rc = io.ncclffm.core.bindings.shim.ShimH.ncclFfmGetLayouts(out, countOut);
      if (rc != 0) {
        throw new NativeLibraryException(shim.file() + ": ncclFfmGetLayouts returned " + rc);
      }
      long count = countOut.get(JAVA_LONG, 0);
      MemorySegment rows = rows(out.get(ADDRESS, 0), count);
      for (long i = 0; i < count; i++) {
        MemorySegment row = ncclFfmLayout.asSlice(rows, i);
        String struct = NativeText.copy(ncclFfmLayout.structName(row));
        String field = NativeText.copy(ncclFfmLayout.fieldName(row));
        seen.add(struct);
        @Nullable MemoryLayout layout = JAVA.get(struct);
        if (layout != null) {
          compare(layout, struct, field, row, differences);
        }
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
  private static MemorySegment rows(MemorySegment base, long count) {
    return base.reinterpret(count * ncclFfmLayout.sizeof());
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

package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Collections;
import java.util.SortedMap;
import java.util.TreeMap;

/**
 * A look at NCCL's parameters as they are in effect ({@code ncclParamGetAllParameterKeys}, 2.30.4),
 * for a log or a report. They are set through the environment, before NCCL is loaded.
 *
 * <p>Thread-safe.
 */
@SuppressWarnings("restricted") // texts and table have the lengths that NCCL tells
public final class NcclParameters {
  private NcclParameters() {}

  /**
   * Every published parameter and its value as text; with {@code NCCL_PARAM_DUMP_ALL=true} in the
   * environment also those that NCCL does not document.
   *
   * @return sorted by name; a parameter without a value is the empty text
   * @throws UnsupportedByLibraryException before NCCL 2.30.4
   */
  public static SortedMap<String, String> all() {
    NativeLibraries.requireNccl("ncclParamGetAllParameterKeys", "2.30.4");
    TreeMap<String, String> values = new TreeMap<>();
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment tableOut = scratch.allocate(ADDRESS);
      MemorySegment countOut = scratch.allocate(JAVA_INT);
      check(
          "ncclParamGetAllParameterKeys",
          NcclH.ncclParamGetAllParameterKeys(tableOut, countOut),
          "");
      int count = countOut.get(JAVA_INT, 0);
      MemorySegment table = tableOut.get(ADDRESS, 0).reinterpret((long) count * ADDRESS.byteSize());
      for (int i = 0; i < count; i++) {
        String key = NativeText.copy(table.getAtIndex(ADDRESS, i));
        values.put(key, value(scratch, key));
      }
    }
    return Collections.unmodifiableSortedMap(values);
  }

  /**
   * One parameter's value as text ({@code ncclParamGetParameter}, 2.30.4).
   *
   * @param name as {@code NCCL_DEBUG_FILE}
   * @return the empty text if it has none
   * @throws NcclException if NCCL has no such parameter
   * @throws UnsupportedByLibraryException before NCCL 2.30.4
   */
  public static String get(String name) {
    NativeLibraries.requireNccl("ncclParamGetParameter", "2.30.4");
    try (Arena scratch = Arena.ofConfined()) {
      return value(scratch, name);
    }
  }

  private static String value(Arena scratch, String name) {
    MemorySegment out = scratch.allocate(ADDRESS);
    MemorySegment length = scratch.allocate(JAVA_INT);
    check(
        "ncclParamGetParameter",
        NcclH.ncclParamGetParameter(scratch.allocateFrom(name), out, length),
        ": " + name);
    // The text is NCCL's until this thread's next question, and has a NUL behind its length.
    MemorySegment text = out.get(ADDRESS, 0);
    return text.address() == 0 ? "" : text.reinterpret(length.get(JAVA_INT, 0) + 1L).getString(0);
  }

  private static void check(String operation, int rc, String about) {
    if (rc != 0) {
      throw NcclException.of(operation, rc, about);
    }
  }
}

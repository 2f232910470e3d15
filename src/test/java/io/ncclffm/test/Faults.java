package io.ncclffm.test;

import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;
import org.jspecify.annotations.Nullable;

/**
 * Functions of the CPU backend that fail or are late, in the whole process, until {@link #clear}.
 * Rules are as in {@code fault.h}: {@code function:key=value,...;function:...}.
 */
final class Faults {
  private static @Nullable MethodHandle set;

  private Faults() {}

  @SuppressWarnings("restricted") // the function's own descriptor
  private static MethodHandle find() {
    TestRanks.assumeCpu("faults are injected");
    // Not by its file: out of a jar it was a temporary one, which is gone.
    return Linker.nativeLinker()
        .downcallHandle(
            NativeLibraries.nccl().findOrThrow("ncclFfmCpuSetFaults"),
            FunctionDescriptor.of(ValueLayout.JAVA_INT, ValueLayout.ADDRESS));
  }

  /** Replaces all rules. */
  static synchronized void inject(String rules) {
    if (set == null) {
      set = find();
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment text = arena.allocateFrom(rules);
      int rc = (int) set.invokeExact(text);
      if (rc != 0) {
        throw new AssertionError("ncclFfmCpuSetFaults(" + rules + ") returned " + rc);
      }
    } catch (Throwable t) {
      throw new AssertionError("ncclFfmCpuSetFaults(" + rules + ")", t);
    }
  }

  /** Removes all rules; also where none were ever set, as on a GPU. */
  static synchronized void clear() {
    if (set != null) {
      inject("");
    }
  }
}

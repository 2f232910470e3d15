package io.ncclffm.core.internal;

import io.ncclffm.core.NativeLibraryException;
import java.lang.foreign.MemorySegment;

/** Whether the JVM lets this library call native code. */
public final class NativeAccess {
  private NativeAccess() {}

  /** The option of java that allows it, for the class path or the module path, as it is. */
  public static String option() {
    Module module = NativeAccess.class.getModule();
    return "--enable-native-access=" + (module.isNamed() ? module.getName() : "ALL-UNNAMED");
  }

  /**
   * Comes before the first native call, which would fail in a class's initialisation.
   *
   * @throws NativeLibraryException if the JVM denies it
   */
  @SuppressWarnings("restricted")
  static void require() {
    try {
      MemorySegment.NULL.reinterpret(0); // the cheapest call that needs it
    } catch (IllegalCallerException e) {
      throw new NativeLibraryException(
          "the JVM denies native access: "
              + e.getMessage()
              + ". Remedy: start java with "
              + option());
    }
  }
}

package io.ncclffm.core.internal;

import java.lang.foreign.MemorySegment;

/** C strings to Java, and the one place where a downcall's {@code Throwable} is narrowed. */
@SuppressWarnings("restricted") // a C string has no length that FFM could check
public final class NativeText {
  private NativeText() {}

  /** Copies a NUL-terminated string; a null pointer gives the empty string. */
  public static String copy(MemorySegment cString) {
    return cString.address() == 0
        ? ""
        : cString.reinterpret(Long.MAX_VALUE).getString(0).stripTrailing();
  }

  static RuntimeException rethrow(Throwable t) {
    if (t instanceof Error error) {
      throw error;
    }
    if (t instanceof RuntimeException exception) {
      throw exception;
    }
    throw new IllegalStateException(t);
  }
}

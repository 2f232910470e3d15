package io.ncclffm.core.internal;

import org.jspecify.annotations.Nullable;

/** The C environment of the process, as CUDA and NCCL read it. */
public final class CEnvironment {
  private CEnvironment() {}

  /** The value that C code sees now, or null. */
  public static @Nullable String get(String name) {
    NativeAccess.require();
    return Libc.getenv(name);
  }

  /** Sets a variable that is not set yet; a value set by the user stays. */
  public static void setIfUnset(String name, String value) {
    NativeAccess.require();
    Libc.setenvIfUnset(name, value);
  }
}

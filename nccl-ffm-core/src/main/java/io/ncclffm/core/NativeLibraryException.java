package io.ncclffm.core;

/**
 * A native library could not be found, or what was found is not usable. The message lists every
 * attempt with the system's own reason. Nothing was initialised; the process goes on.
 */
public final class NativeLibraryException extends RuntimeException {
  private static final long serialVersionUID = 1;

  public NativeLibraryException(String message) {
    super(message);
  }

  /** The same failure again, for a later caller: loading is tried once per process. */
  public NativeLibraryException(NativeLibraryException first) {
    super(first.getMessage(), first);
  }
}

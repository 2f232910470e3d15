package io.ncclffm.core;

/** The loaded library lacks a function: which one, since when it exists, and what is loaded. */
public final class UnsupportedByLibraryException extends RuntimeException {
  private static final long serialVersionUID = 1;

  public UnsupportedByLibraryException(String message) {
    super(message);
  }
}

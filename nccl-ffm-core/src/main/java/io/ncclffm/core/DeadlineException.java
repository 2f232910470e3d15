package io.ncclffm.core;

/** A wait reached its deadline. What was waited for may still happen; nothing was undone. */
public final class DeadlineException extends RuntimeException {
  private static final long serialVersionUID = 1;

  public DeadlineException(String message) {
    super(message);
  }
}

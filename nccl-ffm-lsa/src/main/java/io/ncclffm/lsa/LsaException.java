package io.ncclffm.lsa;

/**
 * No window could be made, or one is not what it was. What the ranks find out together, when they
 * make a window or compare their pools, every rank is told in the same words; what {@link
 * LsaWindow#verify} finds, and that another rank has given up, is told to the rank that asks.
 */
public final class LsaException extends RuntimeException {
  private static final long serialVersionUID = 1;

  LsaException(String message) {
    super(message);
  }
}

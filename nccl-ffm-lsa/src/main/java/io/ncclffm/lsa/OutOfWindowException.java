package io.ncclffm.lsa;

/** A {@link SymmetricPool} has no room. */
public final class OutOfWindowException extends RuntimeException {
  private static final long serialVersionUID = 1;

  OutOfWindowException(long wanted, long window, long free, long largest) {
    super(
        "no room for "
            + wanted
            + " bytes in a symmetric pool of "
            + window
            + ": "
            + free
            + " are free, "
            + largest
            + " of them in one piece");
  }
}

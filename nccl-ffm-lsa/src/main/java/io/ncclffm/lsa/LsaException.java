package io.ncclffm.lsa;

/** No window could be made, or one is not what it was; the text is the same on every rank. */
public final class LsaException extends RuntimeException {
  private static final long serialVersionUID = 1;

  LsaException(String message) {
    super(message);
  }
}

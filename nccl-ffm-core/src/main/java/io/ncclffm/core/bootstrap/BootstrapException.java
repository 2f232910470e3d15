package io.ncclffm.core.bootstrap;

/**
 * The ranks could not find each other for a reason that waiting does not mend: a variable that is
 * missing or contradicts another, a secret that differs, a rank claimed twice, a peer that went
 * away. The message names what was found, where, and what to do. A wait that merely took too long
 * is a {@link io.ncclffm.core.DeadlineException}.
 */
public final class BootstrapException extends RuntimeException {
  private static final long serialVersionUID = 1;

  public BootstrapException(String message) {
    super(message);
  }

  public BootstrapException(String message, Throwable cause) {
    super(message, cause);
  }
}

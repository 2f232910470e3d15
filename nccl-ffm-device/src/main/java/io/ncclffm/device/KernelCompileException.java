package io.ncclffm.device;

/** NVRTC refused a kernel's source: where, why, and all that it said. */
public final class KernelCompileException extends RuntimeException {
  private static final long serialVersionUID = 1;

  private final String log;
  private final String file;
  private final int line;

  KernelCompileException(String message, String log, String file, int line) {
    super(message);
    this.log = log;
    this.file = file;
    this.line = line;
  }

  /** The compiler's whole log. */
  public String log() {
    return log;
  }

  /** Where the first error is: the source's name or a header's; empty if the log does not tell. */
  public String file() {
    return file;
  }

  /** The line of the first error in that file, from 1; 0 if the log does not tell. */
  public int line() {
    return line;
  }
}

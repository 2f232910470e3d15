package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeText;
import java.lang.foreign.MemorySegment;

/**
 * An NCCL call failed. {@code ncclInvalidArgument} leaves the communicator usable; any other result
 * fails it for good, and it can only be aborted or closed.
 */
public class NcclException extends RuntimeException {
  private static final long serialVersionUID = 1;

  private static final int INVALID_ARGUMENT = 4;

  // Of this library's own task queues, as ncclffm.h has them.
  private static final int QUEUE_FULL = 1000;
  private static final int QUEUE_BROKEN = 1001;

  private final String operation;
  private final int resultCode;

  /**
   * For a result code of a call made on this thread just now: takes NCCL's last error text at once,
   * because it is process-global and the next warning of any thread overwrites it.
   *
   * @param operation the C function
   * @param resultCode its {@code ncclResult_t}; unknown values are kept
   * @param where rank and device, or "" where there is none
   */
  public static NcclException of(String operation, int resultCode, String where) {
    String last = NativeText.copy(NcclH.ncclGetLastError(MemorySegment.NULL));
    String detail = last.isEmpty() ? "" : "last NCCL warning in this process: " + last;
    NcclException made = new NcclException(operation, resultCode, where, detail);
    FailureEvent.emit(made);
    return made;
  }

  /** For a result code that did not come from the call itself, with the text known of it. */
  public NcclException(String operation, int resultCode, String where, String detail) {
    super(
        operation
            + where
            + ": "
            + resultName(resultCode)
            + " ("
            + resultCode
            + ")"
            + (detail.isEmpty() ? "" : ": " + detail)
            + (detail.endsWith(hint(resultCode)) ? "" : hint(resultCode)));
    this.operation = operation;
    this.resultCode = resultCode;
  }

  /** The C function that failed. */
  public String operation() {
    return operation;
  }

  /** The {@code ncclResult_t}, also where this library does not know it. */
  public int resultCode() {
    return resultCode;
  }

  /** Whether NCCL calls the result fatal for its communicator: all but ncclInvalidArgument are. */
  public boolean isCommunicatorFatal() {
    return resultCode != INVALID_ARGUMENT;
  }

  /** The name of an {@code ncclResult_t}, "unknown result" for one that this library predates. */
  public static String resultName(int code) {
    switch (code) {
      case 0:
        return "ncclSuccess";
      case 1:
        return "ncclUnhandledCudaError";
      case 2:
        return "ncclSystemError";
      case 3:
        return "ncclInternalError";
      case INVALID_ARGUMENT:
        return "ncclInvalidArgument";
      case 5:
        return "ncclInvalidUsage";
      case 6:
        return "ncclRemoteError";
      case 7:
        return "ncclInProgress";
      case 8:
        return "ncclTimeout";
      case QUEUE_FULL:
        return "ncclFfmQueueFull";
      case QUEUE_BROKEN:
        return "ncclFfmQueueBroken";
      default:
        return "unknown result";
    }
  }

  private static String hint(int code) {
    switch (code) {
      case 1:
      case 3:
        return "; set NCCL_DEBUG=INFO in the environment for NCCL's own account";
      case 2:
        return "; often a full /dev/shm, a missing network interface or too few file descriptors:"
            + " NCCL_DEBUG=INFO tells";
      case 6:
        return "; another rank failed or died: look there, then abort and re-create";
      case 8:
        return "; see what the rank waited for does, then re-create";
      default:
        return "";
    }
  }
}

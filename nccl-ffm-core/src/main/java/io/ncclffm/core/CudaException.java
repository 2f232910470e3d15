package io.ncclffm.core;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.NativeText;

/** A CUDA runtime call failed. */
public final class CudaException extends RuntimeException {
  private static final long serialVersionUID = 1;

  private final String operation;
  private final int errorCode;

  CudaException(String operation, int errorCode, String where) {
    this(operation, errorCode, where, "");
  }

  private CudaException(String operation, int errorCode, String where, String detail) {
    super(
        operation
            + where
            + ": "
            + NativeText.copy(CudartH.cudaGetErrorName(errorCode))
            + " ("
            + errorCode
            + "): "
            + NativeText.copy(CudartH.cudaGetErrorString(errorCode))
            + detail);
    this.operation = operation;
    this.errorCode = errorCode;
  }

  /** The C function that failed. */
  public String operation() {
    return operation;
  }

  /** The {@code cudaError_t}. */
  public int errorCode() {
    return errorCode;
  }

  public static void check(int rc, String operation, CudaDevice device) {
    if (rc != 0) {
      throw of(operation, rc, device);
    }
  }

  /** For a call on a device that is current. */
  static CudaException of(String operation, int rc, CudaDevice device) {
    return of(operation, rc, device, "");
  }

  /** As {@link #of(String, int, CudaDevice)}, with what to do about it. */
  public static CudaException of(String operation, int rc, CudaDevice device, String hint) {
    CudaException e = new CudaException(operation, rc, " on " + device, hint);
    device.noteError(e);
    return e;
  }

  /** For a call that is not made, because the device has failed for good. */
  static CudaException ofLost(CudaDevice device, CudaException cause) {
    CudaException e =
        new CudaException(
            "cudaSetDevice",
            cause.errorCode,
            " on " + device,
            "; it failed earlier in "
                + cause.operation
                + ", and only a new process can use it again");
    e.initCause(cause);
    return e;
  }

  /** Whether CUDA documents the error as one after which the process must be ended. */
  boolean isOfContext() {
    return errorCode == CudartH.cudaErrorIllegalAddress()
        || errorCode == CudartH.cudaErrorLaunchTimeout()
        || errorCode == CudartH.cudaErrorAssert()
        || errorCode >= CudartH.cudaErrorHardwareStackError()
            && errorCode <= CudartH.cudaErrorLaunchFailure();
  }
}

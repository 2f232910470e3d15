package io.ncclffm.core;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.NativeText;

/** A CUDA runtime call failed. */
public final class CudaException extends RuntimeException {
  private static final long serialVersionUID = 1;

  private final String operation;
  private final int errorCode;

  CudaException(String operation, int errorCode, String where) {
    super(
        operation
            + where
            + ": "
            + NativeText.copy(CudartH.cudaGetErrorName(errorCode))
            + " ("
            + errorCode
            + "): "
            + NativeText.copy(CudartH.cudaGetErrorString(errorCode)));
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

  static void check(int rc, String operation, CudaDevice device) {
    if (rc != 0) {
      throw new CudaException(operation, rc, " on device " + device.ordinal());
    }
  }
}

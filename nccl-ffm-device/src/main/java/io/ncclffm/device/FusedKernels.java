package io.ncclffm.device;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.bindings.shim.ShimH;

/** Kernels that compute, communicate and go on computing in one launch. */
public final class FusedKernels {
  private FusedKernels() {}

  /**
   * {@code x = a*x + b}, all-reduce (sum), {@code x = sqrt(|x|)}, in place, one launch,
   * asynchronous. Every rank calls it with the same count.
   *
   * @param x of type {@link DataType#FLOAT32}
   */
  public static void scaleAllReduceSqrt(
      DeviceCommunicator comm, DeviceBuffer x, float a, float b, CudaStream stream) {
    scaleAllReduceSqrt(comm, x, 0, x.count(), a, b, stream);
  }

  /** The same for {@code count} elements from an offset. */
  public static void scaleAllReduceSqrt(
      DeviceCommunicator comm,
      DeviceBuffer x,
      long offset,
      long count,
      float a,
      float b,
      CudaStream stream) {
    String operation = "ncclFfmFusedScaleAllReduceSqrt";
    comm.checkBuffer(operation, x, stream);
    if (x.type() != DataType.FLOAT32) {
      throw new IllegalArgumentException(operation + ": the " + x + " is not of type FLOAT32");
    }
    comm.before(stream);
    int rc =
        ShimH.ncclFfmFusedScaleAllReduceSqrt(
            comm.struct(), x.address(operation, offset, count), count, a, b, stream.handle());
    DeviceCommunicator.checkShim(rc, operation);
  }
}

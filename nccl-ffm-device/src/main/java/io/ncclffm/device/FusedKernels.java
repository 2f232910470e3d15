package io.ncclffm.device;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;

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
    comm.scaleAllReduceSqrt(x, 0, x.count(), a, b, stream);
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
    comm.scaleAllReduceSqrt(x, offset, count, a, b, stream);
  }
}

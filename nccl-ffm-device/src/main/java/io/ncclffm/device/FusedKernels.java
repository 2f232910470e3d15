package io.ncclffm.device;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.lsa.LsaWindow;
import org.jspecify.annotations.Nullable;

/**
 * Kernels that compute, all-reduce and go on computing in one launch, for {@link DataType#FLOAT32},
 * {@link DataType#FLOAT16} and {@link DataType#BFLOAT16}.
 *
 * <p>Every rank calls the same one with the same arguments but for buffers, buffers' offsets and
 * streams; as any collective of its {@link DeviceCommunicator}, whose rules for streams, threads,
 * failures, windows ("zero-copy") and allocation hold here too. A rank whose shapes or numbers
 * differ is told so ({@code ncclInvalidUsage}).
 *
 * <p>The result is bit for bit that of the three steps one after the other: what would lie in
 * memory between two steps is rounded to the buffers' type, everything else is computed in float.
 * It is the same on all ranks, and does not depend on protocol and algorithm. A {@link
 * LaunchChoice} may ask for LL or SIMPLE, ONE_SHOT or TWO_SHOT; what else the device communicator
 * has as its default gives way to the library's table.
 *
 * <p>What a method refuses ({@link IllegalArgumentException}, or {@link
 * io.ncclffm.core.NcclException} with {@code ncclInvalidArgument} for what the shim finds, as
 * buffers that overlap) has launched nothing and changed nothing.
 */
public final class FusedKernels {
  static final String SCALE = "ncclFfmFusedScaleAllReduceSqrt";
  static final String RMS_NORM = "ncclFfmFusedRmsNorm";
  static final String SGD = "ncclFfmFusedSgd";
  static final String ADAMW = "ncclFfmFusedAdamW";

  private FusedKernels() {}

  /**
   * {@code x = a*x + b} (rounded once), all-reduce (sum), {@code x = sqrt(|x|)}, in place. a and b
   * may differ between ranks.
   */
  public static void scaleAllReduceSqrt(
      DeviceCommunicator comm, DeviceBuffer x, float a, float b, CudaStream stream) {
    check(SCALE, comm, "x", x);
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
    scaleAllReduceSqrt(comm, x, offset, x, offset, count, a, b, stream, LaunchChoice.AUTO);
  }

  /** The same from one buffer to another, or in place, run as said. */
  public static void scaleAllReduceSqrt(
      DeviceCommunicator comm,
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      float a,
      float b,
      CudaStream stream,
      LaunchChoice choice) {
    check(SCALE, comm, "send", send);
    check(SCALE, comm, "recv", recv);
    checkFloat(SCALE, send.type(), send);
    checkSameType(SCALE, "recv", recv, "send", send);
    comm.scaleAllReduceSqrt(
        send.type(),
        send.pointer(SCALE, sendOffset, count),
        recv.pointer(SCALE, recvOffset, count),
        count,
        a,
        b,
        stream,
        choice);
  }

  /**
   * The same on windows; a and b are the same on every rank here.
   *
   * @param sendOffset in bytes, as recvOffset
   */
  public static void scaleAllReduceSqrt(
      DeviceCommunicator comm,
      LsaWindow send,
      long sendOffset,
      LsaWindow recv,
      long recvOffset,
      DataType type,
      long count,
      float a,
      float b,
      CudaStream stream,
      LaunchChoice choice) {
    checkFloat(SCALE, type, send);
    comm.scaleAllReduceSqrt(send, sendOffset, recv, recvOffset, type, count, a, b, stream, choice);
  }

  /**
   * Tensor-parallel inference ({@code ncclFfmFusedRmsNorm}): all-reduces partial sums, adds them to
   * the residual, and norms that: {@code residual += sum of x}, {@code out = residual /
   * sqrt(mean(residual^2) + eps) * weight}, the mean over the elements of a token. Squares are
   * added in float.
   *
   * @param x this rank's partial sums, [tokens, hidden] from element 0 on; is not changed unless it
   *     is out
   * @param residual [tokens, hidden], the same on all ranks; updated in place
   * @param weight [hidden]: its length is what hidden is
   * @param out [tokens, hidden]; may be x
   * @param tokens may be fewer than the buffers hold
   * @param eps at least 0
   */
  public static void allReduceRmsNorm(
      DeviceCommunicator comm,
      DeviceBuffer x,
      DeviceBuffer residual,
      DeviceBuffer weight,
      DeviceBuffer out,
      long tokens,
      float eps,
      CudaStream stream) {
    allReduceRmsNorm(comm, x, residual, weight, out, tokens, eps, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. A block of the launch has whole tokens. */
  public static void allReduceRmsNorm(
      DeviceCommunicator comm,
      DeviceBuffer x,
      DeviceBuffer residual,
      DeviceBuffer weight,
      DeviceBuffer out,
      long tokens,
      float eps,
      CudaStream stream,
      LaunchChoice choice) {
    check(RMS_NORM, comm, "x", x);
    check(RMS_NORM, comm, "residual", residual);
    check(RMS_NORM, comm, "weight", weight);
    check(RMS_NORM, comm, "out", out);
    checkFloat(RMS_NORM, x.type(), x);
    checkSameType(RMS_NORM, "residual", residual, "x", x);
    checkSameType(RMS_NORM, "weight", weight, "x", x);
    checkSameType(RMS_NORM, "out", out, "x", x);
    long hidden = weight.count();
    if (tokens < 0 || tokens > Long.MAX_VALUE / hidden) {
      throw new IllegalArgumentException(
          RMS_NORM + ": " + tokens + " tokens of " + hidden + " elements");
    }
    long count = tokens * hidden;
    comm.allReduceRmsNorm(
        x.type(),
        x.pointer(RMS_NORM, 0, count),
        residual.pointer(RMS_NORM, 0, count),
        weight.pointer(RMS_NORM, 0, hidden),
        out.pointer(RMS_NORM, 0, count),
        tokens,
        hidden,
        eps,
        stream,
        choice);
  }

  /**
   * Training ({@code ncclFfmFusedSgd}): averages a gradient over the ranks and updates the weights
   * by it, in float: {@code g = min(1, maxNorm / (|g| + 1e-6)) * g} where maxNorm is not 0, {@code
   * m = momentum*m + g}, {@code w = (1 - learningRate*weightDecay)*w - learningRate*m}.
   *
   * @param gradients this rank's, as many as weights; holds the average afterwards, before clipping
   */
  public static void sgd(
      DeviceCommunicator comm,
      DeviceBuffer gradients,
      OptimizerState state,
      Sgd settings,
      CudaStream stream) {
    sgd(comm, gradients, state, settings, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public static void sgd(
      DeviceCommunicator comm,
      DeviceBuffer gradients,
      OptimizerState state,
      Sgd settings,
      CudaStream stream,
      LaunchChoice choice) {
    checkGradients(SGD, comm, gradients, state);
    comm.sgd(gradients, null, 0, gradients.type(), state, settings, stream, choice);
  }

  /**
   * The same of gradients in a window.
   *
   * @param offset of the first one, in bytes
   */
  public static void sgd(
      DeviceCommunicator comm,
      LsaWindow gradients,
      long offset,
      DataType type,
      OptimizerState state,
      Sgd settings,
      CudaStream stream) {
    checkState(SGD, comm, state);
    checkFloat(SGD, type, gradients);
    comm.sgd(null, gradients, offset, type, state, settings, stream, LaunchChoice.AUTO);
  }

  /**
   * Training ({@code ncclFfmFusedAdamW}): as {@link #sgd}, with {@code m = beta1*m + (1-beta1)*g},
   * {@code v = beta2*v + (1-beta2)*g^2}, {@code w = (1 - learningRate*weightDecay)*w -
   * learningRate*m' / (sqrt(v') + eps)}, where {@code m' = m / (1-beta1^step)} and {@code v' = v /
   * (1-beta2^step)}.
   *
   * @param step which one this is, from 1 on; 0: {@link OptimizerState#steps} counts
   */
  public static void adamW(
      DeviceCommunicator comm,
      DeviceBuffer gradients,
      OptimizerState state,
      AdamW settings,
      int step,
      CudaStream stream) {
    adamW(comm, gradients, state, settings, step, stream, LaunchChoice.AUTO);
  }

  /** The same, run as said. */
  public static void adamW(
      DeviceCommunicator comm,
      DeviceBuffer gradients,
      OptimizerState state,
      AdamW settings,
      int step,
      CudaStream stream,
      LaunchChoice choice) {
    checkGradients(ADAMW, comm, gradients, state);
    checkStep(state, step);
    comm.adamW(gradients, null, 0, gradients.type(), state, settings, step, stream, choice);
  }

  /**
   * The same of gradients in a window.
   *
   * @param offset of the first one, in bytes
   */
  public static void adamW(
      DeviceCommunicator comm,
      LsaWindow gradients,
      long offset,
      DataType type,
      OptimizerState state,
      AdamW settings,
      int step,
      CudaStream stream) {
    checkState(ADAMW, comm, state);
    checkFloat(ADAMW, type, gradients);
    checkStep(state, step);
    comm.adamW(null, gradients, offset, type, state, settings, step, stream, LaunchChoice.AUTO);
  }

  /** Whether a buffer is there and of a type. */
  static void checkIs(String name, @Nullable DeviceBuffer buffer, DataType type) {
    if (buffer == null || buffer.type() != type) {
      throw new IllegalArgumentException(
          name + (buffer == null ? " is null" : ": the " + buffer) + ": must be of type " + type);
    }
  }

  private static void check(
      String operation, DeviceCommunicator comm, String name, @Nullable DeviceBuffer buffer) {
    if (buffer == null) {
      throw new IllegalArgumentException(operation + ": " + name + " is null");
    }
    comm.checkBuffer(operation, buffer);
  }

  private static void checkFloat(String operation, DataType type, Object where) {
    if (type != DataType.FLOAT32 && type != DataType.FLOAT16 && type != DataType.BFLOAT16) {
      throw new IllegalArgumentException(
          operation + ": " + type + " in " + where + ": must be FLOAT32, FLOAT16 or BFLOAT16");
    }
  }

  private static void checkSameType(
      String operation, String name, DeviceBuffer buffer, String otherName, DeviceBuffer other) {
    if (buffer.type() != other.type()) {
      throw new IllegalArgumentException(
          operation
              + ": "
              + name
              + " "
              + buffer
              + " and "
              + otherName
              + " "
              + other
              + " differ in type; take one type");
    }
  }

  private static void checkGradients(
      String operation, DeviceCommunicator comm, DeviceBuffer gradients, OptimizerState state) {
    check(operation, comm, "gradients", gradients);
    checkFloat(operation, gradients.type(), gradients);
    checkState(operation, comm, state);
    if (gradients.count() != state.weights().count()) {
      throw new IllegalArgumentException(
          operation
              + ": the gradients "
              + gradients
              + " must be as many as the weights "
              + state.weights());
    }
  }

  private static void checkState(String operation, DeviceCommunicator comm, OptimizerState state) {
    comm.checkBuffer(operation, state.weights());
    comm.checkBuffer(operation, state.momentum());
    checkOptional(operation, comm, state.variance());
    checkOptional(operation, comm, state.weightCopy());
    checkOptional(operation, comm, state.steps());
  }

  private static void checkOptional(
      String operation, DeviceCommunicator comm, @Nullable DeviceBuffer buffer) {
    if (buffer != null) {
      comm.checkBuffer(operation, buffer);
    }
  }

  private static void checkStep(OptimizerState state, int step) {
    if (state.variance() == null) {
      throw new IllegalArgumentException(ADAMW + ": the state has no variance: it is SGD's");
    }
    boolean isCounted = state.steps() != null;
    if (step < 0 || (step == 0) != isCounted) {
      throw new IllegalArgumentException(
          ADAMW
              + ": step "
              + step
              + (isCounted
                  ? ": must be 0, for the state has a counter in device memory"
                  : ": counts from 1 on; or give the state a counter in device memory, and 0"));
    }
  }
}

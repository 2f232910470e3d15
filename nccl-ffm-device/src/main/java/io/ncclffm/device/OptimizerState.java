package io.ncclffm.device;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import org.jspecify.annotations.Nullable;

/**
 * What an optimizer keeps of a model on one rank, an element for each of the gradient's. Ranks that
 * start with the same values keep the same ones, to the bit. The buffers do not overlap.
 *
 * @param weights of {@link DataType#FLOAT32}
 * @param momentum of {@link DataType#FLOAT32}, zeros at first; AdamW's mean of the gradients
 * @param variance of {@link DataType#FLOAT32}, zeros at first; AdamW's mean of their squares; null:
 *     this is for SGD
 * @param weightCopy of {@link DataType#BFLOAT16}: gets the weights, rounded, with every update; or
 *     null
 * @param steps one element of {@link DataType#UINT32}, 0 at first: AdamW's kernel counts its steps
 *     there, which is what a CUDA graph that is replayed needs; null: the caller counts
 */
public record OptimizerState(
    DeviceBuffer weights,
    DeviceBuffer momentum,
    @Nullable DeviceBuffer variance,
    @Nullable DeviceBuffer weightCopy,
    @Nullable DeviceBuffer steps) {
  /**
   * @throws IllegalArgumentException if a buffer is of another type, length or device
   */
  public OptimizerState {
    FusedKernels.checkIs("weights", weights, DataType.FLOAT32);
    FusedKernels.checkIs("momentum", momentum, DataType.FLOAT32);
    checkSame("momentum", momentum, weights);
    if (variance != null) {
      FusedKernels.checkIs("variance", variance, DataType.FLOAT32);
      checkSame("variance", variance, weights);
    }
    if (weightCopy != null) {
      FusedKernels.checkIs("weightCopy", weightCopy, DataType.BFLOAT16);
      checkSame("weightCopy", weightCopy, weights);
    }
    if (steps != null) {
      FusedKernels.checkIs("steps", steps, DataType.UINT32);
    }
  }

  /** Of SGD. */
  public static OptimizerState ofSgd(DeviceBuffer weights, DeviceBuffer momentum) {
    return new OptimizerState(weights, momentum, null, null, null);
  }

  /** Of AdamW, whose steps the caller counts. */
  public static OptimizerState ofAdamW(
      DeviceBuffer weights, DeviceBuffer momentum, DeviceBuffer variance) {
    return new OptimizerState(weights, momentum, variance, null, null);
  }

  /** This with a copy of the weights. */
  public OptimizerState withWeightCopy(DeviceBuffer copy) {
    return new OptimizerState(weights, momentum, variance, copy, steps);
  }

  /** This with a counter of steps in device memory. */
  public OptimizerState withSteps(DeviceBuffer counter) {
    return new OptimizerState(weights, momentum, variance, weightCopy, counter);
  }

  private static void checkSame(String name, DeviceBuffer buffer, DeviceBuffer weights) {
    if (buffer.count() != weights.count()) {
      throw new IllegalArgumentException(
          name + ": the " + buffer + " must be as long as the weights, the " + weights);
    }
  }
}

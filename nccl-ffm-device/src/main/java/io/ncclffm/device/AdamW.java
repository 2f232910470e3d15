package io.ncclffm.device;

/**
 * The numbers of {@link FusedKernels#adamW}; the same on every rank.
 *
 * @param beta1 in [0, 1): of the mean of the gradients
 * @param beta2 in [0, 1): of the mean of their squares
 * @param eps added to the root of the latter
 * @param weightDecay decoupled: weights are multiplied by {@code 1 - learningRate * weightDecay}
 * @param maxNorm 0: no clipping; else gradients whose average over the ranks is longer (the norm of
 *     all elements of the call) are scaled down to it
 */
public record AdamW(
    float learningRate, float beta1, float beta2, float eps, float weightDecay, float maxNorm) {
  /**
   * @throws IllegalArgumentException if a value is out of range
   */
  public AdamW {
    check("learningRate", learningRate);
    checkBeta("beta1", beta1);
    checkBeta("beta2", beta2);
    check("eps", eps);
    check("weightDecay", weightDecay);
    check("maxNorm", maxNorm);
  }

  /** The usual numbers: 0.9, 0.999, 1e-8, 0.01, and no clipping. */
  public AdamW(float learningRate) {
    this(learningRate, 0.9f, 0.999f, 1e-8f, 0.01f, 0);
  }

  static void check(String name, float value) {
    if (!(value >= 0) || value == Float.POSITIVE_INFINITY) {
      throw new IllegalArgumentException(name + " " + value + ": must be finite, not negative");
    }
  }

  static void checkBeta(String name, float value) {
    if (!(value >= 0 && value < 1)) {
      throw new IllegalArgumentException(name + " " + value + ": must be in [0, 1)");
    }
  }
}

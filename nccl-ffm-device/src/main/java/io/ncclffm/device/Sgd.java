package io.ncclffm.device;

/**
 * The numbers of {@link FusedKernels#sgd}; the same on every rank.
 *
 * @param momentum in [0, 1)
 * @param weightDecay decoupled, as AdamW's: weights are multiplied by {@code 1 - learningRate *
 *     weightDecay}
 * @param maxNorm 0: no clipping; else gradients whose average over the ranks is longer (the norm of
 *     all elements of the call) are scaled down to it
 */
public record Sgd(float learningRate, float momentum, float weightDecay, float maxNorm) {
  /**
   * @throws IllegalArgumentException if a value is out of range
   */
  public Sgd {
    AdamW.check("learningRate", learningRate);
    AdamW.checkBeta("momentum", momentum);
    AdamW.check("weightDecay", weightDecay);
    AdamW.check("maxNorm", maxNorm);
  }

  /** No weight decay, no clipping. */
  public Sgd(float learningRate, float momentum) {
    this(learningRate, momentum, 0, 0);
  }
}

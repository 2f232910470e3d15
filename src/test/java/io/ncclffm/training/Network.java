package io.ncclffm.training;

import java.util.Arrays;
import java.util.Random;

/**
 * Two layers of weights: 64 pixels, 32 hidden units (tanh), 10 digits (softmax and cross-entropy).
 * Gradients are means over the samples of a batch.
 */
final class Network {
  static final int HIDDEN = 32;

  /** Elements of each parameter: weights and bias of the first layer, then of the second. */
  static final long[] COUNTS = {
    (long) Digits.PIXELS * HIDDEN, HIDDEN, (long) HIDDEN * Digits.CLASSES, Digits.CLASSES
  };

  final float[][] parameters = new float[COUNTS.length][];
  final float[][] gradients = new float[COUNTS.length][];
  private float[][] hidden = {};
  private float[][] errors = {};

  Network(long seed) {
    Random random = new Random(seed);
    for (int i = 0; i < COUNTS.length; i++) {
      parameters[i] = new float[(int) COUNTS[i]];
      gradients[i] = new float[(int) COUNTS[i]];
    }
    fill(parameters[0], random, Math.sqrt(1.0 / Digits.PIXELS));
    fill(parameters[2], random, Math.sqrt(1.0 / HIDDEN));
  }

  private static void fill(float[] weights, Random random, double scale) {
    for (int i = 0; i < weights.length; i++) {
      weights[i] = (float) (scale * random.nextGaussian());
    }
  }

  /** The mean loss of a batch: samples from first to first + n - 1. */
  double forward(Digits data, int first, int n) {
    hidden = new float[n][HIDDEN];
    errors = new float[n][];
    double loss = 0;
    for (int s = 0; s < n; s++) {
      float[] p = probabilities(data.pixels()[first + s], hidden[s]);
      int label = data.labels()[first + s];
      loss -= Math.log(Math.max(p[label], 1e-30));
      p[label] -= 1;
      errors[s] = p;
    }
    return loss / n;
  }

  private float[] probabilities(float[] pixels, float[] hiddenOut) {
    for (int h = 0; h < HIDDEN; h++) {
      double sum = parameters[1][h];
      for (int p = 0; p < Digits.PIXELS; p++) {
        sum += pixels[p] * parameters[0][h * Digits.PIXELS + p];
      }
      hiddenOut[h] = (float) Math.tanh(sum);
    }
    double[] exp = new double[Digits.CLASSES];
    double total = 0;
    for (int c = 0; c < Digits.CLASSES; c++) {
      double sum = parameters[3][c];
      for (int h = 0; h < HIDDEN; h++) {
        sum += hiddenOut[h] * parameters[2][c * HIDDEN + h];
      }
      exp[c] = Math.exp(sum);
      total += exp[c];
    }
    float[] p = new float[Digits.CLASSES];
    for (int c = 0; c < p.length; c++) {
      p[c] = (float) (exp[c] / total);
    }
    return p;
  }

  /** The gradients of the second layer: 2 and 3. */
  void backwardOfOutput() {
    int n = errors.length;
    clear(gradients[2]);
    clear(gradients[3]);
    for (int s = 0; s < n; s++) {
      for (int c = 0; c < Digits.CLASSES; c++) {
        float e = errors[s][c] / n;
        gradients[3][c] += e;
        for (int h = 0; h < HIDDEN; h++) {
          gradients[2][c * HIDDEN + h] += e * hidden[s][h];
        }
      }
    }
  }

  /** The gradients of the first layer: 0 and 1. */
  void backwardOfHidden(Digits data, int first) {
    int n = errors.length;
    clear(gradients[0]);
    clear(gradients[1]);
    for (int s = 0; s < n; s++) {
      float[] pixels = data.pixels()[first + s];
      for (int h = 0; h < HIDDEN; h++) {
        float e = 0;
        for (int c = 0; c < Digits.CLASSES; c++) {
          e += errors[s][c] * parameters[2][c * HIDDEN + h];
        }
        e *= (1 - hidden[s][h] * hidden[s][h]) / n;
        gradients[1][h] += e;
        for (int p = 0; p < Digits.PIXELS; p++) {
          gradients[0][h * Digits.PIXELS + p] += e * pixels[p];
        }
      }
    }
  }

  private static void clear(float[] x) {
    Arrays.fill(x, 0);
  }

  /** Which part of the samples it names rightly. */
  double accuracy(Digits data) {
    int right = 0;
    for (int s = 0; s < data.size(); s++) {
      float[] p = probabilities(data.pixels()[s], new float[HIDDEN]);
      int best = 0;
      for (int c = 1; c < p.length; c++) {
        best = p[c] > p[best] ? c : best;
      }
      right += best == data.labels()[s] ? 1 : 0;
    }
    return (double) right / data.size();
  }
}

package io.ncclffm.test;

import io.ncclffm.core.DataType;
import io.ncclffm.core.ReduceOp;
import java.nio.ByteBuffer;
import org.jspecify.annotations.Nullable;

/**
 * Different data for every rank and index from one seed, and what reducing it must give: exactly
 * for integers, minima, maxima and 8-bit floats, within the roundings of the type otherwise.
 */
final class Inputs {
  private final DataType type;
  private final ReduceOp op;
  private final ByteBuffer[] ranks;
  private final double roundings;

  /**
   * @param op what the data will be reduced by: it bounds the values so that results stay finite
   * @param count elements a rank
   */
  Inputs(DataType type, ReduceOp op, int ranks, int count, long seed) {
    this.type = type;
    this.op = op;
    this.ranks = new ByteBuffer[ranks];
    // Every addition or multiplication rounds by half a unit at most, and an average once more.
    this.roundings = 2.0 * ranks * Math.scalb(1.0, -Elements.significantBits(type));
    for (int r = 0; r < ranks; r++) {
      ByteBuffer bytes = Elements.view(new byte[count * type.bytes()]);
      for (int i = 0; i < count; i++) {
        long random = mix(seed + (long) r * 0x632BE59BD9B4E019L + (long) i * 0x9E3779B97F4A7C15L);
        if (Elements.isFloat(type)) {
          Elements.putFloat(bytes, type, i, floatFrom(random));
        } else {
          Elements.putInteger(bytes, type, i, integerFrom(random));
        }
      }
      this.ranks[r] = bytes;
    }
  }

  /** SplitMix64's finalizer. */
  static long mix(long x) {
    long z = (x ^ x >>> 30) * 0xBF58476D1CE4E5B9L;
    z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
    return z ^ z >>> 31;
  }

  private double floatFrom(long random) {
    boolean negative = (random & 1) == 1;
    double magnitude;
    if (Elements.isFloat8(type)) {
      // Few enough values that every partial result of 8 ranks has an 8-bit code.
      double[] values = op == ReduceOp.PROD ? new double[] {0.5, 1, 2} : new double[] {0, 1, 1};
      magnitude = values[(int) Long.remainderUnsigned(random >>> 1, values.length)];
    } else {
      double one = Math.scalb(1.0, Elements.significantBits(type) - 1);
      long below = Long.remainderUnsigned(random >>> 1, (long) one);
      // Products of values near 1 stay near 1; elsewhere [0, 1) with all the bits of the type.
      magnitude = op == ReduceOp.PROD ? (0.75 * one + (below >> 1)) / one : below / one;
    }
    return negative ? -magnitude : magnitude;
  }

  private long integerFrom(long random) {
    long value = Elements.truncate(type, random);
    if (op != ReduceOp.AVG) {
      return value;
    }
    // The sum must not overflow, or what an average is would be open.
    return Elements.isUnsigned(type) ? value >>> 3 : value >> 3;
  }

  byte[] bytes(int rank) {
    return ranks[rank].array();
  }

  /** Null if the element of the result is the rank's input; otherwise what both are. */
  @Nullable String mismatchWithInput(int rank, int index, ByteBuffer result, int resultIndex) {
    for (int b = 0; b < type.bytes(); b++) {
      if (ranks[rank].get(index * type.bytes() + b) != result.get(resultIndex * type.bytes() + b)) {
        return "expected " + text(ranks[rank], index) + ", got " + text(result, resultIndex);
      }
    }
    return null;
  }

  /** Null if the element of the result is the reduction of all ranks' inputs at the index. */
  @Nullable String mismatchWithReduction(int index, ByteBuffer result, int resultIndex) {
    if (!Elements.isFloat(type)) {
      long expected = reducedInteger(index);
      long actual = Elements.getInteger(result, type, resultIndex);
      return actual == expected ? null : "expected " + expected + ", got " + actual;
    }
    double expected = Elements.getFloat(ranks[0], type, index);
    double magnitudes = Math.abs(expected);
    for (int r = 1; r < ranks.length; r++) {
      double x = Elements.getFloat(ranks[r], type, index);
      magnitudes += Math.abs(x);
      if (op == ReduceOp.PROD) {
        expected *= x;
      } else if (op == ReduceOp.MIN) {
        expected = Math.min(expected, x);
      } else if (op == ReduceOp.MAX) {
        expected = Math.max(expected, x);
      } else {
        expected += x;
      }
    }
    double allowed = magnitudes * roundings;
    if (op == ReduceOp.AVG) {
      expected /= ranks.length;
      allowed /= ranks.length;
    } else if (op == ReduceOp.PROD) {
      allowed = Math.abs(expected) * roundings;
    }
    if (op == ReduceOp.MIN || op == ReduceOp.MAX || Elements.isFloat8(type)) {
      allowed = 0;
    }
    double actual = Elements.getFloat(result, type, resultIndex);
    return Math.abs(actual - expected) <= allowed // false for a NaN
        ? null
        : "expected " + expected + " +- " + allowed + ", got " + actual;
  }

  private long reducedInteger(int index) {
    boolean unsigned = Elements.isUnsigned(type);
    long value = Elements.getInteger(ranks[0], type, index);
    for (int r = 1; r < ranks.length; r++) {
      long x = Elements.getInteger(ranks[r], type, index);
      int order = unsigned ? Long.compareUnsigned(x, value) : Long.compare(x, value);
      if (op == ReduceOp.PROD) {
        value *= x;
      } else if (op == ReduceOp.MIN) {
        value = order < 0 ? x : value;
      } else if (op == ReduceOp.MAX) {
        value = order > 0 ? x : value;
      } else {
        value += x;
      }
    }
    if (op == ReduceOp.AVG) {
      return unsigned ? Long.divideUnsigned(value, ranks.length) : value / ranks.length;
    }
    return Elements.truncate(type, value);
  }

  private String text(ByteBuffer bytes, int index) {
    return Elements.isFloat(type)
        ? Double.toString(Elements.getFloat(bytes, type, index))
        : Long.toString(Elements.getInteger(bytes, type, index));
  }
}

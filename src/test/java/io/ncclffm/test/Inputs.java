package io.ncclffm.test;

import io.ncclffm.core.DataType;
import io.ncclffm.core.ReduceOp;
import java.nio.ByteBuffer;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;

/**
 * Different data for every rank and index from one seed, and what reducing it must give: exactly
 * for integers, minima, maxima and 8-bit floats, within the roundings of the type otherwise.
 */
final class Inputs {
  private final DataType type;
  private final ReduceOp op;
  private final ByteBuffer[] ranks;
  private final int elements;
  private final double roundings;
  private @Nullable Reduction reduction;

  /**
   * @param op what the data will be reduced by: it bounds the values so that results stay finite
   * @param count elements a rank
   */
  Inputs(DataType type, ReduceOp op, int ranks, int count, long seed) {
    this.type = type;
    this.op = op;
    this.ranks = new ByteBuffer[ranks];
    this.elements = count;
    // Every addition or multiplication rounds by half a unit at most, and an average once more.
    this.roundings = 2.0 * ranks * Math.scalb(1.0, -Elements.significantBits(type));
    IntStream.range(0, ranks).parallel().forEach(r -> this.ranks[r] = random(r, seed));
  }

  private ByteBuffer random(int rank, long seed) {
    ByteBuffer bytes = Elements.view(new byte[elements * type.bytes()]);
    for (int i = 0; i < elements; i++) {
      long random = mix(seed + (long) rank * 0x632BE59BD9B4E019L + (long) i * 0x9E3779B97F4A7C15L);
      if (Elements.isFloat(type)) {
        Elements.putFloat(bytes, type, i, floatFrom(random));
      } else {
        Elements.putInteger(bytes, type, i, integerFrom(random));
      }
    }
    return bytes;
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

  /**
   * Null if the elements of the result are the rank's input from an index on; otherwise what the
   * first ones are that differ.
   */
  @Nullable String mismatchWithInput(
      int rank, int index, int count, ByteBuffer result, int resultIndex) {
    int bytes = type.bytes();
    ByteBuffer expected = ranks[rank].slice(index * bytes, count * bytes);
    int first = expected.mismatch(result.slice(resultIndex * bytes, count * bytes));
    if (first < 0) {
      return null;
    }
    int i = first / bytes;
    return "element "
        + i
        + ": expected "
        + text(ranks[rank], index + i)
        + ", got "
        + text(result, resultIndex + i);
  }

  /**
   * Null if the elements of the result are the reduction of all ranks' inputs from an index on;
   * otherwise what the first ones are that differ.
   */
  @Nullable String mismatchWithReduction(int index, int count, ByteBuffer result, int resultIndex) {
    Reduction reference = reduction();
    for (int i = 0; i < count; i++) {
      if (!Elements.isFloat(type)) {
        long expected = reference.integers[index + i];
        long actual = Elements.getInteger(result, type, resultIndex + i);
        if (actual != expected) {
          return "element " + i + ": expected " + expected + ", got " + actual;
        }
        continue;
      }
      double expected = reference.floats[index + i];
      double allowed = reference.allowed[index + i];
      double actual = Elements.getFloat(result, type, resultIndex + i);
      if (!(Math.abs(actual - expected) <= allowed)) { // also for a NaN
        return "element " + i + ": expected " + expected + " +- " + allowed + ", got " + actual;
      }
    }
    return null;
  }

  /** What reducing gives: the integers, or the floats and how far off each may be. */
  private record Reduction(long[] integers, double[] floats, double[] allowed) {}

  private synchronized Reduction reduction() {
    @Nullable Reduction known = reduction;
    if (known != null) {
      return known;
    }
    boolean isFloat = Elements.isFloat(type);
    long[] integers = new long[isFloat ? 0 : elements];
    double[] floats = new double[isFloat ? elements : 0];
    double[] allowed = new double[floats.length];
    for (int i = 0; i < elements; i++) {
      if (isFloat) {
        reduceFloats(i, floats, allowed);
      } else {
        integers[i] = reducedInteger(i);
      }
    }
    Reduction made = new Reduction(integers, floats, allowed);
    reduction = made;
    return made;
  }

  private void reduceFloats(int index, double[] results, double[] allowed) {
    double result = Elements.getFloat(ranks[0], type, index);
    double magnitudes = Math.abs(result);
    for (int r = 1; r < ranks.length; r++) {
      double x = Elements.getFloat(ranks[r], type, index);
      magnitudes += Math.abs(x);
      if (op == ReduceOp.PROD) {
        result *= x;
      } else if (op == ReduceOp.MIN) {
        result = Math.min(result, x);
      } else if (op == ReduceOp.MAX) {
        result = Math.max(result, x);
      } else {
        result += x;
      }
    }
    double error = magnitudes * roundings;
    if (op == ReduceOp.AVG) {
      result /= ranks.length;
      error /= ranks.length;
    } else if (op == ReduceOp.PROD) {
      error = Math.abs(result) * roundings;
    }
    results[index] = result;
    allowed[index] = isExact() ? 0 : error;
  }

  private boolean isExact() {
    if (op == ReduceOp.MIN || op == ReduceOp.MAX) {
      return true;
    }
    // The factor of an average, 1 / ranks, is an 8-bit float where it is a power of two.
    return Elements.isFloat8(type) && (op != ReduceOp.AVG || Integer.bitCount(ranks.length) == 1);
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

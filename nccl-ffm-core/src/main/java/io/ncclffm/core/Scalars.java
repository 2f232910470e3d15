package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_DOUBLE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static java.lang.foreign.ValueLayout.JAVA_SHORT;

import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;

/** One number as an element of a data type. */
final class Scalars {
  private Scalars() {}

  /**
   * @throws IllegalArgumentException if an integer type is given a fraction, or a value it cannot
   *     hold; float8 has no conversion here
   */
  static MemorySegment write(SegmentAllocator allocator, DataType type, double value) {
    switch (type) {
      case FLOAT32:
        return allocator.allocateFrom(JAVA_FLOAT, (float) value);
      case FLOAT64:
        return allocator.allocateFrom(JAVA_DOUBLE, value);
      case FLOAT16:
        return allocator.allocateFrom(JAVA_SHORT, Float.floatToFloat16((float) value));
      case BFLOAT16:
        return allocator.allocateFrom(JAVA_SHORT, toBfloat16((float) value));
      case INT8:
        return allocator.allocateFrom(JAVA_BYTE, (byte) whole(type, value, -0x1p7, 0x1p7));
      case UINT8:
        return allocator.allocateFrom(JAVA_BYTE, (byte) whole(type, value, 0, 0x1p8));
      case INT32:
        return allocator.allocateFrom(JAVA_INT, (int) whole(type, value, -0x1p31, 0x1p31));
      case UINT32:
        return allocator.allocateFrom(JAVA_INT, (int) whole(type, value, 0, 0x1p32));
      case INT64:
        return allocator.allocateFrom(JAVA_LONG, whole(type, value, -0x1p63, 0x1p63));
      case UINT64:
        return allocator.allocateFrom(JAVA_LONG, whole(type, value, 0, 0x1p63));
      default:
        throw new IllegalArgumentException(
            "factor for " + type + ": put it into a device buffer instead");
    }
  }

  private static long whole(DataType type, double value, double low, double end) {
    if (value != Math.rint(value) || value < low || value >= end) {
      throw new IllegalArgumentException("factor " + value + " is no value of " + type);
    }
    return (long) value;
  }

  /** Rounds to nearest, ties to even. */
  static short toBfloat16(float value) {
    int bits = Float.floatToRawIntBits(value);
    if (Float.isNaN(value)) {
      return (short) (bits >>> 16 | 0x40);
    }
    return (short) (bits + 0x7fff + (bits >>> 16 & 1) >>> 16);
  }
}

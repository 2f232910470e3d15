package io.ncclffm.test;

import io.ncclffm.core.DataType;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;

/** Elements of every type in arrays of bytes, as the device sees them. */
final class Elements {
  private static final double[] E4M3 = new double[256];
  private static final double[] E5M2 = new double[256];

  static {
    for (int code = 0; code < 256; code++) {
      E5M2[code] = Float.float16ToFloat((short) (code << 8)); // half precision's upper byte
      E4M3[code] = decodeE4m3(code);
    }
  }

  private Elements() {}

  /** Exponent bias 7, subnormals, no infinity, one NaN pattern a sign. */
  private static double decodeE4m3(int code) {
    int exponent = code >> 3 & 15;
    int mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) {
      return Double.NaN;
    }
    double magnitude =
        exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * Math.scalb(1.0, exponent - 10);
    return code >= 128 ? -magnitude : magnitude;
  }

  static boolean isFloat(DataType type) {
    return significantBits(type) > 0;
  }

  static boolean isFloat8(DataType type) {
    return type == DataType.FLOAT8_E4M3 || type == DataType.FLOAT8_E5M2;
  }

  static boolean isUnsigned(DataType type) {
    return type == DataType.UINT8 || type == DataType.UINT32 || type == DataType.UINT64;
  }

  /** Of a float type, with the hidden one; 0 for integers. */
  static int significantBits(DataType type) {
    switch (type) {
      case FLOAT16:
        return 11;
      case FLOAT32:
        return 24;
      case FLOAT64:
        return 53;
      case BFLOAT16:
        return 8;
      case FLOAT8_E4M3:
        return 4;
      case FLOAT8_E5M2:
        return 3;
      default:
        return 0;
    }
  }

  static ByteBuffer view(byte[] bytes) {
    return ByteBuffer.wrap(bytes).order(ByteOrder.nativeOrder());
  }

  /** Writes a value that the float type represents exactly. */
  static void putFloat(ByteBuffer bytes, DataType type, int index, double value) {
    switch (type) {
      case FLOAT64:
        bytes.putDouble(index * 8, value);
        break;
      case FLOAT32:
        bytes.putFloat(index * 4, (float) value);
        break;
      case FLOAT16:
        bytes.putShort(index * 2, Float.floatToFloat16((float) value));
        break;
      case BFLOAT16:
        bytes.putShort(index * 2, (short) (Float.floatToRawIntBits((float) value) >> 16));
        break;
      default:
        bytes.put(index, codeOf(type == DataType.FLOAT8_E4M3 ? E4M3 : E5M2, value));
    }
    if (getFloat(bytes, type, index) != value) {
      throw new IllegalArgumentException(value + " is not a value of " + type);
    }
  }

  private static byte codeOf(double[] values, double value) {
    // The codes of the values that are not negative ascend; the sign is the highest bit.
    int code = Arrays.binarySearch(values, 0, 128, Math.abs(value));
    if (code < 0) {
      throw new IllegalArgumentException(value + " has no 8-bit code");
    }
    return (byte) (value < 0 ? code + 128 : code);
  }

  static double getFloat(ByteBuffer bytes, DataType type, int index) {
    switch (type) {
      case FLOAT64:
        return bytes.getDouble(index * 8);
      case FLOAT32:
        return bytes.getFloat(index * 4);
      case FLOAT16:
        return Float.float16ToFloat(bytes.getShort(index * 2));
      case BFLOAT16:
        return Float.intBitsToFloat(bytes.getShort(index * 2) << 16);
      case FLOAT8_E4M3:
        return E4M3[bytes.get(index) & 0xff];
      default:
        return E5M2[bytes.get(index) & 0xff];
    }
  }

  /** Writes the low bits of a value. */
  static void putInteger(ByteBuffer bytes, DataType type, int index, long value) {
    switch (type.bytes()) {
      case 1:
        bytes.put(index, (byte) value);
        break;
      case 4:
        bytes.putInt(index * 4, (int) value);
        break;
      default:
        bytes.putLong(index * 8, value);
    }
  }

  /** Reads a value, sign- or zero-extended as the type says. */
  static long getInteger(ByteBuffer bytes, DataType type, int index) {
    switch (type.bytes()) {
      case 1:
        return truncate(type, bytes.get(index));
      case 4:
        return truncate(type, bytes.getInt(index * 4));
      default:
        return bytes.getLong(index * 8);
    }
  }

  /** The type's own value with the same low bits: what its arithmetic gives on overflow. */
  static long truncate(DataType type, long value) {
    switch (type) {
      case INT8:
        return (byte) value;
      case UINT8:
        return value & 0xff;
      case INT32:
        return (int) value;
      case UINT32:
        return value & 0xffffffffL;
      default:
        return value;
    }
  }
}

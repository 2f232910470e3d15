package io.ncclffm.core;

/** Element types, in the order of {@code ncclDataType_t}. */
public enum DataType {
  INT8(0, 1),
  UINT8(1, 1),
  INT32(2, 4),
  UINT32(3, 4),
  INT64(4, 8),
  UINT64(5, 8),
  /** IEEE half precision. */
  FLOAT16(6, 2),
  FLOAT32(7, 4),
  FLOAT64(8, 8),
  BFLOAT16(9, 2),
  /** Four exponent bits, three mantissa bits; NCCL 2.24 and later. */
  FLOAT8_E4M3(10, 1),
  /** Five exponent bits, two mantissa bits; NCCL 2.24 and later. */
  FLOAT8_E5M2(11, 1);

  private final int ncclValue;
  private final int bytes;

  DataType(int ncclValue, int bytes) {
    this.ncclValue = ncclValue;
    this.bytes = bytes;
  }

  /** The {@code ncclDataType_t}. */
  public int ncclValue() {
    return ncclValue;
  }

  /** Bytes an element. */
  public int bytes() {
    return bytes;
  }
}

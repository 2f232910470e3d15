package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;

import io.ncclffm.core.bindings.nccl.NcclH;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Types and operations against the values in NCCL's header; no native code. */
class DataTypeTest {
  @ParameterizedTest
  @EnumSource(DataType.class)
  void valueIsThatOfTheHeader(DataType type) throws Exception {
    String name =
        switch (type) {
          case UINT8 -> "ncclUint8";
          case UINT32 -> "ncclUint32";
          case UINT64 -> "ncclUint64";
          case FLOAT8_E4M3 -> "ncclFloat8e4m3";
          case FLOAT8_E5M2 -> "ncclFloat8e5m2";
          case BFLOAT16 -> "ncclBfloat16";
          default -> "nccl" + type.name().charAt(0) + type.name().substring(1).toLowerCase();
        };
    assertEquals(NcclH.class.getMethod(name).invoke(null), type.ncclValue());
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void sizeIsThatOfTheName(DataType type) {
    String digits = type.name().replaceFirst("_.*", "").replaceAll("[A-Z]+", "");
    assertEquals(Integer.parseInt(digits.isEmpty() ? "16" : digits) / 8, type.bytes());
  }

  @Test
  void operationsAreThoseOfTheHeader() {
    assertEquals(NcclH.ncclSum(), ReduceOp.SUM.ncclValue());
    assertEquals(NcclH.ncclProd(), ReduceOp.PROD.ncclValue());
    assertEquals(NcclH.ncclMax(), ReduceOp.MAX.ncclValue());
    assertEquals(NcclH.ncclMin(), ReduceOp.MIN.ncclValue());
    assertEquals(NcclH.ncclAvg(), ReduceOp.AVG.ncclValue());
    assertEquals("avg", ReduceOp.AVG.toString());
  }
}

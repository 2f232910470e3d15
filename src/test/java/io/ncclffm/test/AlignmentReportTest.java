package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.lsa.AlignmentReport;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.util.Set;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class AlignmentReportTest {
  private static final Set<LsaProtocol> ALL =
      Set.of(LsaProtocol.LL, LsaProtocol.LL128, LsaProtocol.SIMPLE);

  @BeforeAll
  static void prepare() {
    TestRanks.prepare();
  }

  /** Offset in elements of a buffer that begins at a multiple of 512 bytes. */
  @ParameterizedTest
  @CsvSource({
    "FLOAT32,0,1024,16,3",
    "FLOAT32,4,1024,16,3",
    "FLOAT32,2,1024,8,2",
    "FLOAT32,1,1024,4,0",
    "FLOAT64,1,1024,8,2",
    "FLOAT16,1,1024,2,0",
    "UINT8,3,1024,1,0",
    "UINT8,0,3,2,3",
    "UINT8,0,0,1,3",
  })
  void widthAndProtocolsFollowTheAddress(
      DataType type, long offset, long count, int vector, int fast) {
    try (DeviceBuffer buffer = DeviceBuffer.allocate(new CudaDevice(0), type, 4096)) {
      AlignmentReport report = AlignmentReport.of(buffer, offset, count);
      assertEquals(vector, report.vectorBytes());
      Set<LsaProtocol> lines = Set.of(LsaProtocol.LL, LsaProtocol.LL128);
      Set<LsaProtocol> expected = fast == 3 ? ALL : fast == 2 ? lines : Set.of();
      assertEquals(expected, report.fast());
      assertEquals(false, report.zeroCopy());
      assertTrue(report.obstacles().toString().contains("in no window"), report.toString());
    }
  }

  @Test
  void whatLiesOutsideIsRefused() {
    try (DeviceBuffer buffer = DeviceBuffer.allocate(new CudaDevice(0), DataType.FLOAT32, 100)) {
      assertThrows(IllegalArgumentException.class, () -> AlignmentReport.of(buffer, 1, 100));
      assertThrows(IllegalArgumentException.class, () -> AlignmentReport.of(buffer, -1, 1));
    }
  }

  @Test
  void inAWindowTheRuleIs128Bytes() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r -> {
            LsaWindow window = LsaWindow.create(r.communicator(), 1 << 16);
            AlignmentReport best = window.alignmentReport(256, 1024, DataType.FLOAT32);
            assertEquals(16, best.vectorBytes());
            assertTrue(best.zeroCopy() && best.obstacles().isEmpty(), best.toString());

            AlignmentReport shifted = window.alignmentReport(64, 1024, DataType.FLOAT32);
            assertEquals(ALL, shifted.fast());
            assertEquals(true, shifted.zeroCopy());
            Messages.assertNames(new Exception(shifted.toString()), "no multiple of 128 bytes");

            AlignmentReport tail = window.alignmentReport(0, 1025, DataType.FLOAT32);
            Messages.assertNames(new Exception(tail.toString()), "the last 4 bytes");

            AlignmentReport odd = window.alignmentReport(2, 7, DataType.FLOAT16);
            assertEquals(2, odd.vectorBytes());
            assertEquals(Set.of(), odd.fast());

            for (long count : new long[] {-1, 16385, Long.MAX_VALUE / 4}) {
              assertThrows(
                  IndexOutOfBoundsException.class,
                  () -> window.alignmentReport(0, count, DataType.FLOAT32));
            }
            assertThrows(
                ArithmeticException.class,
                () -> window.alignmentReport(0, Long.MAX_VALUE, DataType.FLOAT32));
          });
    }
  }
}

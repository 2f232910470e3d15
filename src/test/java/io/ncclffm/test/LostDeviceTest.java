package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.List;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** A CUDA error that stays: what is called then fails at once, and closing works without CUDA. */
class LostDeviceTest {
  // Rows 13 and 14 of the table of known faults: clean-up that calls CUDA after a sticky error.
  @ParameterizedTest
  @ValueSource(strings = {"close", "abort"})
  void laterCallsFailAtOnceAndClosingCallsNothing(String how) throws Exception {
    TestRanks.assumeCpu("the error is injected");
    try (ChildJvm child = ChildJvm.of(LosesItsDevice.class, how).start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(60)), child.output());
      List<String> lines = child.output().lines().toList();
      assertTrue(
          child.awaitLine("WAIT ", Duration.ofSeconds(1)).startsWith("719 cudaStreamQuery"),
          child.output());
      for (String call : List.of("COLLECTIVE ", "ALLOCATION ", "SPLIT ")) {
        String told = child.awaitLine(call, Duration.ofSeconds(1));
        assertTrue(told.startsWith("719 "), child.output());
        assertTrue(
            told.contains("failed earlier in cudaStreamQuery, and only a new process"),
            child.output());
      }
      List<String> closes = lines.stream().filter(l -> l.startsWith("CLOSE ")).toList();
      assertEquals(8, closes.size(), child.output());
      for (String close : closes) {
        assertEquals("CLOSE is quiet", close, child.output());
      }
      assertEquals(
          (how.equals("abort") ? "ABORTED" : "CLOSED") + " CLOSED",
          child.awaitLine("ENDED ", Duration.ofSeconds(1)));
      assertTrue(child.output().contains("device 0 is lost for this process"), child.output());
    }
  }

  /** What lies on the device that is left is freed, also where the lost one's rank used it. */
  @ParameterizedTest
  @CsvSource({"CPU,64,0", "CUDA_IPC,64,0", "HOST_STAGED,0,1"})
  void windowsOnTheOtherDeviceAreFreed(String provider, int mebibytesLost, int mappingsKept)
      throws Exception {
    TestRanks.assumeCpu("the error is injected");
    try (ChildJvm child = ChildJvm.of(LosesOneDevice.class, provider).start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(60)), child.output());
      assertTrue(
          child.awaitLine("LOST ", Duration.ofSeconds(1)).startsWith("true"), child.output());
      Messages.assertNames(
          new Throwable(child.awaitLine("TOLD ", Duration.ofSeconds(1))), "has lost its device");
      String[] bytes = child.awaitLine("DEVICE ", Duration.ofSeconds(1)).split(" ");
      long taken = Long.parseLong(bytes[0]) - Long.parseLong(bytes[1]);
      // Rank 0's window, its table of addresses, and what the ranks agree over.
      assertTrue(taken >= (long) mebibytesLost << 20, child.output());
      assertTrue(taken < ((long) mebibytesLost << 20) + (3 << 20), child.output());
      assertEquals(
          "" + mappingsKept, child.awaitLine("PINNED ", Duration.ofSeconds(1)), child.output());
      child.awaitLine("ENDED", Duration.ofSeconds(1));
    }
  }
}

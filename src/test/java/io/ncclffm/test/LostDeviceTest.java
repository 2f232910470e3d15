package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.List;
import org.junit.jupiter.params.ParameterizedTest;
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
}

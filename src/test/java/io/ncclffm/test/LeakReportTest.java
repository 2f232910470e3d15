package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.List;
import org.junit.jupiter.api.Test;

/** What is dropped without being closed is reported with the place where it was made. */
class LeakReportTest {
  // Rows 11 and 14 of the table of known faults: clean-up by the collector, at a time of its own.
  @Test
  void droppedHandlesAreReportedAndNotTouched() throws Exception {
    try (ChildJvm child = ChildJvm.of(DropsWithoutClosing.class).start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(60)), child.output());
      String output = child.output();
      for (String what :
          List.of(
              "communicator on device 0",
              "stream on device 0",
              "buffer of 1234 x FLOAT32",
              "graph on device 0")) {
        assertTrue(
            output.matches("(?s).*a " + what + "[^\n]* was dropped without close\\(\\).*"), output);
      }
      List<String> sites = output.lines().filter(l -> l.contains("made here")).toList();
      assertEquals(4, sites.size(), output);
      long creations =
          output.lines().filter(l -> l.matches(".*DropsWithoutClosing.drop\\(.*:\\d+\\)")).count();
      assertEquals(4, creations, output);
      String[] taken = child.awaitLine("TAKEN ", Duration.ofSeconds(1)).split(" ");
      assertEquals(taken[0], taken[1], "bytes of device memory, before and after\n" + output);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.benchmarks.Demo;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** The demo as users start it, with small sizes. */
class DemoTest {
  private static final Duration TIMEOUT = Duration.ofSeconds(110);

  @ParameterizedTest(name = "{0} ranks in {1}")
  @CsvSource({
    "1,threads", "2,threads", "4,threads", "8,threads",
    "1,processes", "2,processes", "4,processes", "8,processes"
  })
  void passesAndSaysSo(int ranks, String how) throws Exception {
    boolean processes = how.equals("processes");
    assumeTrue(
        !processes || ranks <= 4 || TestRanks.onCpu(),
        "8 processes that take turns on one GPU take too long");
    List<String> arguments = new ArrayList<>(List.of("--max-bytes", "262144", "--ranks"));
    arguments.add(Integer.toString(ranks));
    if (processes) {
      arguments.add("--processes");
    }
    try (ChildJvm child = ChildJvm.of(Demo.class, arguments.toArray(String[]::new)).start()) {
      int status = child.exitStatus(TIMEOUT);
      String output = child.output();
      assertEquals(0, status, output);
      assertTrue(output.lines().anyMatch("PASS"::equals), output);
      assertFalse(output.contains("FAIL"), output);
      long rows = output.lines().filter(line -> line.matches(" *\\d+ \\|.* PASS")).count();
      assertEquals(4, rows, "sizes 512 B, 4, 32 and 256 KiB in:\n" + output);
      assertTrue(output.contains("libnccl"), output);
    }
  }
}

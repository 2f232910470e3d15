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
  private static final Duration TIMEOUT = Duration.ofSeconds(240);

  @ParameterizedTest(name = "{0} ranks in {1}, up to {2} bytes")
  @CsvSource({
    "1,threads,262144,4",
    "2,threads,262144,4",
    "4,threads,262144,4",
    "8,threads,32768,3",
    "1,processes,262144,4",
    "2,processes,262144,4",
    "4,processes,262144,4",
    "8,processes,4096,2"
  })
  void passesEveryRowAndSaysSo(int ranks, String how, String maxBytes, int rows) throws Exception {
    boolean processes = how.equals("processes");
    assumeTrue(
        !processes || ranks <= 4 || TestRanks.onCpu(),
        "8 processes that take turns on one GPU take too long");
    List<String> arguments = new ArrayList<>(List.of("--max-bytes", maxBytes, "--ranks"));
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
      long passed = output.lines().filter(line -> line.matches(" *\\d+ \\|.* PASS")).count();
      assertEquals(rows, passed, output);
      assertTrue(output.contains("libnccl"), output);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/**
 * Device collectives between ranks that are processes. On a GPU they need MPS to run at the same
 * time.
 */
class DeviceProcessesTest {
  private static final Duration START = Duration.ofSeconds(90);

  /** For all calls of all ranks, on two cores that others use too. */
  private static final Duration WORK = Duration.ofSeconds(180);

  private final List<ChildJvm> children = new ArrayList<>();

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @AfterEach
  void endChildren() {
    children.forEach(ChildJvm::close);
  }

  @ParameterizedTest
  @CsvSource({"2", "4", "8"})
  @Timeout(value = 300, unit = TimeUnit.SECONDS)
  void everyCallMatchesTheReferenceAndIsTheSameInAllProcesses(int size) throws Exception {
    assumeFalse(TestRanks.onCpu() && size == 8, "eight JVMs are too much for a small machine");
    for (int r = 0; r < size; r++) {
      children.add(ChildJvm.of(DeviceCollectivesProcess.class, "" + r, "" + size).start());
    }
    String id = children.get(0).awaitLine("ID ", START);
    for (int r = 1; r < size; r++) {
      children.get(r).send(id);
    }
    for (ChildJvm child : children) {
      assertEquals(0, child.exitStatus(WORK), child.output());
    }
    String calls = children.get(0).awaitLine("RIGHT ", START);
    String sum = children.get(0).awaitLine("SUM ", START);
    // Every function with every type at least.
    int least = DeviceCases.types().size() * DeviceCases.FUNCTIONS.size();
    assertTrue(Long.parseLong(calls) >= least, calls);
    for (ChildJvm child : children) {
      assertEquals(calls, child.awaitLine("RIGHT ", START));
      assertEquals(sum, child.awaitLine("SUM ", START), child.output());
    }
  }
}

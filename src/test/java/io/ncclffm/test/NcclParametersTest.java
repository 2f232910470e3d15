package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclParameters;
import java.time.Duration;
import java.util.SortedMap;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

class NcclParametersTest {
  private static final String NAME = "NCCL_DEBUG_TIMESTAMP_FORMAT";

  @BeforeAll
  static void assumeThere() {
    assumeTrue(
        Nccl.supports("ncclParamGetParameter"),
        "ncclParamGetParameter is not in NCCL " + Nccl.versions().nccl().version());
  }

  @Test
  void everyNameInTheTableHasTheValueThatIsAskedForAlone() {
    SortedMap<String, String> all = NcclParameters.all();
    assertTrue(all.containsKey(NAME), all.toString());
    all.forEach((name, value) -> assertEquals(value, NcclParameters.get(name), name));
    assertThrows(UnsupportedOperationException.class, () -> all.put("NCCL_X", "1"));
  }

  @Test
  void anUnknownNameIsRefusedAndNamed() {
    NcclException refused =
        assertThrows(NcclException.class, () -> NcclParameters.get("NCCL_NO_SUCH_THING"));
    Messages.assertNames(refused, "ncclParamGetParameter", "NCCL_NO_SUCH_THING");
  }

  @Test
  void theEnvironmentIsWhatCounts() throws InterruptedException {
    try (ChildJvm child = ChildJvm.of(Reader.class).environment(NAME, "[stamp %s] ").start()) {
      assertEquals("[stamp %s] ", child.awaitLine("value=", Duration.ofSeconds(30)));
      assertEquals(0, child.exitStatus(Duration.ofSeconds(30)));
    }
  }

  /** Prints the parameter. */
  static final class Reader {
    private Reader() {}

    public static void main(String[] args) {
      System.out.println("value=" + NcclParameters.get(NAME));
    }
  }
}

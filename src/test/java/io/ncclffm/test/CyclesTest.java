package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.time.Duration;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** A process that makes, splits and closes communicators for long does not grow. */
class CyclesTest {
  @Test
  @Timeout(value = 240, unit = TimeUnit.SECONDS)
  void createSplitAndCloseLeaveNothingBehind() throws Exception {
    // The whole heap is resident from the start: what grows then is native.
    try (ChildJvm child =
        ChildJvm.of(CreatesAndCloses.class)
            .option("-Xms64m")
            .option("-Xmx64m")
            .option("-XX:+AlwaysPreTouch")
            .start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(220)), child.output());
      System.out.println(child.awaitLine("FIGURES ", Duration.ofSeconds(1)));
    }
  }
}

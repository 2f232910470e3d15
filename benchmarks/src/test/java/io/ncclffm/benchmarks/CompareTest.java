package io.ncclffm.benchmarks;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import org.junit.jupiter.api.Test;

/** What is flagged between two result files. */
class CompareTest {
  private static final double NOISE = 0.03;

  private static Row row(String backend, String language, String route, double us) {
    return row(backend, language, route, us, NOISE);
  }

  private static Row row(String backend, String language, String route, double us, double noise) {
    return new Row(
        backend,
        language,
        route,
        "allReduce",
        2,
        4096,
        "us",
        30,
        us * (1 - noise),
        us,
        us * (1 + noise));
  }

  private static Row allocated(double bytes) {
    return new Row("cuda", "java", "host", "allReduce", 2, 64, "B", 5, bytes, bytes, bytes);
  }

  private static Results run(Row... rows) {
    return new Results("run.sh bench", List.of(), List.of(rows));
  }

  /** Host and device routes whose times are these. */
  private static Results run(double host, double java, double device) {
    return run(
        row("cuda", "c", "host", host),
        row("cuda", "java", "host", java),
        row("cuda", "java", "device", device));
  }

  private static String compared(int status, Results before, Results after) {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (PrintStream out = new PrintStream(bytes, true, StandardCharsets.UTF_8)) {
      int got = Compare.compare(Results.parse(before.toJson()), Results.parse(after.toJson()), out);
      String text = bytes.toString(StandardCharsets.UTF_8);
      assertEquals(status, got, text);
      return text;
    }
  }

  @Test
  void aSlowerRouteIsFlaggedAndOnlyThat() {
    String text = compared(1, run(14, 14.2, 5), run(14, 14.2, 6));
    assertTrue(text.contains("SLOWER   java device allReduce"), text);
    assertTrue(text.contains("2 compared, 1 flagged"), text);
  }

  @Test
  void javaThatFallsBehindCIsFlagged() {
    assertTrue(compared(1, run(14, 14.2, 5), run(14, 16.5, 5)).contains("SLOWER   java host"));
  }

  @Test
  void noiseIsNotFlagged() {
    compared(0, run(14, 14.2, 5), run(14.2, 14.0, 5.2));
  }

  @Test
  void aSlowerMachineIsNoRegression() {
    compared(0, run(14, 14.2, 5), run(28, 28.4, 10));
  }

  @Test
  void whatVariesMuchIsCalledNoisy() {
    Results noisy = run(row("cuda", "c", "host", 14), row("cuda", "java", "device", 5, 0.8));
    assertTrue(compared(0, noisy, noisy).contains("noisy    java device"));
  }

  @Test
  void aFasterRouteIsToldAndPasses() {
    assertTrue(compared(0, run(14, 14.2, 5), run(14, 14.2, 4)).contains("faster   java device"));
  }

  @Test
  void aRowThatIsGoneIsFlagged() {
    Results after = run(row("cuda", "c", "host", 14), row("cuda", "java", "host", 14.2));
    assertTrue(compared(1, run(14, 14.2, 5), after).contains("MISSING  java device"));
  }

  @Test
  void tasksAreHeldAgainstTheHostsAllReduce() {
    Row host = row("cuda", "c", TaskProgram.HOST, 13);
    Results before = run(host, task(3.5));
    compared(0, before, run(row("cuda", "c", TaskProgram.HOST, 26), task(7)));
    String text = compared(1, before, run(host, task(4.5)));
    assertTrue(text.contains("SLOWER   c task in kernel append to done"), text);
  }

  private static Row task(double us) {
    return new Row("cuda", "c", TaskProgram.ROUTE, "append to done", 2, 65536, "us", 1, us, us, us);
  }

  @Test
  void bytesAllocatedAreComparedAsTheyAre() {
    compared(0, run(allocated(0)), run(allocated(0.2)));
    assertTrue(compared(1, run(allocated(0)), run(allocated(16))).contains("MORE     java host"));
  }

  @Test
  void backendsAreNeverMixed() {
    Results cuda = run(row("cuda", "c", "host", 14));
    Results cpu = run(row("cpu", "c", "host", 14));
    IllegalArgumentException refused =
        assertThrows(IllegalArgumentException.class, () -> compared(0, cuda, cpu));
    assertTrue(refused.getMessage().contains("[cuda, cpu]"), refused.getMessage());
  }

  @Test
  void filesWithNothingInCommonAreRefused() {
    Results one = run(row("cuda", "c", "host", 14));
    assertThrows(IllegalArgumentException.class, () -> compared(0, one, one));
  }
}

package io.ncclffm.benchmarks;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** What the bars say of the rows of a run, and what task_cuda_test prints. */
class BarsTest {
  private static String verdict(List<Row> rows, String what, int ranks) {
    return verdict(rows, 1, what, ranks);
  }

  private static String verdict(List<Row> rows, int devices, String what, int ranks) {
    return Bars.of(rows, devices).stream()
        .filter(bar -> bar.what().equals(what) && bar.ranks() == ranks)
        .map(bar -> bar.verdict())
        .reduce((a, b) -> a + " and " + b)
        .orElseThrow();
  }

  private static List<Row> rows(String... subjectsAndUs) {
    List<String> lines = new ArrayList<>();
    for (String one : subjectsAndUs) {
      lines.add("sample\tcuda\t" + one.replace('|', '\t'));
    }
    return Results.rows(lines);
  }

  @Test
  void aBarIsMetMissedOrNotMeasured() {
    String what = "in a kernel, all-reduce of 4 KiB, us";
    List<Row> run =
        rows("c|in kernel|allReduce|2|4096|us|0.7", "c|in kernel|allReduce|4|4096|us|1.9");
    assertEquals("met", verdict(run, what, 2));
    assertEquals("MISSED", verdict(run, what, 4));
    assertEquals("not measured", verdict(run, what, 8));
  }

  @Test
  void oneRankAGpuHasBarsOfItsOwn() {
    String what = "in a kernel, all-reduce of 4 KiB, us";
    String route = "64 MiB / NCCL's best host route";
    List<Row> run =
        rows(
            "c|in kernel|allReduce|2|4096|us|1.2",
            "c|host, device_route|allReduce|2|67108864|us|250",
            "c|host-symmetric, device_route|allReduce|2|67108864|us|280",
            "c|device zero-copy|allReduce|2|67108864|us|212",
            "c|device|allReduce|2|67108864|us|400");
    assertEquals("met", verdict(run, 2, what, 2));
    assertEquals("MISSED", verdict(run, 1, what, 2));
    assertEquals("met", verdict(run, 2, route, 2));
    assertEquals("met", verdict(run, 8, route, 2));
    assertEquals("not measured", verdict(run, 8, "256 MiB, bandwidth / NCCL's best", 8));
    assertTrue(
        Bars.of(run, 2).stream().noneMatch(bar -> bar.ranks() == 8 && bar.what().equals(what)));
  }

  @Test
  void javaIsHeldAgainstItsTwin() {
    String twin = "c|host|launch allReduce|2|64|us|5";
    String what = "launch of ncclAllReduce, Java / C";
    assertEquals("met", verdict(rows(twin, "java|host|launch allReduce|2|64|us|5.2"), what, 2));
    assertEquals("MISSED", verdict(rows(twin, "java|host|launch allReduce|2|64|us|5.3"), what, 2));
    what = "bytes allocated by an all-reduce, host";
    assertEquals("met", verdict(rows("java|host|allocated by allReduce|2|64|B|0.1"), what, 2));
    assertEquals("MISSED", verdict(rows("java|host|allocated by allReduce|2|64|B|16"), what, 2));
  }

  @Test
  void theTuningTableIsHeldAgainstTheBest() {
    List<Row> run =
        rows(
            "java|device|allReduce|2|64|us|6",
            "java|device LL RING|allReduce|2|64|us|7",
            "java|device LL ONE_SHOT|allReduce|2|64|us|5",
            "java|device window|allReduce|2|64|us|1");
    String text = Bars.toMarkdown(run, 1);
    assertTrue(text.contains("| 2 | 64 | 6.00 | LL ONE_SHOT | 5.00 | 1.20 |"), text);
  }

  @Test
  void whatTheTaskProgramPrintsBecomesRows() {
    List<Row> run =
        Results.rows(
            TaskProgram.samples(
                List.of(
                    "GPU 0: something",
                    "2 ranks: append by a block 0.70 us; by a warp, 32 tasks, 0.123 us each; append to"
                        + " done of an all-reduce of 512 B 4.10 us, 4 KiB 3.40 us, 64 KiB 9.50 us (1"
                        + " block a lane)",
                    "2 ranks, LaneProducer: append 0.30 us; append to done 512 B 3.10 us, 4 KiB 3.49 us,"
                        + " 64 KiB 9.20 us",
                    "2 ranks: ncclAllReduce of 4 KiB, back to back, 13.20 us: the task takes 1/3.9 of it",
                    "2 ranks, overlap, 512 KiB, us an iteration: computes 50.0, communicates 40.0, both"
                        + " 57.0: 82 % of the communication is hidden")));
    assertEquals(13, run.size());
    for (String what :
        List.of(
            "append by a block, us",
            "append by a warp, us a task",
            "append to done, 4 KiB, us",
            "... by a LaneProducer, us",
            "overlap, % of communication hidden")) {
      assertEquals("met", verdict(run, what, 2), what);
    }
  }
}

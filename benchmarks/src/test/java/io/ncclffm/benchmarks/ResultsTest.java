package io.ncclffm.benchmarks;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Lines of samples become rows, and rows become files. */
class ResultsTest {
  private static final List<String> LINES =
      List.of(
          "something else that a program prints",
          "sample\tcuda\tjava\thost\tallReduce\t4\t65536\tus\t1 2 3 4 5",
          "sample\tcuda\tc\thost\tallReduce\t4\t65536\tus\t10 20",
          "sample\tcuda\tjava\thost\tallReduce\t4\t65536\tus\t6 7 8 9 10 11",
          "sample\tcuda\tjava\thost\tallReduce\t4\t512\tus\t1",
          "sample\tcuda\tc\thost\tallReduce\t4\t512\tus\t1",
          "sample\tcuda\tc\thost\tgetVersion\t1\t0\tns\t5");

  private static final Results RUN =
      new Results("run.sh \"bench\"\t\\", List.of("GPU <1> & more"), Results.rows(LINES));

  @Test
  void samplesOfAllProcessesMakeOneRow() {
    Row row = RUN.rows().get(0);
    assertEquals(5, RUN.rows().size());
    assertEquals(11, row.samples());
    assertEquals(List.of(2.0, 6.0, 10.0), List.of(row.p10(), row.p50(), row.p90()));
  }

  @Test
  void busBandwidthIsThatOfNcclTests() {
    assertEquals(65536 / 6.0 / 1e3 * 2 * 3 / 4, RUN.rows().get(0).busBandwidth(), 1e-9);
    assertEquals(0, RUN.rows().get(4).busBandwidth());
  }

  @Test
  void jsonIsReadAsItWasWritten() {
    assertEquals(RUN, Results.parse(RUN.toJson()));
    assertThrows(IllegalArgumentException.class, () -> Results.parse(RUN.toJson() + "x"));
    assertThrows(IllegalArgumentException.class, () -> Results.parse("{\"format\": 2}"));
  }

  @Test
  void filesAreWritten(@TempDir Path folder) throws IOException {
    RUN.write(folder);
    assertEquals(RUN, Results.read(folder.resolve("results.json")));
    String table = Files.readString(folder.resolve("README.md"));
    assertTrue(table.contains("| cuda | allReduce | 4 | 65536 | java | host | us | 2.00 |"), table);
    for (String figure : List.of("latency", "bandwidth")) {
      String svg = Files.readString(folder.resolve("cuda-allReduce-4-ranks-" + figure + ".svg"));
      assertEquals(2, svg.split("<polyline").length - 1, svg);
      assertTrue(svg.contains(">java host</text>") && svg.endsWith("</svg>\n"), svg);
    }
  }
}

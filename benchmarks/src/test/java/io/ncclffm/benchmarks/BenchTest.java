package io.ncclffm.benchmarks;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** All measurements, small and on the CPU backend; and what a C twin that fails does to a run. */
class BenchTest {
  private static final String JAVA_CPP = "javacpp host ncclGetVersion, 1 ranks, 0 B, in ns";

  @Test
  @Timeout(value = 10, unit = TimeUnit.MINUTES)
  void everythingIsMeasuredAndAFailureIsToldAndNotTaken(@TempDir Path folder)
      throws IOException, InterruptedException {
    Path twin = Path.of(System.getProperty("ncclffm.test.programs", ""), "host_route");
    assumeTrue(Files.isExecutable(twin), "there is no " + twin);
    Path programs = Files.createDirectory(folder.resolve("programs"));
    Path failing = programs.resolve("host_route");
    Files.writeString(
        failing, "#!/bin/sh\nset -e\n" + twin + " \"$@\"\n[ \"$1\" != start ] || exit 3\n");
    Files.setPosixFilePermissions(failing, PosixFilePermissions.fromString("rwx------"));

    assertFalse(Bench.run(programs, folder.resolve("results"), true));

    Path made;
    try (Stream<Path> results = Files.list(folder.resolve("results"))) {
      made = results.findFirst().orElseThrow();
    }
    assertTrue(made.getFileName().toString().endsWith("-cpu"), made.toString());
    Results results = Results.read(made.resolve("results.json"));
    List<String> failures =
        results.facts().stream().filter(fact -> fact.startsWith("FAILED")).toList();
    assertEquals(List.of("FAILED: c-start, time 1; see c-start-1.txt"), failures);

    List<String> rows = results.rows().stream().map(Row::name).toList();
    if (!System.getProperty("os.arch").equals("amd64")) {
      rows = Stream.concat(rows.stream(), Stream.of(JAVA_CPP)).toList(); // which it is made for
    }
    for (String row :
        List.of(
            "java host ncclGetVersion, 1 ranks, 0 B, in ns",
            "c host ncclGetVersion, 1 ranks, 0 B, in ns",
            JAVA_CPP,
            "java api ncclGroupStart+End, 1 ranks, 0 B, in ns",
            "java host start, 1 ranks, 0 B, in ms",
            "java host allReduce, 2 ranks, 4096 B, in us",
            "c host allReduce, 2 ranks, 4096 B, in us by events",
            "c host sendRecv, 2 ranks, 64 B, in us",
            "java host-symmetric allReduce, 2 ranks, 4096 B, in us",
            "c host-symmetric allReduce, 2 ranks, 64 B, in us",
            "java device LL128 RING allReduce, 2 ranks, 4096 B, in us",
            "java device allToAll, 2 ranks, 64 B, in us",
            "java fused 2x+1, allReduce, sqrt, 2 ranks, 4096 B, in us",
            "java task overlap: both, 2 ranks, 4096 B, in us",
            "java task allocated by allReduce, 2 ranks, 64 B, in B")) {
      assertTrue(rows.contains(row), row + " is not in " + rows);
    }
    assertFalse(rows.contains("c host start, 1 ranks, 0 B, in ms"), "of a process that failed");
    assertTrue(results.rows().stream().allMatch(row -> row.backend().equals("cpu")));

    String table = Files.readString(made.resolve("README.md"));
    assertTrue(table.contains("say nothing about a GPU") && !table.contains("## Bars"), table);
    for (String plot :
        List.of("cpu-allReduce-2-ranks", "cpu-allReduce-2-ranks-ways-of-java-device")) {
      assertTrue(Files.exists(made.resolve(plot + "-latency.svg")), plot);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** A project of its own, src/test/consumer, takes this one from a repository, and runs. */
class ConsumerTest {
  private static final long MINUTES = 5;

  @TempDir private Path folder;
  private final List<Path> links = new ArrayList<>();

  /**
   * A local repository that has the plugins of the user's, by links, and nothing of this project,
   * which goes into it and not into the user's.
   */
  private Path localRepository() throws IOException {
    Path users = Path.of(System.getProperty("ncclffm.test.localRepository"));
    Path own = folder.resolve("local");
    Path group = Files.createDirectories(own.resolve("io"));
    link(users, own, "io");
    if (Files.isDirectory(users.resolve("io"))) {
      link(users.resolve("io"), group, "ncclffm");
    }
    return own;
  }

  private void link(Path from, Path to, String except) throws IOException {
    try (Stream<Path> entries = Files.list(from)) {
      for (Path entry : entries.toList()) {
        String name = entry.getFileName().toString();
        if (!name.equals(except)) {
          links.add(Files.createSymbolicLink(to.resolve(name), entry));
        }
      }
    }
  }

  /** JUnit warns of every link out of its folder. */
  @AfterEach
  void removeLinks() throws IOException {
    for (Path link : links) {
      Files.delete(link);
    }
  }

  @Test
  @Timeout(value = 2 * MINUTES, unit = TimeUnit.MINUTES)
  void onClassPathAndModulePath() throws Exception {
    Path repository = BuildRepository.assumeInstalled();
    Path log = folder.resolve("log");
    ProcessBuilder maven =
        new ProcessBuilder(
            System.getProperty("ncclffm.test.maven"),
            "--offline",
            "--batch-mode",
            "--no-transfer-progress",
            "--file=" + System.getProperty("ncclffm.test.consumer"),
            "-Dmaven.repo.local=" + localRepository(),
            // A repository in a folder may be used offline; what the plugins came from is not
            // asked.
            "-Daether.offline.protocols=file",
            "-Daether.enhancedLocalRepository.trackingFilename=consumer.repositories",
            "-Dnccl-ffm.repository=" + repository.toUri(),
            "-Dnccl-ffm.version=" + BuildRepository.version());
    maven.environment().put("JAVA_HOME", System.getProperty("java.home"));
    maven.environment().put("NCCLFFM_BACKEND", System.getProperty("ncclffm.backend", "auto"));
    maven.environment().remove("MAVEN_OPTS");
    Process process = maven.redirectErrorStream(true).redirectOutput(log.toFile()).start();
    boolean ended = process.waitFor(MINUTES, TimeUnit.MINUTES);
    if (!ended) {
      process.descendants().forEach(ProcessHandle::destroyForcibly);
      process.destroyForcibly().waitFor();
    }
    String output = Files.readString(log);
    assertTrue(ended, output);
    assumeFalse(
        output.contains("in offline mode") && !output.contains("io.ncclffm:"),
        () -> "the local repository lacks a plugin: " + output);
    assertEquals(0, process.exitValue(), output);
    // 1 + 2 by NCCL, of which each rank has 3 then, twice of which is the sum inside the kernel.
    for (String start : List.of("class path", "module path", "class path without native access")) {
      assertTrue(output.lines().anyMatch(line -> line.equals(start + ": 6.0")), output);
    }
    // The library came out of the jar.
    assertTrue(output.contains("[bundled (META-INF/ncclffm/"), output);
    // The JVM's advice, only where native access is not enabled.
    String warning = "WARNING: A restricted method in java.lang.foreign.";
    assertEquals(1, output.lines().filter(line -> line.startsWith(warning)).count(), output);
    assertTrue(output.contains("WARNING: Use --enable-native-access=ALL-UNNAMED "), output);
    // The library's, where it is denied.
    assertTrue(output.contains("start java with --enable-native-access=io.ncclffm.core"), output);
  }
}

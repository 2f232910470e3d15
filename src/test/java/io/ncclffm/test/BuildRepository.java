package io.ncclffm.test;

import static org.junit.jupiter.api.Assumptions.abort;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import org.jspecify.annotations.Nullable;

/** The Maven repository to which this build has put its modules. */
final class BuildRepository {
  private BuildRepository() {}

  /** Skips the test where there is none: {@code mvn test} makes no jars. */
  static Path assumeInstalled() {
    @Nullable String folder = System.getProperty("ncclffm.test.repository");
    if (folder == null || !Files.isDirectory(Path.of(folder, "io/ncclffm/nccl-ffm-device"))) {
      return abort("no repository of this build: run mvn verify");
    }
    return Path.of(folder);
  }

  static String version() {
    return System.getProperty("ncclffm.test.version");
  }

  /** What there is beside the jars. */
  static List<String> classifiers() {
    String text = System.getProperty("ncclffm.test.classifiers", "");
    return Arrays.stream(text.split(" ")).filter(c -> !c.isBlank()).toList();
  }
}

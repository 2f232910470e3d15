package io.ncclffm.test;

import static org.junit.jupiter.api.Assumptions.abort;

import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;
import org.jspecify.annotations.Nullable;

/**
 * Copies of the CPU backend's library. It exports what libcudart, libnccl and the shim export, so
 * that under other names it stands in for any of them.
 */
final class CpuLibrary {
  private static final String NAME = "libncclffm_cpu.so";

  private CpuLibrary() {}

  /** The folder of this platform's libraries in the jar. */
  static String platform() {
    String arch = System.getProperty("os.arch").replace("amd64", "x86_64");
    return System.getProperty("os.name").toLowerCase(Locale.ROOT) + "-" + arch;
  }

  static Path copyTo(Path folder, String name) throws IOException {
    Path copy = Files.createDirectories(folder).resolve(name);
    @Nullable String shim = System.getProperty("ncclffm.shim");
    if (shim != null && shim.endsWith(NAME)) {
      return Files.copy(Path.of(shim), copy);
    }
    String resource = "/META-INF/ncclffm/" + platform() + "/" + NAME;
    try (@Nullable InputStream in = CpuLibrary.class.getResourceAsStream(resource)) {
      if (in == null) {
        return abort(resource + " is not on the class path");
      }
      Files.copy(in, copy);
    }
    return copy;
  }
}

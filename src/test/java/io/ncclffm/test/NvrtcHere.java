package io.ncclffm.test;

import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.device.KernelCompiler;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Properties;

/** The NVRTC of this machine, or the one that the build downloaded. */
final class NvrtcHere {
  private NvrtcHere() {}

  /** Skips the tests where there is none. */
  static void assumePresent() throws IOException {
    String file = System.getProperty("ncclffm.realLibraries");
    if (file != null
        && Files.exists(Path.of(file))
        && System.getProperty("ncclffm.nvrtc") == null
        && System.getenv("NCCLFFM_NVRTC") == null) {
      Properties found = new Properties();
      try (Reader reader = Files.newBufferedReader(Path.of(file))) {
        found.load(reader);
      }
      String library = found.getProperty("nvrtc.library");
      if (library != null) {
        System.setProperty("ncclffm.nvrtc", library);
      }
    }
    try {
      KernelCompiler.architectures();
    } catch (NativeLibraryException e) {
      assumeTrue(false, "no NVRTC: " + e.getMessage());
    }
  }
}

package io.ncclffm.core.internal;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** The search for libraries, as far as it goes without any. */
class LibrarySearchTest {
  private final String arch = System.getProperty("os.arch");

  @AfterEach
  void restoreArch() {
    System.setProperty("os.arch", arch);
  }

  @ParameterizedTest
  @CsvSource({"amd64,linux-x86_64", "x86_64,linux-x86_64", "aarch64,linux-aarch64"})
  void platformIsNamedAsTheBuildNamesIt(String osArch, String platform) {
    System.setProperty("os.arch", osArch);
    assertEquals(platform, LibrarySearch.platform());
  }

  @Test
  void failureListsEveryAttemptWithTheSystemsReasonAndTheRemedy() {
    LibrarySearch search = LibrarySearch.nccl();
    assertNull(search.find(List.of("libncclffm-none.so.1", "libncclffm-none.so")));
    String message = search.failure().getMessage();
    for (String text :
        List.of(
            "cannot load libnccl",
            "soname, libncclffm-none.so.1: libncclffm-none.so.1: ",
            "soname, libncclffm-none.so: libncclffm-none.so: ",
            "package folders",
            "-Dncclffm.nccl=FILE",
            "NCCLFFM_NCCL=FILE")) {
      assertTrue(message.contains(text), () -> text + " is missing in:\n" + message);
    }
    assertTrue(search.shortReason().contains("libncclffm-none.so.1"), search.shortReason());
  }
}

package io.ncclffm.core.internal;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Set;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
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

  /** Package folders of this machine may have some, too. */
  @Test
  void filesAreThoseOfTheLoadersCacheThatExistEachOnce(@TempDir Path folder) throws IOException {
    Path file = Files.writeString(folder.resolve("libnccl.so.2.30.7"), "no library");
    Path link = Files.createSymbolicLink(folder.resolve("libnccl.so.2"), file);
    Path other = Files.writeString(folder.resolve("libnccl-net.so"), "another");
    Path gone = folder.resolve("gone").resolve("libnccl.so.2");
    byte[] cache =
        ("ld.so\0\u0001" + String.join("\0", "libnccl.so.2", link + "", other + "", gone + "", ""))
            .getBytes(StandardCharsets.ISO_8859_1);
    Path written = Files.write(folder.resolve("ld.so.cache"), cache);
    Set<String> files = LibrarySearch.nccl().files(List.of("libnccl.so.2"), written);
    assertEquals(
        List.of(file.toRealPath().toString()),
        files.stream().filter(f -> f.startsWith(folder.toString())).toList());
    assertEquals(
        Set.of(),
        LibrarySearch.nccl().files(List.of("libncclffm-none.so"), folder.resolve("none")));
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

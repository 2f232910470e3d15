package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.jar.JarEntry;
import java.util.jar.JarOutputStream;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import java.util.zip.CRC32;
import java.util.zip.ZipEntry;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/**
 * The native library inside a jar, as users have it: how it gets out, and what can be in the way.
 */
class BundledLibraryTest {
  private static final Duration TIMEOUT = Duration.ofMinutes(2);
  private static final String NAME = "libncclffm_cpu.so";

  @TempDir private Path folder;
  private Path jar;
  private Path temporary;

  @BeforeEach
  void makeJar() throws IOException {
    byte[] library = Files.readAllBytes(CpuLibrary.copyTo(folder, NAME));
    CRC32 checksum = new CRC32();
    checksum.update(library);
    JarEntry entry = new JarEntry("META-INF/ncclffm/" + CpuLibrary.platform() + "/" + NAME);
    entry.setMethod(ZipEntry.STORED); // what is damaged below is damaged in the library, too
    entry.setSize(library.length);
    entry.setCrc(checksum.getValue());
    jar = folder.resolve("native.jar");
    try (OutputStream file = Files.newOutputStream(jar);
        JarOutputStream out = new JarOutputStream(file)) {
      out.putNextEntry(entry);
      out.write(library);
      out.closeEntry();
    }
    temporary = Files.createDirectory(folder.resolve("tmp"));
  }

  /** The library is in the jar only. */
  private ChildJvm.Setup probe(Path temporary) {
    List<String> classPath = new ArrayList<>(List.of(jar.toString()));
    for (String entry : System.getProperty("java.class.path").split(File.pathSeparator)) {
      if (!entry.contains("nccl-ffm-native") && !hasLibrary(Path.of(entry))) {
        classPath.add(entry);
      }
    }
    return ChildJvm.of(LoaderProbe.class, "versions")
        .withoutLibrarySettings()
        .property("ncclffm.backend", "cpu")
        .property("java.io.tmpdir", temporary)
        .classPath(String.join(File.pathSeparator, classPath));
  }

  private static boolean hasLibrary(Path entry) {
    return Files.exists(entry.resolve("META-INF/ncclffm/" + CpuLibrary.platform()));
  }

  private static String run(ChildJvm.Setup setup) throws InterruptedException {
    try (ChildJvm child = setup.start()) {
      int status = child.exitStatus(TIMEOUT);
      assertEquals(0, status, child.output());
      return child.output();
    }
  }

  private void assertFails(String output, String... texts) {
    assertTrue(output.contains("VERSIONS NativeLibraryException"), output);
    for (String text : texts) {
      assertTrue(output.contains(text), () -> "\"" + text + "\" is missing in:\n" + output);
    }
  }

  private String left() throws IOException {
    try (Stream<Path> files = Files.list(temporary)) {
      return files
          .map(f -> f.getFileName().toString())
          .filter(name -> !name.startsWith("hsperfdata"))
          .collect(Collectors.joining(" "));
    }
  }

  /** Processes share nothing but the jar: no file that one could find half written by another. */
  @Test
  void manyProcessesAtOnceLeaveNothingBehind() throws Exception {
    List<ChildJvm> children = new ArrayList<>();
    try {
      for (int i = 0; i < 4; i++) {
        children.add(probe(temporary).start());
      }
      for (ChildJvm child : children) {
        assertEquals(0, child.exitStatus(TIMEOUT), child.output());
        assertTrue(child.output().contains("VERSIONS succeeded"), child.output());
        assertTrue(child.output().contains("[bundled (META-INF/ncclffm/"), child.output());
      }
    } finally {
      children.forEach(ChildJvm::close);
    }
    assertEquals("", left());
  }

  @Test
  void damagedJarIsNotOpened() throws Exception {
    byte[] content = Files.readAllBytes(jar);
    int middle = content.length / 2;
    Arrays.fill(content, middle, middle + 4096, (byte) 0xcc);
    Files.write(jar, content);
    assertFails(run(probe(temporary)), jar.toString(), "the jar is damaged");
    assertEquals("", left());
  }

  @Test
  void folderForTemporaryFilesThatIsNotThere() throws Exception {
    assertFails(run(probe(folder.resolve("none"))), "NoSuchFile", "-Djava.io.tmpdir=FOLDER");
  }

  @Test
  void folderThatIsFullOrRunsNothing() throws Exception {
    for (String options : List.of("noexec", "size=64k")) {
      String mount = "mount -t tmpfs -o " + options + " none " + temporary + " && exec \"$@\"";
      List<String> namespace = List.of("unshare", "-rm", "sh", "-c", mount, "sh");
      assumeTrue(ChildJvm.runs(namespace), "mounting is not allowed here");
      assertFails(
          run(probe(temporary).option("-XX:-UsePerfData").behind(namespace)),
          temporary.toString(),
          "noexec: -Djava.io.tmpdir=FOLDER");
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * What the loader says when there is nothing, or the wrong thing, to load. Loading happens once per
 * process, so every case has a JVM of its own; copies of the CPU backend play all libraries. Row
 * numbers are those of the table of known faults of JVM bindings in docs/known-faults.md.
 */
class LoaderTest {
  private static final Duration TIMEOUT = Duration.ofMinutes(1);

  @TempDir private Path folder;

  private static ChildJvm.Setup probe(String... arguments) {
    return ChildJvm.of(LoaderProbe.class, arguments).withoutLibrarySettings();
  }

  /** All three libraries are copies of the CPU backend in different folders. */
  private ChildJvm.Setup allCopies(String... arguments) throws IOException {
    return probe(arguments)
        .property("ncclffm.backend", "cuda")
        .property("ncclffm.cudart", CpuLibrary.copyTo(folder.resolve("a"), "libcudart.so.13"))
        .property("ncclffm.nccl", CpuLibrary.copyTo(folder.resolve("b"), "libnccl.so.2"))
        .property("ncclffm.shim", CpuLibrary.copyTo(folder.resolve("c"), "libncclffm_cuda.so"));
  }

  /** The child's output; a child that crashed or was stopped by the failure fails the test. */
  private static String run(ChildJvm.Setup setup) throws InterruptedException {
    try (ChildJvm child = setup.start()) {
      int status = child.exitStatus(TIMEOUT);
      String output = child.output();
      assertEquals(0, status, output);
      assertTrue(output.contains("STILL RUNNING"), output);
      return output;
    }
  }

  private static void assertContains(String output, String... texts) {
    for (String text : texts) {
      assertTrue(output.contains(text), () -> "\"" + text + "\" is missing in:\n" + output);
    }
  }

  private static String line(String output, String prefix) {
    return output
        .lines()
        .filter(line -> line.startsWith(prefix))
        .findFirst()
        .orElseThrow(() -> new AssertionError("no line \"" + prefix + "\" in:\n" + output));
  }

  // Rows 4 and 27 of the table of known faults.
  @ParameterizedTest
  @CsvSource({"cuda,cudart", "cuda,nccl", "cuda,shim", "cpu,shim", "auto,cudart", "auto,nccl"})
  void fileThatDoesNotExist(String backend, String library) throws Exception {
    Path missing = folder.resolve("no-such-library.so");
    String property = "ncclffm." + library;
    ChildJvm.Setup setup =
        allCopies("versions").property("ncclffm.backend", backend).property(property, missing);

    String failure = line(run(setup), "VERSIONS NativeLibraryException");
    assertContains(failure, "-D" + property + "=" + missing, "no such file", "Remedy");
  }

  @ParameterizedTest
  @CsvSource({
    "cudart,libcudart,cudaRuntimeGetVersion",
    "nccl,libnccl,ncclGetVersion",
    "shim,libncclffm,ncclFfmGetAbiVersion"
  })
  void libraryThatIsSomethingElse(String library, String name, String symbol) throws Exception {
    String libc = mappedLibc();
    ChildJvm.Setup setup = allCopies("versions").property("ncclffm." + library, libc);

    String failure = line(run(setup), "VERSIONS NativeLibraryException");
    assertContains(failure, libc, "is not " + name, "no symbol " + symbol, "Remedy");
  }

  private static String mappedLibc() throws IOException {
    try (Stream<String> maps = Files.lines(Path.of("/proc/self/maps"))) {
      return maps.filter(line -> line.matches(".*/(libc\\.so\\.6|libc-[0-9.]+\\.so)"))
          .map(line -> line.substring(line.indexOf('/')))
          .findFirst()
          .orElseThrow();
    }
  }

  @Test
  void fileThatIsNoLibrary() throws Exception {
    Path text = Files.writeString(folder.resolve("libnccl.so.2"), "This is not a library.\n");
    ChildJvm.Setup setup = allCopies("versions").property("ncclffm.nccl", text);

    String failure = line(run(setup), "VERSIONS NativeLibraryException");
    // The second text is the dynamic loader's own reason, whatever its words.
    assertContains(failure, "cannot load libnccl", text + ": " + text + ":", "Remedy");
  }

  /** Its list of needed libraries names one that no system has. Row 3. */
  @ParameterizedTest
  @CsvSource({"cudart,libcudart.so.13", "nccl,libnccl.so.2", "shim,libncclffm_cuda.so"})
  void dependencyThatIsMissingIsNamed(String library, String name) throws Exception {
    Path broken = CpuLibrary.copyTo(folder.resolve("broken"), name);
    byte[] content = Files.readAllBytes(broken);
    byte[] needed = "\0libm.so.6\0".getBytes(StandardCharsets.US_ASCII);
    byte[] missing = "\0no-m.so.6\0".getBytes(StandardCharsets.US_ASCII);
    int replaced = 0;
    for (int at = 0; at + needed.length <= content.length; at++) {
      if (Arrays.equals(content, at, at + needed.length, needed, 0, needed.length)) {
        System.arraycopy(missing, 0, content, at, missing.length);
        replaced++;
      }
    }
    assertTrue(replaced > 0, "the CPU backend's library does not need libm any more");
    Files.write(broken, content);

    String failure =
        line(
            run(allCopies("versions").property("ncclffm." + library, broken)),
            "VERSIONS NativeLibraryException");
    assertContains(failure, "-Dncclffm." + library, broken.toString(), "no-m.so.6", "Remedy");
  }

  // Row 21: the version comes before any other symbol.
  @Test
  void ncclThatIsTooOld() throws Exception {
    ChildJvm.Setup setup = allCopies("versions").environment("NCCLFFM_CPU_NCCL_VERSION", 21000);

    String failure = line(run(setup), "VERSIONS NativeLibraryException");
    assertContains(
        failure, "too old", ">= 2.19", "2.10.0", folder + "/b/libnccl.so.2", "-Dncclffm.nccl=FILE");
  }

  @Test
  void backendThatDoesNotExist() throws Exception {
    String failure =
        line(
            run(probe("versions").property("ncclffm.backend", "gpu")),
            "VERSIONS NativeLibraryException");
    assertContains(failure, "-Dncclffm.backend=gpu", "auto, cuda or cpu");

    String fromEnvironment =
        line(
            run(probe("versions").environment("NCCLFFM_BACKEND", "gpu")),
            "VERSIONS NativeLibraryException");
    assertContains(fromEnvironment, "NCCLFFM_BACKEND=gpu", "auto, cuda or cpu");
  }

  /** Row 4: whichever library is missing, it is never an error of a class's initialisation. */
  @ParameterizedTest
  @ValueSource(strings = {"cudart", "nccl", "shim"})
  void laterCallsRepeatTheFirstFailure(String library) throws Exception {
    Path missing = folder.resolve("no-such-library.so");
    String output = run(allCopies("thrice").property("ncclffm." + library, missing));

    String first = line(output, "FIRST ");
    for (String later : new String[] {"SECOND ", "THIRD ", "FOURTH ", "FIFTH "}) {
      assertEquals(
          first.substring("FIRST ".length()), line(output, later).substring(later.length()));
    }
  }

  // Row 26.
  @Test
  void autoTakesTheCpuBackendWithoutAGpuAndSaysWhyInOneLine() throws Exception {
    Path cpu = CpuLibrary.copyTo(folder, "libncclffm_cpu.so");
    String output =
        run(
            probe("versions")
                .environment("CUDA_VISIBLE_DEVICES", "")
                .property("ncclffm.shim", cpu));

    assertContains(output, "VERSIONS succeeded");
    String[] logged =
        output.lines().filter(line -> line.contains("nccl-ffm: ")).toArray(String[]::new);
    assertEquals(1, logged.length, output);
    assertTrue(logged[0].matches(".*cpu backend, no (GPU|libcudart).*"), logged[0]);
    assertContains(logged[0], "development backend", cpu.toString());
  }

  @Test
  void cudaIsNeverReplacedByTheCpuBackend() throws Exception {
    String output =
        run(
            probe("versions")
                .environment("NCCLFFM_BACKEND", "cpu")
                .property("ncclffm.backend", "cuda")
                .property("ncclffm.cudart", folder.resolve("none.so"))
                .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cpu.so")));
    assertContains(output, "VERSIONS NativeLibraryException");
  }

  // Row 23.
  @Test
  void versionsTellVersionHeaderAndTheFileReallyMapped() throws Exception {
    Path real = CpuLibrary.copyTo(folder.resolve("real"), "libnccl.so.2.30.7");
    Path link = Files.createSymbolicLink(folder.resolve("libnccl.so.2"), real);
    String output = run(allCopies("versions").property("ncclffm.nccl", link));

    String nccl = line(output, "libnccl ");
    assertContains(nccl, "2.30.7 (bound against 2.30.7)", real.toString(), "[-Dncclffm.nccl]");
    assertContains(
        line(output, "libcudart "),
        "13.0 (bound against 13.0)",
        folder + "/a/libcudart.so.13",
        "[-Dncclffm.cudart]");
    assertContains(
        line(output, "shim "),
        "bound against ABI ",
        folder + "/c/libncclffm_cuda.so",
        "[-Dncclffm.shim]");
    assertContains(line(output, "backend "), "cuda, asked for by -Dncclffm.backend");
    assertEquals("OTHER COPIES []", line(output, "OTHER COPIES"));
  }

  // Row 22.
  @Test
  void secondCopyInTheProcessIsNamed() throws Exception {
    Path second = CpuLibrary.copyTo(folder.resolve("elsewhere"), "libnccl.so.2");
    String output = run(allCopies("versions", second.toString()));

    assertEquals("OTHER COPIES [" + second + "]", line(output, "OTHER COPIES"));
    assertContains(line(output, "libnccl "), folder + "/b/libnccl.so.2", "ALSO in this process");
  }

  // Row 22.
  @Test
  void libraryThatIsMappedAlreadyIsTaken() throws Exception {
    Path mapped = CpuLibrary.copyTo(folder.resolve("elsewhere"), "libnccl.so.2");
    String output =
        run(
            probe("versions", mapped.toString())
                .property("ncclffm.backend", "cuda")
                .property(
                    "ncclffm.cudart", CpuLibrary.copyTo(folder.resolve("a"), "libcudart.so.13"))
                .property(
                    "ncclffm.shim", CpuLibrary.copyTo(folder.resolve("c"), "libncclffm_cuda.so")));

    assertContains(line(output, "libnccl "), mapped.toString(), "[already mapped]");
  }

  /** Row 24: what the system's own search finds comes before the package folders. */
  @Test
  void librariesThatTheSystemFindsAreTaken() throws Exception {
    Path system = folder.resolve("system");
    CpuLibrary.copyTo(system, "libcudart.so.13");
    CpuLibrary.copyTo(system, "libnccl.so.2");
    Path environment = pythonEnvironment();
    String output =
        run(
            probe("versions")
                .property("ncclffm.backend", "cuda")
                .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cuda.so"))
                .environment("VIRTUAL_ENV", environment)
                .environment("LD_LIBRARY_PATH", system));

    assertContains(line(output, "libnccl "), system + "/libnccl.so.2", "[soname]");
    assertContains(line(output, "libcudart "), system + "/libcudart.so.13", "[soname]");
  }

  /** Row 24: pip's folders, which the system's own search does not know. */
  @Test
  void librariesInAPythonEnvironmentAreFound() throws Exception {
    Path environment = pythonEnvironment();
    String output =
        run(
            probe("versions")
                .property("ncclffm.backend", "cuda")
                .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cuda.so"))
                .environment("VIRTUAL_ENV", environment));

    for (String library : new String[] {"libnccl ", "libcudart "}) {
      assumeFalse(
          line(output, library).contains("[soname]"), "this machine has an installed " + library);
      assertContains(line(output, library), environment.toString(), "[package folder]");
    }
  }

  private Path pythonEnvironment() throws IOException {
    Path environment = folder.resolve("environment");
    Path packages = environment.resolve("lib/python3.11/site-packages/nvidia");
    CpuLibrary.copyTo(packages.resolve("nccl/lib"), "libnccl.so.2");
    CpuLibrary.copyTo(packages.resolve("cuda_runtime/lib"), "libcudart.so.13");
    return environment;
  }

  /** Row 6: nothing is unloaded, and a library does not belong to the class loader. */
  @Test
  void librariesOutliveTheClassLoaderThatLoadedThem() throws Exception {
    assertContains(
        run(
            allCopies("reload")
                .property("ncclffm.backend", "cpu")
                .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cpu.so"))),
        "FIRST LOADER GONE",
        "STILL MAPPED",
        "SECOND LOADER WORKS");
  }

  /** Row 7: the JVM's own signals (null checks, safepoint polls) still work with all loaded. */
  @Test
  void theJvmsSignalHandlersStayInPlace() throws Exception {
    assertContains(run(allCopies("signals")), "SIGNALS succeeded");
  }

  @Test
  void moreRanksThanDevicesNeedNccl230() throws Exception {
    ChildJvm.Setup setup =
        probe("world", "4")
            .property("ncclffm.backend", "cpu")
            .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cpu.so"))
            .environment("NCCLFFM_CPU_NCCL_VERSION", 22900)
            .environment("NCCLFFM_CPU_DEVICES", 2);

    String failure = line(run(setup), "WORLD UnsupportedByLibraryException");
    assertContains(failure, "4 ranks on 2 GPUs", ">= 2.30", "2.29.0", "Remedy");
    assertFalse(failure.contains("succeeded"), failure);
  }

  @Test
  void asManyRanksAsDevicesWorkWithAnOlderNccl() throws Exception {
    ChildJvm.Setup setup =
        probe("world", "2")
            .property("ncclffm.backend", "cpu")
            .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cpu.so"))
            .environment("NCCLFFM_CPU_NCCL_VERSION", 22900)
            .environment("NCCLFFM_CPU_DEVICES", 2);

    assertContains(run(setup), "WORLD succeeded");
  }
}

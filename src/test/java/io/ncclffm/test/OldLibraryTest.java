package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.abort;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Libraries older than the bindings: what they have works, what they lack is refused with a text
 * that tells which version has it, which one is loaded and from where. Rows 20 (the older library
 * is the first on the path) and 21 (a missing symbol is reported, not the version) of the table of
 * known faults. Each library has a JVM of its own.
 */
class OldLibraryTest {
  private static final Duration TIMEOUT = Duration.ofMinutes(1);
  private static final int OLDEST = 21901;
  private static final int NEWEST = 23007;
  private static final Pattern PASSED =
      Pattern.compile(
          NewerCalls.OK
              + "$|IllegalArgumentException: |IndexOutOfBoundsException: "
              + "|NcclException: \\w+ on rank 0 of 1 .*: ncclInvalid(Argument|Usage) ");
  private static final String UNSUPPORTED = "UnsupportedByLibraryException: ";

  /** A function of docs/coverage.md, how Java has it, and since when NCCL has it. */
  private record Row(String function, String java, int since) {}

  /** What is not a function, by the first release of NCCL whose header has it. */
  private static final Map<String, Integer> FIELDS_AND_VALUES =
      Map.ofEntries(
          Map.entry("FLOAT8_E4M3", 22403),
          Map.entry("FLOAT8_E5M2", 22403),
          Map.entry("trafficClass", 22602),
          Map.entry("commName", 22703),
          Map.entry("collnetEnable", 22703),
          Map.entry("CTAPolicy", 22703),
          Map.entry("shrinkShare", 22703),
          Map.entry("nvlsCTAs", 22703),
          Map.entry("nChannelsPerNetPeer", 22803),
          Map.entry("nvlinkCentricSched", 22803),
          Map.entry("graphUsageMode", 22902),
          Map.entry("numRmaCtx", 22902),
          Map.entry("NCCL_WIN_STRICT_ORDERING", 22907),
          Map.entry("maxP2pPeers", 23003),
          Map.entry("9 ranks on 8 GPUs", 23003),
          Map.entry("graphStreamOrdering", 23007));

  @TempDir private Path folder;

  // ------------------------------------------------------------------ the library of 2.19

  @Test
  void oldLibraryRefusesWhatItLacks() throws Exception {
    String library = oldLibrary();
    Map<String, Integer> since = since();
    String output = run(newerCalls(library));

    for (NewerCalls.Call call : NewerCalls.CALLS) {
      String need = call.needs().get(0);
      assertRefused(output, call, need, since.get(need), "loaded 2.19.3 from " + library);
    }
  }

  /** A library may lack what its version should have: it is asked for the symbol too. */
  @Test
  void symbolThatIsMissingThoughTheVersionIsNew() throws Exception {
    String library = oldLibrary();
    Map<String, Integer> since = since();
    String output = run(newerCalls(library).environment("NCCLFFM_CPU_NCCL_VERSION", NEWEST));

    for (NewerCalls.Call call : NewerCalls.CALLS) {
      String need = call.needs().get(0);
      if (FIELDS_AND_VALUES.containsKey(need)) {
        assertPassed(output, call);
      } else {
        String loaded = "loaded 2.30.7 from " + library + ", which lacks it all the same";
        assertRefused(output, call, need, since.get(need), loaded);
      }
    }
  }

  /** Row 20: the older libnccl.so.2 comes first, with a newer one further on. */
  @Test
  void olderLibraryFirstOnThePath() throws Exception {
    Path first = Files.createDirectories(folder.resolve("old"));
    Path old = Files.copy(Path.of(oldLibrary()), first.resolve("libnccl.so.2"));
    Path second = CpuLibrary.copyTo(folder.resolve("new"), "libnccl.so.2").getParent();

    String output =
        run(
            ChildJvm.of(LoaderProbe.class, "simulate")
                .withoutLibrarySettings()
                .property("ncclffm.backend", "cuda")
                .property("ncclffm.cudart", CpuLibrary.copyTo(folder, "libcudart.so.13"))
                .property("ncclffm.shim", CpuLibrary.copyTo(folder, "libncclffm_cuda.so"))
                .environment("LD_LIBRARY_PATH", first + ":" + second));

    String text =
        UNSUPPORTED + "ncclGroupSimulateEnd needs NCCL >= 2.22.3, loaded 2.19.3 from " + old;
    assertTrue(output.contains("libnccl    2.19.3 (bound against 2.30.7), " + old), output);
    assertTrue(output.contains("FIRST " + text), output);
    assertTrue(output.contains("SECOND " + text), output);
  }

  @Test
  void deviceCommunicatorsWorkOnTheOldestLibrary() throws Exception {
    String output =
        run(
            ChildJvm.of(DeviceOnOldLibrary.class)
                .withoutLibrarySettings()
                .property("ncclffm.backend", "cpu")
                .property("ncclffm.shim", oldLibrary())
                .environment("NCCLFFM_CPU_DEVICES", 8));

    assertTrue(output.contains(DeviceOnOldLibrary.DONE + "2.19."), output);
  }

  // ------------------------------------------------------------------ claimed versions

  @ParameterizedTest
  @ValueSource(ints = {21800, 21900})
  void versionThatIsTooOldToLoad(int version) throws Exception {
    String library = CpuLibrary.copyTo(folder, "libncclffm_cpu.so").toString();
    String output =
        run(
            ChildJvm.of(LoaderProbe.class, "versions")
                .withoutLibrarySettings()
                .property("ncclffm.backend", "cpu")
                .property("ncclffm.shim", library)
                .environment("NCCLFFM_CPU_NCCL_VERSION", version));

    assertTrue(
        output.contains(
            "VERSIONS NativeLibraryException: libnccl is too old: needs >= 2.19.1, loaded "
                + text(version)
                + " from "
                + library),
        output);
  }

  /** One version below each at which something came, and the newest. */
  static Stream<Integer> versions() throws IOException {
    Stream<Integer> functions = newerMethods().map(Row::since);
    Stream<Integer> steps = Stream.concat(functions, FIELDS_AND_VALUES.values().stream());
    return Stream.concat(steps.map(since -> since - 1), Stream.of(NEWEST)).distinct().sorted();
  }

  @ParameterizedTest
  @MethodSource("versions")
  void claimedVersionGatesWhatIsNewer(int version) throws Exception {
    String library = CpuLibrary.copyTo(folder, "libncclffm_cpu.so").toString();
    Map<String, Integer> since = since();
    String output = run(newerCalls(library).environment("NCCLFFM_CPU_NCCL_VERSION", version));

    for (NewerCalls.Call call : NewerCalls.CALLS) {
      String missing =
          call.needs().stream().filter(need -> since.get(need) > version).findFirst().orElse("");
      if (missing.isEmpty()) {
        assertPassed(output, call);
      } else {
        String loaded = "loaded " + text(version) + " from " + library;
        assertRefused(output, call, missing, since.get(missing), loaded);
      }
    }
  }

  @Test
  void everyMethodOfANewerFunctionIsCalled() throws Exception {
    TreeSet<String> expected =
        newerMethods().map(Row::function).collect(Collectors.toCollection(TreeSet::new));
    // Closing a window, which there is only where the library has both functions.
    expected.remove("ncclCommWindowDeregister");
    // The CPU backend, which stands in for all versions, has none.
    expected.remove("ncclDevCommCreate");
    expected.remove("ncclDevCommDestroy");

    TreeSet<String> called =
        NewerCalls.CALLS.stream()
            .flatMap(call -> call.needs().stream())
            .filter(need -> !FIELDS_AND_VALUES.containsKey(need))
            .collect(Collectors.toCollection(TreeSet::new));
    assertEquals(expected, called);
  }

  // ------------------------------------------------------------------ common

  private static String oldLibrary() {
    String library = System.getProperty("ncclffm.test.oldNccl");
    return library != null
        ? library
        : abort("no -Dncclffm.test.oldNccl=FILE; Maven's build sets it");
  }

  /** Methods for functions that came after the oldest NCCL that loads, by docs/coverage.md. */
  private static Stream<Row> newerMethods() throws IOException {
    String table = System.getProperty("ncclffm.test.coverageTable");
    if (table == null) {
      return abort("no -Dncclffm.test.coverageTable=FILE; Maven's build sets it");
    }
    Pattern row = Pattern.compile("\\| `(\\w+)` \\| (.*) \\| (2\\.\\d+\\.\\d+) \\| [^|]+ \\|");
    return Files.readAllLines(Path.of(table)).stream()
        .map(row::matcher)
        .filter(Matcher::matches)
        .map(m -> new Row(m.group(1), m.group(2), code(m.group(3))))
        .filter(found -> found.since() > OLDEST && !found.java().startsWith("raw: "));
  }

  /** The first version that has what a call needs. */
  private static Map<String, Integer> since() throws IOException {
    Map<String, Integer> since = new HashMap<>(FIELDS_AND_VALUES);
    newerMethods().forEach(row -> since.put(row.function(), row.since()));
    return since;
  }

  private static int code(String version) {
    String[] parts = version.split("\\.");
    return Integer.parseInt(parts[0]) * 10000
        + Integer.parseInt(parts[1]) * 100
        + Integer.parseInt(parts[2]);
  }

  private static String text(int code) {
    return code / 10000 + "." + code / 100 % 100 + "." + code % 100;
  }

  /** Makes all calls with this library as the CPU backend; the child checks an all-reduce first. */
  private static ChildJvm.Setup newerCalls(String library) {
    return ChildJvm.of(NewerCalls.class)
        .withoutLibrarySettings()
        .property("ncclffm.backend", "cpu")
        .property("ncclffm.shim", library)
        .environment("NCCLFFM_CPU_DEVICES", 8);
  }

  private static String run(ChildJvm.Setup setup) throws InterruptedException {
    try (ChildJvm child = setup.start()) {
      int status = child.exitStatus(TIMEOUT);
      String output = child.output();
      assertEquals(0, status, output);
      return output;
    }
  }

  private static String outcome(String output, NewerCalls.Call call) {
    String prefix = NewerCalls.CALL + call.name() + "\t";
    return output
        .lines()
        .filter(line -> line.startsWith(prefix))
        .map(line -> line.substring(prefix.length()))
        .findFirst()
        .orElseThrow(() -> new AssertionError("no line \"" + prefix + "\" in:\n" + output));
  }

  /** Refused, by its name, with the version that has it, the one that is loaded, and the file. */
  private static void assertRefused(
      String output, NewerCalls.Call call, String missing, int since, String loaded) {
    String outcome = outcome(output, call);
    for (String part : List.of(UNSUPPORTED, missing, "NCCL >= " + text(since), loaded)) {
      assertTrue(
          outcome.contains(part), () -> call.name() + ": no \"" + part + "\" in: " + outcome);
    }
  }

  /** It did what it should, or it got as far as the checks of its arguments. */
  private static void assertPassed(String output, NewerCalls.Call call) {
    String outcome = outcome(output, call);
    assertTrue(PASSED.matcher(outcome).lookingAt(), () -> call.name() + ": " + outcome);
  }
}

package io.ncclffm.device.doctor;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DataType;
import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.TaskQueueSnapshot;
import io.ncclffm.device.TaskRecord;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.doctor.Finding.Severity;
import java.io.IOException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.concurrent.CountDownLatch;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** What the doctor makes of what it is shown, without native code. */
class DoctorChecksTest {
  private static final long MIB = 1 << 20;
  private static final Path SHM = Path.of("/dev/shm");

  @TempDir private Path folder;

  private static void assertSeverity(Severity severity, Finding finding) {
    assertEquals(severity, finding.severity(), finding::toString);
  }

  private static Finding only(List<Finding> findings) {
    assertEquals(1, findings.size(), findings::toString);
    return findings.get(0);
  }

  private static Finding environment(String name, String value) {
    return only(EnvironmentCheck.of(Map.of(name, value), "test"));
  }

  // ------------------------------------------------------------------ system

  @ParameterizedTest(name = "{0} MiB, {1} free")
  @CsvSource({"64,60,WARNING", "64,10,ERROR", "8192,10,ERROR", "8192,8000,OK", "1024,1024,OK"})
  void sizeOfSharedMemory(long mebibytes, long free, Severity severity) {
    Finding finding = SystemCheck.sharedMemory(SHM, mebibytes * MIB, free * MIB);
    assertSeverity(severity, finding);
    assertEquals(severity != Severity.OK, finding.remedy().contains("--shm-size"));
  }

  private Path limits(String files, String memory) throws IOException {
    return Files.writeString(
        folder.resolve("limits"),
        """
        Limit                     Soft Limit           Hard Limit           Units
        Max processes             unlimited            unlimited            processes
        Max open files            %s                 1048576              files
        Max locked memory         %s              unlimited            bytes
        """
            .formatted(files, memory));
  }

  @Test
  void limitsOfTheProcess() throws IOException {
    Path limits = limits("1024", "8388608");
    List<Finding> findings = SystemCheck.limits(limits, folder.resolve("none"));
    assertEquals(
        List.of(Severity.WARNING, Severity.OK, Severity.OK),
        findings.stream().map(Finding::severity).toList(),
        findings::toString);
    assertTrue(findings.get(0).remedy().contains("ulimit -n 4096"));
    Finding locked = SystemCheck.limits(limits, folder).get(2); // InfiniBand is there
    assertSeverity(Severity.WARNING, locked);
    assertTrue(locked.remedy().contains("ulimit -l unlimited"), locked::toString);
    Path good = limits("20000", "unlimited");
    assertTrue(
        SystemCheck.limits(good, folder).stream().allMatch(f -> f.severity() == Severity.OK));
  }

  @Test
  void limitsOfTheContainer() throws IOException {
    assertEquals(List.of(), SystemCheck.container(folder));
    Files.writeString(folder.resolve("memory.max"), "max\n");
    Files.writeString(folder.resolve("pids.max"), "100\n");
    Finding finding = only(SystemCheck.container(folder));
    assertSeverity(Severity.WARNING, finding);
    assertTrue(finding.seen().contains("100 threads"));
    Files.writeString(folder.resolve("pids.max"), "max\n");
    assertEquals(List.of(), SystemCheck.container(folder));
  }

  @Test
  void driver() throws IOException {
    Path version = folder.resolve("version");
    assertSeverity(Severity.WARNING, GpuCheck.driver(version, folder));
    Files.writeString(version, "NVRM version: 580.1\nGCC version\n");
    assertSeverity(Severity.OK, GpuCheck.driver(version, folder));
    Finding hidden = GpuCheck.driver(version, folder.resolve("nvidiactl"));
    assertSeverity(Severity.ERROR, hidden);
    assertTrue(hidden.remedy().contains("--gpus all"));
  }

  // ------------------------------------------------------------------ Java and libraries

  @Test
  void java() {
    assertSeverity(Severity.ERROR, JavaCheck.platform("Windows 11", "amd64"));
    assertSeverity(Severity.OK, JavaCheck.platform("Linux", "aarch64"));
    assertSeverity(Severity.OK, JavaCheck.nativeAccess(true));
    Finding missing = JavaCheck.nativeAccess(false);
    assertSeverity(Severity.WARNING, missing);
    assertEquals("start java with --enable-native-access=ALL-UNNAMED", missing.remedy());
  }

  @Test
  void whyNothingIsLoaded() {
    Finding old = LibraryCheck.failed(new NativeLibraryException("too old. Remedy: a newer one."));
    assertEquals("too old.", old.seen());
    assertEquals("a newer one.", old.remedy());
    Finding search = LibraryCheck.failed(new NativeLibraryException("tried\n  a\nRemedy: name it"));
    assertEquals("tried\n  a", search.seen());
    assertEquals("name it", search.remedy());
  }

  @Test
  void memoryOfTheDeviceIsSharedBy() {
    assertEquals("nothing", GpuCheck.handleTypes(0));
    assertEquals("file descriptors", GpuCheck.handleTypes(1));
    assertEquals("file descriptors and fabric handles", GpuCheck.handleTypes(9));
  }

  // ------------------------------------------------------------------ environment

  @ParameterizedTest
  @CsvSource({
    "NCCL_P2P_DISABLE,1,WARNING",
    "NCCL_P2P_DISABLE,0,INFO",
    "NCCL_SHM_DISABLE,1,WARNING",
    "NCCL_CUMEM_ENABLE,0,WARNING",
    "NCCL_CUMEM_ENABLE,1,INFO",
    "NCCL_DEBUG,TRACE,WARNING",
    "NCCL_DEBUG,WARN,INFO",
    "CUDA_LAUNCH_BLOCKING,1,WARNING",
    "CUDA_MODULE_LOADING,LAZY,WARNING",
    "CUDA_MODULE_LOADING,EAGER,INFO",
    "CUDA_DEVICE_MAX_CONNECTIONS,1,WARNING",
    "CUDA_DEVICE_MAX_CONNECTIONS,32,INFO",
    "CUDA_VISIBLE_DEVICES,'',ERROR",
    "CUDA_VISIBLE_DEVICES,-1,ERROR",
    "CUDA_VISIBLE_DEVICES,'0, 1',WARNING",
    "CUDA_VISIBLE_DEVICES,'0,1,',WARNING",
    "CUDA_VISIBLE_DEVICES,'0,1,0',WARNING",
    "CUDA_VISIBLE_DEVICES,'0,1,10',INFO",
    "NCCL_SOCKET_IFNAME,eth0,INFO",
    "LD_PRELOAD,/lib/x.so,INFO",
    "NCCLFFM_BACKEND,cpu,INFO"
  })
  void settings(String name, String value, Severity severity) {
    assertSeverity(severity, environment(name, value));
  }

  @Test
  void unknownNameOfOurs() {
    Finding finding = environment("NCCLFFM_BAKCEND", "cuda");
    assertSeverity(Severity.WARNING, finding);
    assertTrue(finding.remedy().startsWith("did you mean NCCLFFM_BACKEND?"), finding::toString);
  }

  @Test
  void secretIsNotShown() {
    assertFalse(environment("NCCLFFM_SECRET", "hush").toString().contains("hush"));
  }

  @Test
  void configurationFile() throws IOException {
    Path file = Files.writeString(folder.resolve("nccl.conf"), "# no\nNCCL_P2P_DISABLE = 1\n");
    assertEquals(Map.of("NCCL_P2P_DISABLE", "1"), EnvironmentCheck.configuration(file));
    assertEquals(Map.of(), EnvironmentCheck.configuration(folder.resolve("none")));
  }

  // ------------------------------------------------------------------ buffers

  @Test
  void buffers() {
    assertSeverity(Severity.OK, BufferCheck.of("float32,1024,128,window"));
    Finding odd = BufferCheck.of("float16,7,2");
    assertSeverity(Severity.WARNING, odd);
    assertTrue(odd.seen().contains("2 bytes only"), odd::toString);
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "float32", "float32,1", "float31,1,0", "float32,x,0", "float32,1,-4"})
  void descriptionsThatAreNone(String description) {
    assertThrows(IllegalArgumentException.class, () -> BufferCheck.of(description));
  }

  // ------------------------------------------------------------------ task queues

  private static TaskRecord task(String symbol, long sequence) {
    return new TaskRecord(
        TaskSymbol.of(symbol),
        "ncclFfmAllReduce",
        DataType.FLOAT32,
        ReduceOp.SUM,
        0,
        64,
        0,
        sequence);
  }

  private static String snapshot(long head, long launched, long done, TaskRecord oldest) {
    TaskQueueSnapshot.Scheduler scheduler = TaskQueueSnapshot.Scheduler.RUNNING;
    return new TaskQueueSnapshot(
            scheduler,
            1,
            0,
            List.of(
                new TaskQueueSnapshot.Lane(0, head, launched, done, 0, oldest, null),
                new TaskQueueSnapshot.Lane(1, 3, 3, 3, 0, null, null)))
        .toString();
  }

  private static String ids(String text) {
    return String.join(" ", QueueReader.read(text).stream().map(Finding::id).toList());
  }

  @Test
  void whatALaneWaitsFor() {
    assertEquals("queue.idle queue.idle", ids(snapshot(5, 5, 5, null)));
    assertEquals("queue.not-launched queue.idle", ids(snapshot(5, 4, 4, task("g", 4))));
    assertEquals("queue.not-handed-in queue.idle", ids(snapshot(5, 5, 4, null)));
    assertEquals("queue.waits-for-peers queue.idle", ids(snapshot(5, 5, 4, task("g", 4))));
    String stopped = snapshot(5, 5, 4, task("g", 4)).replace("RUNNING", "STOPPED");
    assertEquals("queue.no-scheduler queue.idle", ids(stopped));
    // The numbers wrap.
    assertEquals(
        "queue.waits-for-peers queue.idle",
        ids(snapshot(2, 1, 0xfffffffeL, task("g", 0xfffffffeL))));
    assertEquals("queue.format", ids("nothing of the kind"));
    Finding oldest = QueueReader.read("log: " + snapshot(5, 5, 4, task("grads", 4))).get(0);
    assertTrue(oldest.seen().contains(task("grads", 4).toString()), oldest::toString);
  }

  @Test
  void whyALaneFailed() {
    String failure = ", failed: lane 0, at task x, [1]: waited 10 ms for rank 1";
    String text = snapshot(5, 5, 4, null).replace("done 4", "done 4" + failure);
    List<Finding> findings = QueueReader.read(text);
    assertEquals("queue.failed queue.idle", ids(text));
    assertTrue(findings.get(0).seen().contains("waited 10 ms for rank 1"), findings::toString);
  }

  @Test
  void snapshotsOfSeveralRanks() {
    String ahead = snapshot(5, 5, 4, task("g", 4));
    String late = snapshot(5, 5, 2, task("f", 2));
    List<Finding> findings = QueueReader.read("rank 0 " + ahead + "\nrank 1 " + late);
    Finding last = findings.get(findings.size() - 1);
    assertEquals("queue.behind", last.id());
    assertTrue(last.seen().startsWith("snapshot 2, lane 0 is 2 tasks behind"), last::toString);
    assertTrue(last.seen().contains(task("f", 2).toString()), last::toString);
    String idle = snapshot(4, 4, 4, null);
    for (String text : List.of(ahead + idle, idle + ahead)) {
      Finding missing = QueueReader.read(text).getLast();
      assertEquals("queue.missing", missing.id(), text);
      int rank = text.startsWith(idle) ? 1 : 2;
      assertTrue(missing.seen().startsWith("snapshot " + rank + ", lane 0 has"), missing::toString);
      assertTrue(missing.seen().contains(task("g", 4).toString()), missing::toString);
    }
    assertTrue(
        ids(ahead + snapshot(5, 5, 4, task("h", 4))).endsWith("queue.disagree"),
        () -> ids(ahead + snapshot(5, 5, 4, task("h", 4))));
  }

  // ------------------------------------------------------------------ report

  @Test
  void checksThatFailOrHang() {
    Finding failed =
        only(
            Doctor.findings(
                "gpu",
                () -> {
                  throw new IllegalStateException("no such thing");
                },
                Duration.ofMinutes(1)));
    assertEquals("gpu.failed", failed.id());
    assertTrue(failed.seen().contains("no such thing"), failed::toString);

    CountDownLatch never = new CountDownLatch(1);
    Callable<List<Finding>> hanging =
        () -> {
          never.await();
          return List.of();
        };
    Finding hung = only(Doctor.findings("gpu", hanging, Duration.ofSeconds(2)));
    assertEquals("gpu.hangs", hung.id());
    assertSeverity(Severity.ERROR, hung);
    assertTrue(hung.seen().contains("CountDownLatch.await"), hung::toString);
  }

  @Test
  void reportInBothForms() {
    Report report = new Report();
    report.add("one", List.of(Finding.ok("a.b", "fine"), Finding.info("c.d", "\"é\\ \t\nmore")));
    assertEquals(0, report.exitStatus());
    report.add("two", List.of(Finding.warning("e.f", "slow", "quick")));
    assertEquals(0, report.exitStatus());
    report.add("two", List.of(Finding.error("g.h", "broken", "mend")));
    assertEquals(1, report.exitStatus());
    assertEquals(
        "{\"exitStatus\":1,\"findings\":[\n"
            + "{\"section\":\"one\",\"id\":\"a.b\",\"severity\":\"OK\",\"seen\":\"fine\","
            + "\"remedy\":\"\"},\n"
            + "{\"section\":\"one\",\"id\":\"c.d\",\"severity\":\"INFO\","
            + "\"seen\":\"\\\"\\u00e9\\\\ \\u0009\\nmore\",\"remedy\":\"\"},\n"
            + "{\"section\":\"two\",\"id\":\"e.f\",\"severity\":\"WARNING\",\"seen\":\"slow\","
            + "\"remedy\":\"quick\"},\n"
            + "{\"section\":\"two\",\"id\":\"g.h\",\"severity\":\"ERROR\",\"seen\":\"broken\","
            + "\"remedy\":\"mend\"}]}\n",
        report.json());
    String text = report.text();
    for (String line :
        List.of("OK      a.b: fine", "        more", "ERROR   g.h: broken", "remedy: mend")) {
      assertTrue(text.contains(line), text);
    }
    assertTrue(text.endsWith("== ok 1, info 1, warning 1, error 1\n"), text);
  }

  @Test
  void noWarningWithoutARemedy() {
    assertThrows(IllegalArgumentException.class, () -> Finding.warning("a.b", "seen", " "));
  }

  /** docs/doctor.md has a row for each finding that the sources can make. */
  @Test
  void everyFindingIsInTheDocs() throws IOException {
    Path module = Path.of(System.getProperty("basedir", "nccl-ffm-device"));
    String docs = Files.readString(module.resolve("../docs/doctor.md"));
    TreeSet<String> ids = new TreeSet<>();
    Pattern id =
        Pattern.compile(
            "\"((?:java|library|gpu|system|environment|self-test|device-api|buffer|queue)"
                + "\\.[a-z][a-z0-9-]+)\"");
    Path sources = module.resolve("src/main/java/io/ncclffm/device/doctor");
    try (DirectoryStream<Path> files = Files.newDirectoryStream(sources, "*.java")) {
      for (Path file : files) {
        Matcher matcher = id.matcher(Files.readString(file));
        while (matcher.find()) {
          ids.add(matcher.group(1));
        }
      }
    }
    EnvironmentCheck.ruled().forEach(name -> ids.add("environment." + name));
    ids.removeIf(i -> i.startsWith("java.") && i.matches("java\\.(runtime|vendor|home).*"));
    assertTrue(ids.size() > 40, ids::toString);
    ids.removeIf(i -> docs.contains("`" + i + "`"));
    assertEquals(new TreeSet<String>(), ids);
  }
}

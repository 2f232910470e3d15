package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.Ticket;
import io.ncclffm.device.doctor.Doctor;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Supplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** The doctor as users start it, in processes in which something is wrong. */
class DoctorTest {
  private static final Duration TIMEOUT = Duration.ofSeconds(240);
  private static final Pattern FINDING =
      Pattern.compile(
          "\\{\"section\":\"([^\"]*)\",\"id\":\"([^\"]*)\",\"severity\":\"([A-Z]+)\","
              + "\"seen\":\"((?:[^\"\\\\]++|\\\\.)*+)\",\"remedy\":\"((?:[^\"\\\\]++|\\\\.)*+)\"}");

  @TempDir private Path folder;

  private record Seen(String id, String severity, String seen, String remedy) {}

  private record Result(int status, String output, List<Seen> findings) {
    Seen finding(String id) {
      return findings.stream()
          .filter(f -> f.id.equals(id))
          .findFirst()
          .orElseThrow(() -> new AssertionError("no finding " + id + " in:\n" + output));
    }

    void assertSevere(String id, String severity, String seen, String remedy) {
      Seen finding = finding(id);
      assertEquals(severity, finding.severity, finding::toString);
      assertTrue(finding.seen.contains(seen), finding::toString);
      assertTrue(finding.remedy.contains(remedy), finding::toString);
    }
  }

  private static ChildJvm.Setup doctor(String... arguments) {
    return ChildJvm.of(Doctor.class, arguments);
  }

  private static ChildJvm.Setup looking() {
    return doctor("--json", "--no-self-test").withoutLibrarySettings();
  }

  /** Runs it with --json; the whole object must be findings and nothing else. */
  private static Result run(ChildJvm.Setup setup) throws InterruptedException {
    try (ChildJvm child = setup.start()) {
      int status = child.exitStatus(TIMEOUT);
      String output = child.output();
      String begin = "{\"exitStatus\":" + status + ",\"findings\":[\n";
      int at = output.indexOf(begin);
      assertTrue(at >= 0, output);
      String json = output.substring(at + begin.length());
      List<Seen> findings = new ArrayList<>();
      Matcher matcher = FINDING.matcher(json);
      while (matcher.lookingAt()) {
        findings.add(
            new Seen(matcher.group(2), matcher.group(3), matcher.group(4), matcher.group(5)));
        int next = json.startsWith(",\n", matcher.end()) ? matcher.end() + 2 : matcher.end();
        matcher.region(next, json.length());
      }
      assertTrue(json.startsWith("]}", matcher.regionStart()), output);
      return new Result(status, output, findings);
    }
  }

  @Test
  void selfTestOfEveryRoute() throws Exception {
    TestRanks.assumeShim();
    Result result = run(doctor("--json"));
    // Of this library; what the machine has set, or lacks, is not looked at here.
    Pattern ours = Pattern.compile("(self-test|library|java)\\..*");
    for (Seen finding : result.findings) {
      assertFalse(
          ours.matcher(finding.id).matches() && finding.severity.equals("ERROR"),
          finding::toString);
    }
    boolean error = result.findings.stream().anyMatch(f -> f.severity.equals("ERROR"));
    assertEquals(error ? 1 : 0, result.status, result.output);
    for (String route : List.of("host", "windows", "device", "fused", "task")) {
      assertEquals("OK", result.finding("self-test." + route).severity, result.output);
    }
    assertEquals("OK", result.finding("device-api").severity, result.output);
  }

  @Test
  void withoutGpu() throws Exception {
    TestRanks.assumeCpu("hides the GPUs");
    // Also where libraries for GPUs are installed.
    Result result = run(looking().environment("CUDA_VISIBLE_DEVICES", "-1"));
    result.assertSevere("library.backend", "WARNING", "cpu, no ", "an NVIDIA driver");
    result.assertSevere("environment.CUDA_VISIBLE_DEVICES", "ERROR", "-1", "unset it");
    assertEquals(1, result.status, result.output);
  }

  @Test
  void wrongPathOfALibrary() throws Exception {
    Path missing = folder.resolve("libnccl.so.2");
    Path other = CpuLibrary.copyTo(folder.resolve("venv/lib"), "libnccl.so.2");
    Result result =
        run(
            looking()
                .property("ncclffm.nccl", missing)
                .environment("VIRTUAL_ENV", folder.resolve("venv")));
    assertEquals(1, result.status, result.output);
    result.assertSevere("library.load", "ERROR", missing + ": no such file", "-Dncclffm.nccl");
    assertTrue(
        result.findings.stream()
            .anyMatch(f -> f.id.equals("library.search") && f.seen.contains(other.toString())),
        result.output);
    assertTrue(result.finding("self-test.skipped").seen.contains("left out"), result.output);
  }

  private ChildJvm.Setup copies(Path folder) throws Exception {
    return copies(folder, "--json", "--no-self-test");
  }

  private ChildJvm.Setup copies(Path folder, String... arguments) throws Exception {
    TestRanks.assumeCpu("copies of the CPU backend play the libraries");
    return doctor(arguments)
        .withoutLibrarySettings()
        .property("ncclffm.backend", "cuda")
        .property("ncclffm.cudart", CpuLibrary.copyTo(folder.resolve("a"), "libcudart.so.13"))
        .property("ncclffm.nccl", CpuLibrary.copyTo(folder.resolve("b"), "libnccl.so.2"))
        .property("ncclffm.shim", CpuLibrary.copyTo(folder.resolve("c"), "libncclffm_cuda.so"));
  }

  @Test
  void twoCopiesOfNccl() throws Exception {
    assertTrue(
        run(copies(folder.resolve("one"))).findings.stream()
            .noneMatch(f -> f.id.equals("library.duplicate")),
        "a duplicate, where there is one copy");
    Path other = CpuLibrary.copyTo(folder.resolve("d"), "libnccl.so.2");
    Result result = run(copies(folder.resolve("two")).environment("LD_PRELOAD", other));
    result.assertSevere("library.duplicate", "WARNING", other.toString(), "-Dncclffm.nccl=FILE");
  }

  /** A GPU host of which one copy of the CPU backend plays all three libraries, and all works. */
  private static ChildJvm.Setup gpuHost(Path library, String... arguments) {
    return doctor(arguments)
        .withoutLibrarySettings()
        .property("ncclffm.backend", "cuda")
        .property("ncclffm.cudart", library)
        .property("ncclffm.shim", library);
  }

  private static List<Seen> naming(Result result, Path folder) {
    return result.findings.stream()
        .filter(f -> f.id.equals("library.other") && f.seen.contains(folder.toString()))
        .toList();
  }

  private Path libraryOfAll() throws Exception {
    TestRanks.assumeCpu("a copy of the CPU backend plays the libraries");
    return CpuLibrary.copyTo(folder.resolve("host"), "libnccl.so.2");
  }

  @Test
  void secondNcclThatIsNotInUse() throws Exception {
    Path used = libraryOfAll();
    Path venv = folder.resolve("venv");
    Path lib = Files.createDirectories(venv.resolve("lib"));
    Supplier<ChildJvm.Setup> host =
        () -> gpuHost(used, "--json", "--no-self-test").environment("VIRTUAL_ENV", venv);

    Path link = Files.createSymbolicLink(lib.resolve("libnccl.so.2"), used);
    assertEquals(List.of(), naming(run(host.get()), folder), "a link to the one in use");

    Files.delete(link);
    Path other = CpuLibrary.copyTo(lib, "libnccl.so.2");
    Result result = run(host.get());
    result.assertSevere("library.other", "WARNING", other.toString(), "-Dncclffm.nccl=FILE");
    assertFalse(result.finding("library.other").seen.contains(used.toString()), result.output);
    assertTrue(
        result.findings.stream().noneMatch(f -> f.id.equals("library.duplicate")),
        () -> "it was opened: " + result.output);

    Seen named = naming(run(host.get().property("ncclffm.nccl", used)), folder).get(0);
    assertEquals("INFO", named.severity, named::toString);
  }

  @Test
  void gpuHostWithoutPeerAccess() throws Exception {
    Path library = libraryOfAll();
    Path none = folder.resolve("libnvrtc.so.13");
    Result result =
        run(
            gpuHost(library, "--json")
                .environment("NCCLFFM_CPU_PEER_ACCESS", "0")
                .property("ncclffm.nvrtc", none));
    for (String ok : List.of("library.backend", "gpu.driver-version", "gpu.device", "device-api")) {
      assertEquals("OK", result.finding(ok).severity, result.output);
    }
    assertTrue(result.finding("gpu.topology").seen.contains("CUDA_IPC"), result.output);
    result.assertSevere("gpu.p2p", "WARNING", "from device 0 to 1", "IOMMU");
    result.assertSevere(
        "library.nvrtc", "WARNING", none + ": no such file", "-Dncclffm.nvrtc=FILE");
    for (String route : List.of("windows", "device", "fused", "task")) {
      List<Seen> tried =
          result.findings.stream().filter(f -> f.id.equals("self-test." + route)).toList();
      for (Seen finding : tried) {
        boolean needsPeers = finding.seen.contains("CUDA_IPC");
        assertEquals(needsPeers ? "WARNING" : "OK", finding.severity, finding::toString);
        assertTrue(!needsPeers || finding.seen.contains("no peer access"), finding::toString);
      }
      assertEquals(3, tried.size(), () -> "a finding for each provider: " + tried);
    }
  }

  /** The libraries are there and asked for, and CUDA says no. */
  @Test
  void withoutGpuWhereOneIsAskedFor() throws Exception {
    Result result =
        run(
            copies(folder.resolve("all"), "--json")
                .environment("NCCLFFM_CPU_FAULTS", "cudaGetDeviceCount:result=35"));
    assertEquals(1, result.status, result.output);
    assertEquals("OK", result.finding("library.backend").severity, result.output);
    result.assertSevere("gpu.none", "ERROR", "cudaGetDeviceCount", "nvidia-smi");
    assertTrue(result.finding("self-test.skipped").seen.contains("nothing"), result.output);
  }

  @Test
  void oldNccl() throws Exception {
    Result result = run(copies(folder).environment("NCCLFFM_CPU_NCCL_VERSION", "21805"));
    assertEquals(1, result.status, result.output);
    result.assertSevere("library.load", "ERROR", "loaded 2.18.5", "newer NCCL");
  }

  /** In a mount namespace of its own, as a container gives it. */
  @Test
  void smallSharedMemory() throws Exception {
    String mount = "mount -t tmpfs -o size=16m none /dev/shm && exec \"$@\"";
    List<String> namespace = List.of("unshare", "-rm", "sh", "-c", mount, "sh");
    assumeTrue(ChildJvm.runs(namespace), "mounting is not allowed here");
    Result result = run(looking().property("ncclffm.backend", "cpu").behind(namespace));
    result.assertSevere("system.shm", "ERROR", "/dev/shm: 16 MiB", "--shm-size");
    assertEquals(1, result.status, result.output);
  }

  @Test
  void withoutNativeAccess() throws Exception {
    Result result = run(looking().withoutNativeAccess().property("ncclffm.backend", "cpu"));
    String flag = "start java with --enable-native-access=ALL-UNNAMED";
    result.assertSevere("java.native-access", "WARNING", "not enabled", flag);
    Result denied =
        run(doctor("--json").withoutNativeAccess().option("--illegal-native-access=deny"));
    assertEquals(1, denied.status, denied.output);
    assertTrue(
        denied.findings.stream().anyMatch(f -> f.severity.equals("ERROR") && f.remedy.equals(flag)),
        denied.output);
  }

  @Test
  void statusAndTextOfTheOtherUses() throws Exception {
    Path text = Files.writeString(folder.resolve("queue"), "no snapshot");
    assertStatus(2, "unknown argument --nothing", "--nothing");
    assertStatus(1, "ERROR   queue.format", "--queue", text.toString());
    assertStatus(0, "OK      buffer.alignment", "--buffer", "float32,1024,128,window");
  }

  @Test
  void bufferAsAnObject() throws Exception {
    Result result = run(doctor("--json", "--buffer", "float16,7,2"));
    assertEquals(0, result.status, result.output);
    result.assertSevere("buffer.alignment", "WARNING", "2 bytes only", "LsaWindow");
    assertEquals(1, result.findings.size(), result.output);
  }

  /** The snapshots of queues that stand: one rank has not appended its task. */
  @Test
  void queueThatStands() throws Exception {
    TestRanks.assumeShim();
    Path file = folder.resolve("log");
    TaskQueueConfig config = TaskQueueConfig.builder().timeout(TaskRanks.LONG).build();
    try (LocalWorld world = TestRanks.open(2);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      Ticket[] tickets = new Ticket[2];
      world.run(rank -> tickets[rank.rank()] = tasks.of(rank).ticket());
      LocalWorld.RankTask append =
          rank -> {
            DeviceBuffer x = tasks.x(rank);
            Ticket ticket = tickets[rank.rank()];
            TaskQueue queue = tasks.of(rank);
            queue.allReduce(TaskRanks.GRADIENTS, 0, x, 0, x, 0, 10, ReduceOp.SUM, ticket);
            queue.launch(rank.stream());
            rank.stream().synchronize(TaskRanks.PATIENCE); // the task is handed in
          };
      world.run(
          rank -> {
            if (rank.rank() == 0) {
              append.run(rank);
            }
          });
      Files.writeString(file, "rank 0 " + tasks.queues[0].snapshot() + "\n");
      Files.writeString(file, "rank 1 " + tasks.queues[1].snapshot(), StandardOpenOption.APPEND);
      Result stands = run(doctor("--json", "--queue", file.toString()));
      assertEquals(0, stands.status, stands.output);
      stands.assertSevere("queue.waits-for-peers", "WARNING", "oldest: task", "every rank");
      stands.assertSevere(
          "queue.missing", "WARNING", "snapshot 2, lane 0 has no task", "has not appended");

      world.run(
          rank -> {
            if (rank.rank() == 1) {
              append.run(rank);
            }
            tickets[rank.rank()].await(TaskRanks.LONG);
          });
      Files.writeString(file, tasks.queues[0].snapshot() + " " + tasks.queues[1].snapshot());
      Result done = run(doctor("--json", "--queue", file.toString()));
      assertTrue(done.findings.stream().allMatch(f -> f.id.equals("queue.idle")), done.output);
    }
  }

  /** Two ranks that disagree: what the exception says is in the dump, too. */
  @Test
  void queueThatFailed() throws Exception {
    TestRanks.assumeShim();
    TaskQueueConfig config = TaskQueueConfig.builder().timeout(TaskRanks.LONG).build();
    try (LocalWorld world = TestRanks.open(2);
        TaskRanks tasks = TaskRanks.open(world, config)) {
      String[] messages = new String[2];
      world.run(
          rank -> {
            TaskQueue queue = tasks.of(rank);
            DeviceBuffer x = tasks.x(rank);
            Ticket ticket = queue.ticket();
            long count = 10 + rank.rank();
            queue.allReduce(TaskRanks.GRADIENTS, 0, x, 0, x, 0, count, ReduceOp.SUM, ticket);
            queue.launch(rank.stream());
            messages[rank.rank()] =
                assertThrows(TaskQueueException.class, () -> ticket.await(TaskRanks.PATIENCE))
                    .getMessage();
          });
      Path file = Files.writeString(folder.resolve("log"), tasks.queues[0].snapshot().toString());
      Result failed = run(doctor("--json", "--queue", file.toString()));
      assertEquals(1, failed.status, failed.output);
      String reason = messages[0].lines().findFirst().orElseThrow().replace("\"", "\\\"");
      failed.assertSevere("queue.failed", "ERROR", reason, "a new queue");
    }
  }

  private static void assertStatus(int status, String text, String... arguments)
      throws InterruptedException {
    try (ChildJvm child = doctor(arguments).start()) {
      assertEquals(status, child.exitStatus(TIMEOUT), child.output());
      assertTrue(child.output().contains(text), child.output());
    }
  }
}

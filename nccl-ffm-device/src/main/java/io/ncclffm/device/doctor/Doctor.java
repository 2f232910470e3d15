package io.ncclffm.device.doctor;

import io.ncclffm.core.CudaException;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.core.Versions;
import io.ncclffm.core.internal.CEnvironment;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.Collectors;
import org.jspecify.annotations.Nullable;

/**
 * Looks at all that this library needs of a machine and of a process, and tells what is wrong and
 * what helps; see docs/doctor.md.
 *
 * <p>Exit status: 0 without an error among the findings, 1 with one, 2 if the arguments are wrong.
 */
public final class Doctor {
  private static final int WRONG_USAGE = 2;
  private static final int RANKS = 2;
  private static final String USAGE =
      """
      usage: Doctor [--json] [--no-self-test]    this machine and this process
             Doctor [--json] [--buffer TYPE,COUNT,OFFSET[,window]]... [--queue FILE]...
                                                 alignment of a buffer, OFFSET in bytes; the
                                                 snapshots of a task queue in a file
      """;

  private static final Duration PATIENCE = Duration.ofMinutes(2);

  /** Each of its routes has a deadline of its own. */
  private static final Duration SELF_TEST_PATIENCE = Duration.ofMinutes(10);

  private final Report report = new Report();
  private volatile @Nullable Versions versions;
  private volatile int ranks;
  private boolean json;
  private boolean selfTest = true;

  private Doctor() {}

  public static void main(String[] arguments) {
    Doctor doctor = new Doctor();
    try {
      if (!doctor.read(arguments)) {
        doctor.examine();
      }
    } catch (IllegalArgumentException | IOException e) {
      System.err.println(e + "\n" + USAGE);
      System.exit(WRONG_USAGE);
    }
    System.out.print(doctor.json ? doctor.report.json() : doctor.report.text());
    System.out.flush();
    // Not exit: what hangs in a driver would hang in its exit handlers, too.
    Runtime.getRuntime().halt(doctor.report.exitStatus());
  }

  /** Whether the arguments name buffers or files, which have been looked at then. */
  private boolean read(String[] arguments) throws IOException {
    List<Finding> buffers = new ArrayList<>();
    List<Finding> queues = new ArrayList<>();
    for (int i = 0; i < arguments.length; i++) {
      switch (arguments[i]) {
        case "--json":
          json = true;
          break;
        case "--no-self-test":
          selfTest = false;
          break;
        case "--buffer":
          buffers.add(BufferCheck.of(value(arguments, ++i)));
          break;
        case "--queue":
          queues.addAll(QueueReader.read(Files.readString(Path.of(value(arguments, ++i)))));
          break;
        default:
          throw new IllegalArgumentException("unknown argument " + arguments[i]);
      }
    }
    if (!buffers.isEmpty()) {
      report.add("buffers", buffers);
    }
    if (!queues.isEmpty()) {
      report.add("task queue", queues);
    }
    return !buffers.isEmpty() || !queues.isEmpty();
  }

  private static String value(String[] arguments, int i) {
    if (i == arguments.length) {
      throw new IllegalArgumentException(arguments[i - 1] + " needs a value");
    }
    return arguments[i];
  }

  private void examine() {
    section("Java", "java", JavaCheck::run);
    section("environment", "environment", EnvironmentCheck::run);
    section("system", "system", SystemCheck::run);
    section("libraries", "library", this::load);
    section("GPUs", "gpu", () -> GpuCheck.run(versions));
    report.add("self-test", findings("self-test", this::selfTest, SELF_TEST_PATIENCE));
  }

  private List<Finding> load() {
    List<Finding> findings = new ArrayList<>();
    LibraryCheck.Loading loading =
        LibraryCheck.Loading.of(
            () -> {
              if (selfTest) {
                // Ranks that share a GPU must be prepared for before anything is loaded.
                ranks = prepare(findings);
              }
              return Nccl.versions();
            });
    versions = loading.versions();
    findings.addAll(LibraryCheck.run(loading));
    return findings;
  }

  /** How many ranks the self-test can have. */
  private int prepare(List<Finding> findings) {
    try {
      if (json && System.getenv("NCCL_DEBUG") != null) {
        CEnvironment.setIfUnset("NCCL_DEBUG_FILE", "/dev/stderr");
      }
      DeviceSharing.prepare(RANKS, RANKS);
      return RANKS;
    } catch (UnsupportedByLibraryException | IllegalStateException e) {
      findings.add(
          Finding.warning(
              "self-test.ranks",
              "one rank only: " + e.getMessage(),
              "two GPUs, or NCCL 2.30.3 or later, of which ranks may share a GPU"));
      return 1;
    } catch (CudaException e) {
      return 0; // what is loaded comes first, then the GPUs
    }
  }

  private List<Finding> selfTest() {
    @Nullable Versions loaded = versions;
    if (loaded == null || ranks == 0) {
      String why = selfTest ? "there is nothing that it could run on" : "left out";
      return List.of(Finding.info("self-test.skipped", why));
    }
    return SelfTest.run(loaded, ranks);
  }

  private void section(String name, String id, Callable<List<Finding>> check) {
    report.add(name, findings(id, check, PATIENCE));
  }

  /** A check that fails, or does not come back from a driver, is a finding: the others go on. */
  static List<Finding> findings(String id, Callable<List<Finding>> check, Duration patience) {
    FutureTask<List<Finding>> task = new FutureTask<>(check);
    Thread thread = Thread.ofPlatform().daemon().name("doctor, " + id).start(task);
    try {
      return task.get(patience.toMillis(), TimeUnit.MILLISECONDS);
    } catch (TimeoutException | InterruptedException e) {
      return List.of(
          Finding.error(
              id + ".hangs",
              "no answer within "
                  + patience.toSeconds()
                  + " s, at\n"
                  + Arrays.stream(thread.getStackTrace())
                      .map(frame -> "  " + frame)
                      .collect(Collectors.joining("\n")),
              "look whether nvidia-smi answers, and into dmesg for lines with NVRM and Xid; a"
                  + " driver that does not answer takes a reset of the GPU or a reboot"));
    } catch (ExecutionException e) {
      return List.of(
          Finding.error(
              id + ".failed",
              "the check itself failed: " + e.getCause(),
              "mend the other errors first; then report it with this text"));
    }
  }
}

package io.ncclffm.benchmarks;

import io.ncclffm.core.Backend;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.Versions;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * All-reduces on several ranks by three routes, checked against float64: NCCL's host collective,
 * the LL kernel of this project, and compute, all-reduce and compute fused into one launch.
 *
 * <p>Usage: {@code Demo [--ranks N] [--processes] [--max-bytes N]}. Exit status 0 means that every
 * row passed.
 */
public final class Demo {
  private static final int DEFAULT_RANKS = 4;
  private static final Duration TIMEOUT = Duration.ofMinutes(8);

  /** How a child process learns what it is: rank, size, largest size, unique id in hex. */
  private static final String RANK_ARGUMENT = "--as-rank";

  private Demo() {}

  public static void main(String[] arguments) throws Exception {
    int ranks = DEFAULT_RANKS;
    boolean processes = false;
    long maxBytes = DemoTable.LARGEST_BYTES;
    for (int i = 0; i < arguments.length; i++) {
      switch (arguments[i]) {
        case "--ranks":
          ranks = Integer.parseInt(value(arguments, ++i));
          break;
        case "--max-bytes":
          maxBytes = Long.parseLong(value(arguments, ++i));
          break;
        case "--processes":
          processes = true;
          break;
        case RANK_ARGUMENT:
          runAsRank(arguments);
          return;
        default:
          throw new IllegalArgumentException(
              "unknown argument " + arguments[i] + "; take --ranks N, --processes, --max-bytes N");
      }
    }
    boolean passed = processes ? runProcesses(ranks, maxBytes) : runThreads(ranks, maxBytes);
    System.out.println(passed ? "\nPASS" : "\nFAIL");
    System.exit(passed ? 0 : 1);
  }

  private static String value(String[] arguments, int i) {
    if (i == arguments.length) {
      throw new IllegalArgumentException(arguments[i - 1] + " needs a value");
    }
    return arguments[i];
  }

  private static boolean runThreads(int ranks, long maxBytes) {
    try (LocalWorld world = LocalWorld.open(ranks)) {
      printHeader(ranks, "threads of one process");
      AtomicBoolean passed = new AtomicBoolean(true);
      world.run(
          rank -> {
            if (!new DemoTable(rank.communicator(), rank.stream()).run(maxBytes)) {
              passed.set(false);
            }
          },
          TIMEOUT);
      return passed.get();
    }
  }

  /** This process is rank 0 and starts the others. */
  private static boolean runProcesses(int ranks, long maxBytes) throws Exception {
    DeviceSharing.prepare(ranks, 1);
    NcclUniqueId id = NcclUniqueId.create();
    List<Process> others = new CopyOnWriteArrayList<>();
    try {
      for (int r = 1; r < ranks; r++) {
        Process other = start(r, ranks, maxBytes, id);
        others.add(other);
        other.onExit().thenAccept(ended -> giveUpIfFailed(ended, others));
      }
      printHeader(ranks, "processes");
      boolean passed = runRank(id, ranks, 0, maxBytes);
      for (Process other : others) {
        if (!other.waitFor(1, TimeUnit.MINUTES) || other.exitValue() != 0) {
          passed = false;
        }
      }
      return passed;
    } finally {
      others.forEach(Process::destroyForcibly);
    }
  }

  /** This rank may be waiting inside NCCL for one that will not come, where nothing can wake it. */
  private static void giveUpIfFailed(Process other, List<Process> all) {
    if (other.exitValue() != 0) {
      all.forEach(Process::destroyForcibly);
      System.err.println("a rank ended with status " + other.exitValue() + "\n\nFAIL");
      Runtime.getRuntime().halt(1);
    }
  }

  private static Process start(int rank, int ranks, long maxBytes, NcclUniqueId id)
      throws IOException {
    List<String> command = new ArrayList<>();
    command.add(ProcessHandle.current().info().command().orElse("java"));
    command.add("--enable-native-access=ALL-UNNAMED");
    for (String property : System.getProperties().stringPropertyNames()) {
      if (property.startsWith("ncclffm.")) {
        command.add("-D" + property + "=" + System.getProperty(property));
      }
    }
    command.add("-cp");
    command.add(System.getProperty("java.class.path"));
    command.add(Demo.class.getName());
    command.add(RANK_ARGUMENT);
    command.add(Integer.toString(rank));
    command.add(Integer.toString(ranks));
    command.add(Long.toString(maxBytes));
    Process process =
        new ProcessBuilder(command)
            .redirectOutput(ProcessBuilder.Redirect.DISCARD)
            .redirectError(ProcessBuilder.Redirect.INHERIT)
            .start();
    // Through the pipe, not the command line: whoever has the id can join.
    try (var in = process.outputWriter()) {
      in.write(id.toHex());
      in.newLine();
    }
    return process;
  }

  private static void runAsRank(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[1]);
    int ranks = Integer.parseInt(arguments[2]);
    DeviceSharing.prepare(ranks, 1);
    String hex = new String(System.in.readAllBytes(), java.nio.charset.StandardCharsets.US_ASCII);
    NcclUniqueId id = NcclUniqueId.fromHex(hex.strip());
    System.exit(runRank(id, ranks, rank, Long.parseLong(arguments[3])) ? 0 : 1);
  }

  private static boolean runRank(NcclUniqueId id, int ranks, int rank, long maxBytes) {
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    try (CudaStream stream = CudaStream.create(device);
        Communicator communicator = Communicator.create(id, ranks, rank, device)) {
      return new DemoTable(communicator, stream).run(maxBytes);
    }
  }

  private static void printHeader(int ranks, String how) {
    Versions versions = Nccl.versions();
    System.out.println(versions);
    System.out.printf(
        "ranks      %d, %s, on %d x %s%n",
        ranks, how, Math.min(ranks, CudaDevice.count()), new CudaDevice(0).name());
    if (versions.backend() == Backend.CPU) {
      System.out.println(
          "note       times on the CPU backend say how long the demo takes, not how fast NCCL is");
    }
    System.out.println();
  }
}

package io.ncclffm.benchmarks;

import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;

/**
 * Runs every measurement, each in a process of its own: Java ({@link Measure}) and its C twins turn
 * and turn about. {@code Bench PROGRAMS RESULTS [quick]}: PROGRAMS is the folder of the C twins, of
 * which those that are missing are left out; a new folder RESULTS/date-gpu gets {@code
 * results.json}, {@code README.md}, plots, and what each process printed. {@code quick}: small and
 * short, to see that it works.
 *
 * <p>First everything runs once; then what one process is not enough for runs again, up to {@value
 * #FORKS} times, as long as there is time. Exit status: 0, or 1 if a process failed or did not come
 * to its end; its samples are not taken then.
 */
public final class Bench {
  static final int FORKS = 3;
  private static final long BUDGET_S = 560;
  private static final double LEAST_S = 5;

  /** One process that hangs must not cost the whole run. */
  private static final long LIMIT_S = 180;

  /** Stands for the moment at which the process is started. */
  private static final String NOW = "NOW";

  /** What ranks need that share a GPU, as DeviceSharing sets it; the C twins need it, too. */
  private static final Map<String, String> SHARING =
      Map.of(
          "NCCL_MULTI_RANK_GPU_ENABLE", "1",
          "NCCL_NVLS_ENABLE", "0",
          "CUDA_MODULE_LOADING", "EAGER",
          "CUDA_DEVICE_MAX_CONNECTIONS", "32");

  private record Work(
      String name, List<String> command, Map<String, String> environment, boolean again) {}

  private final Path programs;
  private final boolean quick;
  private final long started = System.nanoTime();
  private final List<String> facts = new ArrayList<>();
  private final List<String> lines = new ArrayList<>();
  private final List<Work> work = new ArrayList<>();
  private final Map<String, Double> took = new LinkedHashMap<>();
  private final Map<String, String> libraries = new TreeMap<>();
  private final Path temporary;
  private Path folder;
  private int devices = 1;
  private boolean failed;

  private Bench(Path programs, Path folder, boolean quick) throws IOException {
    this.temporary = Files.createTempDirectory("nccl-ffm-bench");
    this.programs = programs;
    this.folder = folder;
    this.quick = quick;
  }

  public static void main(String[] arguments) throws IOException, InterruptedException {
    boolean quick = arguments.length == 3 && arguments[2].equals("quick");
    if (arguments.length != 2 && !quick) {
      System.err.println("usage: Bench PROGRAMS RESULTS [quick]");
      System.exit(2);
    }
    System.exit(run(Path.of(arguments[0]), Path.of(arguments[1]), quick) ? 0 : 1);
  }

  /** Whether every process came to a good end. */
  static boolean run(Path programs, Path results, boolean quick)
      throws IOException, InterruptedException {
    Bench bench = new Bench(programs, results, quick);
    bench.run();
    return !bench.failed;
  }

  private void run() throws IOException, InterruptedException {
    Path log = Files.createTempFile("facts", ".txt");
    boolean known = execute(new Work("facts", java(Measure.class, "facts"), Map.of(), false), log);
    Map<String, String> told = new LinkedHashMap<>();
    for (String line : Files.readAllLines(log)) {
      String[] fields = line.split("\t");
      if (fields[0].equals("fact") && fields.length == 3) {
        told.put(fields[1], fields[2]);
        facts.add(fields[1] + ": " + fields[2].replaceAll("\\S*/", "")); // no folders
      }
    }
    if (!known || !told.containsKey("backend")) {
      throw new IOException("the libraries do not load:\n" + Files.readString(log));
    }
    Files.delete(log);
    String backend = told.get("backend");
    libraries(backend, told);
    facts.add(
        "sharing a GPU: "
            + new TreeMap<>(SHARING)
            + ", NCCL_MAX_CTAS 8, 4 with 8 ranks and in task_cuda_test");
    machine();
    clocks("before");
    devices = Integer.parseInt(told.get("devices"));
    String device = told.get("device") + (devices == 1 ? "" : " x" + devices);
    folder = free(folder, backend.equals("cpu") ? "cpu" : device);
    Files.createDirectories(folder);
    plan(backend.equals("cuda"));
    for (int round = 1; round <= (quick ? 1 : FORKS); round++) {
      for (Work one : work) {
        if (round == 1 || one.again) {
          measure(one, round);
          write(); // whatever ends this process
        }
      }
    }
    clocks("after");
    facts.add(String.format(Locale.ROOT, "took %.0f s", elapsed()));
    write();
    try (Stream<Path> files = Files.walk(temporary)) {
      for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
        Files.delete(file);
      }
    }
    System.out.println(folder);
  }

  /**
   * Tells the C twins which libraries Java has taken, and JavaCPP, which finds them by their names.
   */
  private void libraries(String backend, Map<String, String> told) throws IOException {
    Path nccl = Path.of(told.get("libnccl"));
    Path cudart = Path.of(told.get("libcudart"));
    if (backend.equals("cpu")) {
      if (!Files.exists(nccl)) {
        // Out of a jar: the file that Java has opened is gone.
        nccl = temporary.resolve("libncclffm_cpu.so");
        String architecture = System.getProperty("os.arch").replace("amd64", "x86_64");
        String resource = "/META-INF/ncclffm/linux-" + architecture + "/" + nccl.getFileName();
        try (InputStream in = Bench.class.getResourceAsStream(resource)) {
          Files.copy(in, nccl);
        }
        cudart = nccl;
      }
      Files.createSymbolicLink(temporary.resolve("libcuda.so.1"), nccl);
    }
    Files.createSymbolicLink(temporary.resolve("libnccl.so.2"), nccl);
    Files.createSymbolicLink(temporary.resolve("libcudart.so.13"), cudart);
    libraries.put("NCCLFFM_BACKEND", backend);
    libraries.put("NCCLFFM_NCCL", nccl.toString());
    libraries.put("NCCLFFM_CUDART", cudart.toString());
  }

  private void write() throws IOException {
    new Results(command(), facts, Results.rows(lines)).write(folder);
  }

  private double elapsed() {
    return (System.nanoTime() - started) / 1e9;
  }

  private static String command() {
    return System.getProperty("ncclffm.bench.command", "java ... " + Bench.class.getName());
  }

  /** RESULTS/date-device, or with a number behind it if that is there. */
  private static Path free(Path results, String device) {
    String name =
        device.toLowerCase(Locale.ROOT).replace("nvidia", "").replaceAll("[^a-z0-9]+", " ").strip();
    Path first = results.resolve(LocalDate.now() + "-" + name.replace(' ', '-'));
    Path folder = first;
    for (int number = 2; Files.exists(folder); number++) {
      folder = first.resolveSibling(first.getFileName() + "-" + number);
    }
    return folder;
  }

  private void machine() throws IOException {
    facts.add("java: " + Runtime.version() + ", " + System.getProperty("java.vm.name"));
    facts.add("system: " + System.getProperty("os.name") + " " + System.getProperty("os.version"));
    String processor =
        Files.readAllLines(Path.of("/proc/cpuinfo")).stream()
            .filter(line -> line.startsWith("model name"))
            .findFirst()
            .map(line -> line.substring(line.indexOf(':') + 1).strip())
            .orElse("unknown");
    facts.add("processors: " + Runtime.getRuntime().availableProcessors() + " of " + processor);
  }

  private void clocks(String when) throws IOException, InterruptedException {
    String fields =
        "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,temperature.gpu,power.draw";
    Path log = Files.createTempFile("clocks", ".txt");
    List<String> command =
        List.of("nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader", "--id=0");
    boolean here;
    try {
      here = execute(new Work("nvidia-smi", command, Map.of(), false), log);
    } catch (IOException e) {
      here = false; // as where there is no GPU
    }
    String told = here ? Files.readString(log).strip() : "nvidia-smi does not tell";
    facts.add("clocks " + when + " (" + fields + "): " + told);
    Files.delete(log);
  }

  // What there is to do.

  private void plan(boolean cuda) {
    String quickly = Boolean.toString(quick);
    for (String call : quick ? Measure.CALLS.subList(0, 1) : Measure.CALLS) {
      both("calls-" + call, 1, "calls", quickly, call);
      javaCpp(quickly, call);
    }
    java("calls-api", 1, "calls", quickly, "api");
    both("start", 1, "start", quickly, NOW);
    world(2);
    if (quick) {
      return;
    }
    int[] several = {2, 4, 8};
    if (cuda) {
      String gpus = Integer.toString(devices);
      program("task_cuda_test", "task_cuda_test", 8, false, gpus, "0", "cs");
      for (int n : several) {
        program("device_route-" + n, "device_route", n, false, gpus, Integer.toString(n));
      }
      for (int n : several) {
        String ranks = Integer.toString(n);
        program("functions-" + n, "device_route", n, false, gpus, ranks, "functions");
      }
    }
    world(4);
    world(8);
    if (cuda) {
      for (int n : several) {
        String gpus = Integer.toString(devices);
        program("fused_route-" + n, "fused_route", n, false, gpus, Integer.toString(n));
      }
    }
    world(1);
    List<String> compile = java(Measure.class, "compile");
    compile.add(1, "-Dncclffm.kernelCache=" + temporary.resolve("kernels"));
    work.add(new Work("java-compile", compile, Map.of(), false));
  }

  private void world(int ranks) {
    both("world-" + ranks, ranks, "world", Boolean.toString(quick), Integer.toString(ranks));
  }

  private void both(String name, int ranks, String... arguments) {
    java(name, ranks, arguments);
    program("c-" + name, "host_route", ranks, true, arguments);
  }

  private void java(String name, int ranks, String... arguments) {
    work.add(new Work("java-" + name, java(Measure.class, arguments), sharing(ranks), true));
  }

  private void javaCpp(String quickly, String call) {
    String platform = "linux-" + System.getProperty("os.arch").replace("amd64", "x86_64");
    if (Bench.class.getResource("/org/bytedeco/cuda/" + platform + "/libjninccl.so") == null) {
      facts.add("left out: javacpp-calls-" + call + ", its libraries are not on the class path");
      return;
    }
    List<String> command = java(JavaCppCalls.class, quickly, call);
    command.add(1, "-Dorg.bytedeco.javacpp.cachedir=" + temporary);
    Map<String, String> environment = new TreeMap<>(libraries);
    String others = System.getenv("LD_LIBRARY_PATH");
    environment.put("LD_LIBRARY_PATH", temporary + (others == null ? "" : ":" + others));
    work.add(new Work("javacpp-calls-" + call, command, environment, true));
  }

  private void program(String name, String program, int ranks, boolean again, String... arguments) {
    Path file = programs.resolve(program);
    if (!Files.isExecutable(file)) {
      facts.add("left out: " + name + ", there is no program " + program);
      return;
    }
    List<String> command = new ArrayList<>(List.of(file.toString()));
    command.addAll(List.of(arguments));
    Map<String, String> environment = new TreeMap<>(sharing(ranks));
    environment.putAll(libraries);
    work.add(new Work(name, command, environment, again));
  }

  private Map<String, String> sharing(int ranks) {
    Map<String, String> environment = new TreeMap<>();
    if (ranks > devices) {
      environment.putAll(SHARING);
      environment.put("NCCL_MAX_CTAS", ranks >= 8 ? "4" : "8");
    }
    return environment;
  }

  /** A virtual machine as this one, which measures. */
  private List<String> java(Class<?> main, String... arguments) {
    List<String> command = new ArrayList<>();
    command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
    command.add("--enable-native-access=ALL-UNNAMED");
    if (quick) {
      command.add("-XX:TieredStopAtLevel=1");
      command.add("-XX:+UseSerialGC");
    }
    System.getProperties().stringPropertyNames().stream()
        .filter(name -> name.startsWith("ncclffm."))
        .sorted()
        .forEach(name -> command.add("-D" + name + "=" + System.getProperty(name)));
    command.add("-cp");
    command.add(System.getProperty("java.class.path"));
    command.add(main.getName());
    command.addAll(List.of(arguments));
    return command;
  }

  // Doing it.

  private void measure(Work one, int round) throws IOException, InterruptedException {
    double needed = took.getOrDefault(one.name, LEAST_S);
    if (elapsed() + needed > BUDGET_S) {
      facts.add("left out: " + one.name + ", time " + round + ": out of time");
      return;
    }
    Path log = folder.resolve(Results.fileName(one.name + "-" + round) + ".txt");
    double from = elapsed();
    boolean done = execute(one, log);
    took.put(one.name, elapsed() - from);
    System.out.printf(Locale.ROOT, "%6.1f s  %s, time %d%n", elapsed(), one.name, round);
    if (!done && elapsed() >= BUDGET_S) {
      facts.add("left out: " + one.name + ", time " + round + ": out of time in the middle");
      return;
    }
    if (!done) {
      failed = true;
      facts.add("FAILED: " + one.name + ", time " + round + "; see " + log.getFileName());
      return;
    }
    List<String> printed = Files.readAllLines(log);
    lines.addAll(printed);
    lines.addAll(TaskProgram.samples(printed));
  }

  /** Whether it came to a good end in time. */
  private boolean execute(Work one, Path log) throws IOException, InterruptedException {
    List<String> command = new ArrayList<>(one.command);
    command.replaceAll(word -> word.equals(NOW) ? Long.toString(System.nanoTime()) : word);
    ProcessBuilder builder =
        new ProcessBuilder(command).redirectErrorStream(true).redirectOutput(log.toFile());
    builder.environment().putAll(one.environment);
    builder.redirectInput(new File("/dev/null"));
    Process process = builder.start();
    try {
      long left = Math.clamp(BUDGET_S - (long) elapsed(), 1, LIMIT_S);
      return process.waitFor(left, TimeUnit.SECONDS) && process.exitValue() == 0;
    } finally {
      process.destroyForcibly();
    }
  }
}

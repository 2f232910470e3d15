package io.ncclffm.device.doctor;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.jspecify.annotations.Nullable;

/** The environment that NCCL, CUDA and this library read, and what in it does harm. */
final class EnvironmentCheck {
  /**
   * @param values a regular expression of the harmful ones
   * @param harm what they do
   */
  private record Rule(
      String name, String values, Finding.Severity severity, String harm, String remedy) {
    static Rule warning(String name, String values, String harm, String remedy) {
      return new Rule(name, values, Finding.Severity.WARNING, harm, remedy);
    }
  }

  private static final String UNSET = "unset it, unless you know that you need it";

  private static final List<Rule> RULES =
      List.of(
          Rule.warning(
              "NCCL_P2P_DISABLE",
              "1",
              "GPUs no longer reach each other directly: slow, and no device API",
              UNSET),
          Rule.warning(
              "NCCL_P2P_LEVEL",
              "(?i)LOC|0",
              "GPUs no longer reach each other directly: slow, and no device API",
              UNSET),
          Rule.warning(
              "NCCL_SHM_DISABLE",
              "1",
              "ranks of one host without peer access talk through the network: slow",
              UNSET),
          Rule.warning(
              "NCCL_CUMEM_ENABLE",
              "0",
              "no symmetric windows, so no device API of NCCL; LSA windows fall back to CUDA IPC",
              UNSET),
          Rule.warning("NCCL_WIN_ENABLE", "0", "ncclCommWindowRegister makes no windows", UNSET),
          Rule.warning("NCCL_IB_DISABLE", "1", "between hosts NCCL takes TCP sockets: slow", UNSET),
          Rule.warning(
              "NCCL_DEBUG",
              "(?i)TRACE|INFO",
              "NCCL writes to the standard output, with TRACE at every call: slow",
              "NCCL_DEBUG=WARN, and NCCL_DEBUG_FILE for its lines"),
          Rule.warning(
              "NCCL_PROTO",
              "(?s).*",
              "takes NCCL's choice away, also where the protocol is not safe (LL128)",
              UNSET),
          Rule.warning("NCCL_ALGO", "(?s).*", "takes NCCL's choice away", UNSET),
          Rule.warning(
              "NCCL_BUFFSIZE", "(?s).*", "changes the memory that each channel takes", UNSET),
          Rule.warning("NCCL_LAUNCH_MODE", "(?s).*", "was for NCCL before 2.9", UNSET),
          Rule.warning(
              "CUDA_LAUNCH_BLOCKING",
              "1",
              "every launch waits for its kernel: ranks that are threads wait for each other for"
                  + " ever, and the task route cannot work",
              "unset it; use it with one rank a process only, to look for a faulty kernel"),
          Rule.warning(
              "CUDA_MODULE_LOADING",
              "(?i)LAZY",
              "where ranks share a GPU, loading a kernel waits for another rank's that spins",
              "CUDA_MODULE_LOADING=EAGER where ranks share a GPU"),
          Rule.warning(
              "CUDA_DEVICE_MAX_CONNECTIONS",
              "[1-7]",
              "streams share few hardware queues: a kernel stands behind another that waits for it",
              "32 where ranks of a process share a GPU, else unset"),
          new Rule(
              "CUDA_VISIBLE_DEVICES",
              "\\s*|-1|NoDevFiles",
              Finding.Severity.ERROR,
              "hides every GPU",
              "unset it, or list the GPUs of this process: 0,1"),
          Rule.warning(
              "CUDA_VISIBLE_DEVICES",
              ".*\\s.*\\S.*|.*,,.*|.*,|,.*",
              "CUDA stops reading at the first entry that it does not understand",
              "numbers or UUIDs, separated by commas, without blanks"),
          Rule.warning(
              "CUDA_VISIBLE_DEVICES",
              "(?:.*,)?([^,]+),(?:.*,)?\\1(?:,.*)?",
              "names a GPU twice, which hides all GPUs",
              "name each GPU once"),
          Rule.warning(
              "NCCLFFM_CPU_FAULTS",
              "(?s).+",
              "the CPU backend injects faults, for this project's tests",
              "unset it"),
          Rule.warning(
              "NCCLFFM_CPU_NCCL_VERSION",
              "(?s).+",
              "the CPU backend claims another version, for this project's tests",
              "unset it"));

  /** What this library reads; README.md and docs/bootstrap.md tell what for. */
  static final List<String> OWN =
      List.of(
          "NCCLFFM_ALGO",
          "NCCLFFM_BACKEND",
          "NCCLFFM_CPU_DEVICES",
          "NCCLFFM_CPU_FAULTS",
          "NCCLFFM_CPU_NCCL_VERSION",
          "NCCLFFM_CPU_PEER_ACCESS",
          "NCCLFFM_CPU_TIMEOUT_MS",
          "NCCLFFM_CUDART",
          "NCCLFFM_KERNEL_CACHE",
          "NCCLFFM_MPS",
          "NCCLFFM_NCCL",
          "NCCLFFM_NVRTC",
          "NCCLFFM_PORT",
          "NCCLFFM_PROTO",
          "NCCLFFM_SECRET",
          "NCCLFFM_SECRET_FILE",
          "NCCLFFM_SHIM");

  /** What the system's dynamic loader reads. */
  private static final List<String> LOADER = List.of("LD_LIBRARY_PATH", "LD_PRELOAD");

  private EnvironmentCheck() {}

  static List<Finding> run() {
    Map<String, String> files = new LinkedHashMap<>();
    @Nullable String named = System.getenv("NCCL_CONF_FILE");
    Path user =
        named == null ? Path.of(System.getProperty("user.home"), ".nccl.conf") : Path.of(named);
    for (Path file : List.of(Path.of("/etc/nccl.conf"), user)) {
      files.putAll(configuration(file));
    }
    List<Finding> findings = new ArrayList<>(of(System.getenv(), "environment"));
    files.keySet().removeAll(System.getenv().keySet());
    findings.addAll(of(files, "NCCL's configuration file"));
    return findings;
  }

  /** The settings of a file of NCCL's, which count where the environment has none. */
  static Map<String, String> configuration(Path file) {
    Map<String, String> settings = new LinkedHashMap<>();
    try {
      for (String line : Files.isReadable(file) ? Files.readAllLines(file) : List.<String>of()) {
        int equals = line.indexOf('=');
        if (!line.startsWith("#") && equals > 0) {
          settings.put(line.substring(0, equals).strip(), line.substring(equals + 1).strip());
        }
      }
    } catch (IOException e) {
      return settings; // NCCL cannot read it either
    }
    return settings;
  }

  static List<Finding> of(Map<String, String> environment, String where) {
    List<Finding> findings = new ArrayList<>();
    new TreeMap<>(environment)
        .forEach(
            (name, value) -> {
              if (name.startsWith("NCCL") || name.startsWith("CUDA_") || LOADER.contains(name)) {
                findings.addAll(judge(name, value, where));
              }
            });
    return findings;
  }

  private static List<Finding> judge(String name, String value, String where) {
    String seen =
        where + ": " + name + "=" + (name.equals("NCCLFFM_SECRET") ? "(not shown)" : value);
    List<Finding> findings = new ArrayList<>();
    if (name.startsWith("NCCLFFM_") && !OWN.contains(name)) {
      findings.add(
          Finding.warning(
              "environment.unknown",
              seen + ": this library has no such variable",
              "did you mean " + nearest(name) + "? They are " + String.join(", ", OWN)));
    }
    for (Rule rule : RULES) {
      if (rule.name.equals(name) && value.matches(rule.values)) {
        findings.add(
            new Finding(
                "environment." + name, rule.severity, seen + ": " + rule.harm, rule.remedy));
      }
    }
    return findings.isEmpty() ? List.of(Finding.info("environment.set", seen)) : findings;
  }

  /** The names that have a finding of their own when they are set to what does harm. */
  static TreeSet<String> ruled() {
    TreeSet<String> names = new TreeSet<>();
    RULES.forEach(rule -> names.add(rule.name));
    return names;
  }

  private static String nearest(String name) {
    String best = OWN.get(0);
    for (String candidate : OWN) {
      if (distance(name, candidate) < distance(name, best)) {
        best = candidate;
      }
    }
    return best;
  }

  /** How many characters must be put in, taken out or changed. */
  private static int distance(String a, String b) {
    int[] row = new int[b.length() + 1];
    for (int j = 0; j <= b.length(); j++) {
      row[j] = j;
    }
    for (int i = 1; i <= a.length(); i++) {
      int diagonal = row[0];
      row[0] = i;
      for (int j = 1; j <= b.length(); j++) {
        int change = diagonal + (a.charAt(i - 1) == b.charAt(j - 1) ? 0 : 1);
        diagonal = row[j];
        row[j] = Math.min(change, Math.min(row[j], row[j - 1]) + 1);
      }
    }
    return row[b.length()];
  }
}

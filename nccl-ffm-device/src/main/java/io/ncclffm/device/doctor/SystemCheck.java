package io.ncclffm.device.doctor;

import java.io.IOException;
import java.nio.file.FileStore;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.jspecify.annotations.Nullable;

/** Shared memory, limits of the process, limits of the container. */
final class SystemCheck {
  private static final long MIB = 1 << 20;

  /** Docker gives 64 MiB, NVIDIA advises 1 GiB. */
  private static final long LITTLE_SHM = 1024 * MIB;

  /** A rank of NCCL takes about 10 MiB for each peer that it reaches through host memory. */
  private static final long NO_SHM = 32 * MIB;

  private static final long FEW_FILES = 4096;
  private static final long FEW_PROCESSES = 4096;

  private SystemCheck() {}

  static List<Finding> run() {
    List<Finding> findings = new ArrayList<>();
    Path shm = Path.of("/dev/shm");
    try {
      FileStore store = Files.getFileStore(shm);
      findings.add(
          Files.isWritable(shm)
              ? sharedMemory(shm, store.getTotalSpace(), store.getUsableSpace())
              : noSharedMemory(shm, "not to be written to"));
    } catch (IOException e) {
      findings.add(noSharedMemory(shm, e.toString()));
    }
    findings.addAll(limits(Path.of("/proc/self/limits"), Path.of("/sys/class/infiniband")));
    findings.addAll(container(Path.of("/sys/fs/cgroup")));
    return findings;
  }

  static Finding noSharedMemory(Path folder, String reason) {
    return Finding.error(
        "system.shm",
        folder + ": " + reason,
        "mount a tmpfs there that this user may write to; NCCL's ranks of one host meet in it");
  }

  static Finding sharedMemory(Path folder, long bytes, long usable) {
    String seen = folder + ": " + bytes / MIB + " MiB, " + usable / MIB + " MiB of them free";
    String remedy =
        "containers: --shm-size=1g or --ipc=host (Kubernetes: an emptyDir of medium Memory"
            + " there); else mount -o remount,size=1g, and delete old nccl-* files of dead jobs";
    if (usable < NO_SHM) {
      return Finding.error("system.shm", seen + ": NCCL's set-up fails for want of it", remedy);
    }
    if (bytes < LITTLE_SHM) {
      return Finding.warning("system.shm", seen + ": too little for many ranks", remedy);
    }
    return Finding.ok("system.shm", seen);
  }

  /**
   * @param limits in the format of {@code /proc/self/limits}
   * @param infiniband exists where there are InfiniBand cards, which need locked memory
   */
  static List<Finding> limits(Path limits, Path infiniband) {
    Map<String, Long> soft = new TreeMap<>();
    try {
      for (String line : Files.readAllLines(limits)) {
        String[] fields = line.split(" {2,}");
        if (fields.length >= 3 && fields[1].matches("unlimited|\\d{1,18}")) {
          soft.put(
              fields[0],
              fields[1].equals("unlimited") ? Long.MAX_VALUE : Long.parseLong(fields[1]));
        }
      }
    } catch (IOException e) {
      return List.of(Finding.info("system.limits", limits + ": " + e));
    }
    List<Finding> findings = new ArrayList<>();
    limit(findings, soft, "Max open files", "nofile", "-n", FEW_FILES);
    limit(findings, soft, "Max processes", "nproc", "-u", FEW_PROCESSES);
    limit(
        findings,
        soft,
        "Max locked memory",
        "memlock",
        "-l",
        Files.exists(infiniband) ? Long.MAX_VALUE : 0);
    return findings;
  }

  private static void limit(
      List<Finding> findings,
      Map<String, Long> soft,
      String name,
      String item,
      String option,
      long wanted) {
    @Nullable Long value = soft.get(name);
    if (value == null) {
      return;
    }
    String id = "system." + item;
    String seen = name + ": " + text(value);
    findings.add(
        value >= wanted
            ? Finding.ok(id, seen)
            : Finding.warning(
                id,
                seen + ", wanted: " + text(wanted),
                "ulimit "
                    + option
                    + " "
                    + text(wanted)
                    + ", or "
                    + item
                    + " in /etc/security/limits.conf; containers: --ulimit "
                    + item
                    + "="
                    + (wanted == Long.MAX_VALUE ? -1 : wanted)));
  }

  private static String text(long value) {
    return value == Long.MAX_VALUE ? "unlimited" : Long.toString(value);
  }

  /**
   * @param cgroup where the control group of version 2 is mounted
   */
  static List<Finding> container(Path cgroup) {
    List<Finding> findings = new ArrayList<>();
    for (String file : List.of("memory.max", "cpu.max")) {
      @Nullable String value = read(cgroup.resolve(file));
      if (value != null && !value.startsWith("max")) {
        findings.add(Finding.info("system.container", file + " is " + value));
      }
    }
    @Nullable String pids = read(cgroup.resolve("pids.max"));
    if (pids != null && pids.matches("\\d{1,18}") && Long.parseLong(pids) < FEW_PROCESSES) {
      findings.add(
          Finding.warning(
              "system.pids",
              "the container may have " + pids + " threads, those of the JVM and of NCCL together",
              "docker: --pids-limit=-1; Kubernetes: podPidsLimit of the kubelet"));
    }
    return findings;
  }

  private static @Nullable String read(Path file) {
    try {
      return Files.exists(file) ? Files.readString(file).strip() : null;
    } catch (IOException e) {
      return null; // not ours to read: then its limit is not known
    }
  }
}

package io.ncclffm.core.bootstrap;

import java.net.InetSocketAddress;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/** Reads the variables that launchers set; the rules are those of {@link RankInfo}. */
final class LauncherEnvironment {
  private static final String PORT = "NCCLFFM_PORT";
  private static final String MASTER_HOST = "MASTER_ADDR";
  private static final String MASTER_PORT = "MASTER_PORT";
  private static final int MAX_PORT = 65_535;

  /** Below the ports that Linux gives to outgoing connections by default, 32768 and up. */
  private static final int FIRST_SLURM_PORT = 20_000;

  private static final int SLURM_PORTS = 12_000;

  /** Names and bracketed lists up to the first comma outside of brackets. */
  private static final Pattern FIRST_NODE =
      Pattern.compile("((?:[^,\\[\\]\\s]+|\\[[^-,\\[\\]]+[^\\[\\]]*\\])+)(?:,.*)?");

  private final Map<String, String> env;
  private final String launcher;
  private final String remedy;

  private LauncherEnvironment(Map<String, String> env, String launcher, String remedy) {
    this.env = env;
    this.launcher = launcher;
    this.remedy = remedy;
  }

  static RankInfo read(Map<String, String> env) {
    if (env.containsKey("RANK")) {
      return new LauncherEnvironment(
              env,
              "torchrun",
              "start the ranks with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and"
                  + " LOCAL_WORLD_SIZE for each, or unset RANK if it means something else")
          .torchrun();
    }
    if (env.containsKey("OMPI_COMM_WORLD_RANK")) {
      return new LauncherEnvironment(env, "Open MPI", "start the ranks with Open MPI's mpirun")
          .openMpi();
    }
    if (env.containsKey("SLURM_PROCID")) {
      return new LauncherEnvironment(
              env, "Slurm", "start the ranks with srun, from the batch script too")
          .slurm();
    }
    if (env.containsKey("PMIX_RANK")) {
      throw new BootstrapException(
          "PMIX_RANK="
              + env.get("PMIX_RANK")
              + " alone: PMIx does not put the number of ranks into the environment; start the"
              + " ranks with srun or Open MPI's mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK and"
              + " LOCAL_WORLD_SIZE for each");
    }
    throw new BootstrapException(
        "no launcher in the environment: none of RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI),"
            + " SLURM_PROCID (Slurm) is set; start the ranks with one of these, or set RANK,"
            + " WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each");
  }

  private RankInfo torchrun() {
    @Nullable Integer port = port(MASTER_PORT);
    if (port != null && "True".equals(env.get("TORCHELASTIC_USE_AGENT_STORE"))) {
      if (port == MAX_PORT) {
        throw bad(MASTER_PORT, "torchrun listens there, and there is no next port: set " + PORT);
      }
      port++;
    }
    return info(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        number("LOCAL_WORLD_SIZE", 1, Integer.MAX_VALUE),
        "LOCAL_WORLD_SIZE",
        null,
        port,
        env.get("TORCHELASTIC_RUN_ID"));
  }

  private RankInfo openMpi() {
    samePmixRank("OMPI_COMM_WORLD_RANK");
    return info(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, Integer.MAX_VALUE),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        null,
        port(MASTER_PORT),
        env.get("PMIX_NAMESPACE"));
  }

  private RankInfo slurm() {
    // Differs where PMIx' own launcher runs below srun, which then is not the one to be asked.
    samePmixRank("SLURM_PROCID");
    String size = env.containsKey("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    boolean perNode = env.containsKey("SLURM_STEP_TASKS_PER_NODE");
    @Nullable String job = env.get("SLURM_JOB_ID");
    @Nullable String step = env.get("SLURM_STEP_ID");
    @Nullable Integer port = port(MASTER_PORT);
    if (port == null && job != null) {
      int jobId = number("SLURM_JOB_ID", 0, Integer.MAX_VALUE);
      int stepId = step == null ? 0 : number("SLURM_STEP_ID", 0, Integer.MAX_VALUE);
      port = FIRST_SLURM_PORT + (int) ((31L * jobId + stepId) % SLURM_PORTS);
    }
    return info(
        "SLURM_PROCID",
        size,
        "SLURM_LOCALID",
        perNode ? tasksOfThisNode() : number("SLURM_NTASKS_PER_NODE", 1, Integer.MAX_VALUE),
        perNode ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_NTASKS_PER_NODE",
        firstNode(),
        port,
        job == null ? null : job + "." + (step == null ? "0" : step));
  }

  private RankInfo info(
      String rankName,
      String sizeName,
      String localRankName,
      int localSize,
      String localSizeName,
      @Nullable String launcherHost,
      @Nullable Integer launcherPort,
      @Nullable String run) {
    int size = number(sizeName, 1, Integer.MAX_VALUE);
    int rank = number(rankName, 0, Integer.MAX_VALUE);
    if (rank >= size) {
      throw bad(rankName, "must be below " + sizeName + "=" + size);
    }
    if (localSize > size) {
      throw bad(localSizeName, "gives this host " + localSize + ", above " + sizeName + "=" + size);
    }
    int localRank = number(localRankName, 0, Integer.MAX_VALUE);
    if (localRank >= localSize) {
      throw bad(
          localRankName,
          "must be below "
              + localSize
              + ", this host's number of ranks by "
              + localSizeName
              + "="
              + env.get(localSizeName));
    }
    @Nullable String host = env.get(MASTER_HOST);
    if (host != null && host.isBlank()) {
      throw bad(MASTER_HOST, "must be the host of rank 0, or not be set");
    }
    if (host == null) {
      host = launcherHost;
    }
    if (host == null && localSize == size) {
      host = "127.0.0.1";
    }
    @Nullable Integer own = port(PORT);
    @Nullable Integer port = own != null ? own : launcherPort;
    @Nullable InetSocketAddress master =
        host == null || port == null ? null : InetSocketAddress.createUnresolved(host, port);
    return new RankInfo(launcher, rank, size, localRank, localSize, master, run);
  }

  private void samePmixRank(String rankName) {
    if (env.containsKey("PMIX_RANK")
        && number("PMIX_RANK", 0, Integer.MAX_VALUE) != number(rankName, 0, Integer.MAX_VALUE)) {
      throw new BootstrapException(
          rankName
              + "="
              + env.get(rankName)
              + " and PMIX_RANK="
              + env.get("PMIX_RANK")
              + " contradict each other, as where one launcher runs below another: set RANK,"
              + " WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which go before both");
    }
  }

  private @Nullable Integer port(String name) {
    return env.containsKey(name) ? number(name, 1, MAX_PORT) : null;
  }

  private int number(String name, int min, int max) {
    @Nullable String text = env.get(name);
    if (text == null) {
      throw new BootstrapException(launcher + ": " + name + " is not set: " + remedy);
    }
    try {
      int value = Integer.parseInt(text);
      if (value >= min && value <= max) {
        return value;
      }
    } catch (NumberFormatException e) {
      throw bad(name, "must be a whole number below 2^31");
    }
    throw bad(name, "must be " + min + (max == Integer.MAX_VALUE ? " or more" : " to " + max));
  }

  private BootstrapException bad(String name, String why) {
    return new BootstrapException(
        launcher + ": " + name + "=" + env.get(name) + ": " + why + "; " + remedy);
  }

  /** From Slurm's form "4(x2),3": two nodes of 4 tasks, then one of 3. */
  private int tasksOfThisNode() {
    String name = "SLURM_STEP_TASKS_PER_NODE";
    int node = number("SLURM_NODEID", 0, Integer.MAX_VALUE);
    long before = 0;
    for (String part : env.get(name).split(",", -1)) {
      if (!part.matches("\\d{1,9}(\\(x\\d{1,9}\\))?")) {
        throw bad(name, "must look like 4(x2),3");
      }
      int bracket = part.indexOf('(');
      before += bracket < 0 ? 1 : Integer.parseInt(part.substring(bracket + 2, part.length() - 1));
      if (node < before) {
        int tasks = Integer.parseInt(bracket < 0 ? part : part.substring(0, bracket));
        if (tasks == 0) {
          throw bad(name, "has no task on this node, SLURM_NODEID=" + node);
        }
        return tasks;
      }
    }
    throw bad("SLURM_NODEID", "beyond the nodes of " + name + "=" + env.get(name));
  }

  /** From Slurm's form "gpu[07-09,12]n[1-2],login1": the first, gpu07n1. */
  private @Nullable String firstNode() {
    for (String name : List.of("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")) {
      @Nullable String text = env.get(name);
      if (text != null) {
        return firstNode(name, text);
      }
    }
    return null;
  }

  private String firstNode(String name, String text) {
    Matcher first = FIRST_NODE.matcher(text);
    if (!first.matches()) {
      throw bad(name, "must look like gpu[07-09,12],login1");
    }
    return first.group(1).replaceAll("\\[([^-,\\]]+)[^\\]]*\\]", "$1");
  }
}

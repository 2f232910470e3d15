package io.ncclffm.core.bootstrap;

import java.net.InetSocketAddress;
import java.util.Map;
import java.util.Optional;
import org.jspecify.annotations.Nullable;

/**
 * Who this process is among the ranks of a run.
 *
 * @param launcher who started it, for messages
 * @param rank 0 to size - 1
 * @param size number of ranks
 * @param localRank 0 to localSize - 1, among the ranks on this host: usually also the device
 * @param localSize number of ranks on this host
 * @param master where rank 0 listens, not resolved yet; null where the launcher does not tell
 * @param run the launcher's name for this run, equal on all its ranks; null where there is none
 */
public record RankInfo(
    String launcher,
    int rank,
    int size,
    int localRank,
    int localSize,
    @Nullable InetSocketAddress master,
    @Nullable String run) {

  /**
   * @throws IllegalArgumentException if a number is out of its range
   */
  public RankInfo {
    requireBelow("rank", rank, "size", size);
    requireBelow("localRank", localRank, "localSize", localSize);
    if (localSize > size) {
      throw new IllegalArgumentException(
          "localSize " + localSize + ": at most the size, which is " + size);
    }
    if (master != null && master.getPort() == 0) {
      throw new IllegalArgumentException("master " + master + ": needs a port");
    }
  }

  private static void requireBelow(String name, int value, String limitName, int limit) {
    if (value < 0 || value >= limit) {
      throw new IllegalArgumentException(
          name
              + " "
              + value
              + ": must be in 0.."
              + (limit - 1)
              + ", "
              + limitName
              + " is "
              + limit);
    }
  }

  /**
   * From the environment of this process, see {@link #fromEnvironment(Map)}.
   *
   * @throws BootstrapException if a variable is missing, malformed, or contradicts another
   */
  public static RankInfo fromEnvironment() {
    return fromEnvironment(System.getenv());
  }

  /**
   * From the variables of the launcher nearest to the process, since the variables of an outer one
   * are inherited: {@code RANK} (torchrun, or set by hand), else {@code OMPI_COMM_WORLD_RANK} (Open
   * MPI's mpirun), else {@code SLURM_PROCID} (srun).
   *
   * <table class="striped">
   * <caption>Variables read</caption>
   * <tr><th></th><th>torchrun</th><th>Open MPI</th><th>Slurm</th></tr>
   * <tr><td>rank</td><td>RANK</td><td>OMPI_COMM_WORLD_RANK</td><td>SLURM_PROCID</td></tr>
   * <tr><td>size</td><td>WORLD_SIZE</td><td>OMPI_COMM_WORLD_SIZE</td>
   * <td>SLURM_STEP_NUM_TASKS, else SLURM_NTASKS</td></tr>
   * <tr><td>localRank</td><td>LOCAL_RANK</td><td>OMPI_COMM_WORLD_LOCAL_RANK</td>
   * <td>SLURM_LOCALID</td></tr>
   * <tr><td>localSize</td><td>LOCAL_WORLD_SIZE</td><td>OMPI_COMM_WORLD_LOCAL_SIZE</td>
   * <td>SLURM_STEP_TASKS_PER_NODE at SLURM_NODEID, else SLURM_NTASKS_PER_NODE</td></tr>
   * <tr><td>host of rank 0</td><td>MASTER_ADDR</td><td>MASTER_ADDR</td>
   * <td>MASTER_ADDR, else the first of SLURM_STEP_NODELIST</td></tr>
   * <tr><td>its port</td><td>MASTER_PORT, or the next one where torchrun's own store has that
   * (TORCHELASTIC_USE_AGENT_STORE=True)</td><td>MASTER_PORT</td>
   * <td>MASTER_PORT, else 20000..31999 from the ids of job and step</td></tr>
   * <tr><td>run</td><td>TORCHELASTIC_RUN_ID</td><td>PMIX_NAMESPACE</td>
   * <td>SLURM_JOB_ID.SLURM_STEP_ID</td></tr>
   * </table>
   *
   * <p>{@code NCCLFFM_PORT} goes before every other port. Where all ranks are on one host and none
   * is named, the host is 127.0.0.1. PMIx alone names a rank ({@code PMIX_RANK}) but no size in the
   * environment, so it only serves to check the others.
   *
   * @throws BootstrapException if a variable is missing, malformed, or contradicts another
   */
  public static RankInfo fromEnvironment(Map<String, String> environment) {
    return LauncherEnvironment.read(environment);
  }

  /** Whether all ranks are on this host. */
  boolean oneHost() {
    return localSize == size;
  }

  /** The address of rank 0 as text, for messages. */
  String masterText() {
    return Optional.ofNullable(master).map(m -> m.getHostString() + ":" + m.getPort()).orElse("?");
  }
}

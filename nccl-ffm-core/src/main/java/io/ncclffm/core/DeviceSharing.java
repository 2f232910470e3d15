package io.ncclffm.core;

import io.ncclffm.core.internal.CEnvironment;
import io.ncclffm.core.internal.NativeLibraries;
import java.io.IOException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/**
 * Several ranks on one GPU, for tests and development (NCCL 2.30, experimental there). CUDA and
 * NCCL read what this needs from the C environment, before their first call.
 */
public final class DeviceSharing {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");
  private static final int FIRST_NCCL = 23003;

  private DeviceSharing() {}

  /**
   * Prepares this process for the ranks of its host: where there are more ranks than GPUs it sets
   * {@code NCCL_MULTI_RANK_GPU_ENABLE} and its companions, keeping what the user set, and says so
   * in the log. Must come before any other call of this library. {@link LocalWorld} does it by
   * itself; programs with one process per rank call it first of all.
   *
   * @param ranks ranks on this host, in all its processes
   * @param ranksHere those of them in this process
   * @throws IllegalStateException if the libraries were used already, so that it is too late
   * @throws UnsupportedByLibraryException if the loaded NCCL is older than 2.30
   */
  public static void prepare(int ranks, int ranksHere) {
    if (ranksHere < 1 || ranks < ranksHere) {
      throw new IllegalArgumentException(
          ranks + " ranks, " + ranksHere + " of them here: must be positive");
    }
    int gpus = NativeLibraries.isCpuOnly() ? 0 : visibleGpus();
    if (gpus > 0 && ranks > gpus) {
      setEnvironment(ranks, ranksHere, gpus);
    }
    int devices = CudaDevice.count();
    NativeLibraries.Loaded loaded = NativeLibraries.load();
    if (ranks > devices
        && loaded.backend() == Backend.CUDA
        && !"1".equals(CEnvironment.get("NCCL_MULTI_RANK_GPU_ENABLE"))) {
      throw new IllegalStateException(
          ranks
              + " ranks on "
              + devices
              + " GPUs: NCCL allows it only with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment of"
              + " the JVM, which is not so here");
    }
    if (ranks > devices && loaded.ncclVersion() < FIRST_NCCL) {
      throw new UnsupportedByLibraryException(
          ranks
              + " ranks on "
              + devices
              + " GPUs need NCCL >= 2.30.3, loaded "
              + NativeLibraries.versionText(loaded.ncclVersion())
              + " from "
              + loaded.nccl().file()
              + ". Remedy: a newer NCCL (-Dncclffm.nccl=FILE), or one rank a GPU.");
    }
  }

  private static void setEnvironment(int ranks, int ranksHere, int gpus) {
    int ranksPerGpu = (ranks + gpus - 1) / gpus;
    Map<String, String> wanted = new LinkedHashMap<>();
    wanted.put("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    wanted.put("NCCL_NVLS_ENABLE", "0");
    // All ranks' blocks must be resident at once; 8 ranks of 8 blocks do not fit beside others.
    wanted.put("NCCL_MAX_CTAS", ranksPerGpu >= 8 ? "4" : "8");
    wanted.put("CUDA_MODULE_LOADING", "EAGER");
    if (ranksHere > 1) {
      // One hardware queue a stream. A process of one rank has few streams, and under MPS four
      // processes with 32 queues each do not get them: cudaErrorMemoryAllocation.
      wanted.put("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }
    wanted.keySet().removeIf(name -> CEnvironment.get(name) != null);
    if (wanted.isEmpty()) {
      return;
    }
    if (NativeLibraries.isLoaded()) {
      throw new IllegalStateException(
          ranks
              + " ranks on "
              + gpus
              + (gpus == 1 ? " GPU" : " GPUs")
              + ": it is too late to prepare, CUDA was used in this process already. Remedy: open"
              + " the LocalWorld (or call DeviceSharing.prepare) first, or start the JVM with "
              + wanted.toString().replaceAll("[{},]", ""));
    }
    wanted.forEach(CEnvironment::setIfUnset);
    LOG.log(
        System.Logger.Level.INFO,
        "nccl-ffm: {0} ranks on {1} GPU(s): set {2}",
        ranks,
        gpus,
        wanted);
  }

  /** Counts GPUs without a CUDA call, which would fix the environment; 0 where unknown. */
  static int visibleGpus() {
    int gpus = 0;
    Path driver = Path.of("/proc/driver/nvidia/gpus");
    if (Files.isDirectory(driver)) {
      try (DirectoryStream<Path> entries = Files.newDirectoryStream(driver)) {
        for (Path ignored : entries) {
          gpus++;
        }
      } catch (IOException e) {
        return 0;
      }
    }
    @Nullable String visible = CEnvironment.get("CUDA_VISIBLE_DEVICES");
    if (visible == null) {
      return gpus;
    }
    return visible.isBlank() ? 0 : Math.min(gpus, visible.split(",").length);
  }
}

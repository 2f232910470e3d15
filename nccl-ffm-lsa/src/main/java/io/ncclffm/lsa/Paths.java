package io.ncclffm.lsa;

import io.ncclffm.core.Backend;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.internal.Nvml;
import java.util.List;

/** Which provider can join which ranks, and over what. */
final class Paths {
  private Paths() {}

  /** Why a provider is out of the question for these ranks, or "". The same on every rank. */
  static String refusal(LsaProvider provider, List<Card> ranks) {
    boolean cpu = Nccl.versions().backend() == Backend.CPU;
    switch (provider) {
      case NCCL_WINDOW:
        return cpu ? "not on the CPU backend, which has its own" : noNcclWindow(ranks);
      case CPU:
        return cpu ? noNcclWindow(ranks) : "only on the CPU backend";
      case CUDA_IPC:
        return otherHost(ranks);
      case HOST_STAGED:
        String other = otherHost(ranks);
        for (int r = 1; other.isEmpty() && r < ranks.size(); r++) {
          if (ranks.get(r).namespace() != ranks.get(0).namespace()) {
            other = "ranks 0 and " + r + " are in different containers (process id namespaces)";
          }
        }
        return other;
    }
    throw new AssertionError(provider);
  }

  private static String noNcclWindow(List<Card> ranks) {
    for (int r = 0; r < ranks.size(); r++) {
      if (!ranks.get(r).noNcclWindow().isEmpty()) {
        return "rank " + r + ": " + ranks.get(r).noNcclWindow();
      }
    }
    return "";
  }

  private static String otherHost(List<Card> ranks) {
    for (int r = 1; r < ranks.size(); r++) {
      if (!ranks.get(r).isSameHost(ranks.get(0))) {
        return "ranks 0 and " + r + " are on different hosts";
      }
    }
    return "";
  }

  /** Between two different ranks that the provider joins. */
  static LsaPath between(Card from, Card to, LsaProvider provider) {
    if (provider == LsaProvider.HOST_STAGED) {
      return LsaPath.HOST_STAGED;
    }
    return between(from.device().equals(to.device()), from.busId(), to.busId());
  }

  static LsaPath between(boolean sameGpu, String busId, String otherBusId) {
    if (sameGpu) {
      return LsaPath.SAME_GPU;
    }
    if (Nccl.versions().backend() == Backend.CPU) {
      return LsaPath.HOST_STAGED;
    }
    return Boolean.TRUE.equals(Nvml.isNvLinked(busId, otherBusId))
        ? LsaPath.NVLINK
        : LsaPath.PCIE_P2P;
  }
}

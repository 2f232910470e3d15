package io.ncclffm.lsa;

import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.Nvml;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/** The devices of this process and what joins each pair of them. {@link #toString} is a table. */
public final class DeviceTopology {
  /**
   * What CUDA and NVML say of one device's access to another's memory.
   *
   * @param canAccess whether kernels on the first can load from and store to the second's memory
   * @param nativeAtomics whether atomics on it work over the link
   * @param performanceRank CUDA's, 0 is best; -1 where there is no access
   * @param sameGpu whether they are one GPU
   * @param nvLink whether NVLink joins them, null if not known
   */
  public record Pair(
      boolean canAccess,
      boolean nativeAtomics,
      int performanceRank,
      boolean sameGpu,
      @Nullable Boolean nvLink) {}

  private final List<CudaDevice> devices = new ArrayList<>();
  private final List<String> names = new ArrayList<>();
  private final Pair[][] pairs;

  private DeviceTopology() {
    for (int d = 0; d < CudaDevice.count(); d++) {
      devices.add(new CudaDevice(d));
      names.add(devices.get(d).name());
    }
    pairs = new Pair[devices.size()][devices.size()];
    for (CudaDevice from : devices) {
      for (CudaDevice to : devices) {
        pairs[from.ordinal()][to.ordinal()] = ask(from, to);
      }
    }
  }

  /** Asks CUDA, and NVML where it is installed. */
  public static DeviceTopology query() {
    return new DeviceTopology();
  }

  private static Pair ask(CudaDevice from, CudaDevice to) {
    if (from.equals(to)) {
      return new Pair(true, true, 0, true, false);
    }
    boolean access = from.canAccess(to);
    boolean cpu = Nccl.versions().backend() == Backend.CPU;
    return new Pair(
        access,
        access && attribute(CudartH.cudaDevP2PAttrNativeAtomicSupported(), from, to) != 0,
        access ? attribute(CudartH.cudaDevP2PAttrPerformanceRank(), from, to) : -1,
        from.uuid().equals(to.uuid()),
        cpu ? Boolean.FALSE : Nvml.isNvLinked(from.pciBusId(), to.pciBusId()));
  }

  private static int attribute(int attribute, CudaDevice from, CudaDevice to) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaDeviceGetP2PAttribute(out, attribute, from.ordinal(), to.ordinal());
      CudaException.check(rc, "cudaDeviceGetP2PAttribute(" + to + ")", from);
      return out.get(JAVA_INT, 0);
    }
  }

  public List<CudaDevice> devices() {
    return List.copyOf(devices);
  }

  /**
   * How one device reaches another.
   *
   * @throws IndexOutOfBoundsException if this process has no such device
   */
  public Pair pair(CudaDevice from, CudaDevice to) {
    Objects.checkIndex(from.ordinal(), pairs.length);
    Objects.checkIndex(to.ordinal(), pairs.length);
    return pairs[from.ordinal()][to.ordinal()];
  }

  /**
   * What a provider would do for ranks on two devices, or null if it cannot join them.
   *
   * @param from this rank's
   * @param to the other rank's
   */
  public @Nullable LsaPath path(CudaDevice from, CudaDevice to, LsaProvider provider) {
    Pair pair = pair(from, to);
    boolean cpu = Nccl.versions().backend() == Backend.CPU;
    if (cpu ? provider == LsaProvider.NCCL_WINDOW : provider == LsaProvider.CPU) {
      return null;
    }
    if (provider == LsaProvider.HOST_STAGED) {
      return LsaPath.HOST_STAGED;
    }
    if (!pair.canAccess() && provider != LsaProvider.CPU) {
      return null;
    }
    if (pair.sameGpu()) {
      return LsaPath.SAME_GPU;
    }
    if (cpu) {
      return LsaPath.HOST_STAGED;
    }
    return Boolean.TRUE.equals(pair.nvLink()) ? LsaPath.NVLINK : LsaPath.PCIE_P2P;
  }

  @Override
  public String toString() {
    StringBuilder text = new StringBuilder();
    for (CudaDevice device : devices) {
      text.append(device).append(": ").append(names.get(device.ordinal())).append(", PCI ");
      text.append(device.pciBusId()).append('\n');
    }
    text.append("from to  access atomics rank nvlink");
    for (LsaProvider provider : LsaProvider.values()) {
      text.append(String.format("  %-12s", provider));
    }
    for (CudaDevice from : devices) {
      for (CudaDevice to : devices) {
        appendRow(text.append('\n'), from, to);
      }
    }
    return text.toString();
  }

  private void appendRow(StringBuilder text, CudaDevice from, CudaDevice to) {
    Pair pair = pair(from, to);
    text.append(
        String.format(
            Locale.ROOT,
            "%4d %2d  %-6s %-7s %4d %-6s",
            from.ordinal(),
            to.ordinal(),
            yesOrNo(pair.canAccess()),
            yesOrNo(pair.nativeAtomics()),
            pair.performanceRank(),
            pair.nvLink() == null ? "?" : yesOrNo(pair.nvLink())));
    for (LsaProvider provider : LsaProvider.values()) {
      @Nullable LsaPath path = path(from, to, provider);
      text.append(String.format("  %-12s", path == null ? "-" : path));
    }
  }

  private static String yesOrNo(boolean value) {
    return value ? "yes" : "no";
  }
}

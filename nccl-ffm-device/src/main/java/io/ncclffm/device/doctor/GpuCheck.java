package io.ncclffm.device.doctor;

import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.Versions;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.lsa.DeviceTopology;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalInt;
import java.util.function.IntFunction;
import org.jspecify.annotations.Nullable;

/** Driver, devices, and what joins them. */
final class GpuCheck {
  private static final int OLDEST_CAPABILITY = 80;
  private static final int COMPUTE_MODE_DEFAULT = 0;
  private static final int COMPUTE_MODE_PROHIBITED = 2;
  private static final int COMPUTE_MODE_EXCLUSIVE_PROCESS = 3;
  private static final int POSIX_FILE_DESCRIPTOR = 1;
  private static final int FABRIC = 8;
  private static final long MIB = 1 << 20;

  private GpuCheck() {}

  /**
   * @param versions null if nothing could be loaded
   */
  static List<Finding> run(@Nullable Versions versions) {
    List<Finding> findings = new ArrayList<>();
    findings.add(driver(Path.of("/proc/driver/nvidia/version"), Path.of("/dev/nvidiactl")));
    if (versions == null) {
      return findings;
    }
    DeviceTopology topology;
    try {
      topology = DeviceTopology.query();
    } catch (CudaException e) {
      findings.add(none(String.valueOf(e.getMessage())));
      return findings;
    }
    if (topology.devices().isEmpty()) {
      findings.add(none("CUDA sees no device"));
      return findings;
    }
    if (versions.backend() == Backend.CUDA) {
      findings.add(driverVersion(versions));
      findings.add(mps());
      topology.devices().forEach(device -> device(device, findings));
      findings.add(Finding.info("gpu.topology", topology.toString()));
    } else {
      findings.add(
          Finding.info(
              "gpu.emulated",
              topology.devices().size() + " devices, which the CPU backend emulates"));
    }
    peerAccess(topology, findings);
    return findings;
  }

  private static Finding none(String seen) {
    return Finding.error(
        "gpu.none",
        seen,
        "look at the driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES; containers: --gpus all;"
            + " -Dncclffm.backend=cpu goes without");
  }

  /**
   * @param version the file that the driver keeps
   * @param control the device file that a container must be given
   */
  static Finding driver(Path version, Path control) {
    if (!Files.exists(version)) {
      return Finding.warning(
          "gpu.driver",
          "no NVIDIA driver: " + version + " is not there",
          "install the driver, on the host also for containers; without a GPU this is as it"
              + " should be");
    }
    if (!Files.exists(control)) {
      return Finding.error(
          "gpu.driver",
          "there is an NVIDIA driver, but " + control + " is not there",
          "containers: NVIDIA's container toolkit and --gpus all; else run nvidia-smi once as"
              + " root, which makes the device files");
    }
    try {
      return Finding.ok("gpu.driver", Files.readAllLines(version).get(0));
    } catch (IOException | IndexOutOfBoundsException e) {
      return Finding.info("gpu.driver", version + ": " + e);
    }
  }

  private static Finding driverVersion(Versions versions) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaDriverGetVersion(out);
      CudaException.check(rc, "cudaDriverGetVersion", new CudaDevice(0));
      int code = out.get(JAVA_INT, 0);
      int runtime = Integer.parseInt(versions.cudart().version().split("\\.")[0]);
      String seen =
          "the driver is for CUDA "
              + code / 1000
              + "."
              + code % 1000 / 10
              + ", libcudart is "
              + versions.cudart().version();
      return code / 1000 >= runtime
          ? Finding.ok("gpu.driver-version", seen)
          : Finding.error(
              "gpu.driver-version",
              seen,
              "a newer driver, or an older libcudart by -Dncclffm.cudart=FILE");
    }
  }

  private static Finding mps() {
    @Nullable String pipe = System.getenv("CUDA_MPS_PIPE_DIRECTORY");
    Path control = Path.of(pipe == null ? "/tmp/nvidia-mps" : pipe, "control");
    return Finding.info(
        "gpu.mps",
        Files.exists(control)
            ? "MPS: " + control + " is there"
            : "no MPS: processes that share a GPU take turns, milliseconds each (threads of one"
                + " process do not)");
  }

  private static void device(CudaDevice device, List<Finding> findings) {
    String name = device.name();
    int capability =
        10 * device.attribute(CudartH.cudaDevAttrComputeCapabilityMajor())
            + device.attribute(CudartH.cudaDevAttrComputeCapabilityMinor());
    String seen =
        device
            + ": "
            + name
            + ", "
            + device.uuid()
            + ", compute capability "
            + capability / 10
            + "."
            + capability % 10
            + ", "
            + device.multiProcessorCount()
            + " multiprocessors, "
            + memory(device)
            + ", IPC "
            + known(device, CudartH.cudaDevAttrIpcEventSupport(), has -> has != 0 ? "yes" : "no")
            + ", cuMem memory shared by "
            + known(
                device, CudartH.cudaDevAttrMemoryPoolSupportedHandleTypes(), GpuCheck::handleTypes);
    findings.add(
        capability >= OLDEST_CAPABILITY
            ? Finding.ok("gpu.device", seen)
            : Finding.error(
                "gpu.device",
                seen + ": the shim has kernels for 8.0 and later",
                "another GPU; NCCL's host collectives work on this one"));
    if (name.contains(" MIG ")) {
      findings.add(
          Finding.warning(
              "gpu.mig",
              device + " is a MIG instance: no peer access to others, a process sees one",
              "a whole GPU for several ranks, or NCCL 2.31 and ranks on one instance each"));
    }
    OptionalInt attribute = attribute(device, CudartH.cudaDevAttrComputeMode());
    int mode = attribute.orElse(COMPUTE_MODE_DEFAULT);
    if (mode == COMPUTE_MODE_PROHIBITED || mode == COMPUTE_MODE_EXCLUSIVE_PROCESS) {
      findings.add(
          Finding.warning(
              "gpu.compute-mode",
              device
                  + (mode == COMPUTE_MODE_PROHIBITED
                      ? " is closed to programs"
                      : " takes one process at a time")
                  + " (compute mode "
                  + mode
                  + ")",
              "nvidia-smi -c DEFAULT, or MPS where processes share it"));
    }
  }

  /** Empty where the CUDA in use does not know the attribute. */
  private static OptionalInt attribute(CudaDevice device, int attribute) {
    try {
      return OptionalInt.of(device.attribute(attribute));
    } catch (CudaException e) {
      if (e.errorCode() != CudartH.cudaErrorInvalidValue()) {
        throw e;
      }
      return OptionalInt.empty();
    }
  }

  private static String known(CudaDevice device, int attribute, IntFunction<String> text) {
    OptionalInt value = attribute(device, attribute);
    return value.isPresent() ? text.apply(value.getAsInt()) : "unknown";
  }

  /**
   * @param mask of {@code cudaMemAllocationHandleType}
   */
  static String handleTypes(int mask) {
    List<String> types = new ArrayList<>();
    if ((mask & POSIX_FILE_DESCRIPTOR) != 0) {
      types.add("file descriptors");
    }
    if ((mask & FABRIC) != 0) {
      types.add("fabric handles");
    }
    return types.isEmpty() ? "nothing" : String.join(" and ", types);
  }

  private static String memory(CudaDevice device) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment free = arena.allocate(JAVA_LONG);
      MemorySegment total = arena.allocate(JAVA_LONG);
      device.makeCurrent();
      CudaException.check(CudartH.cudaMemGetInfo(free, total), "cudaMemGetInfo", device);
      return total.get(JAVA_LONG, 0) / MIB
          + " MiB, "
          + free.get(JAVA_LONG, 0) / MIB
          + " MiB of them free";
    }
  }

  private static void peerAccess(DeviceTopology topology, List<Finding> findings) {
    List<String> apart = new ArrayList<>();
    for (CudaDevice from : topology.devices()) {
      for (CudaDevice to : topology.devices()) {
        if (!topology.pair(from, to).canAccess()) {
          apart.add(from.ordinal() + " to " + to.ordinal());
        }
      }
    }
    findings.add(
        apart.isEmpty()
            ? Finding.ok("gpu.p2p", "every device reaches every other's memory")
            : Finding.warning(
                "gpu.p2p",
                "no peer access from device " + String.join(", ", apart),
                "switch PCIe's access control services and the IOMMU off (virtual machines: pass"
                    + " the switch through, too); nvidia-smi topo -p2p r tells the driver's"
                    + " reason; without it windows go through host memory"));
  }
}

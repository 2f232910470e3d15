package io.ncclffm.device.doctor;

import io.ncclffm.core.Nccl;
import io.ncclffm.core.internal.NativeAccess;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;

/** The JDK and how it was started. */
final class JavaCheck {
  private static final Set<String> ARCHITECTURES = Set.of("amd64", "aarch64");

  private JavaCheck() {}

  /** Must come before the first native call, at which the JVM grants access with a warning. */
  static List<Finding> run() {
    List<Finding> findings = new ArrayList<>();
    findings.add(
        Finding.ok(
            "java.version",
            System.getProperty("java.runtime.version")
                + " of "
                + System.getProperty("java.vendor")
                + " in "
                + System.getProperty("java.home")));
    findings.add(platform(System.getProperty("os.name"), System.getProperty("os.arch")));
    findings.add(nativeAccess(Nccl.class.getModule().isNativeAccessEnabled()));
    return findings;
  }

  static Finding platform(String os, String architecture) {
    String platform = os + " " + architecture;
    return os.equals("Linux") && ARCHITECTURES.contains(architecture)
        ? Finding.ok("java.platform", platform)
        : Finding.error(
            "java.platform",
            platform + ": NCCL is for Linux on x86_64 and aarch64",
            "use a 64-bit JDK on Linux (WSL 2 and containers are)");
  }

  static Finding nativeAccess(boolean enabled) {
    if (enabled) {
      return Finding.ok("java.native-access", "enabled");
    }
    return Finding.warning(
        "java.native-access",
        "not enabled: the JVM warns today, and refuses native calls in a later release or with"
            + " --illegal-native-access=deny",
        "start java with " + NativeAccess.option());
  }
}

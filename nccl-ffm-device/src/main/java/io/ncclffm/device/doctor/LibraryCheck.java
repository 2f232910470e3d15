package io.ncclffm.device.doctor;

import io.ncclffm.core.Backend;
import io.ncclffm.core.LibraryVersion;
import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.Versions;
import io.ncclffm.core.internal.Library;
import io.ncclffm.core.internal.NativeLibraries;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/** What is loaded, why that, and whether its parts fit together. */
final class LibraryCheck {
  private static final String REMEDY = "\nRemedy: ";
  private static final String SAME_LINE_REMEDY = " Remedy: ";

  private LibraryCheck() {}

  /** What was loaded, or why nothing was. */
  record Loading(@Nullable Versions versions, @Nullable Throwable failure) {
    static Loading of(Supplier<Versions> load) {
      try {
        return new Loading(load.get(), null);
      } catch (RuntimeException | LinkageError e) {
        return new Loading(null, e);
      }
    }
  }

  static List<Finding> run(Loading loading) {
    List<Finding> findings = new ArrayList<>();
    @Nullable Versions versions = loading.versions;
    @Nullable Throwable failure = loading.failure;
    if (failure != null) {
      findings.add(failed(failure));
    } else if (versions != null) {
      loaded(versions, findings);
    }
    // Not beside a working NCCL: a search opens what it finds.
    boolean opens = Nccl.class.getModule().isNativeAccessEnabled();
    if (opens && (versions == null || versions.backend() == Backend.CPU)) {
      NativeLibraries.searches().forEach(search -> findings.add(onThisMachine(search)));
    }
    return findings;
  }

  private static Finding onThisMachine(NativeLibraries.Search search) {
    return Finding.info(
        "library.search",
        search.library()
            + (search.found().isEmpty()
                ? ": none on this machine:\n" + String.join("\n", search.attempts())
                : " on this machine:\n  " + String.join("\n  ", search.found())));
  }

  static Finding failed(Throwable failure) {
    String message = String.valueOf(failure.getMessage());
    int at = Math.max(message.lastIndexOf(REMEDY), message.lastIndexOf(SAME_LINE_REMEDY));
    return at < 0
        ? Finding.error(
            "library.load",
            failure.toString(),
            "take the libraries, jars and shim of one release; -Dncclffm.backend=cpu goes without"
                + " a GPU")
        : Finding.error(
            "library.load",
            message.substring(0, at),
            message.substring(at + SAME_LINE_REMEDY.length()));
  }

  private static void loaded(Versions versions, List<Finding> findings) {
    String backend = versions.backend().name().toLowerCase(Locale.ROOT);
    findings.add(
        versions.backend() == Backend.CUDA
            ? Finding.ok("library.backend", backend + ", " + versions.reason())
            : Finding.warning(
                "library.backend",
                backend + ", " + versions.reason(),
                "for GPUs: an NVIDIA driver, libcudart 12 or 13 and libnccl 2.19.1 or later, where"
                    + " the search below finds them or named by -Dncclffm.cudart=FILE and"
                    + " -Dncclffm.nccl=FILE; -Dncclffm.backend=cuda makes their absence an error"));
    describe("libcudart", "cudart", versions.cudart(), findings);
    describe("libnccl", "nccl", versions.nccl(), findings);
    @Nullable LibraryVersion shim = versions.shim();
    if (shim == null) {
      findings.add(
          Finding.warning(
              "library.shim",
              "the CUDA shim is not there: no kernels, so no device route and no task route",
              "build nccl-ffm-native where nvcc is, or name the shim with -Dncclffm.shim=FILE"));
    } else {
      describe("shim", "shim", shim, findings);
      findings.add(
          Finding.ok("library.layouts", "the structs of the bindings are those of the shim"));
    }
    if (versions.backend() == Backend.CUDA) {
      Set<String> others = NativeLibraries.ncclFiles();
      others.remove(versions.nccl().file());
      others.removeAll(versions.nccl().otherCopies());
      if (!others.isEmpty()) {
        findings.add(others(versions.nccl(), others));
      }
      findings.add(nvrtc());
    }
  }

  private static Finding others(LibraryVersion nccl, Set<String> others) {
    String seen = "libnccl: on this machine, too, and not in use: " + String.join(", ", others);
    boolean named = nccl.origin().matches("-Dncclffm\\.nccl|NCCLFFM_NCCL");
    return named
        ? Finding.info("library.other", seen)
        : Finding.warning(
            "library.other",
            seen,
            "name the one that you mean with -Dncclffm.nccl=FILE: without it the first one that is"
                + " found counts, or one that something else in the process has loaded before");
  }

  /** What compiles kernels of the user's own; nothing else needs it. */
  private static Finding nvrtc() {
    try {
      Library nvrtc = NativeLibraries.requireNvrtc();
      return Finding.ok("library.nvrtc", nvrtc.file() + " [" + nvrtc.origin() + "]");
    } catch (NativeLibraryException e) {
      String message = String.valueOf(e.getMessage());
      int at = message.lastIndexOf(REMEDY);
      return Finding.warning(
          "library.nvrtc",
          "no kernels are compiled at run time: " + message.substring(0, at),
          message.substring(at + REMEDY.length()));
    }
  }

  private static void describe(
      String name, String property, LibraryVersion library, List<Finding> findings) {
    findings.add(
        Finding.ok(
            "library." + property,
            name
                + " "
                + library.version()
                + " (bindings: "
                + library.headerVersion()
                + "), "
                + library.file()
                + " ["
                + library.origin()
                + "]"));
    if (!library.otherCopies().isEmpty()) {
      findings.add(
          Finding.warning(
              "library.duplicate",
              name + ": also mapped in this process: " + String.join(", ", library.otherCopies()),
              "let the whole process use one: name it with -Dncclffm."
                  + property
                  + "=FILE, or take the other off LD_LIBRARY_PATH and LD_PRELOAD"));
    }
  }
}

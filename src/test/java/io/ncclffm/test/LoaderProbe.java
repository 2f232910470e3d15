package io.ncclffm.test;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.Versions;
import java.lang.foreign.Arena;
import java.lang.foreign.SymbolLookup;
import java.nio.file.Path;

/**
 * A child JVM's main class: uses the library in several ways, each of which is the first to load it
 * or finds that loading has failed, and prints what comes of it.
 */
final class LoaderProbe {
  private LoaderProbe() {}

  private interface Attempt {
    void make();
  }

  @SuppressWarnings("restricted") // opening a second copy is the point
  public static void main(String[] arguments) {
    switch (arguments[0]) {
      case "versions":
        if (arguments.length > 1) {
          SymbolLookup.libraryLookup(Path.of(arguments[1]), Arena.global());
        }
        attempt("VERSIONS", () -> print(Nccl.versions()));
        break;
      case "thrice":
        attempt("FIRST", Nccl::versions);
        attempt("SECOND", Nccl::versions);
        attempt("THIRD", CudaDevice::count);
        attempt("FOURTH", NcclUniqueId::create);
        attempt("FIFTH", () -> CudaStream.create(new CudaDevice(0)));
        break;
      case "simulate":
        print(Nccl.versions());
        attempt("FIRST", () -> NcclGroup.simulate(() -> {}));
        attempt("SECOND", () -> NcclGroup.simulate(() -> {}));
        break;
      case "world":
        attempt("WORLD", () -> LocalWorld.open(Integer.parseInt(arguments[1])).close());
        break;
      default:
        throw new IllegalArgumentException(arguments[0]);
    }
    System.out.println("STILL RUNNING");
  }

  private static void print(Versions versions) {
    System.out.println(versions);
    System.out.println("OTHER COPIES " + versions.nccl().otherCopies());
  }

  /** Prints the class and message of what is thrown, on one line. */
  private static void attempt(String name, Attempt attempt) {
    try {
      attempt.make();
      System.out.println(name + " succeeded");
    } catch (Throwable t) {
      System.out.println(
          name + " " + t.getClass().getSimpleName() + ": " + t.getMessage().replace("\n", " | "));
    }
  }
}

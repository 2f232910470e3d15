package io.ncclffm.test;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.Versions;
import java.io.File;
import java.lang.foreign.Arena;
import java.lang.foreign.SymbolLookup;
import java.lang.ref.WeakReference;
import java.net.URL;
import java.net.URLClassLoader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/**
 * A child JVM's main class: uses the library in several ways, each of which is the first to load it
 * or finds that loading has failed, and prints what comes of it.
 */
final class LoaderProbe {
  private LoaderProbe() {}

  private static volatile long counter;

  private interface Attempt {
    void make();
  }

  @SuppressWarnings("restricted") // opening a second copy is the point
  public static void main(String[] arguments) throws Exception {
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
      case "reload":
        reload();
        break;
      case "signals":
        attempt("SIGNALS", LoaderProbe::useTheJvmsSignals);
        break;
      default:
        throw new IllegalArgumentException(arguments[0]);
    }
    System.out.println("STILL RUNNING");
  }

  /** Uses the library through a class loader of its own, drops that, and does it once more. */
  private static void reload() throws Exception {
    Path library = Path.of(System.getProperty("ncclffm.shim"));
    WeakReference<ClassLoader> first = new WeakReference<>(useInItsOwnClassLoader());
    long deadline = System.nanoTime() + Duration.ofSeconds(30).toNanos();
    while (first.get() != null) {
      if (System.nanoTime() > deadline) {
        throw new AssertionError("the class loader is still there");
      }
      System.gc();
    }
    System.out.println("FIRST LOADER GONE");
    if (Files.readString(Path.of("/proc/self/maps")).contains(library.toString())) {
      System.out.println("STILL MAPPED");
    }
    useInItsOwnClassLoader();
    System.out.println("SECOND LOADER WORKS");
  }

  private static ClassLoader useInItsOwnClassLoader() throws Exception {
    List<URL> path = new ArrayList<>();
    for (String entry : System.getProperty("java.class.path").split(File.pathSeparator)) {
      path.add(Path.of(entry).toUri().toURL());
    }
    URL[] all = path.toArray(new URL[0]);
    try (URLClassLoader loader = new URLClassLoader(all, ClassLoader.getPlatformClassLoader())) {
      Class<?> device = loader.loadClass(CudaDevice.class.getName());
      if (device == CudaDevice.class) {
        throw new AssertionError("not loaded anew");
      }
      device.getMethod("count").invoke(null);
      return loader;
    }
  }

  /**
   * Compiled code has no null checks and no polls: it runs into a protected page, and the JVM's
   * SIGSEGV handler makes an exception or a stop of it.
   */
  private static void useTheJvmsSignals() {
    CudaDevice.count();
    NcclUniqueId.create();
    Thread busy = Thread.ofPlatform().daemon().start(LoaderProbe::loopForEver);
    int[][] arrays = {new int[1], null};
    int caught = 0;
    for (int i = 0; i < 200_000; i++) {
      try {
        arrays[i % 1000 == 999 ? 1 : 0][0]++;
      } catch (NullPointerException e) {
        caught++;
      }
      if (i % 20_000 == 0) {
        System.gc(); // stops the loop at a poll
      }
    }
    if (caught != 200 || !busy.isAlive()) {
      throw new AssertionError(caught + " null pointers, loop alive: " + busy.isAlive());
    }
  }

  private static void loopForEver() {
    for (long i = 0; i >= 0; i++) {
      counter = i;
    }
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

package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.internal.LeakReport;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.StampedLock;

/**
 * Kernels of one's own on a device ({@code cudaLibrary_t}): loaded from a cubin, a fatbin or PTX,
 * or compiled from CUDA C++ at run time. Needs CUDA's runtime 12.8; the CPU backend runs no CUDA
 * code.
 *
 * <p>Ranks that share a GPU load their modules before any rank's kernel waits for another's, for
 * loading can wait for the device. Loading here brings every kernel's code to the device, but that
 * is not all that a first launch does: launch each kernel once with nothing to do (a count of 0) on
 * every rank, synchronize, and let the ranks meet, before any of them waits.
 *
 * <p>Threads: any; a launch of a kernel one at a time.
 */
public final class KernelModule implements AutoCloseable {
  private static final int LOG_BYTES = 8192;
  private static final Duration LAUNCH_TIMEOUT = Duration.ofSeconds(10);

  private final CudaDevice device;
  private final MemorySegment library;
  private final String description;

  /** What CUDA's translator may still write to when a kernel is loaded. */
  private final Arena logged;

  private final TreeMap<String, Kernel> kernels = new TreeMap<>();
  private final LeakReport.Tracker leak;
  // Read by launches, which are made side by side, and written by the end.
  private final StampedLock using = new StampedLock();
  private volatile boolean closed; // written under using

  private KernelModule(CudaDevice device, MemorySegment library, String description, Arena logged) {
    this.device = device;
    this.library = library;
    this.description = description;
    this.logged = logged;
    this.leak = LeakReport.track(this, toString());
  }

  /** Compiles text for the device and loads it; see the long form. */
  public static KernelModule compile(CudaDevice device, String text) {
    return compile(device, KernelSource.of(text));
  }

  /**
   * Compiles for the device ({@link KernelCompiler}, which has a cache) and loads.
   *
   * @throws KernelCompileException if the source is wrong
   * @throws io.ncclffm.core.NativeLibraryException if there is no NVRTC
   * @throws CudaException if CUDA does not take what was compiled
   * @throws UnsupportedByLibraryException on the CPU backend
   */
  public static KernelModule compile(CudaDevice device, KernelSource source) {
    requireCuda();
    String architecture = KernelCompiler.architectureFor(capability(device));
    return load(device, KernelCompiler.compile(source, architecture), source.name());
  }

  /**
   * Loads a cubin, a fatbin or PTX from a file.
   *
   * @throws UncheckedIOException if it cannot be read
   */
  public static KernelModule load(CudaDevice device, Path file) {
    requireCuda();
    try {
      return load(device, KernelImage.of(Files.readAllBytes(file)), file.toString());
    } catch (IOException e) {
      throw new UncheckedIOException("kernel module " + file + ": " + e, e);
    } catch (IllegalArgumentException e) {
      throw new IllegalArgumentException("kernel module " + file + ": " + e.getMessage(), e);
    }
  }

  /**
   * Loads ({@code cudaLibraryLoadData}).
   *
   * @throws IllegalArgumentException if the device cannot run it, or there is no kernel in it
   * @throws CudaException if CUDA does not take it, with the log of its translator
   * @throws UnsupportedByLibraryException on the CPU backend, or before CUDA 12.8
   */
  public static KernelModule load(CudaDevice device, KernelImage image) {
    requireCuda();
    return load(device, image, "in memory");
  }

  private static void requireCuda() {
    NativeLibraries.Loaded loaded = NativeLibraries.load();
    if (loaded.backend() == Backend.CPU) {
      throw new UnsupportedByLibraryException(
          "kernel module: the CPU backend runs no CUDA code ("
              + loaded.reason()
              + "). Kernels of your own need a GPU; KernelCompiler compiles them without one.");
    }
    if (loaded.cudart().find("cudaLibraryLoadData").isEmpty()) {
      throw new UnsupportedByLibraryException(
          "kernel module: cudaLibraryLoadData needs CUDA's runtime >= 12.8; loaded is "
              + loaded.cudart().file());
    }
  }

  private static int capability(CudaDevice device) {
    return device.attribute(CudartH.cudaDevAttrComputeCapabilityMajor()) * 10
        + device.attribute(CudartH.cudaDevAttrComputeCapabilityMinor());
  }

  private static KernelModule load(CudaDevice device, KernelImage image, String origin) {
    int capability = capability(device);
    String problem = image.problemOn(capability);
    if (problem != null) {
      throw new IllegalArgumentException(
          "kernel module "
              + origin
              + " on "
              + device
              + ", which is sm_"
              + capability
              + ": "
              + problem);
    }
    device.makeCurrent();
    String operation = "cudaLibraryLoadData of " + origin + " (" + image + ")";
    Arena logged = Arena.ofShared();
    MemorySegment log = logged.allocate(LOG_BYTES);
    MemorySegment library;
    try (Arena arena = Arena.ofConfined()) {
      byte[] bytes = image.bytes();
      MemorySegment code = arena.allocate(bytes.length + 1L, 16); // PTX ends with a 0
      MemorySegment.copy(bytes, 0, code, JAVA_BYTE, 0, bytes.length);
      MemorySegment options = arena.allocate(JAVA_INT, 2);
      options.setAtIndex(JAVA_INT, 0, CudartH.cudaJitErrorLogBuffer());
      options.setAtIndex(JAVA_INT, 1, CudartH.cudaJitErrorLogBufferSizeBytes());
      MemorySegment values = arena.allocate(ADDRESS, 2);
      values.setAtIndex(ADDRESS, 0, log);
      values.setAtIndex(ADDRESS, 1, MemorySegment.ofAddress(LOG_BYTES));
      MemorySegment out = arena.allocate(ADDRESS);
      int rc =
          CudartH.cudaLibraryLoadData(
              out, code, options, values, 2, MemorySegment.NULL, MemorySegment.NULL, 0);
      if (rc != 0) {
        String text = textOf(log);
        logged.close();
        throw CudaException.of(operation, rc, device, hint(rc) + text);
      }
      library = out.get(ADDRESS, 0);
    }
    KernelModule module = new KernelModule(device, library, origin, logged);
    try {
      List<String> names = module.names();
      if (names.isEmpty()) { // CUDA may take what it cannot translate, until it is asked for
        throw new IllegalArgumentException(
            operation + " on " + device + ": CUDA finds no kernel in it" + textOf(log));
      }
      names.forEach(module::kernel); // so that no launch has to load one
    } catch (RuntimeException e) {
      module.close();
      throw e;
    }
    return module;
  }

  private static String textOf(MemorySegment log) {
    String text = log.getString(0).strip();
    return text.isEmpty() ? "" : "\nLog:\n" + text;
  }

  private static String hint(int rc) {
    return rc == CudartH.cudaErrorUnsupportedPtxVersion()
        ? "; the driver is older than the compiler: compile for the device itself (sm_NN)"
        : "";
  }

  /** The device that it is loaded for. */
  public CudaDevice device() {
    return device;
  }

  /**
   * The names of its kernels, in order ({@code cudaLibraryEnumerateKernels}, which is as old as
   * loading is). A kernel that is not {@code extern "C"} has a name like {@code _Z5scalePfi}.
   */
  public synchronized List<String> names() {
    checkOpen("cudaLibraryEnumerateKernels");
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment count = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaLibraryGetKernelCount(count, library);
      CudaException.check(rc, "cudaLibraryGetKernelCount of the " + this, device);
      int n = count.get(JAVA_INT, 0);
      MemorySegment all = arena.allocate(ADDRESS, Math.max(1, n));
      rc = CudartH.cudaLibraryEnumerateKernels(all, n, library);
      CudaException.check(rc, "cudaLibraryEnumerateKernels of the " + this, device);
      List<String> names = new ArrayList<>();
      MemorySegment name = arena.allocate(ADDRESS);
      for (int i = 0; i < n; i++) {
        rc = CudartH.cudaFuncGetName(name, all.getAtIndex(ADDRESS, i));
        CudaException.check(rc, "cudaFuncGetName", device);
        names.add(NativeText.copy(name.get(ADDRESS, 0)));
      }
      names.sort(null);
      return names;
    }
  }

  /**
   * One of its kernels ({@code cudaLibraryGetKernel}).
   *
   * @throws IllegalArgumentException naming those that there are, if it is none of them
   */
  public synchronized Kernel kernel(String name) {
    checkOpen("cudaLibraryGetKernel");
    Kernel known = kernels.get(name);
    if (known != null) {
      return known;
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      int rc = CudartH.cudaLibraryGetKernel(out, library, arena.allocateFrom(name));
      if (rc == CudartH.cudaErrorSymbolNotFound()) {
        int unused = CudartH.cudaGetLastError();
        throw new IllegalArgumentException(missing(name, names()));
      }
      CudaException.check(rc, "cudaLibraryGetKernel(" + name + ") of the " + this, device);
      Kernel kernel = new Kernel(this, name, out.get(ADDRESS, 0));
      kernels.put(name, kernel);
      return kernel;
    }
  }

  private String missing(String name, List<String> names) {
    boolean mangled = names.stream().anyMatch(n -> n.startsWith("_Z") && n.contains(name));
    return "the "
        + this
        + " has no kernel "
        + name
        + ", it has "
        + names
        + (mangled ? "; declare it extern \"C\" __global__" : "");
  }

  void checkOpen(String operation) {
    if (closed) {
      throw new IllegalStateException(operation + ": the " + this + " is closed");
    }
  }

  /** Keeps it from being closed until {@link #endUse}. */
  long beginUse(String operation) {
    long stamp = using.readLock();
    try {
      checkOpen(operation);
      return stamp;
    } catch (IllegalStateException e) {
      using.unlockRead(stamp);
      throw e;
    }
  }

  void endUse(long stamp) {
    using.unlockRead(stamp);
  }

  /**
   * Unloads it ({@code cudaLibraryUnload}). Its kernels must have ended, and no graph that holds
   * one may be launched again. Waits for launches that other threads are making.
   *
   * @throws DeadlineException if one takes longer than 10 seconds, or on interruption; it is open
   *     then
   */
  @Override
  public synchronized void close() {
    if (closed) {
      return;
    }
    long stamp = 0;
    try {
      stamp = using.tryWriteLock(LAUNCH_TIMEOUT.toMillis(), TimeUnit.MILLISECONDS);
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    }
    if (stamp == 0) {
      throw new DeadlineException("a launch of a kernel keeps the " + this + " from being closed");
    }
    closed = true;
    using.unlockWrite(stamp);
    leak.closed();
    if (!device.isLost()) {
      device.makeCurrent();
      CudaException.check(CudartH.cudaLibraryUnload(library), "cudaLibraryUnload", device);
      logged.close();
    }
  }

  @Override
  public String toString() {
    return "kernel module " + description + " on " + device;
  }
}

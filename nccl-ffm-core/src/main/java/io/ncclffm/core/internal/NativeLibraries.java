package io.ncclffm.core.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.Backend;
import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.UnsupportedByLibraryException;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.invoke.MethodHandle;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import java.util.Optional;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * The loader: chooses the backend once per process, opens its libraries for the life of the process
 * and hands their symbols to the generated bindings. The only class that knows that there are two
 * backends.
 */
public final class NativeLibraries {
  /** Windows, registration and the configurable init that the API builds on. */
  private static final int OLDEST_NCCL = 21901;

  private static final System.Logger LOG = System.getLogger("io.ncclffm");
  private static final ConcurrentHashMap<String, Boolean> NCCL_SYMBOLS = new ConcurrentHashMap<>();
  // Functions that requireNccl has let pass: it comes before hot calls.
  private static final Set<String> USABLE = ConcurrentHashMap.newKeySet();

  private static volatile @Nullable Loaded loaded;
  private static @Nullable NativeLibraryException failure;
  private static @Nullable Library nvrtc;

  private NativeLibraries() {}

  /**
   * What was loaded.
   *
   * @param shim null where the CUDA shim was not built into the jar; its search tells why
   */
  public record Loaded(
      Backend backend,
      String reason,
      Library cudart,
      Library nccl,
      int ncclVersion,
      @Nullable Library shim,
      String shimAttempts) {}

  /** Loads on the first call; a failure is kept and thrown again for every later caller. */
  public static Loaded load() {
    @Nullable Loaded done = loaded;
    return done != null ? done : loadOnce();
  }

  /** Whether some call has chosen and opened the libraries already. */
  public static boolean isLoaded() {
    return loaded != null;
  }

  /** Whether GPUs are out of the question: the CPU backend is asked for, or in use. */
  public static boolean isCpuOnly() {
    @Nullable Loaded done = loaded;
    if (done != null) {
      return done.backend == Backend.CPU;
    }
    String property = System.getProperty("ncclffm.backend");
    return "cpu".equalsIgnoreCase(property != null ? property : System.getenv("NCCLFFM_BACKEND"));
  }

  private static synchronized Loaded loadOnce() {
    @Nullable Loaded done = loaded;
    if (done != null) {
      return done;
    }
    if (failure != null) {
      throw new NativeLibraryException(failure);
    }
    try {
      NativeAccess.require();
      done = choose();
      StructLayouts.verify(done.shim);
      LOG.log(
          System.Logger.Level.INFO,
          "nccl-ffm: {0} backend, {1}; NCCL {2} from {3}",
          done.backend.name().toLowerCase(Locale.ROOT),
          done.reason,
          versionText(done.ncclVersion),
          done.nccl.file());
      loaded = done;
      return done;
    } catch (NativeLibraryException e) {
      failure = e;
      throw e;
    }
  }

  private static Loaded choose() {
    String property = System.getProperty("ncclffm.backend");
    String value = property != null ? property : System.getenv("NCCLFFM_BACKEND");
    String origin = property != null ? "-Dncclffm.backend" : "NCCLFFM_BACKEND";
    switch (value == null ? "auto" : value.toLowerCase(Locale.ROOT)) {
      case "cpu":
        return openCpu("asked for by " + origin);
      case "cuda":
        return openCuda("asked for by " + origin, openCudart(), openNccl());
      case "auto":
        return openAuto();
      default:
        throw new NativeLibraryException(
            origin + "=" + value + ": unknown backend; take auto, cuda or cpu");
    }
  }

  private static Loaded openAuto() {
    LibrarySearch cudartSearch = LibrarySearch.cudart();
    @Nullable Library cudart = cudartSearch.find(CUDART_SONAMES);
    if (cudart == null && cudartSearch.namedByUser()) {
      throw cudartSearch.failure();
    }
    LibrarySearch ncclSearch = LibrarySearch.nccl();
    @Nullable Library nccl = ncclSearch.find(NCCL_SONAMES);
    if (nccl == null && ncclSearch.namedByUser()) {
      throw ncclSearch.failure();
    }
    if (cudart == null) {
      return openCpu("no libcudart: " + cudartSearch.shortReason());
    }
    int devices = deviceCount(cudart);
    if (devices <= 0) {
      return openCpu(
          devices == 0
              ? "no GPU"
              : "no GPU: cudaGetDeviceCount gave CUDA error "
                  + -devices
                  + " ("
                  + errorText(cudart, -devices)
                  + ")");
    }
    String found = devices + (devices == 1 ? " GPU" : " GPUs") + " found";
    if (nccl == null) {
      return openCpu(found + ", but no libnccl: " + ncclSearch.shortReason());
    }
    return openCuda(found, cudart, nccl);
  }

  private static final List<String> CUDART_SONAMES =
      List.of("libcudart.so.13", "libcudart.so.12", "libcudart.so");
  private static final List<String> NCCL_SONAMES = List.of("libnccl.so.2", "libnccl.so");

  private static final List<String> NVRTC_SONAMES =
      List.of("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so");

  /**
   * What there is of a library, in use or not.
   *
   * @param found each file, and by which rule it is found
   * @param attempts what did not work, with the system's reasons
   */
  public record Search(String library, List<String> found, List<String> attempts) {}

  /** Searches for libcudart and libnccl, for a diagnosis: what is found is opened. */
  public static List<Search> searches() {
    return List.of(
        search("libcudart", LibrarySearch.cudart(), CUDART_SONAMES),
        search("libnccl", LibrarySearch.nccl(), NCCL_SONAMES));
  }

  /** The files of libnccl on this machine, in use or not; none of them is opened. */
  public static Set<String> ncclFiles() {
    return LibrarySearch.nccl().files(NCCL_SONAMES, Path.of("/etc/ld.so.cache"));
  }

  private static Search search(String name, LibrarySearch search, List<String> sonames) {
    return new Search(name, search.findAll(sonames), search.attempts());
  }

  private static Library openCudart() {
    LibrarySearch search = LibrarySearch.cudart();
    @Nullable Library cudart = search.find(CUDART_SONAMES);
    if (cudart == null) {
      throw search.failure();
    }
    return cudart;
  }

  private static Library openNccl() {
    LibrarySearch search = LibrarySearch.nccl();
    @Nullable Library nccl = search.find(NCCL_SONAMES);
    if (nccl == null) {
      throw search.failure();
    }
    return nccl;
  }

  private static Loaded openCuda(String reason, Library cudart, Library nccl) {
    int version = ncclVersion(nccl);
    LibrarySearch shimSearch = LibrarySearch.shim();
    @Nullable Library shim = shimSearch.findBundled("libncclffm_cuda.so");
    if (shim == null && shimSearch.namedByUser()) {
      throw shimSearch.failure();
    }
    return new Loaded(
        Backend.CUDA,
        reason,
        cudart,
        nccl,
        version,
        shim,
        shim == null ? shimSearch.failure().getMessage() : "");
  }

  private static Loaded openCpu(String reason) {
    LibrarySearch search = LibrarySearch.shim();
    @Nullable Library cpu = search.findBundled("libncclffm_cpu.so");
    if (cpu == null) {
      throw search.failure();
    }
    return new Loaded(
        Backend.CPU,
        reason + "; a development backend that emulates devices, not for performance",
        cpu,
        cpu,
        ncclVersion(cpu),
        cpu,
        "");
  }

  private static int ncclVersion(Library nccl) {
    int version;
    try {
      version = callIntOut(nccl, "ncclGetVersion");
    } catch (ProbeFailure e) {
      throw new NativeLibraryException(
          nccl.file() + ": " + e.getMessage() + ". Remedy: name another with -Dncclffm.nccl=FILE.");
    }
    if (version < OLDEST_NCCL) {
      throw new NativeLibraryException(
          "libnccl is too old: needs >= "
              + versionText(OLDEST_NCCL)
              + ", loaded "
              + versionText(version)
              + " from "
              + nccl.file()
              + ". Remedy: install a newer NCCL, or name one with -Dncclffm.nccl=FILE.");
    }
    return version;
  }

  /** The number of devices, or the negated CUDA error. */
  private static int deviceCount(Library cudart) {
    try {
      return callIntOut(cudart, "cudaGetDeviceCount");
    } catch (ProbeFailure e) {
      return -e.code;
    }
  }

  @SuppressWarnings("restricted")
  private static String errorText(Library cudart, int code) {
    MethodHandle handle =
        Linker.nativeLinker()
            .downcallHandle(
                cudart.find("cudaGetErrorString").orElseThrow(),
                FunctionDescriptor.of(ADDRESS, JAVA_INT));
    try {
      return NativeText.copy((MemorySegment) handle.invokeExact(code));
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  static final class ProbeFailure extends RuntimeException {
    private static final long serialVersionUID = 1;
    final int code;

    ProbeFailure(String call, int code) {
      super(call + " returned " + code);
      this.code = code;
    }
  }

  /** Calls {@code int f(int *out)}, before the generated bindings can be used. */
  @SuppressWarnings("restricted")
  static int callIntOut(Library library, String function) {
    MemorySegment address =
        library
            .find(function)
            .orElseThrow(
                () -> new NativeLibraryException(library.file() + " has no symbol " + function));
    MethodHandle handle =
        Linker.nativeLinker().downcallHandle(address, FunctionDescriptor.of(JAVA_INT, ADDRESS));
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = (int) handle.invokeExact(out);
      if (rc != 0) {
        throw new ProbeFailure(function, rc);
      }
      return out.get(JAVA_INT, 0);
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** Symbols of libcudart, for the generated bindings; loads on the first look-up. */
  public static SymbolLookup cudart() {
    return name -> load().cudart.find(name);
  }

  /** Symbols of libnccl, for the generated bindings; loads on the first look-up. */
  public static SymbolLookup nccl() {
    return name -> load().nccl.find(name);
  }

  /** Symbols of the shim, for the generated bindings; loads on the first look-up. */
  public static SymbolLookup shim() {
    return name -> requireShim().find(name);
  }

  /** The shim, or the reason why there is none. */
  public static Library requireShim() {
    Loaded done = load();
    @Nullable Library shim = done.shim;
    if (shim == null) {
      throw new NativeLibraryException(
          "this needs the CUDA shim, which is built where nvcc is installed; " + done.shimAttempts);
    }
    return shim;
  }

  /** Whether the loaded libnccl exports a function. */
  public static boolean ncclHas(String function) {
    return NCCL_SYMBOLS.computeIfAbsent(function, name -> find(name).isPresent());
  }

  private static Optional<MemorySegment> find(String ncclFunction) {
    return load().nccl.find(ncclFunction);
  }

  /**
   * Fails where the loaded libnccl is too old for a function, or lacks it all the same.
   *
   * @param since the first NCCL version that has it
   */
  public static void requireNccl(String function, String since) {
    if (USABLE.contains(function)) {
      return;
    }
    int first = versionCode(since);
    if (load().ncclVersion < first) {
      throw tooOld(function, first);
    }
    if (!ncclHas(function)) {
      throw new UnsupportedByLibraryException(
          tooOld(function, first).getMessage() + ", which lacks it all the same");
    }
    USABLE.add(function);
  }

  /**
   * The exception for what the loaded libnccl is too old for.
   *
   * @param what a function, or an operation and its argument
   * @param since the version code of the first NCCL that has it
   */
  public static UnsupportedByLibraryException tooOld(String what, int since) {
    Loaded done = load();
    return new UnsupportedByLibraryException(
        what
            + " needs NCCL >= "
            + versionText(since)
            + ", loaded "
            + versionText(done.ncclVersion)
            + " from "
            + done.nccl.file());
  }

  private static int versionCode(String version) {
    String[] parts = version.split("\\.");
    return Integer.parseInt(parts[0]) * 10000
        + Integer.parseInt(parts[1]) * 100
        + Integer.parseInt(parts[2]);
  }

  /** NCCL's version code (X*10000 + Y*100 + Z) as text. */
  public static String versionText(int code) {
    return code / 10000 + "." + code / 100 % 100 + "." + code % 100;
  }

  /** Symbols of NVRTC, for the generated bindings; loads it on the first look-up. */
  public static SymbolLookup nvrtc() {
    return name -> requireNvrtc().find(name);
  }

  /**
   * NVRTC, which nothing else needs: looked for at the first use, whatever the backend. Also opens
   * the library of its builtins that lies beside it, which NVRTC itself looks for by name only.
   *
   * @throws NativeLibraryException with every attempt, each time, if there is none
   */
  public static synchronized Library requireNvrtc() {
    @Nullable Library found = nvrtc;
    if (found != null) {
      return found;
    }
    NativeAccess.require();
    LibrarySearch search = LibrarySearch.nvrtc();
    found = search.find(NVRTC_SONAMES);
    if (found == null) {
      throw search.failure();
    }
    int[] version = nvrtcVersion(found);
    String builtins = "libnvrtc-builtins.so." + version[0] + "." + version[1];
    Path beside = Path.of(found.file()).resolveSibling(builtins);
    if (Files.exists(beside)) {
      Libc.open(beside.toString());
    }
    nvrtc = found;
    return found;
  }

  /** Major and minor. */
  @SuppressWarnings("restricted")
  private static int[] nvrtcVersion(Library library) {
    MethodHandle handle =
        Linker.nativeLinker()
            .downcallHandle(
                library.find("nvrtcVersion").orElseThrow(),
                FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS));
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment major = arena.allocate(JAVA_INT);
      MemorySegment minor = arena.allocate(JAVA_INT);
      int rc = (int) handle.invokeExact(major, minor);
      if (rc != 0) {
        throw new NativeLibraryException(library.file() + ": nvrtcVersion returned " + rc);
      }
      return new int[] {major.get(JAVA_INT, 0), minor.get(JAVA_INT, 0)};
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** Files mapped into this process that are copies of a library other than the one in use. */
  public static Set<String> otherCopies(Library library) {
    Set<String> files = new TreeSet<>(ProcessMaps.read().filesNamed(library.filePrefix()));
    files.remove(library.file());
    return files;
  }
}

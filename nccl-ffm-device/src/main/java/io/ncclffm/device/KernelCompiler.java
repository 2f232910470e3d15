package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.bindings.nvrtc.NvrtcH;
import io.ncclffm.core.internal.Library;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.BasicFileAttributes;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.jspecify.annotations.Nullable;

/**
 * Compiles CUDA C++ by NVRTC, an optional library that is looked for as the others are ({@code
 * -Dncclffm.nvrtc}, {@code NCCLFFM_NVRTC}). Needs no GPU.
 *
 * <p>What was compiled once is taken from a cache on disk afterwards, by a hash of source, options,
 * headers and compiler: {@code $XDG_CACHE_HOME/ncclffm/kernels}, else {@code
 * ~/.cache/ncclffm/kernels}, or the folder that {@code -Dncclffm.kernelCache} or {@code
 * NCCLFFM_KERNEL_CACHE} names; {@code off} turns it off. Folders of headers count by their files'
 * names, sizes and times. Threads: any.
 */
public final class KernelCompiler {
  private static final int FORMAT = 1; // of keys and entries
  private static final int MOST_LOG = 4000; // characters of it in a message
  private static final Pattern ERROR =
      Pattern.compile("^(.*)\\((\\d+)\\): ((?:catastrophic )?error.*)$", Pattern.MULTILINE);
  private static final Pattern MISSING_HEADER =
      Pattern.compile("cannot open source file \"([^\"]*)\"");
  // Ranks that are threads compile the same at the same time: one does it.
  private static final ConcurrentHashMap<String, Object> UNDER_WAY = new ConcurrentHashMap<>();

  private KernelCompiler() {}

  /**
   * Compiles, or finds in the cache.
   *
   * @param architecture {@code sm_90} for a cubin, {@code compute_90} for PTX; a {@code
   *     --gpu-architecture} among the source's options comes first
   * @throws KernelCompileException if the source is wrong
   * @throws io.ncclffm.core.NativeLibraryException if there is no NVRTC
   */
  public static KernelImage compile(KernelSource source, String architecture) {
    Library library = NativeLibraries.requireNvrtc();
    @Nullable Path cuda = cudaHeaders(Path.of(library.file()));
    Map<String, String> headers = source.allHeaders();
    List<String> options = options(source, architecture, cuda);
    KernelCache cache = KernelCache.open();
    String key = key(source, options, headers, library, cuda);
    synchronized (UNDER_WAY.computeIfAbsent(key, k -> new Object())) {
      try {
        @Nullable KernelImage known = cache.get(key);
        if (known != null) {
          return known;
        }
        KernelImage made = compile(source, options, headers, cuda);
        cache.put(key, made);
        return made;
      } finally {
        UNDER_WAY.remove(key);
      }
    }
  }

  /**
   * The architectures that the compiler knows, as 90, in rising order ({@code
   * nvrtcGetSupportedArchs}).
   */
  public static List<Integer> architectures() {
    NativeLibraries.requireNvrtc();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment count = arena.allocate(JAVA_INT);
      check(NvrtcH.nvrtcGetNumSupportedArchs(count), "nvrtcGetNumSupportedArchs");
      MemorySegment all = arena.allocate(JAVA_INT, count.get(JAVA_INT, 0));
      check(NvrtcH.nvrtcGetSupportedArchs(all), "nvrtcGetSupportedArchs");
      return all.elements(JAVA_INT).map(e -> e.get(JAVA_INT, 0)).sorted().toList();
    }
  }

  /**
   * What to compile for: the device itself, or PTX for the newest architecture that an older
   * compiler knows.
   *
   * @param device as 90
   */
  static String architectureFor(int device) {
    List<Integer> known = architectures();
    int newest = known.get(known.size() - 1);
    return device > newest ? "compute_" + newest : "sm_" + device;
  }

  private static List<String> options(
      KernelSource source, String architecture, @Nullable Path cuda) {
    // What is found by these would change unnoticed by the cache.
    for (String option : List.of("--include-path", "-I", "--pre-include", "-include")) {
      if (mentions(source.options(), option, option)) {
        throw new IllegalArgumentException(
            source + ": option " + option + ": name folders by includeFolder, headers by header");
      }
    }
    List<String> options = new ArrayList<>(List.of("--no-source-include"));
    if (!mentions(source.options(), "--std", "-std")) {
      options.add("--std=c++17");
    }
    if (!mentions(source.options(), "--gpu-architecture", "-arch")) {
      options.add("--gpu-architecture=" + architecture);
    }
    options.addAll(source.options());
    source.includeFolders().forEach(folder -> options.add("--include-path=" + folder));
    if (cuda != null) {
      options.add("--include-path=" + cuda);
      if (Files.isDirectory(cuda.resolve("cccl"))) { // CUDA 13's libcu++
        options.add("--include-path=" + cuda.resolve("cccl"));
      }
    }
    return options;
  }

  private static boolean mentions(List<String> options, String name, String shortName) {
    return options.stream().anyMatch(o -> o.startsWith(name) || o.startsWith(shortName));
  }

  /**
   * The folder of CUDA's own headers, or null: those beside the compiler, else an installation's.
   */
  private static @Nullable Path cudaHeaders(Path library) {
    List<Path> candidates = new ArrayList<>();
    for (String variable : List.of("CUDA_HOME", "CUDA_PATH")) {
      @Nullable String home = System.getenv(variable);
      if (home != null) {
        candidates.add(Path.of(home, "include"));
      }
    }
    candidates.add(library.resolveSibling("../include").normalize());
    candidates.add(library.resolveSibling("../../../include").normalize()); // targets/X/lib
    candidates.add(Path.of("/usr/local/cuda/include"));
    for (Path candidate : candidates) {
      if (Files.exists(candidate.resolve("cuda_fp16.h"))
          && !candidate.equals(Path.of("/usr/include"))) {
        return candidate;
      }
    }
    return null;
  }

  private static String key(
      KernelSource source,
      List<String> options,
      Map<String, String> headers,
      Library library,
      @Nullable Path cuda) {
    MessageDigest digest = KernelCache.sha256();
    try {
      add(digest, List.of("ncclffm kernel " + FORMAT, source.name(), source.text()));
      add(digest, options);
      add(digest, headers.keySet());
      add(digest, headers.values());
      add(digest, List.of(version(), stamp(Path.of(library.file()))));
      if (cuda != null) { // one installation's headers are of one age
        add(digest, List.of(stamp(cuda.resolve("cuda_fp16.h"))));
      }
      for (Path folder : source.includeFolders()) {
        try (Stream<Path> files = Files.walk(folder)) {
          List<String> stamps = new ArrayList<>();
          for (Path file : (Iterable<Path>) files.filter(Files::isRegularFile)::iterator) {
            stamps.add(stamp(file));
          }
          stamps.sort(null);
          add(digest, stamps);
        }
      }
    } catch (IOException e) {
      throw new UncheckedIOException("headers of " + source + ": " + e.getMessage(), e);
    }
    return HexFormat.of().formatHex(digest.digest());
  }

  private static void add(MessageDigest digest, Collection<String> texts) {
    digest.update((texts.size() + ";").getBytes(StandardCharsets.UTF_8));
    for (String text : texts) {
      byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
      digest.update((bytes.length + ":").getBytes(StandardCharsets.UTF_8));
      digest.update(bytes);
    }
  }

  private static String stamp(Path file) throws IOException {
    BasicFileAttributes attributes = Files.readAttributes(file, BasicFileAttributes.class);
    return file + " " + attributes.size() + " " + attributes.lastModifiedTime().toMillis();
  }

  private static String version() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment major = arena.allocate(JAVA_INT);
      MemorySegment minor = arena.allocate(JAVA_INT);
      check(NvrtcH.nvrtcVersion(major, minor), "nvrtcVersion");
      return "NVRTC " + major.get(JAVA_INT, 0) + "." + minor.get(JAVA_INT, 0);
    }
  }

  private static KernelImage compile(
      KernelSource source, List<String> options, Map<String, String> headers, @Nullable Path cuda) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ADDRESS);
      check(
          NvrtcH.nvrtcCreateProgram(
              out,
              arena.allocateFrom(source.text()),
              arena.allocateFrom(source.name()),
              headers.size(),
              strings(arena, headers.values()),
              strings(arena, headers.keySet())),
          "nvrtcCreateProgram of " + source);
      MemorySegment program = out.get(ADDRESS, 0);
      try {
        int rc = NvrtcH.nvrtcCompileProgram(program, options.size(), strings(arena, options));
        String log = log(arena, program);
        if (rc != NvrtcH.NVRTC_SUCCESS()) {
          throw failure(source, options, cuda, rc, log);
        }
        byte[] image = cubin(arena, program);
        if (image.length == 0) { // no real architecture was asked for
          image = ptx(arena, program);
        }
        if (image.length <= 1) { // the 0 at the end
          throw new IllegalArgumentException(
              source
                  + ": its options make neither a cubin nor PTX, which are what can be loaded: "
                  + String.join(" ", options));
        }
        return new KernelImage(image, log, false);
      } finally {
        check(NvrtcH.nvrtcDestroyProgram(out), "nvrtcDestroyProgram");
      }
    }
  }

  private static MemorySegment strings(Arena arena, Collection<String> texts) {
    MemorySegment all = arena.allocate(ADDRESS, Math.max(1, texts.size()));
    int i = 0;
    for (String text : texts) {
      all.setAtIndex(ADDRESS, i++, arena.allocateFrom(text));
    }
    return all;
  }

  private static String log(Arena arena, MemorySegment program) {
    MemorySegment size = arena.allocate(JAVA_LONG);
    check(NvrtcH.nvrtcGetProgramLogSize(program, size), "nvrtcGetProgramLogSize");
    if (size.get(JAVA_LONG, 0) <= 1) {
      return "";
    }
    MemorySegment text = arena.allocate(size.get(JAVA_LONG, 0));
    check(NvrtcH.nvrtcGetProgramLog(program, text), "nvrtcGetProgramLog");
    return text.getString(0);
  }

  private static byte[] ptx(Arena arena, MemorySegment program) {
    MemorySegment size = arena.allocate(JAVA_LONG);
    check(NvrtcH.nvrtcGetPTXSize(program, size), "nvrtcGetPTXSize");
    MemorySegment image = arena.allocate(size.get(JAVA_LONG, 0));
    check(NvrtcH.nvrtcGetPTX(program, image), "nvrtcGetPTX");
    return image.toArray(JAVA_BYTE);
  }

  private static byte[] cubin(Arena arena, MemorySegment program) {
    MemorySegment size = arena.allocate(JAVA_LONG);
    check(NvrtcH.nvrtcGetCUBINSize(program, size), "nvrtcGetCUBINSize");
    MemorySegment image = arena.allocate(size.get(JAVA_LONG, 0));
    check(NvrtcH.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN");
    return image.toArray(JAVA_BYTE);
  }

  private static void check(int rc, String operation) {
    if (rc != NvrtcH.NVRTC_SUCCESS()) {
      throw new IllegalStateException(operation + ": " + errorText(rc));
    }
  }

  private static String errorText(int rc) {
    return NativeText.copy(NvrtcH.nvrtcGetErrorString(rc)) + " (" + rc + ")";
  }

  private static KernelCompileException failure(
      KernelSource source, List<String> options, @Nullable Path cuda, int rc, String log) {
    StringBuilder message = new StringBuilder("nvrtcCompileProgram of ");
    message.append(source.name()).append(": ").append(errorText(rc));
    String file = "";
    int line = 0;
    Matcher error = ERROR.matcher(log);
    if (error.find()) {
      file = error.group(1);
      line = Integer.parseInt(error.group(2));
      message.append(": ").append(file).append(", line ").append(line).append(": ");
      message.append(error.group(3));
      List<String> lines = source.text().lines().toList();
      if (file.equals(source.name()) && line <= lines.size()) {
        message.append("\n  ").append(line).append(" | ").append(lines.get(line - 1));
      }
    }
    Matcher missing = MISSING_HEADER.matcher(log);
    if (missing.find()) {
      message
          .append("\nThere are: the device library's headers (ncclffm/device.h)")
          .append(source.headers().isEmpty() ? "" : ", the source's " + source.headers().keySet())
          .append(
              source.includeFolders().isEmpty() ? "" : ", what is in " + source.includeFolders())
          .append(
              cuda != null
                  ? ", and CUDA's own in " + cuda
                  : ". CUDA's own were not found: set CUDA_HOME to a toolkit that has"
                      + " include/cuda_fp16.h, or name their folder with includeFolder")
          .append(". NVRTC has no headers of the system.");
    }
    message.append("\nOptions: ").append(String.join(" ", options));
    message.append("\nLog:\n").append(log, 0, Math.min(log.length(), MOST_LOG));
    if (log.length() > MOST_LOG) {
      message.append("... (the whole: KernelCompileException.log())");
    }
    return new KernelCompileException(message.toString(), log, file, line);
  }
}

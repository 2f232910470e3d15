package io.ncclffm.core.bindings;

import static org.junit.jupiter.api.Assumptions.abort;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nvrtc.NvrtcH;
import io.ncclffm.core.bindings.shim.ShimH;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;

/**
 * The generated classes, the argument files they were generated from, and the foreign headers where
 * this machine has them. Tests run in the folder of their module.
 */
final class Generated {
  static final Path BINDINGS = Path.of("..", "native", "bindings");

  private static final Path SOURCES =
      Path.of("src", "main", "java", "io", "ncclffm", "core", "bindings");

  private Generated() {}

  /** The class that holds the functions and constants of {@code library}. */
  static Class<?> header(String library) {
    return Map.of(
            "nccl", NcclH.class,
            "cudart", CudartH.class,
            "nvrtc", NvrtcH.class,
            "shim", ShimH.class)
        .get(library);
  }

  /** Every generated class of {@code library}, by simple name. */
  static Map<String, Class<?>> classes(String library) throws IOException {
    Map<String, Class<?>> classes = new TreeMap<>();
    try (Stream<Path> files = Files.list(SOURCES.resolve(library))) {
      for (Path file : (Iterable<Path>) files::iterator) {
        String name = file.getFileName().toString().replaceFirst("\\.java$", "");
        if (!name.equals("package-info")) {
          classes.put(name, load(header(library).getPackageName() + "." + name));
        }
      }
    }
    return classes;
  }

  /** The functions that {@code library}'s class binds. */
  static Set<String> functions(String library) {
    Set<String> names = new TreeSet<>();
    for (var method : header(library).getMethods()) {
      if (method.getName().endsWith("$handle")) {
        names.add(method.getName().replaceFirst("\\$handle$", ""));
      }
    }
    return names;
  }

  /**
   * The names that {@code library}'s argument file includes as {@code kind} (function, constant,
   * struct, union or typedef).
   */
  static Set<String> included(String library, String kind) throws IOException {
    String option = "--include-" + kind + " ";
    Set<String> names = new TreeSet<>();
    for (String line : Files.readAllLines(BINDINGS.resolve(library + ".args"))) {
      if (line.startsWith(option)) {
        names.add(line.substring(option.length()).strip());
      }
    }
    return names;
  }

  /** The folder of the NCCL headers that the bindings were generated from; else skips the test. */
  static Path ncclInclude() throws IOException {
    return include("nccl", "nccl.h", "NCCL_VERSION_CODE", NcclH.NCCL_VERSION_CODE());
  }

  /** The folder of the CUDA headers that the bindings were generated from; else skips the test. */
  static Path cudaInclude() throws IOException {
    return include("cuda", "cuda_runtime_api.h", "CUDART_VERSION", CudartH.CUDART_VERSION());
  }

  /** A C or C++ header without comments, preprocessor lines and string literals. */
  static String declarations(Path header) throws IOException {
    return Files.readString(header)
        .replaceAll("(?s)/\\*.*?\\*/", " ")
        .replaceAll("//[^\n]*", " ")
        .replaceAll("\"[^\"\n]*\"", "\"\"")
        .replaceAll("(?m)^[ \t]*#([^\n]*\\\\\n)*[^\n]*$", "");
  }

  /** The first group of every match of {@code regex} in {@code text}. */
  static Set<String> matches(String regex, String text) {
    Set<String> names = new TreeSet<>();
    Matcher matcher = Pattern.compile(regex).matcher(text);
    while (matcher.find()) {
      names.add(matcher.group(1));
    }
    return names;
  }

  /**
   * The folder that the environment variable NCCLFFM_LIBRARY_INCLUDE names; without it the one that
   * the build found (the file of -Dncclffm.realLibraries).
   */
  private static Path include(String library, String header, String macro, int version)
      throws IOException {
    String variable = "NCCLFFM_" + library.toUpperCase(Locale.ROOT) + "_INCLUDE";
    String folder = System.getenv(variable);
    if (folder == null) {
      Properties found = realLibraries();
      folder = found.getProperty(library + ".include");
      if (folder == null) {
        return abort("no " + header + "; set " + variable + ". " + found.getProperty("reason", ""));
      }
    }
    Path file = Path.of(folder, header);
    Set<String> versions =
        matches("(?m)^# *define +" + macro + " +([0-9]+)", Files.readString(file));
    if (!versions.contains(String.valueOf(version))) {
      return abort(
          "%s has %s %s, the bindings were made from %d".formatted(file, macro, versions, version));
    }
    return Path.of(folder);
  }

  private static Properties realLibraries() throws IOException {
    Properties found = new Properties();
    String file = System.getProperty("ncclffm.realLibraries");
    if (file != null && Files.exists(Path.of(file))) {
      try (Reader reader = Files.newBufferedReader(Path.of(file))) {
        found.load(reader);
      }
    }
    return found;
  }

  private static Class<?> load(String name) {
    try {
      return Class.forName(name);
    } catch (ClassNotFoundException e) {
      throw new AssertionError(name + " has a source file but no class", e);
    }
  }
}

package io.ncclffm.core.internal;

import io.ncclffm.core.NativeLibraryException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.lang.foreign.MemorySegment;
import java.net.JarURLConnection;
import java.net.URI;
import java.net.URL;
import java.net.URLConnection;
import java.nio.charset.StandardCharsets;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import java.util.zip.CRC32;
import java.util.zip.CheckedInputStream;
import org.jspecify.annotations.Nullable;

/**
 * Looks for one library: system property, environment, already mapped, soname, known package
 * folders; or, for our own libraries, system property, environment, the jar. Keeps every failed
 * attempt with the system's reason. A path that the user named is the only candidate: if it fails,
 * the search fails.
 */
final class LibrarySearch {
  private static final String CPU = "take -Dncclffm.backend=cpu";

  private final String name;
  private final String filePrefix;
  private final String property;
  private final String environment;
  private final String probeSymbol;
  private final String otherRemedy;
  private final List<String> attempts = new ArrayList<>();
  private boolean namedByUser;

  private LibrarySearch(
      String name, String filePrefix, String property, String probeSymbol, String otherRemedy) {
    this.otherRemedy = otherRemedy;
    this.name = name;
    this.filePrefix = filePrefix;
    this.property = property;
    this.environment = property.toUpperCase(Locale.ROOT).replace('.', '_');
    this.probeSymbol = probeSymbol;
  }

  static LibrarySearch cudart() {
    return new LibrarySearch(
        "libcudart", "libcudart.so", "ncclffm.cudart", "cudaRuntimeGetVersion", CPU);
  }

  static LibrarySearch nccl() {
    return new LibrarySearch("libnccl", "libnccl.so", "ncclffm.nccl", "ncclGetVersion", CPU);
  }

  static LibrarySearch shim() {
    return new LibrarySearch(
        "libncclffm", "libncclffm_", "ncclffm.shim", "ncclFfmGetAbiVersion", CPU);
  }

  static LibrarySearch nvrtc() {
    return new LibrarySearch(
        "libnvrtc",
        "libnvrtc.so",
        "ncclffm.nvrtc",
        "nvrtcCompileProgram",
        "install it (CUDA's toolkit, or pip install nvidia-cuda-nvrtc)");
  }

  /** Whether the property or the variable names the file, so that no other may stand in for it. */
  boolean namedByUser() {
    return namedByUser;
  }

  /** Finds a library of the system. */
  @Nullable Library find(List<String> sonames) {
    @Nullable Library found = findNamedByUser();
    if (found != null || namedByUser) {
      return found;
    }
    for (String file : ProcessMaps.read().filesNamed(filePrefix)) {
      found = accept("already mapped", file, Libc.openIfMapped(file));
      if (found != null) {
        return found;
      }
    }
    return findOnDisk(sonames, Set.of());
  }

  /**
   * For a diagnosis: every copy that the process has mapped or that can be found, whatever the user
   * named, and by which rule.
   */
  List<String> findAll(List<String> sonames) {
    Set<String> known = ProcessMaps.read().filesNamed(filePrefix);
    List<String> all = new ArrayList<>();
    known.forEach(file -> all.add(file + " [mapped in this process]"));
    for (@Nullable Library other = findOnDisk(sonames, known);
        other != null;
        other = findOnDisk(sonames, known)) {
      known.add(other.file());
      all.add(other.file() + " [" + other.origin() + "]");
    }
    return all;
  }

  /**
   * For a diagnosis beside a library in use: the files on this machine that may be found by its
   * name. None of them is opened.
   *
   * @param cache where the system's loader keeps what it finds without being told a folder
   */
  Set<String> files(List<String> sonames, Path cache) {
    List<Path> candidates = cached(cache);
    List<Path> folders = packageFolders();
    @Nullable String path = System.getenv("LD_LIBRARY_PATH");
    if (path != null) {
      Stream.of(path.split("[:;]"))
          .filter(s -> !s.isEmpty())
          .flatMap(LibrarySearch::path)
          .forEach(folders::add);
    }
    for (Path folder : folders) {
      sonames.forEach(soname -> candidates.add(folder.resolve(soname)));
    }
    Set<String> files = new TreeSet<>();
    for (Path candidate : candidates) {
      try {
        files.add(candidate.toRealPath().toString());
      } catch (IOException e) {
        continue; // not there, or not to be reached
      }
    }
    return files;
  }

  /** None if the name cannot be said in this JVM's encoding. */
  private static Stream<Path> path(String name) {
    try {
      return Stream.of(Path.of(name));
    } catch (InvalidPathException e) {
      return Stream.empty();
    }
  }

  /** The cache has the names as they are, each with a zero behind it. */
  private List<Path> cached(Path cache) {
    List<Path> files = new ArrayList<>();
    try {
      Pattern name = Pattern.compile("/[^\\x00]*/" + Pattern.quote(filePrefix) + "[^\\x00/]*");
      Matcher found = name.matcher(Files.readString(cache, StandardCharsets.ISO_8859_1));
      while (found.find()) {
        path(found.group()).forEach(files::add);
      }
    } catch (IOException e) {
      return files; // a system without it
    }
    return files;
  }

  private @Nullable Library findOnDisk(List<String> sonames, Set<String> except) {
    @Nullable Library found;
    for (String soname : sonames) {
      found = accept("soname", soname, Libc.open(soname));
      if (found != null && !except.contains(found.file())) {
        return found;
      }
    }
    for (Path folder : packageFolders()) {
      for (String soname : sonames) {
        Path file = folder.resolve(soname);
        if (Files.exists(file)) {
          found = accept("package folder", file.toString(), Libc.open(file.toString()));
          if (found != null && !except.contains(found.file())) {
            return found;
          }
        }
      }
    }
    attempts.add(
        "  package folders: pip's nvidia/*/lib, conda's lib, CUDA_HOME, /usr/local/cuda*: no "
            + String.join(" or ", sonames)
            + " that opens");
    return null;
  }

  /** Finds a library that travels in the nccl-ffm-native jar. */
  @Nullable Library findBundled(String fileName) {
    @Nullable Library found = findNamedByUser();
    if (found != null || namedByUser) {
      return found;
    }
    String resource = "META-INF/ncclffm/" + platform() + "/" + fileName;
    @Nullable ClassLoader loader = LibrarySearch.class.getClassLoader();
    @Nullable URL url =
        loader == null ? ClassLoader.getSystemResource(resource) : loader.getResource(resource);
    if (url == null) {
      attempts.add("  bundled " + resource + ": not on the class path or module path");
      return null;
    }
    try {
      found = openBundled(resource, url);
    } catch (IOException e) {
      attempts.add("  bundled " + url + ": " + e);
    }
    if (found == null && !url.getProtocol().equals("file")) {
      attempts.add(
          "  a copy of it is opened in "
              + System.getProperty("java.io.tmpdir")
              + ", which needs room for it and must not be mounted noexec: -Djava.io.tmpdir=FOLDER");
    }
    return found;
  }

  private @Nullable Library openBundled(String resource, URL url) throws IOException {
    if (url.getProtocol().equals("file")) {
      String file = Path.of(URI.create(url.toString())).toString();
      return accept("bundled", file, Libc.open(file));
    }
    // dlopen needs a file: a new one of this process, which no other user can read or write. Once
    // mapped, its name is not needed any more and nothing is left behind.
    Path copy = Files.createTempFile("ncclffm", ".so");
    try {
      extract(url, copy);
      return accept("bundled (" + resource + ")", copy.toString(), Libc.open(copy.toString()));
    } finally {
      Files.delete(copy);
    }
  }

  private static void extract(URL url, Path copy) throws IOException {
    URLConnection connection = url.openConnection();
    CRC32 checksum = new CRC32();
    try (InputStream in = new CheckedInputStream(connection.getInputStream(), checksum);
        OutputStream out = Files.newOutputStream(copy)) {
      in.transferTo(out);
    }
    // Java itself does not look at it.
    if (connection instanceof JarURLConnection jar
        && jar.getJarEntry().getCrc() != checksum.getValue()) {
      throw new IOException("the jar is damaged: this file's checksum is wrong");
    }
  }

  private @Nullable Library findNamedByUser() {
    @Nullable String value = System.getProperty(property);
    String origin = "-D" + property;
    if (value == null) {
      value = System.getenv(environment);
      origin = environment;
    }
    if (value == null) {
      return null;
    }
    namedByUser = true;
    if (!Files.isRegularFile(Path.of(value))) {
      attempts.add("  " + origin + "=" + value + ": no such file");
      return null;
    }
    return accept(origin, value, Libc.open(value));
  }

  private @Nullable Library accept(String origin, String file, Libc.Opened opened) {
    @Nullable MemorySegment handle = opened.handle();
    if (handle == null) {
      attempts.add("  " + origin + ", " + file + ": " + opened.error());
      return null;
    }
    @Nullable MemorySegment probe = Libc.symbol(handle, probeSymbol);
    if (probe == null) {
      attempts.add(
          "  " + origin + ", " + file + ": is not " + name + ", it has no symbol " + probeSymbol);
      return null;
    }
    @Nullable String mapped = ProcessMaps.read().fileAt(probe.address());
    return new Library(name, filePrefix, origin, handle, mapped == null ? file : mapped);
  }

  /** The failure of this search, with every attempt. */
  NativeLibraryException failure() {
    return new NativeLibraryException(
        "cannot load "
            + name
            + ":\n"
            + String.join("\n", attempts)
            + "\nRemedy: name the file with -D"
            + property
            + "=FILE or "
            + environment
            + "=FILE, or "
            + otherRemedy
            + ".");
  }

  /** What did not work, one line each. */
  List<String> attempts() {
    return attempts.stream().distinct().toList();
  }

  /** One line for the log. */
  String shortReason() {
    return attempts.isEmpty() ? name + " not found" : attempts.get(0).strip();
  }

  /** The folder of the jar that holds this platform's libraries, as {@code linux-x86_64}. */
  static String platform() {
    String arch = System.getProperty("os.arch");
    return System.getProperty("os.name").toLowerCase(Locale.ROOT)
        + "-"
        + (arch.equals("amd64") ? "x86_64" : arch);
  }

  private static List<Path> packageFolders() {
    List<Path> folders = new ArrayList<>();
    for (String variable : List.of("CUDA_HOME", "CUDA_PATH")) {
      @Nullable String home = System.getenv(variable);
      if (home != null) {
        folders.add(Path.of(home, "lib64"));
      }
    }
    for (String variable : List.of("VIRTUAL_ENV", "CONDA_PREFIX")) {
      @Nullable String prefix = System.getenv(variable);
      if (prefix != null) {
        folders.add(Path.of(prefix, "lib"));
        addPythonFolders(folders, Path.of(prefix, "lib"));
      }
    }
    addPythonFolders(folders, Path.of(System.getProperty("user.home"), ".local", "lib"));
    addPythonFolders(folders, Path.of("/usr/local/lib"));
    addPythonFolders(folders, Path.of("/usr/lib"));
    for (Path cuda : list(Path.of("/usr/local"), "cuda*")) {
      folders.add(cuda.resolve("lib64"));
    }
    return folders;
  }

  /** pip puts NVIDIA's libraries into {@code pythonX.Y/{site,dist}-packages/nvidia/NAME/lib}. */
  private static void addPythonFolders(List<Path> folders, Path lib) {
    for (Path python : list(lib, "python3*")) {
      for (Path packages : list(python, "{site,dist}-packages")) {
        for (Path library :
            list(packages.resolve("nvidia"), "{nccl,cuda_runtime,cuda_nvrtc,cu1[0-9]}")) {
          folders.add(library.resolve("lib"));
        }
      }
    }
  }

  private static List<Path> list(Path folder, String glob) {
    List<Path> entries = new ArrayList<>();
    if (Files.isDirectory(folder)) {
      try (DirectoryStream<Path> stream = Files.newDirectoryStream(folder, glob)) {
        stream.forEach(entries::add);
      } catch (IOException e) {
        return List.of(); // an unreadable folder holds no candidate
      }
    }
    entries.sort(null);
    return entries;
  }
}

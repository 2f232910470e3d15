package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.device.KernelCompiler;
import io.ncclffm.device.KernelSource;
import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.regex.MatchResult;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import javax.tools.Diagnostic;
import javax.tools.DiagnosticCollector;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.ToolProvider;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * README.md, CONTRIBUTING.md and docs/ keep to the code. Fenced blocks say what they hold:
 *
 * <ul>
 *   <li>{@code java}: compiles, as a class or in a method of a {@link DocumentationSnippet}; so do
 *       the examples in the Javadoc.
 *   <li>{@code cpp}: a kernel that NVRTC compiles. {@code jshell}: see JshellTest.
 *   <li>{@code sh}: run here, from a folder like the built tree with the README's Hello.java in it.
 *       A {@code text} block right behind it is part of what it prints.
 *   <li>{@code sh build}, {@code sh gpu}: each command is in the table {@link #RUN_BY}.
 *   <li>{@code text}: anything else.
 * </ul>
 */
class DocumentationTest {
  private static final Set<String> LANGUAGES =
      Set.of("java", "cpp", "jshell", "sh", "sh build", "sh gpu", "text");

  /** Begin of a command, then who runs it: a file, and what stands in it. */
  private static final Map<String, List<String>> RUN_BY = new HashMap<>();

  private static void runBy(String file, String evidence, String... commands) {
    for (String command : commands) {
      RUN_BY.put(command, List.of(file, evidence));
    }
  }

  static {
    String results = "benchmarks/results/2026-11-30-h200/";
    runBy(".ci/run", "mvn -B -ntp verify", "mvn verify");
    runBy(
        "scripts/follow-readme.sh",
        "for document in README.md CONTRIBUTING.md docs/testing.md",
        "mvn -Pdemo",
        "mvn -DskipTests",
        "mvn -Psite",
        "mvn -Pgpu-bundle package",
        "mvn install",
        "mvn spotless:apply",
        "mvn -q -Pdoctor",
        "mvn -pl src/test test");
    runBy("benchmarks/results/2026-11-29-cpu/README.md", "mvn -Pjmh", "mvn -Pjmh");
    // By hand, before a release: RepositoryTest looks at what comes of it.
    runBy("pom.xml", "<id>release</id>", "mvn -Prelease deploy", "mvn -Prelease,sign deploy");
    runBy("src/test/java/io/ncclffm/test/ConsumerTest.java", "--file=", "mvn -f src/test/consumer");
    String benchmarks = "benchmarks/src/test/java/io/ncclffm/benchmarks/";
    runBy(benchmarks + "BenchTest.java", "Bench.run", "./run.sh bench");
    runBy(benchmarks + "CompareTest.java", "Compare.", "benchmarks/compare");
    runBy("benchmarks/pom.xml", "jmh-jar", "mvn -Pjmh-jar package", "java -jar benchmarks.jar");
    runBy("native/pom.xml", "build-native.sh", "scripts/build-native.sh test");
    runBy("scripts/build-native.sh", "ctest --output-on-failure", "ctest");
    runBy("native/test/device/CMakeLists.txt", "model/run.sh", "sh native/model/run.sh");
    runBy(
        "native/pom.xml", "bindings/generate.sh", "mvn -Pbindings", "native/bindings/generate.sh");
    runBy(
        "src/test/java/io/ncclffm/test/DoctorTest.java",
        "Doctor.class",
        "java --enable-native-access=ALL-UNNAMED -cp \"lib/*\" io.ncclffm.device.doctor.Doctor",
        "java --enable-native-access=io.ncclffm.core -p lib",
        "./run.sh doctor",
        "mvn -q -Pdoctor -Ddoctor.args");
    // What needs GPUs or a cluster is run by hand; RankInfoTest has the launchers' environments.
    runBy("benchmarks/results/2026-11-29-h200/demo.txt", "./run.sh demo", "./run.sh demo");
    runBy("benchmarks/results/2026-11-29-h200/lsa.txt", "./run.sh test -c", "./run.sh test");
    runBy(results + "device_route.txt", "native-test/device_route 1 2", "native-test/device_route");
    runBy(
        results + "device_calls_cuda_test.txt",
        "memcheck --error-exitcode 9 native-test/device_calls_cuda_test 1 reduced",
        "native-test/device_calls_cuda_test",
        "compute-sanitizer");
    runBy(
        "scripts/build-native.sh",
        "device_cuda_test device_calls_cuda_test",
        "native-test/device_cuda_test",
        "native-test/fused_route");
    runBy(
        "nccl-ffm-core/src/test/java/io/ncclffm/core/bootstrap/RankInfoTest.java",
        "SLURM_",
        "torchrun",
        "srun",
        "mpirun");
  }

  private static final Pattern CODE = Pattern.compile("`([^`\n]+)`");
  private static final Pattern LINK = Pattern.compile("\\]\\(([^)\\s]+)\\)");
  private static final Pattern WORD = Pattern.compile("\\w+");
  private static final Pattern MEMBER = Pattern.compile("([A-Z]\\w*)\\.([a-z]\\w*)(\\(.*\\))?");
  private static final Pattern NAME =
      Pattern.compile("(\\w*[a-z_][A-Z]\\w*|[A-Z]+_\\w+)(\\(.*\\))?");
  private static final Pattern COMMAND =
      Pattern.compile("(mvn|java|cmake|ctest|torchrun|srun|mpirun|\\./|scripts/|native/).* .*");
  private static final Pattern PROPERTY = Pattern.compile("\"(ncclffm\\.[a-z]+)\"");
  private static final Pattern JAVADOC =
      Pattern.compile("<pre>\\{@code\n(.*?)\\}</pre>", Pattern.DOTALL);

  /** Those of jextract's are C. */
  private static final Pattern SNIPPET = Pattern.compile("\\{@snippet (?!lang=c )");

  private static final Pattern TYPE =
      Pattern.compile("(?m)^(?:public |final |abstract )*(?:class|record|interface) (\\w+)");

  private static final String FENCE = "```";

  private record Block(Path file, int line, String language, String text) {
    @Override
    public String toString() {
      return file.getFileName() + ":" + line;
    }
  }

  private static Path tree;
  private static List<Path> documents;

  @BeforeAll
  static void find() throws IOException {
    String property = System.getProperty("ncclffm.test.tree");
    assumeTrue(property != null, "no -Dncclffm.test.tree=FOLDER");
    tree = Path.of(property);
    documents = new ArrayList<>();
    for (String name : List.of("README.md", "CONTRIBUTING.md", "native/bindings/README.md")) {
      documents.add(tree.resolve(name));
    }
    try (Stream<Path> guides = Files.list(tree.resolve("docs"))) {
      guides.filter(file -> file.toString().endsWith(".md")).sorted().forEach(documents::add);
    }
  }

  private static List<Block> blocks() throws IOException {
    List<Block> blocks = new ArrayList<>();
    for (Path file : documents) {
      List<String> lines = Files.readAllLines(file);
      for (int i = 0; i < lines.size(); i++) {
        if (lines.get(i).startsWith(FENCE)) {
          int begin = i++;
          while (!lines.get(i).startsWith(FENCE)) {
            i++;
          }
          String text = String.join("\n", lines.subList(begin + 1, i)) + "\n";
          blocks.add(new Block(file, begin + 1, lines.get(begin).substring(3), text));
        }
      }
    }
    return blocks;
  }

  private static List<Block> blocks(String language) throws IOException {
    return blocks().stream().filter(block -> block.language.equals(language)).toList();
  }

  /** What stands outside the fenced blocks. */
  private static String prose(Path file) throws IOException {
    return Files.readString(file).replaceAll("(?ms)^```.*?^```$", "");
  }

  private static List<Path> sources(String ending, String... folders) throws IOException {
    List<Path> found = new ArrayList<>();
    for (String folder : folders) {
      try (Stream<Path> files = Files.walk(tree.resolve(folder))) {
        files
            .filter(file -> file.toString().matches(".*" + ending))
            .filter(file -> !tree.relativize(file).toString().matches("(.*/)?target/.*"))
            .forEach(found::add);
      }
    }
    return found;
  }

  private static void assertNone(String what, List<String> problems) {
    assertTrue(problems.isEmpty(), what + ":\n" + String.join("\n", problems));
  }

  @Test
  void everyBlockSaysWhatItHolds() throws IOException {
    assertNone(
        "neither of " + LANGUAGES,
        blocks().stream()
            .filter(block -> !LANGUAGES.contains(block.language))
            .map(block -> block + ": \"" + block.language + "\"")
            .toList());
  }

  private static String anchor(String heading) {
    return heading
        .replaceAll("[`*]|^#+ ", "")
        .toLowerCase(Locale.ROOT)
        .replaceAll("[^\\w\\- ]", "")
        .replace(' ', '-');
  }

  @Test
  void linksLeadSomewhere() throws IOException {
    List<String> broken = new ArrayList<>();
    for (Path file : documents) {
      Matcher link = LINK.matcher(prose(file));
      while (link.find()) {
        if (link.group(1).matches("[a-z]+:.*")) {
          continue;
        }
        String[] parts = link.group(1).split("#");
        Path target = parts[0].isEmpty() ? file : file.resolveSibling(parts[0]).normalize();
        boolean found = Files.exists(target);
        if (found && parts.length > 1) {
          found =
              prose(target).lines().anyMatch(l -> l.startsWith("#") && anchor(l).equals(parts[1]));
        }
        if (!found) {
          broken.add(tree.relativize(file) + ": " + link.group(1));
        }
      }
    }
    assertNone("links to nothing", broken);
  }

  /** From Java's own classes and from other programs: names that stand in no source of ours. */
  private static boolean isForeign(String name) {
    for (String known :
        List.of("java.lang.", "java.util.", "java.time.", "java.util.concurrent.")) {
      try {
        Class.forName(known + name);
        return true;
      } catch (ClassNotFoundException e) {
        // the next one
      }
    }
    return name.matches("(NCCL|CUDA|UCX|TORCHELASTIC|XDG|JAVA)_.*|p?ncclX|cudaX_ptsz");
  }

  private static String environment(String property) {
    return property.toUpperCase(Locale.ROOT).replace('.', '_');
  }

  @Test
  void namesStandInTheSources() throws IOException {
    Set<String> words = new HashSet<>();
    Map<String, String> texts = new HashMap<>(); // of Java files, by class
    for (Path file :
        sources(
            "\\.(java|h|c|cpp|cu|cuh|sh|xml|pml|txt|cmake|jfc|args|list)",
            "native",
            "nccl-ffm-core",
            "nccl-ffm-lsa",
            "nccl-ffm-device",
            "benchmarks/src",
            "src",
            "scripts")) {
      words.add(file.getFileName().toString().replace(".java", ""));
      if (file.endsWith("DocumentationTest.java")) {
        continue;
      }
      String text = Files.readString(file);
      // Environment variables of libraries are made from the names of the properties.
      PROPERTY.matcher(text).results().forEach(p -> words.add(environment(p.group(1))));
      WORD.matcher(text).results().map(MatchResult::group).forEach(words::add);
      if (file.toString().endsWith(".java")) {
        String code = text.replaceAll("(?s)/\\*.*?\\*/|//[^\n]*", "");
        texts.merge(file.getFileName().toString().replace(".java", ""), code, String::concat);
      }
    }
    List<String> unknown = new ArrayList<>();
    for (Path file : documents) {
      Matcher code = CODE.matcher(prose(file));
      while (code.find()) {
        Matcher member = MEMBER.matcher(code.group(1));
        Matcher name = NAME.matcher(code.group(1));
        boolean known = true;
        if (member.matches()) {
          // Declared there: behind a type, as a method, a component or a field.
          String declared = "(?s).*[\\w>\\]] " + member.group(2) + "[(,;)].*";
          String text = texts.get(member.group(1));
          known =
              text != null
                  ? text.matches(declared)
                  : words.contains(member.group(1)) || isForeign(member.group(1));
        } else if (name.matches()) {
          known = words.contains(name.group(1)) || isForeign(name.group(1));
        }
        if (!known) {
          unknown.add(tree.relativize(file) + ": " + code.group(1));
        }
      }
    }
    assertNone("named, but not there", unknown);
  }

  @Test
  void otherCommandsAreRunSomewhere() throws IOException {
    List<String> commands = new ArrayList<>();
    for (Block block : blocks()) {
      if (block.language.matches("sh (build|gpu)")) {
        block.text.replace("\\\n", " ").lines().forEach(line -> commands.add(block + ": " + line));
      }
    }
    for (Path file : documents) {
      CODE.matcher(prose(file))
          .results()
          .map(code -> code.group(1))
          .filter(code -> COMMAND.matcher(code).matches())
          .forEach(code -> commands.add(file.getFileName() + ": " + code));
    }
    List<String> unknown = new ArrayList<>();
    for (String line : commands) {
      // Without what sets the environment.
      String command =
          line.substring(line.indexOf(": ") + 2).replaceFirst("^( *[A-Z_]+=\\S+)* *", "").strip();
      if (!command.matches("|#.*|(cd|export|tar) .*")
          && RUN_BY.keySet().stream().noneMatch(command::startsWith)) {
        unknown.add(line);
      }
    }
    assertNone("not in the table RUN_BY", unknown);
    for (List<String> by : RUN_BY.values()) {
      Path file = tree.resolve(by.get(0));
      assertTrue(Files.readString(file).contains(by.get(1)), () -> by.get(1) + " in " + file);
    }
  }

  /** By the blocks and by the test, and by users in their tree. */
  private static final Set<String> WRITTEN = Set.of("Hello.java", "nccl.jfr", "META-INF");

  static List<Block> shellBlocks() throws IOException {
    return blocks("sh");
  }

  private static String hello() throws IOException {
    return blocks("java").stream()
        .filter(block -> block.text.contains("class Hello "))
        .findFirst()
        .orElseThrow()
        .text;
  }

  /** What the block that follows says is printed; empty if there is none. */
  private static List<String> promised(Block block) throws IOException {
    List<Block> all = blocks();
    int next = all.indexOf(block) + 1;
    boolean follows =
        next < all.size()
            && all.get(next).language.equals("text")
            && all.get(next).file.equals(block.file)
            && all.get(next).line - block.line - block.text.lines().count() <= 4;
    return follows ? all.get(next).text.lines().toList() : List.of();
  }

  @ParameterizedTest
  @MethodSource("shellBlocks")
  @Timeout(value = 5, unit = TimeUnit.MINUTES)
  void shellBlocksWork(Block block, @TempDir Path folder) throws Exception {
    try (Stream<Path> jars = Files.walk(tree.resolve("nccl-ffm-device"), 2)) {
      assumeTrue(
          jars.anyMatch(file -> file.toString().endsWith(".jar")), "mvn package comes first");
    }
    assumeTrue(TestRanks.onCpu(), "once is enough");
    List<Path> links = new ArrayList<>();
    try (Stream<Path> entries = Files.list(tree)) {
      for (Path entry : entries.toList()) {
        if (!WRITTEN.contains(entry.getFileName().toString())) {
          links.add(Files.createSymbolicLink(folder.resolve(entry.getFileName()), entry));
        }
      }
    }
    Files.writeString(folder.resolve("Hello.java"), hello());
    try {
      String printed = run(block.text, folder);
      for (String line : promised(block)) {
        assertTrue(printed.contains(line), () -> "not printed: " + line + "\n" + printed);
      }
    } finally {
      for (Path link : links) {
        Files.delete(link);
      }
    }
  }

  private static String run(String commands, Path folder) throws Exception {
    Path output = folder.resolve("what-it-printed");
    ProcessBuilder shell = new ProcessBuilder("bash", "-euo", "pipefail", "-c", commands);
    shell.directory(folder.toFile()).redirectErrorStream(true).redirectOutput(output.toFile());
    shell.redirectInput(Path.of("/dev/null").toFile());
    String home = System.getProperty("java.home");
    shell.environment().put("JAVA_HOME", home);
    shell.environment().merge("PATH", home + "/bin:", (path, bin) -> bin + path);
    shell.environment().put("NCCLFFM_BACKEND", "cpu");
    Process process = shell.start();
    boolean ended = process.waitFor(4, TimeUnit.MINUTES);
    process.descendants().forEach(ProcessHandle::destroyForcibly);
    process.destroyForcibly();
    String printed = Files.readString(output);
    assertTrue(ended, () -> commands + "does not end:\n" + printed);
    assertEquals(0, process.exitValue(), () -> commands + printed);
    return printed;
  }

  @Test
  void kernelsCompile() throws IOException {
    List<Block> kernels = blocks("cpp");
    assertTrue(!kernels.isEmpty());
    NvrtcHere.assumePresent();
    for (Block kernel : kernels) {
      KernelCompiler.compile(
          KernelSource.builder(kernel.text).name(kernel.toString()).build(), "sm_90");
    }
  }

  @Test
  void javaCompiles(@TempDir Path classes) throws IOException {
    assumeTrue(ModuleLayer.boot().findModule("java.compiler").isPresent(), "no compiler");
    List<Block> blocks = new ArrayList<>(blocks("java"));
    for (Path file :
        sources("src/main/.*\\.java", "nccl-ffm-core", "nccl-ffm-lsa", "nccl-ffm-device")) {
      String text = Files.readString(file);
      assertFalse(SNIPPET.matcher(text).find(), () -> file + ": only <pre>{@code is compiled here");
      for (MatchResult found : JAVADOC.matcher(text).results().toList()) {
        int line = (int) text.substring(0, found.start(1)).lines().count();
        blocks.add(new Block(file, line, "java", found.group(1).replaceAll("(?m)^ *\\* ?", "")));
      }
    }
    assertTrue(blocks.size() > 10, blocks::toString);
    assertNone("does not compile", Javac.problems(blocks, classes));
  }

  /** Apart, because a runtime without a compiler cannot load it. */
  private static final class Javac {
    private static final String BEFORE =
        """
        package io.ncclffm.test;
        import io.ncclffm.core.*;
        import io.ncclffm.core.bootstrap.*;
        import io.ncclffm.device.*;
        import io.ncclffm.lsa.*;
        import java.lang.foreign.*;
        import java.time.*;
        import java.util.*;
        abstract class %s extends DocumentationSnippet {
          void run() throws Exception {
        """;

    private static final class Source extends SimpleJavaFileObject {
      private final Block block;
      private final String text;
      private final int linesBefore;

      Source(Block block, int number) {
        super(URI.create("string:///" + className(block, number) + ".java"), Kind.SOURCE);
        this.block = block;
        // "..." in a place of its own stands for what the reader fills in.
        String shown = block.text.replaceAll("(?m)(^|\\{) *\\.\\.\\. *($|\\})", "$1$2");
        boolean isType = TYPE.matcher(shown).find();
        String before = isType ? "" : BEFORE.formatted(className(block, number));
        this.text = isType ? shown : before + shown + "}}\n";
        this.linesBefore = (int) before.lines().count();
      }

      private static String className(Block block, int number) {
        Matcher type = TYPE.matcher(block.text);
        return type.find() ? type.group(1) : "Snippet" + number;
      }

      @Override
      public CharSequence getCharContent(boolean ignoreEncodingErrors) {
        return text;
      }
    }

    static List<String> problems(List<Block> blocks, Path classes) {
      JavaCompiler compiler = ToolProvider.getSystemJavaCompiler();
      DiagnosticCollector<JavaFileObject> diagnostics = new DiagnosticCollector<>();
      List<Source> sources = new ArrayList<>();
      for (Block block : blocks) {
        sources.add(new Source(block, sources.size()));
      }
      String path = System.getProperty("java.class.path");
      List<String> options = List.of("-proc:none", "-d", classes.toString(), "-cp", path);
      compiler.getTask(null, null, diagnostics, options, null, sources).call();
      List<String> problems = new ArrayList<>();
      for (Diagnostic<? extends JavaFileObject> diagnostic : diagnostics.getDiagnostics()) {
        if (diagnostic.getKind() == Diagnostic.Kind.ERROR) {
          String where = "";
          if (diagnostic.getSource() instanceof Source source) {
            long line = source.block.line + diagnostic.getLineNumber() - source.linesBefore;
            where = source.block.file.getFileName() + ":" + line + ": ";
          }
          problems.add(where + diagnostic.getMessage(null));
        }
      }
      return problems;
    }
  }
}

package io.ncclffm.test;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;

/**
 * A JVM that runs a main class of the test class path. Nothing waits for it without a deadline, and
 * closing ends it, whatever it does.
 */
final class ChildJvm implements AutoCloseable {
  /** The output of a process that has ended is at hand. */
  private static final long READER_MILLIS = 10_000;

  /** How to start one: by default with this JVM's properties of the library and its environment. */
  static final class Setup {
    private final Class<?> main;
    private final List<String> arguments;
    private final Map<String, String> properties = new TreeMap<>();
    private final List<String> options = new ArrayList<>();
    private final ProcessBuilder process = new ProcessBuilder();
    private boolean nativeAccess = true;
    private String classPath = System.getProperty("java.class.path");

    private Setup(Class<?> main, String... arguments) {
      // The environment as this JVM was started with, not as it was changed for a shared GPU since.
      process.environment();
      this.main = main;
      this.arguments = List.of(arguments);
      for (String name : System.getProperties().stringPropertyNames()) {
        if (name.startsWith("ncclffm.")) {
          properties.put(name, System.getProperty(name));
        }
      }
    }

    Setup property(String name, Object value) {
      properties.put(name, value.toString());
      return this;
    }

    /** An option of the JVM's own, as -Xmx64m. */
    Setup option(String option) {
      options.add(option);
      return this;
    }

    Setup environment(String name, Object value) {
      process.environment().put(name, value.toString());
      return this;
    }

    Setup classPath(String entries) {
      classPath = entries;
      return this;
    }

    /** Started by another program, of which the command of the JVM is the last argument. */
    Setup behind(List<String> program) {
      process.command().addAll(program);
      return this;
    }

    /** Without --enable-native-access. */
    Setup withoutNativeAccess() {
      nativeAccess = false;
      return this;
    }

    /** Takes away all that says which backend and which libraries to take. */
    Setup withoutLibrarySettings() {
      for (String name : List.of("backend", "cudart", "nccl", "shim")) {
        properties.remove("ncclffm." + name);
        process.environment().remove("NCCLFFM_" + name.toUpperCase(java.util.Locale.ROOT));
      }
      return this;
    }

    ChildJvm start() {
      List<String> command = process.command();
      command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
      if (nativeAccess) {
        command.add("--enable-native-access=ALL-UNNAMED");
      }
      // Short lives: no time for the optimising compiler, no threads for the collector.
      command.add("-XX:TieredStopAtLevel=1");
      command.add("-XX:+UseSerialGC");
      command.addAll(options);
      command.add("-cp");
      command.add(classPath);
      properties.forEach((name, value) -> command.add("-D" + name + "=" + value));
      command.add(main.getName());
      command.addAll(arguments);
      try {
        return new ChildJvm(process.redirectErrorStream(true).start());
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }
  }

  private final Process process;
  private final Thread reader;
  private final List<String> lines = new ArrayList<>();
  private boolean ended;

  private ChildJvm(Process process) {
    this.process = process;
    this.reader = Thread.ofPlatform().daemon().name("output of a child JVM").start(this::read);
  }

  /** Whether a program that starts another one can do so here. */
  static boolean runs(List<String> program) throws InterruptedException {
    List<String> command = new ArrayList<>(program);
    command.add("true");
    try {
      return new ProcessBuilder(command).redirectErrorStream(true).start().waitFor() == 0;
    } catch (IOException e) {
      return false; // there is no such program
    }
  }

  static Setup of(Class<?> main, String... arguments) {
    return new Setup(main, arguments);
  }

  private void read() {
    try (BufferedReader output = process.inputReader()) {
      for (String line = output.readLine(); line != null; line = output.readLine()) {
        add(line);
      }
    } catch (IOException e) {
      add("(output lost: " + e + ")"); // its pipe breaks when it is killed
    }
    synchronized (lines) {
      ended = true;
      lines.notifyAll();
    }
  }

  private void add(String line) {
    synchronized (lines) {
      lines.add(line);
      lines.notifyAll();
    }
  }

  long pid() {
    return process.pid();
  }

  /** Sends a line to its standard input and closes that. */
  void send(String line) {
    tell(line);
    endInput();
  }

  /** Sends a line to its standard input, which stays open. */
  void tell(String line) {
    try {
      process.outputWriter().append(line).append('\n').flush();
    } catch (IOException e) {
      throw new AssertionError("cannot write to the child: " + e + "\n" + output(), e);
    }
  }

  void endInput() {
    try {
      process.outputWriter().close();
    } catch (IOException e) {
      throw new AssertionError("cannot write to the child: " + e + "\n" + output(), e);
    }
  }

  /** Waits for a line that begins so and returns its rest. */
  String awaitLine(String prefix, Duration timeout) throws InterruptedException {
    long deadline = System.nanoTime() + timeout.toNanos();
    synchronized (lines) {
      for (int next = 0; ; ) {
        for (; next < lines.size(); next++) {
          if (lines.get(next).startsWith(prefix)) {
            return lines.get(next).substring(prefix.length());
          }
        }
        long left = TimeUnit.NANOSECONDS.toMillis(deadline - System.nanoTime());
        if (ended || left <= 0) {
          throw new AssertionError(
              (ended ? "the child ended" : timeout + " passed")
                  + " without a line \""
                  + prefix
                  + "\":\n"
                  + output());
        }
        lines.wait(left);
      }
    }
  }

  /** Everything it printed so far. */
  String output() {
    synchronized (lines) {
      return String.join("\n", lines);
    }
  }

  /** Kills it and what it started, which would hold the pipe of its output open. */
  void kill() {
    process.descendants().forEach(ProcessHandle::destroyForcibly);
    process.destroyForcibly();
  }

  /** Waits for its end and returns the exit status; kills it and fails after the timeout. */
  int exitStatus(Duration timeout) throws InterruptedException {
    if (!process.waitFor(timeout.toMillis(), TimeUnit.MILLISECONDS)) {
      kill();
      reader.join(READER_MILLIS);
      throw new AssertionError("the child did not end within " + timeout + ":\n" + output());
    }
    reader.join(READER_MILLIS);
    return process.exitValue();
  }

  @Override
  public void close() {
    kill();
    try {
      process.waitFor(READER_MILLIS, TimeUnit.MILLISECONDS);
      reader.join(READER_MILLIS);
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
    }
  }
}

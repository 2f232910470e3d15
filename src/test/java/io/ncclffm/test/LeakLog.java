package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.jspecify.annotations.Nullable;

/** What the library reports as dropped without being closed, from the start on. */
final class LeakLog extends Handler implements AutoCloseable {
  private static final int COLLECTIONS = 5;

  // Held: a logger that nobody refers to is collected, and its handlers with it.
  private final Logger logger = Logger.getLogger("io.ncclffm");
  private final List<String> reports = new CopyOnWriteArrayList<>();

  private LeakLog() {}

  static LeakLog start() {
    collect();
    LeakLog log = new LeakLog();
    log.logger.addHandler(log);
    return log;
  }

  /** Lets the collector find what was dropped and the cleaner's thread tell of it. */
  private static void collect() {
    for (int i = 0; i < COLLECTIONS; i++) {
      System.gc();
    }
  }

  void assertNothingDropped() {
    collect();
    assertEquals(List.of(), reports, "dropped without close()");
  }

  @Override
  public void publish(LogRecord record) {
    if (record.getMessage().contains("dropped without close()")) {
      @Nullable Throwable site = record.getThrown();
      StackTraceElement[] stack = site == null ? new StackTraceElement[0] : site.getStackTrace();
      String user = "";
      for (StackTraceElement frame : stack) {
        if (!frame.getClassName().startsWith("io.ncclffm.core.")) {
          user = frame.toString();
          break;
        }
      }
      reports.add(record.getMessage() + " " + user);
    }
  }

  @Override
  public void flush() {}

  @Override
  public void close() {
    logger.removeHandler(this);
  }
}

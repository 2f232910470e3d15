package io.ncclffm.core.internal;

import java.lang.ref.Cleaner;
import java.util.concurrent.atomic.AtomicBoolean;
import org.jspecify.annotations.Nullable;

/**
 * Tells of handles that were dropped without being closed, and where they were made. The cleaner
 * thread only logs: a CUDA or NCCL call on it could block it, or come after the driver's end.
 */
public final class LeakReport {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");
  private static final Cleaner CLEANER = Cleaner.create();

  private LeakReport() {}

  /** Follows a handle until {@link Tracker#closed}. */
  public static Tracker track(Object handle, String what) {
    Report report = new Report(what, new Throwable("made here"));
    return new Tracker(report, CLEANER.register(handle, report));
  }

  /** The handle's side. */
  public record Tracker(Report report, Cleaner.Cleanable cleanable) {
    public void closed() {
      report.closed.set(true);
      cleanable.clean();
    }
  }

  /** Must not refer to the handle, or it would never be dropped. */
  private static final class Report implements Runnable {
    private final String what;
    private final @Nullable Throwable site;
    private final AtomicBoolean closed = new AtomicBoolean();

    Report(String what, Throwable site) {
      this.what = what;
      this.site = site;
    }

    @Override
    public void run() {
      if (!closed.get()) {
        LOG.log(
            System.Logger.Level.WARNING,
            "nccl-ffm: a " + what + " was dropped without close(); what it holds stays taken",
            site);
      }
    }
  }
}

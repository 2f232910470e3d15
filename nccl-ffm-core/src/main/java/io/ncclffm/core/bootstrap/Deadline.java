package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

/** The end of a wait. */
final class Deadline {
  private final long end;
  private final Duration timeout;

  private Deadline(long end, Duration timeout) {
    this.end = end;
    this.timeout = timeout;
  }

  /**
   * @param timeout positive, else {@link IllegalArgumentException}
   */
  static Deadline in(Duration timeout) {
    return new Deadline(Backoff.deadline(timeout), timeout);
  }

  Deadline plus(Duration more) {
    return new Deadline(end + more.toNanos(), timeout.plus(more));
  }

  /** The earlier of this one and one that starts now. */
  Deadline atMost(Duration other) {
    return nanosLeft() <= other.toNanos() ? this : in(other);
  }

  long nanosLeft() {
    return end - System.nanoTime();
  }

  boolean passed() {
    return nanosLeft() <= 0;
  }

  /** For a socket's timeout, where 0 would mean for ever. */
  int millisLeft() {
    long millis = TimeUnit.NANOSECONDS.toMillis(nanosLeft());
    return (int) Math.max(1, Math.min(Integer.MAX_VALUE, millis));
  }

  /** Ends at the deadline and on interruption at the latest; the caller looks for both. */
  void pause(long millis) {
    LockSupport.parkNanos(Math.min(TimeUnit.MILLISECONDS.toNanos(millis), nanosLeft()));
  }

  /** The whole length of the wait, for messages. */
  @Override
  public String toString() {
    return timeout.toMillis() % 1000 == 0 ? timeout.toSeconds() + " s" : timeout.toMillis() + " ms";
  }

  /** What an interrupted wait throws; the thread stays interrupted. */
  static DeadlineException interrupted(String what) {
    Thread.currentThread().interrupt();
    return new DeadlineException(what + " was interrupted while waiting");
  }
}

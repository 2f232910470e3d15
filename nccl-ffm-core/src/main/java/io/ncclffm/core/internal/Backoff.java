package io.ncclffm.core.internal;

import io.ncclffm.core.DeadlineException;
import java.time.Duration;
import java.util.concurrent.locks.LockSupport;

/**
 * The waiting half of every polling loop: first spins, since most device work is a matter of
 * microseconds, then parks briefly, and ends at the deadline or on interruption.
 */
public final class Backoff {
  private static final int SPINS = 2_000;
  private static final long PARK_NANOS = 50_000;

  private Backoff() {}

  /** The {@link System#nanoTime} at which a wait that starts now must end. */
  public static long deadline(Duration timeout) {
    if (timeout.isNegative() || timeout.isZero()) {
      throw new IllegalArgumentException("timeout " + timeout + ": must be positive");
    }
    try {
      return System.nanoTime() + timeout.toNanos();
    } catch (ArithmeticException e) {
      throw new IllegalArgumentException("timeout " + timeout + ": must be below 292 years", e);
    }
  }

  /**
   * Pauses before the next look.
   *
   * @param round how often the caller has looked already
   * @param what the waiting operation, for the message
   */
  public static void pause(int round, long deadline, String what) {
    pause(round, deadline, what, "");
  }

  /**
   * Pauses before the next look, without allocating.
   *
   * @param what the waiting operation, for the message
   * @param whose appended to it, if it is needed
   */
  public static void pause(int round, long deadline, String what, Object whose) {
    if (round < SPINS) {
      Thread.onSpinWait();
      return;
    }
    if (System.nanoTime() - deadline >= 0) {
      throw new DeadlineException(what + whose + " did not end within its deadline");
    }
    if (Thread.currentThread().isInterrupted()) {
      throw new DeadlineException(what + whose + " was interrupted while waiting");
    }
    LockSupport.parkNanos(PARK_NANOS);
  }
}

package io.ncclffm.benchmarks;

import java.time.Duration;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Where threads meet and go on at the same moment: they spin, as those of the C twins do. A thread
 * that had to be woken would come late, and the others' collectives would wait for it.
 */
final class Meeting {
  private static final int SPINS = 100_000; // then others may need the processor

  private final int threads;
  private final AtomicInteger arrived = new AtomicInteger();
  private final AtomicInteger generation = new AtomicInteger();
  private volatile boolean off;

  Meeting(int threads) {
    this.threads = threads;
  }

  /** Whoever waits, or will, fails. */
  void callOff() {
    off = true;
  }

  /**
   * @throws IllegalStateException if the others do not come in time
   */
  void await(Duration timeout) {
    int before = generation.get();
    if (arrived.incrementAndGet() == threads) {
      arrived.set(0);
      generation.incrementAndGet();
      return;
    }
    long start = System.nanoTime();
    for (int spins = 0; generation.get() == before; spins++) {
      if (off) {
        throw new IllegalStateException("another rank has failed");
      }
      if (spins < SPINS) {
        Thread.onSpinWait();
      } else if (System.nanoTime() - start < timeout.toNanos()) {
        Thread.yield();
      } else {
        throw new IllegalStateException("another rank did not come within " + timeout);
      }
    }
  }
}

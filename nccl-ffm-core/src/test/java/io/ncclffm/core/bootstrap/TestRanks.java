package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assertions.fail;

import io.ncclffm.core.NcclUniqueId;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.locks.LockSupport;
import java.util.function.BooleanSupplier;

/** Ranks as threads, each with an end, for the tests of this package. */
final class TestRanks implements AutoCloseable {
  /** Far beyond what anything here takes, so that only a hang reaches it. */
  static final long LIMIT_SECONDS = 30;

  private final ExecutorService threads = Executors.newVirtualThreadPerTaskExecutor();

  <T> Future<T> start(Callable<T> rank) {
    return threads.submit(rank);
  }

  static <T> T result(Future<T> future) throws Exception {
    try {
      return future.get(LIMIT_SECONDS, TimeUnit.SECONDS);
    } catch (ExecutionException e) {
      if (e.getCause() instanceof Exception cause) {
        throw cause;
      }
      throw e;
    }
  }

  static <T> List<T> results(List<Future<T>> futures) throws Exception {
    List<T> results = new ArrayList<>();
    for (Future<T> future : futures) {
      results.add(result(future));
    }
    return results;
  }

  static <E extends Exception> E failure(Class<E> type, Future<?> future) {
    try {
      Object value = future.get(LIMIT_SECONDS, TimeUnit.SECONDS);
      return fail("no exception, but " + value);
    } catch (ExecutionException e) {
      if (type.isInstance(e.getCause())) {
        return type.cast(e.getCause());
      }
      return fail("not " + type, e.getCause());
    } catch (InterruptedException | TimeoutException | CancellationException e) {
      return fail(e);
    }
  }

  /** Looks until it is so. */
  static void until(String what, BooleanSupplier condition) {
    long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(LIMIT_SECONDS);
    while (!condition.getAsBoolean()) {
      if (System.nanoTime() - end > 0) {
        fail("not within " + LIMIT_SECONDS + " s: " + what);
      }
      // Lets the others run where all virtual threads share one processor.
      LockSupport.parkNanos(100_000);
    }
  }

  /** What could be an id: 128 bytes from a seed. */
  static byte[] id(long seed) {
    byte[] id = new byte[NcclUniqueId.BYTES];
    new Random(seed).nextBytes(id);
    return id;
  }

  /**
   * Waits for what it ends: files that it still writes would be in the way of their folder's end.
   */
  @Override
  public void close() {
    threads.shutdownNow();
    try {
      assertTrue(threads.awaitTermination(LIMIT_SECONDS, TimeUnit.SECONDS), "ranks do not end");
    } catch (InterruptedException e) {
      fail(e);
    }
  }
}

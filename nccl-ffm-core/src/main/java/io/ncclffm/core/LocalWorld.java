package io.ncclffm.core;

import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CancellationException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;

/**
 * All ranks of a communicator in this process, each on a thread of its own with its own stream:
 * rank r on device r, or several ranks on a device where there are more ranks than devices (see
 * {@link DeviceSharing}).
 *
 * <pre>{@code
 * try (LocalWorld world = LocalWorld.open(4)) {
 *   world.run(rank -> {
 *     try (DeviceBuffer x = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 1024)) {
 *       x.copyFrom(data, rank.stream());
 *       rank.communicator().allReduce(x, x, ReduceOp.SUM, rank.stream());
 *       x.copyTo(data, rank.stream());
 *     }
 *   });
 * }
 * }</pre>
 *
 * <p>Threads: the world itself is used by one thread. Where ranks share a GPU, no rank may free
 * device or pinned memory between two of its collectives: CUDA lets a free wait for the whole
 * device, and so for a kernel of another rank that waits for this one. Free after the last wait, as
 * above.
 */
public final class LocalWorld implements AutoCloseable {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");

  /** How long the others get to notice once a rank has failed. */
  private static final Duration AFTER_FAILURE_TIMEOUT = Duration.ofSeconds(10);

  private static final Duration SETUP_TIMEOUT = Duration.ofMinutes(5);

  /**
   * One rank, to be used on its own thread only.
   *
   * @param rank 0 to size - 1
   * @param size number of ranks
   */
  public record Rank(
      int rank, int size, CudaDevice device, CudaStream stream, Communicator communicator) {}

  /** What a rank does. */
  @FunctionalInterface
  public interface RankTask {
    void run(Rank rank) throws Exception;
  }

  private final List<ExecutorService> threads = new ArrayList<>();
  private final List<@Nullable Rank> ranks = Collections.synchronizedList(new ArrayList<>());
  private final Set<Integer> late = new HashSet<>();
  private boolean closed;

  private LocalWorld(int size) {
    for (int r = 0; r < size; r++) {
      String name = "ncclffm-rank-" + r;
      // Daemons: a program that ends without closing must still end.
      threads.add(
          Executors.newSingleThreadExecutor(
              task -> Thread.ofPlatform().daemon().name(name).unstarted(task)));
      ranks.add(null);
    }
  }

  /**
   * Creates the ranks.
   *
   * @param size number of ranks, at least 1
   * @throws IllegalStateException if ranks must share devices and it is too late to prepare that
   */
  public static LocalWorld open(int size) {
    DeviceSharing.prepare(size, size);
    int devices = CudaDevice.count();
    if (devices == 0) {
      throw new IllegalStateException(
          "LocalWorld of " + size + " ranks: no device; take -Dncclffm.backend=cpu");
    }
    NcclUniqueId id = NcclUniqueId.create();
    LocalWorld world = new LocalWorld(size);
    try {
      world.onEach(
          world.allRanks(),
          r -> {
            CudaDevice device = new CudaDevice(r % devices);
            CudaStream stream = CudaStream.create(device);
            try {
              Communicator communicator = Communicator.create(id, size, r, device);
              world.ranks.set(r, new Rank(r, size, device, stream, communicator));
            } catch (RuntimeException e) {
              stream.close();
              throw e;
            }
          },
          SETUP_TIMEOUT,
          "creating the ranks");
      return world;
    } catch (RuntimeException e) {
      world.closeAfter(e);
      throw e;
    }
  }

  /** Number of ranks. */
  public int size() {
    return threads.size();
  }

  /** Runs a task on every rank's thread and waits; {@link CudaStream#DEFAULT_TIMEOUT} at most. */
  public void run(RankTask task) {
    run(task, CudaStream.DEFAULT_TIMEOUT);
  }

  /**
   * Runs a task on every rank's thread and waits for all. When one rank throws, the communicators
   * are aborted so that no other waits for it, and its exception is thrown here with the others'
   * suppressed; the world can only be closed then.
   *
   * @throws DeadlineException if a rank is not done in time
   */
  public void run(RankTask task, Duration timeout) {
    if (closed) {
      throw new IllegalStateException("LocalWorld is closed");
    }
    onEach(allRanks(), r -> task.run(ranks.get(r)), timeout, "the ranks' task");
  }

  private interface IndexedTask {
    void run(int rank) throws Exception;
  }

  private List<Integer> allRanks() {
    return IntStream.range(0, threads.size()).boxed().toList();
  }

  private void onEach(List<Integer> which, IndexedTask task, Duration timeout, String what) {
    long deadline = Backoff.deadline(timeout);
    List<Future<?>> futures = new ArrayList<>();
    for (int rank : which) {
      Callable<@Nullable Void> call =
          () -> {
            task.run(rank);
            return null;
          };
      futures.add(threads.get(rank).submit(call));
    }
    RuntimeException failure = null;
    int round = 0;
    List<Future<?>> waiting = new ArrayList<>(futures);
    while (!waiting.isEmpty()) {
      for (Future<?> future : List.copyOf(waiting)) {
        if (!future.isDone()) {
          continue;
        }
        waiting.remove(future);
        @Nullable RuntimeException thrown = outcome(future, which.get(futures.indexOf(future)));
        if (thrown != null && failure == null) {
          failure = thrown;
          deadline = Math.min(deadline, Backoff.deadline(AFTER_FAILURE_TIMEOUT));
        } else if (thrown != null) {
          failure.addSuppressed(thrown);
        }
      }
      if (failure != null) {
        abortAll(); // at every look: a rank inside a native call can only be aborted after it
      }
      if (!waiting.isEmpty()) {
        try {
          Backoff.pause(round++, deadline, what);
        } catch (DeadlineException e) {
          abortAll();
          for (Future<?> future : waiting) {
            late.add(which.get(futures.indexOf(future)));
            future.cancel(true);
          }
          if (failure == null) {
            throw e;
          }
          failure.addSuppressed(
              new DeadlineException("ranks still inside a call, left as they are: " + late));
          throw failure;
        }
      }
    }
    if (failure != null) {
      throw failure;
    }
  }

  private void abortAll() {
    // First the kernels of all: what one rank frees would wait for those of another on its GPU.
    for (@Nullable Rank rank : ranks) {
      if (rank != null) {
        rank.communicator().abortKernels();
      }
    }
    for (@Nullable Rank rank : ranks) {
      if (rank != null) {
        try {
          rank.communicator().abort();
        } catch (RuntimeException e) {
          LOG.log(System.Logger.Level.DEBUG, e.getMessage()); // inside a call; tried again
        }
      }
    }
  }

  private static @Nullable RuntimeException outcome(Future<?> future, int rank) {
    try {
      future.get(0, TimeUnit.SECONDS);
      return null;
    } catch (ExecutionException e) {
      Throwable cause = e.getCause();
      if (cause instanceof RuntimeException r) {
        return r;
      }
      return new IllegalStateException("rank " + rank + " threw " + cause, cause);
    } catch (InterruptedException | TimeoutException | CancellationException e) {
      return new IllegalStateException("rank " + rank + " was not waited for", e);
    }
  }

  /** Closes every rank's communicator and stream. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    try {
      List<Integer> made =
          allRanks().stream().filter(r -> ranks.get(r) != null && !isStuck(r)).toList();
      onEach(made, this::closeRank, SETUP_TIMEOUT, "closing the ranks");
    } finally {
      threads.forEach(ExecutorService::shutdownNow);
    }
  }

  /** Whether a rank waits for another inside a native call, where nothing can reach it. */
  private boolean isStuck(int r) {
    if (!late.contains(r)) {
      return false;
    }
    try {
      threads.get(r).submit(() -> {}).get(AFTER_FAILURE_TIMEOUT.toSeconds(), TimeUnit.SECONDS);
      return false;
    } catch (InterruptedException | ExecutionException | TimeoutException e) {
      LOG.log(
          System.Logger.Level.WARNING,
          "nccl-ffm: rank {0} is inside a native call and is left as it is",
          r);
      return true;
    }
  }

  private void closeRank(int r) {
    @Nullable Rank rank = ranks.get(r);
    if (rank != null) {
      try {
        rank.communicator().close();
      } finally {
        rank.stream().close();
      }
    }
  }

  private void closeAfter(RuntimeException failure) {
    try {
      close();
    } catch (RuntimeException e) {
      failure.addSuppressed(e);
    }
  }

  @Override
  public String toString() {
    return "world of " + size() + " ranks";
  }
}

package io.ncclffm.core;

import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Optional;
import org.jspecify.annotations.Nullable;

/**
 * Watches one communicator: NCCL's asynchronous errors and the age of what is enqueued. On an error
 * or a timeout it logs what was in flight, aborts the communicator, and so wakes the threads that
 * wait in {@link CudaStream#synchronize} with the exception. Started by {@link Communicator#watch}.
 * Costs an event record and a stack walk an operation.
 */
final class Watchdog {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");
  private static final Duration PERIOD = Duration.ofMillis(50);

  /** An operation whose end is not known yet. */
  private record InFlight(
      String operation,
      long count,
      DataType type,
      CudaStream stream,
      String caller,
      long startNanos,
      CudaEvent end) {

    String describe(long now) {
      return String.format(
          "%s of %d x %s on %s, %d ms old, called from %s",
          operation, count, type, stream, (now - startNanos) / 1_000_000, caller);
    }
  }

  private final Communicator communicator;
  private final long timeoutNanos;
  private final Deque<InFlight> inFlight = new ArrayDeque<>();
  private final Deque<CudaEvent> spareEvents = new ArrayDeque<>();
  private final Thread thread;
  private volatile boolean stopped;

  Watchdog(Communicator communicator, Duration timeout) {
    this.communicator = communicator;
    this.timeoutNanos = Backoff.deadline(timeout) - System.nanoTime();
    this.thread =
        Thread.ofPlatform()
            .daemon()
            .name("ncclffm-watchdog-rank-" + communicator.rank())
            .unstarted(this::watch);
  }

  void start() {
    thread.start();
  }

  /** An operation was enqueued on the stream just now, outside a group. */
  void enqueued(String operation, long count, DataType type, CudaStream stream) {
    Optional<StackWalker.StackFrame> caller =
        StackWalker.getInstance()
            .walk(
                frames ->
                    frames
                        .filter(f -> !f.getClassName().startsWith("io.ncclffm.core."))
                        .findFirst());
    synchronized (inFlight) {
      @Nullable CudaEvent spare = spareEvents.poll();
      CudaEvent end = spare != null ? spare : CudaEvent.create(stream.device());
      end.record(stream);
      String from = caller.map(Object::toString).orElse("unknown");
      inFlight.add(new InFlight(operation, count, type, stream, from, System.nanoTime(), end));
    }
  }

  private void watch() {
    while (!stopped) {
      try {
        Thread.sleep(PERIOD);
        look();
      } catch (InterruptedException e) {
        return;
      } catch (RuntimeException e) {
        giveUp(e);
        return;
      }
    }
  }

  private void look() {
    communicator.throwIfFailed();
    long now = System.nanoTime();
    synchronized (inFlight) {
      while (!inFlight.isEmpty() && inFlight.peek().end().isDone()) {
        spareEvents.add(inFlight.poll().end());
      }
      @Nullable InFlight oldest = inFlight.peek();
      if (oldest != null && now - oldest.startNanos() > timeoutNanos) {
        throw new NcclException(
            oldest.operation(), 8, " on " + communicator, "watchdog: " + oldest.describe(now));
      }
    }
  }

  private void giveUp(RuntimeException cause) {
    if (stopped) {
      return;
    }
    StringBuilder report = new StringBuilder("nccl-ffm: watchdog of ").append(communicator);
    report.append(": ").append(cause.getMessage());
    long now = System.nanoTime();
    synchronized (inFlight) {
      for (InFlight operation : inFlight) {
        report.append("\n  in flight: ").append(operation.describe(now));
      }
    }
    LOG.log(System.Logger.Level.ERROR, report.toString());
    try {
      boolean told = false;
      while (!stopped && !tryAbort(cause, !told)) {
        told = true;
        Thread.sleep(PERIOD);
      }
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt(); // stopped
    }
  }

  /** False while a thread is inside a native call, where NCCL allows no abort. */
  private boolean tryAbort(RuntimeException cause, boolean tell) {
    try {
      communicator.abort(cause);
    } catch (IllegalStateException e) {
      if (tell) {
        LOG.log(System.Logger.Level.ERROR, "nccl-ffm: watchdog tries again: " + e.getMessage());
      }
      return false;
    } catch (RuntimeException e) {
      LOG.log(System.Logger.Level.ERROR, "nccl-ffm: watchdog's abort: " + e.getMessage());
    }
    return true;
  }

  /** Ends the watching and frees its events; called when the communicator ends. */
  void stop() {
    stopped = true;
    thread.interrupt();
    synchronized (inFlight) {
      inFlight.forEach(operation -> operation.end().close());
      inFlight.clear();
      spareEvents.forEach(CudaEvent::close);
      spareEvents.clear();
    }
  }
}

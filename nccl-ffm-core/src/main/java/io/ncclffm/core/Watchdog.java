package io.ncclffm.core;

import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Iterator;
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

  /** An operation that is not known to have ended. */
  private static final class InFlight {
    private final String operation;
    private final long count;
    private final @Nullable DataType type;
    private final CudaStream stream;
    private final String caller;
    private final long startNanos = System.nanoTime();

    /** Null until NCCL has put the operation on the stream. */
    private @Nullable CudaEvent end;

    InFlight(
        String operation, long count, @Nullable DataType type, CudaStream stream, String caller) {
      this.operation = operation;
      this.count = count;
      this.type = type;
      this.stream = stream;
      this.caller = caller;
    }

    boolean isDone() {
      @Nullable CudaEvent marked = end;
      return marked != null && marked.isDone();
    }

    String describe(long now) {
      return String.format(
          "%s of %d %s on %s, %d ms old, called from %s",
          operation,
          count,
          type == null ? "signals" : "x " + type,
          stream,
          (now - startNanos) / 1_000_000,
          caller);
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

  /** An operation was called; in a group or in the background it reaches the stream later. */
  void called(String operation, long count, @Nullable DataType type, CudaStream stream) {
    Optional<StackWalker.StackFrame> caller =
        StackWalker.getInstance()
            .walk(
                frames ->
                    frames
                        .filter(f -> !f.getClassName().startsWith("io.ncclffm.core."))
                        .findFirst());
    String from = caller.map(Object::toString).orElse("unknown");
    synchronized (inFlight) {
      inFlight.add(new InFlight(operation, count, type, stream, from));
    }
  }

  /** What was called is on the streams now: marks its end there. */
  void launched() {
    synchronized (inFlight) {
      if (stopped) {
        return; // the communicator was aborted meanwhile
      }
      for (Iterator<InFlight> youngest = inFlight.descendingIterator(); youngest.hasNext(); ) {
        InFlight operation = youngest.next();
        if (operation.end != null) {
          break;
        }
        @Nullable CudaEvent spare = spareEvents.poll();
        CudaEvent end = spare != null ? spare : CudaEvent.create(operation.stream.device());
        end.record(operation.stream);
        operation.end = end;
      }
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
    if (communicator.state() == Communicator.State.REVOKED) {
      return; // its operations are ended, and a shrink may follow
    }
    communicator.throwIfFailed();
    long now = System.nanoTime();
    synchronized (inFlight) {
      for (Iterator<InFlight> all = inFlight.iterator(); all.hasNext(); ) {
        InFlight operation = all.next();
        if (operation.isDone()) {
          all.remove();
          spareEvents.add(operation.end);
        }
      }
      @Nullable InFlight oldest = inFlight.peek();
      if (oldest != null && now - oldest.startNanos > timeoutNanos) {
        NcclException late =
            new NcclException(
                oldest.operation, 8, " on " + communicator, "watchdog: " + oldest.describe(now));
        FailureEvent.emit(late);
        throw late;
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
    synchronized (inFlight) {
      stopped = true;
      for (InFlight operation : inFlight) {
        if (operation.end != null) {
          operation.end.close();
        }
      }
      inFlight.clear();
      spareEvents.forEach(CudaEvent::close);
      spareEvents.clear();
    }
    thread.interrupt();
  }
}

package io.ncclffm.device;

import io.ncclffm.core.NcclException;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * A lane of a task queue has failed, for good: the tasks from the one named on are not done. Other
 * lanes and the communicator go on; a new queue has lanes that work. After a timeout or an abort,
 * make it on a new device communicator.
 */
public final class TaskQueueException extends NcclException {
  private static final long serialVersionUID = 1;

  private static final int INVALID_ARGUMENT = 4;
  private static final int INVALID_USAGE = 5;
  private static final int REMOTE_ERROR = 6;
  private static final int TIMEOUT = 8;

  private final int rank;
  private final int peer;
  private final int lane;
  private final long number;
  private final Duration waited;
  private final transient @Nullable TaskRecord task;
  private final transient @Nullable TaskRecord peerTask;

  /**
   * @param number where the lane stands, for where there is no task
   */
  TaskQueueException(
      int code,
      int rank,
      int peer,
      int lane,
      long number,
      Duration waited,
      @Nullable TaskRecord task,
      @Nullable TaskRecord peerTask) {
    super(
        task == null ? "task queue" : task.function(),
        code,
        " on rank " + rank,
        describe(code, rank, peer, lane, number, waited, task, peerTask));
    this.rank = rank;
    this.peer = peer;
    this.lane = lane;
    this.number = number;
    this.waited = waited;
    this.task = task;
    this.peerTask = peerTask;
  }

  private static String describe(
      int code,
      int rank,
      int peer,
      int lane,
      long number,
      Duration waited,
      @Nullable TaskRecord task,
      @Nullable TaskRecord peerTask) {
    String at = "lane " + lane + (task == null ? "" : ", at " + task) + ": ";
    String after = " after waiting " + waited.toMillis() + " ms";
    switch (code) {
      case INVALID_ARGUMENT:
        return at + "its arguments are none that the function takes";
      case INVALID_USAGE:
        if (peer < 0) {
          return at + "its channel is in use; a device communicator takes one queue at a time";
        }
        if (task != null && task.equals(peerTask)) {
          return at
              + "rank "
              + peer
              + " refused its arguments (see its exception), or was told to take another protocol"
              + " or algorithm";
        }
        return at
            + "rank "
            + peer
            + " came to "
            + (peerTask == null ? "something else" : peerTask)
            + "; every rank must append the same tasks to a lane, in the same order, on a new queue";
      case REMOTE_ERROR:
        return at
            + "aborted by this process"
            + (peer < 0 || peer == rank ? "" : after + " for rank " + peer);
      case TIMEOUT:
        return at
            + "waited "
            + waited.toMillis()
            + " ms "
            + (peer < 0 || peer == rank
                ? "for tasks of its own to be done, as far as number " + number
                : "for rank " + peer);
      case TaskQueue.QUEUE_BROKEN:
        return at
            + "number "
            + number
            + " was taken by a producer that has not handed in its task"
            + after;
      default:
        return at + "failed" + after;
    }
  }

  /** The same, with the stack of where this is called. */
  TaskQueueException again() {
    return new TaskQueueException(resultCode(), rank, peer, lane, number, waited, task, peerTask);
  }

  /** False: the communicator under the queue is as it was. */
  @Override
  public boolean isCommunicatorFatal() {
    return false;
  }

  /** The rank whose lane failed. */
  public int rank() {
    return rank;
  }

  /** The rank it waited for or that came to another task, or -1. */
  public int peer() {
    return peer;
  }

  /** The lane. */
  public int lane() {
    return lane;
  }

  /** How long it waited. */
  public Duration waited() {
    return waited;
  }

  /** What ran when the lane failed, or null if nothing did. */
  public @Nullable TaskRecord task() {
    return task;
  }

  /**
   * What the peer came to instead; null if it is not known, as of sends and receives, or if both
   * agreed. The same as {@link #task} if the peer refused its arguments, or was configured to take
   * another protocol or algorithm.
   */
  public @Nullable TaskRecord peerTask() {
    return peerTask;
  }
}

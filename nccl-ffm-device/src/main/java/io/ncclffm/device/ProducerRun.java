package io.ncclffm.device;

import io.ncclffm.core.NcclException;
import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * One launch of a kernel that appends tasks: {@link TaskQueue#buckets} or {@link
 * TaskQueue#overlap}. Of one that was captured into a {@link io.ncclffm.core.CudaGraph}, it stands
 * for the last launch of that. Threads: any.
 */
public final class ProducerRun {
  final TaskQueue queue;
  final String operation;
  final int place;
  final long tasks;
  final int blocks;
  final boolean hasResults;

  /** Of a launch that is over; null: all is done. */
  record Outcome(@Nullable NcclException failure) {}

  // All below are the queue's, under its lock.
  boolean inGraph; // which may launch it again
  boolean launched;
  boolean ended;
  long endedAt; // System.nanoTime
  int result;
  final int[] ends;
  boolean done;
  @Nullable NcclException failure;

  /**
   * @param place where its memory is
   * @param tasks that it appends in all
   * @param blocks of the kernel
   * @param hasResults whether each block says how it ended
   */
  ProducerRun(
      TaskQueue queue, String operation, int place, long tasks, int blocks, boolean hasResults) {
    this.queue = queue;
    this.operation = operation;
    this.place = place;
    this.tasks = tasks;
    this.blocks = blocks;
    this.hasResults = hasResults;
    this.ends = new int[queue.config().lanes()];
  }

  boolean isOver() {
    return done || failure != null;
  }

  void begin() {
    launched = true;
    ended = false;
    result = 0;
    done = false;
    failure = null;
  }

  /**
   * Whether the kernel and all of its tasks have ended, well or not.
   *
   * @throws IllegalStateException if it was captured into a graph that was not launched yet; the
   *     same for those below
   */
  public boolean isDone() {
    return queue.look(this) != null;
  }

  /**
   * Why not all is done: a {@link TaskQueueException} if a lane has failed, a {@link
   * QueueFullException} if that was because a block found no room in time. Null if all is done or
   * may still be.
   */
  public @Nullable NcclException failure() {
    @Nullable Outcome outcome = queue.look(this);
    return outcome == null ? null : outcome.failure;
  }

  /**
   * Waits for the kernel and its tasks.
   *
   * @throws TaskQueueException if a lane has failed, or was aborted
   * @throws QueueFullException if a block found no room in the ring until its deadline
   * @throws NcclException if the communicator has failed
   * @throws io.ncclffm.core.DeadlineException after the timeout or on interruption; the work goes
   *     on
   */
  public void await(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    @Nullable Outcome outcome = queue.look(this);
    for (int round = 0; outcome == null; round++) {
      if ((round & 63) == 63) {
        queue.checkCommunicator();
      }
      Backoff.pause(round, deadline, "wait for ", this);
      outcome = queue.look(this);
    }
    if (outcome.failure != null) {
      throw TaskQueue.again(outcome.failure);
    }
  }

  @Override
  public String toString() {
    return operation + " of " + tasks + " tasks by " + blocks + " blocks on the " + queue;
  }
}

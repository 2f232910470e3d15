package io.ncclffm.device;

import io.ncclffm.core.DataType;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.internal.Backoff;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/**
 * Stands for one task that the host has appended to a {@link TaskQueue}. Made by {@link
 * TaskQueue#ticket}; may be used again when its task has ended, so that a program which appends
 * many tasks makes a few tickets. Threads: any.
 */
public final class Ticket {
  final TaskQueue queue;

  // All below are the queue's, under its lock.
  TaskSymbol symbol = TaskQueue.NO_SYMBOL;
  String operation = "";
  DataType type = DataType.INT8;
  long count;
  int lane;

  /** How many tasks the host had appended before it; -1: none was appended with this ticket. */
  long position = -1;

  /** Whether the lane has given it a number, or refused it. */
  boolean answered;

  int sequence;
  int result;
  long answeredAt; // System.nanoTime, if it was refused
  boolean done;
  @Nullable NcclException failure;

  Ticket(TaskQueue queue) {
    this.queue = queue;
  }

  void begin(
      long newPosition,
      TaskSymbol newSymbol,
      String newOperation,
      DataType newType,
      long newCount,
      int newLane) {
    position = newPosition;
    symbol = newSymbol;
    operation = newOperation;
    type = newType;
    count = newCount;
    lane = newLane;
    answered = false;
    sequence = 0;
    result = 0;
    done = false;
    failure = null;
  }

  boolean isOver() {
    return done || failure != null;
  }

  /**
   * Whether the task has ended, well or not. If well, its result is there for whatever is enqueued
   * from now on, and its input may be overwritten. Allocates nothing.
   *
   * @throws IllegalStateException if no task was appended with this ticket
   */
  public boolean isDone() {
    return queue.look(this);
  }

  /**
   * Why the task will not be done: a {@link TaskQueueException} if its lane has failed, a {@link
   * QueueFullException} if it found no room. Null if it is done or may still be.
   */
  public @Nullable NcclException failure() {
    queue.look(this);
    return failure;
  }

  /**
   * Waits for the end of the task, which must have been {@link TaskQueue#launch launched}.
   *
   * @throws TaskQueueException if the lane has failed before the task was done, or was aborted
   * @throws QueueFullException if it found no room in the ring
   * @throws NcclException if the communicator has failed
   * @throws io.ncclffm.core.DeadlineException after the timeout or on interruption; the task goes
   *     on
   * @throws IllegalStateException if it was not launched
   */
  public void await(Duration timeout) {
    long deadline = Backoff.deadline(timeout);
    queue.checkLaunched(this);
    for (int round = 0; !isDone(); round++) {
      if ((round & 63) == 63) {
        queue.checkCommunicator();
      }
      Backoff.pause(round, deadline, "wait for the ", this);
    }
    NcclException failed = failure;
    if (failed != null) {
      throw TaskQueue.again(failed);
    }
  }

  /** The lane of its task. */
  public int lane() {
    return lane;
  }

  /**
   * The number of the task in its lane, unsigned; -1 while the lane has not given it one.
   *
   * @throws IllegalStateException if no task was appended with this ticket
   */
  public long sequence() {
    queue.look(this);
    return answered && result == 0 ? Integer.toUnsignedLong(sequence) : -1;
  }

  @Override
  public String toString() {
    return "task "
        + symbol
        + " ("
        + operation
        + " of "
        + count
        + " x "
        + type
        + ") on lane "
        + lane
        + (answered && result == 0 ? ", number " + Integer.toUnsignedString(sequence) : "")
        + " of the "
        + queue;
  }
}

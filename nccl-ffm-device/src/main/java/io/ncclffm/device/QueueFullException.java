package io.ncclffm.device;

import io.ncclffm.core.NcclException;

/**
 * A task found no room ({@code ncclFfmQueueFull}): the ring of its lane stayed full until the
 * deadline, or too many appended tasks of the host are still on their way to it. Nothing was
 * appended, and the lane goes on; only where a kernel had taken a number for the task, as {@link
 * TaskQueue#overlap} does, has the lane failed.
 */
public final class QueueFullException extends NcclException {
  private static final long serialVersionUID = 1;

  private final int rank;
  private final String detail;

  QueueFullException(String operation, int rank, String detail) {
    super(operation, TaskQueue.QUEUE_FULL, " on rank " + rank, detail);
    this.rank = rank;
    this.detail = detail;
  }

  /** The same, with the stack of where this is called. */
  QueueFullException again() {
    QueueFullException again = new QueueFullException(operation(), rank, detail);
    again.initCause(getCause());
    return again;
  }

  /** False: the communicator under the queue is as it was. */
  @Override
  public boolean isCommunicatorFatal() {
    return false;
  }
}

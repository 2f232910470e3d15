package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DeadlineException;
import java.time.Duration;
import java.util.Arrays;

/**
 * Where the ranks of a communicator that are threads of this process meet, on the host. A rank that
 * waited in a kernel instead could keep another one waiting for ever that is in a {@code cudaFree}:
 * that ends only when the device is idle.
 */
final class Meeting {
  private static final long LOOK_MILLIS = 20;

  private final byte[][] records;
  private byte[][] result = new byte[0][];
  private int arrived;
  private long round;
  private String over = "";

  Meeting(int ranks) {
    records = new byte[ranks][];
  }

  /**
   * Waits for the others.
   *
   * @param place of the caller among the ranks that meet, from 0
   * @return what each of them brought
   * @throws DeadlineException if one does not come; then nobody can meet here any more
   * @throws io.ncclffm.core.NcclException if the communicator fails meanwhile
   * @throws LsaException if another rank has given up or ended its communicator
   */
  synchronized byte[][] exchange(
      int place, byte[] record, Communicator communicator, Duration timeout) {
    checkNotOver(communicator);
    long deadline = System.nanoTime() + timeout.toNanos();
    records[place] = record;
    arrived++;
    long mine = round;
    if (arrived == records.length) {
      result = Arrays.copyOf(records, records.length);
      arrived = 0;
      round++;
      notifyAll();
      return result;
    }
    while (round == mine) {
      checkNotOver(communicator);
      try {
        communicator.throwIfFailed();
      } catch (RuntimeException e) {
        end("a rank's communicator failed: " + e.getMessage());
        throw e;
      }
      if (System.nanoTime() - deadline > 0) {
        end("a rank waited for the others in vain");
        throw new DeadlineException(
            (records.length - arrived)
                + " of "
                + records.length
                + " ranks in this process did not come within "
                + timeout
                + " on "
                + communicator);
      }
      try {
        wait(LOOK_MILLIS);
      } catch (InterruptedException e) {
        Thread.currentThread().interrupt();
        end("a rank was interrupted while it waited for the others");
        throw new DeadlineException("interrupted while waiting for the other ranks");
      }
    }
    // The next round cannot end, and replace the result, before this rank has come again.
    return result;
  }

  private void checkNotOver(Communicator communicator) {
    if (!over.isEmpty()) {
      communicator.throwIfFailed();
      throw new LsaException(over);
    }
  }

  /** Nobody waits here any more, for the first reason given. */
  synchronized void end(String reason) {
    if (over.isEmpty()) {
      over = reason;
      notifyAll();
    }
  }
}

package io.ncclffm.device;

import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * How far a {@link TaskQueue} has come on this rank. The parts are read one after the other while
 * kernels go on, so they may be some tasks apart.
 *
 * @param scheduler what it says that it does; the last word of one that is launched again may be
 *     late
 * @param schedulerLaunches how often it has been launched
 * @param producers that have been launched and have not ended
 * @param lanes in order
 */
public record TaskQueueSnapshot(
    Scheduler scheduler, long schedulerLaunches, int producers, List<Lane> lanes) {
  /** What the last scheduler that was launched is doing ({@code ncclFfmTaskControl}). */
  public enum Scheduler {
    STOPPED,
    RUNNING,
    /** It has announced its end. */
    STOPPING
  }

  /**
   * One lane. The numbers of tasks are unsigned 32-bit numbers, which wrap.
   *
   * @param head the next number to be given
   * @param launched tasks before it may run
   * @param done tasks before it are complete, and their places in the ring free
   * @param generation laps of the ring that head has made since number 0
   * @param oldest the first task that is not done; null if there is none, or if its producer has
   *     not handed it in
   * @param failure what the lane has failed with, or null
   */
  public record Lane(
      int lane,
      long head,
      long launched,
      long done,
      long generation,
      @Nullable TaskRecord oldest,
      @Nullable TaskQueueException failure) {
    @Override
    public String toString() {
      return "lane "
          + lane
          + ": head "
          + head
          + ", launched "
          + launched
          + ", done "
          + done
          + (oldest == null ? "" : ", oldest " + oldest)
          + (failure == null ? "" : ", failed: " + failure.getMessage());
    }
  }

  /** The first task of the first lane that has one which is not done, or null. */
  public @Nullable TaskRecord oldest() {
    for (Lane lane : lanes) {
      if (lane.oldest != null) {
        return lane.oldest;
      }
    }
    return null;
  }
}

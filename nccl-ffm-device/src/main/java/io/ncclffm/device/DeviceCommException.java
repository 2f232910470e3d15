package io.ncclffm.device;

import io.ncclffm.core.NcclException;
import java.time.Duration;

/**
 * A kernel gave up: a peer did not come before the deadline ({@code ncclTimeout}), the device
 * communicator was aborted ({@code ncclRemoteError}), two collectives met on one channel, or a peer
 * called something else ({@code ncclInvalidUsage}). The device communicator is lost on this rank; a
 * new one can be made on the same communicator.
 */
public final class DeviceCommException extends NcclException {
  private static final long serialVersionUID = 1;

  private static final int INVALID_USAGE = 5;
  private static final int REMOTE_ERROR = 6;

  private final int rank;
  private final int peer;
  private final int channel;
  private final int epoch;
  private final Duration waited;

  DeviceCommException(
      String function, int code, int rank, int peer, int channel, int epoch, Duration waited) {
    super(function, code, " on rank " + rank, describe(code, peer, channel, epoch, waited));
    this.rank = rank;
    this.peer = peer;
    this.channel = channel;
    this.epoch = epoch;
    this.waited = waited;
  }

  private static String describe(int code, int peer, int channel, int epoch, Duration waited) {
    if (peer < 0 && code == INVALID_USAGE) {
      return "channel "
          + channel
          + " is in use by another collective, or by another send to or receive from the same peer;"
          + " a device communicator takes one at a time, make one for each stream";
    }
    if (peer < 0) {
      return "aborted by this process";
    }
    if (code == INVALID_USAGE) {
      return "rank "
          + peer
          + " called something else on channel "
          + channel
          + ", epoch "
          + Integer.toUnsignedString(epoch)
          + ": another function, or the same with another count, type, operation, root, protocol,"
          + " algorithm or number of blocks; every rank must make the same calls in the same order,"
          + " on a new device communicator";
    }
    return (code == REMOTE_ERROR ? "aborted after waiting " : "waited ")
        + waited.toMillis()
        + " ms for rank "
        + peer
        + " on channel "
        + channel
        + ", epoch "
        + Integer.toUnsignedString(epoch)
        + "; see what that rank does, then make a new device communicator";
  }

  /** False: the communicator under the device communicator is as it was. */
  @Override
  public boolean isCommunicatorFatal() {
    return false;
  }

  /** The rank whose kernel gave up. */
  public int rank() {
    return rank;
  }

  /** The rank it waited for, or -1. */
  public int peer() {
    return peer;
  }

  /** The channel, which is the index of the block. */
  public int channel() {
    return channel;
  }

  /** The exchange on that channel, an unsigned 32-bit number. */
  public int epoch() {
    return epoch;
  }

  /** How long it waited. */
  public Duration waited() {
    return waited;
  }
}

package io.ncclffm.device;

import io.ncclffm.core.NcclException;
import java.time.Duration;

/**
 * A kernel gave up: a peer did not come before the deadline, the communicator was aborted, or it
 * was used wrongly. The device communicator is lost on this rank; a new one can be made on the same
 * communicator.
 */
public final class DeviceCommException extends NcclException {
  private static final long serialVersionUID = 1;

  private final int rank;
  private final int peer;
  private final int channel;
  private final int epoch;
  private final Duration waited;

  DeviceCommException(
      String function, int code, int rank, int peer, int channel, int epoch, Duration waited) {
    super(
        function,
        code,
        " on rank " + rank,
        "waited "
            + waited.toMillis()
            + " ms for rank "
            + peer
            + " on channel "
            + channel
            + ", epoch "
            + Integer.toUnsignedString(epoch));
    this.rank = rank;
    this.peer = peer;
    this.channel = channel;
    this.epoch = epoch;
    this.waited = waited;
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

package io.ncclffm.device;

import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.lsa.LsaProtocol;
import org.jspecify.annotations.Nullable;

/**
 * How one call is to run, where the library's own choice is not wanted; the same on every rank.
 *
 * @param protocol null: the device communicator's default, else chosen by size and path. LL128
 *     needs the same GPU or NVLink between all ranks; windows take {@link LsaProtocol#SIMPLE} alone
 * @param algorithm null: the device communicator's default where the function has it, else chosen
 *     by size
 * @param blocks of the launch, each on a channel of its own; 0: chosen by size. At most the device
 *     communicator's channels, and what fits on the GPU side by side with the ranks that share it
 */
public record LaunchChoice(
    @Nullable LsaProtocol protocol, @Nullable DeviceAlgorithm algorithm, int blocks) {
  /** All is left to the library. */
  public static final LaunchChoice AUTO = new LaunchChoice(null, null, 0);

  /**
   * @throws IllegalArgumentException if blocks is negative
   */
  public LaunchChoice {
    if (blocks < 0) {
      throw new IllegalArgumentException("blocks " + blocks + ": must not be negative");
    }
  }

  /** This with a protocol. */
  public LaunchChoice with(LsaProtocol protocol) {
    return new LaunchChoice(protocol, algorithm, blocks);
  }

  /** This with an algorithm. */
  public LaunchChoice with(DeviceAlgorithm algorithm) {
    return new LaunchChoice(protocol, algorithm, blocks);
  }

  /** This with a number of blocks. */
  public LaunchChoice withBlocks(int blocks) {
    return new LaunchChoice(protocol, algorithm, blocks);
  }

  /** The {@code ncclFfmProtocol}; null is the library's choice. */
  static int valueOf(@Nullable LsaProtocol protocol) {
    if (protocol == null) {
      return ShimH.ncclFfmProtocolAuto();
    }
    switch (protocol) {
      case LL:
        return ShimH.ncclFfmProtocolLL();
      case LL128:
        return ShimH.ncclFfmProtocolLL128();
      case SIMPLE:
        return ShimH.ncclFfmProtocolSimple();
    }
    throw new AssertionError(protocol);
  }

  /** What the shim filled in. */
  static LaunchChoice of(int protocol, int algorithm, int blocks) {
    @Nullable LsaProtocol chosen = null;
    for (LsaProtocol known : LsaProtocol.values()) {
      if (valueOf(known) == protocol) {
        chosen = known;
      }
    }
    return new LaunchChoice(chosen, DeviceAlgorithm.of(algorithm), blocks);
  }
}

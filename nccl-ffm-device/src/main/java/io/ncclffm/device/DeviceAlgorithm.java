package io.ncclffm.device;

import io.ncclffm.core.bindings.shim.ShimH;
import org.jspecify.annotations.Nullable;

/** Which way the data of a collective takes ({@code ncclFfmAlgorithm}). */
public enum DeviceAlgorithm {
  /** Every rank gives all it has to each rank that needs it, in one exchange. */
  ONE_SHOT(ShimH.ncclFfmAlgorithmOneShot()),
  /** Every rank works on a shard of its own, then hands it on: two exchanges, less data. */
  TWO_SHOT(ShimH.ncclFfmAlgorithmTwoShot()),
  /** Along the ring of ranks, neighbour to neighbour. Takes the channels of send and receive. */
  RING(ShimH.ncclFfmAlgorithmRing());

  private final int value;

  DeviceAlgorithm(int value) {
    this.value = value;
  }

  /** The {@code ncclFfmAlgorithm}; null is the library's choice. */
  static int valueOf(@Nullable DeviceAlgorithm algorithm) {
    return algorithm == null ? ShimH.ncclFfmAlgorithmAuto() : algorithm.value;
  }

  /** Null for the library's choice. */
  static @Nullable DeviceAlgorithm of(int value) {
    for (DeviceAlgorithm algorithm : values()) {
      if (algorithm.value == value) {
        return algorithm;
      }
    }
    return null;
  }
}

package io.ncclffm.lsa;

import io.ncclffm.core.DeviceBuffer;
import java.lang.foreign.MemorySegment;
import java.util.List;

/**
 * One rank's part in making a window by one provider. The ranks go through the steps together;
 * after each they tell one another whether it worked, and if it did not on one, all close.
 */
interface WindowMemory {
  /**
   * Allocates this rank's memory.
   *
   * @return what the others need to reach it
   */
  byte[] offer();

  /** This rank's memory, after {@link #offer}; its contents are undefined. */
  DeviceBuffer local();

  /**
   * Maps the others' memory.
   *
   * @param offers of all ranks
   * @return the base address of every rank as this one's kernels use it; 0 where there is none
   */
  long[] open(List<Card> ranks, byte[][] offers);

  /** After every rank has opened. */
  default void opened() {}

  /** The ranks that {@link #open} joined. */
  LsaTeam team();

  /** NCCL's handle of the window, or a null pointer. */
  default MemorySegment handle() {
    return MemorySegment.NULL;
  }

  /** Unmaps the others' memory. Also after an {@link #open} that failed half way. */
  void closePeers();

  /** Frees this rank's. Also after an {@link #offer} that failed. */
  void closeLocal();
}

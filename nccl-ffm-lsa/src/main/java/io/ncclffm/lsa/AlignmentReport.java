package io.ncclffm.lsa;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.EnumSet;
import java.util.List;
import java.util.Set;

/**
 * What the alignment of some data allows. Nothing is refused for its alignment: what cannot go the
 * fast way goes element by element.
 *
 * @param vectorBytes width of the loads and stores: 16, 8, 4, 2 or 1
 * @param fast the protocols that go at full speed with this data
 * @param zeroCopy whether {@link LsaProtocol#SIMPLE} can leave the data where it is, in a window,
 *     instead of copying it to one: wherever it lies there
 * @param obstacles what keeps it from the faster ways, one sentence each; empty if nothing does
 */
public record AlignmentReport(
    int vectorBytes, Set<LsaProtocol> fast, boolean zeroCopy, List<String> obstacles) {
  private static final int VECTOR = 16;
  private static final int WORD = 8;
  private static final int HALF = 4;
  private static final long NO_WINDOW = -1;

  /**
   * Of elements of a buffer that is in no window.
   *
   * @param offset the first element
   * @throws IllegalArgumentException if they do not lie in the buffer
   */
  public static AlignmentReport of(DeviceBuffer buffer, long offset, long count) {
    long address = buffer.pointer("alignmentReport", offset, count);
    return of(address, count, buffer.type(), NO_WINDOW);
  }

  /**
   * Of elements that begin some bytes behind the begin of an allocation or of a window.
   *
   * @param byteOffset in bytes, not negative
   * @param inWindow whether it is a window
   * @throws IllegalArgumentException if the count or the offset is negative
   */
  public static AlignmentReport of(DataType type, long count, long byteOffset, boolean inWindow) {
    if (count < 0 || byteOffset < 0) {
      throw new IllegalArgumentException(
          count + " elements at byte " + byteOffset + ": must not be negative");
    }
    return of(byteOffset, count, type, inWindow ? byteOffset : NO_WINDOW);
  }

  /**
   * @param windowOffset in bytes, or {@link #NO_WINDOW}
   */
  static AlignmentReport of(long address, long count, DataType type, long windowOffset) {
    long bytes = count * type.bytes();
    List<String> obstacles = new ArrayList<>();
    int vector = (int) Math.min(VECTOR, Long.lowestOneBit(address | VECTOR));
    if (vector < VECTOR) {
      obstacles.add(
          "the address is a multiple of "
              + vector
              + " bytes only: loads and stores are "
              + vector
              + " bytes wide instead of 16, unless Simple's other buffer lies as far beside one");
    }
    while (vector > bytes && vector > 1) {
      vector /= 2;
    }
    EnumSet<LsaProtocol> fast = EnumSet.noneOf(LsaProtocol.class);
    if (address % WORD == 0) {
      fast.add(LsaProtocol.LL);
      fast.add(LsaProtocol.LL128);
    } else {
      obstacles.add(
          "the address is no multiple of 8 bytes: LL and LL128 go "
              + (address % HALF == 0 ? "4 bytes at a time" : "element by element"));
    }
    if (address % VECTOR == 0) {
      fast.add(LsaProtocol.SIMPLE);
    }
    boolean zeroCopy = windowOffset != NO_WINDOW;
    if (!zeroCopy) {
      obstacles.add("the data is in no window: Simple copies it through one");
    } else if (windowOffset % LsaWindow.LINE != 0) {
      obstacles.add(
          "the offset in the window is no multiple of 128 bytes: blocks and ranks share lines at"
              + " the borders of their parts");
    }
    if (bytes % VECTOR != 0) {
      obstacles.add("the last " + bytes % VECTOR + " bytes go element by element");
    }
    return new AlignmentReport(
        vector, Collections.unmodifiableSet(fast), zeroCopy, List.copyOf(obstacles));
  }

  /** Without the protocols that the way to some rank does not carry at full speed. */
  AlignmentReport on(LsaProvider provider, LsaPath[] paths) {
    EnumSet<LsaProtocol> left = EnumSet.noneOf(LsaProtocol.class);
    left.addAll(fast);
    List<String> more = new ArrayList<>(obstacles);
    if (provider == LsaProvider.HOST_STAGED) {
      left.remove(LsaProtocol.LL128);
      more.add(
          "the window is in host memory, on the way to which lines of 128 bytes are not whole");
    } else if (Arrays.asList(paths).contains(LsaPath.PCIE_P2P)) {
      left.remove(LsaProtocol.LL128);
      more.add("PCIe is on the way, which does not keep the 128 bytes of a line together");
    }
    return new AlignmentReport(
        vectorBytes, Collections.unmodifiableSet(left), zeroCopy, List.copyOf(more));
  }
}

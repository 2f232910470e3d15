package io.ncclffm.core.bootstrap;

import java.util.BitSet;

/** Sets of ranks as text. */
final class RankText {
  /** So that a message about thousands of ranks stays readable, and fits into a frame. */
  private static final int MAX_RUNS = 12;

  private RankText() {}

  /** As "rank 3" or "ranks 1, 4..7". */
  static String of(BitSet ranks) {
    StringBuilder text = new StringBuilder(ranks.cardinality() == 1 ? "rank " : "ranks ");
    int runs = 0;
    for (int first = ranks.nextSetBit(0); first >= 0; runs++) {
      int end = ranks.nextClearBit(first);
      if (runs == MAX_RUNS) {
        int more = ranks.get(first, Math.max(first, ranks.length())).cardinality();
        return text.append(" and ").append(more).append(" more").toString();
      }
      text.append(runs == 0 ? "" : ", ").append(first);
      if (end - first > 1) {
        text.append(end - first > 2 ? ".." : ", ").append(end - 1);
      }
      first = ranks.nextSetBit(end);
    }
    return text.toString();
  }
}

package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.BitSet;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

/** Ranks in messages. */
class RankTextTest {
  private static String text(int... ranks) {
    return RankText.of(IntStream.of(ranks).collect(BitSet::new, BitSet::set, BitSet::or));
  }

  @Test
  void runsAreShortened() {
    assertEquals("rank 3", text(3));
    assertEquals("ranks 1, 2", text(1, 2));
    assertEquals("ranks 1, 4..7, 9", text(1, 4, 5, 6, 7, 9));
  }

  @Test
  void longListsEndWithACount() {
    String text = text(IntStream.range(0, 1000).map(i -> 2 * i).toArray());
    assertTrue(text.endsWith("20, 22 and 988 more"), text);
  }
}

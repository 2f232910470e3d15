package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaWindow;
import io.ncclffm.lsa.OutOfWindowException;
import io.ncclffm.lsa.SymmetricPool;
import java.util.ArrayList;
import java.util.BitSet;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class SymmetricPoolTest {
  private static final long BYTES = 1 << 20;

  /** Which lines are taken, by the slowest means: a bit each. */
  private static final class Model {
    private final BitSet taken = new BitSet();

    /** First fit by the definition; -1 if there is none. */
    long place(long size, long alignment) {
      long lines = size / SymmetricPool.LINE;
      for (long offset = 0; offset + size <= BYTES; offset += alignment) {
        int from = Math.toIntExact(offset / SymmetricPool.LINE);
        int used = taken.nextSetBit(from);
        if (used < 0 || used >= from + lines) {
          return offset;
        }
      }
      return -1;
    }

    void set(long offset, long size, boolean value) {
      int from = Math.toIntExact(offset / SymmetricPool.LINE);
      int to = Math.toIntExact((offset + size) / SymmetricPool.LINE);
      assertEquals(
          value ? -1 : from,
          taken.get(from) ? from : -1,
          "the first line of the block at " + offset);
      taken.set(from, to, value);
    }

    long free() {
      return BYTES - taken.cardinality() * SymmetricPool.LINE;
    }
  }

  @ParameterizedTest
  @ValueSource(longs = {1, 2, 3})
  void tenThousandRandomStepsAgreeWithAModel(long seed) {
    String where = "seed " + seed;
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r -> {
            Random random = new Random(seed);
            LsaWindow window = LsaWindow.create(r.communicator(), BYTES);
            SymmetricPool pool = SymmetricPool.over(window, false);
            Model model = new Model();
            List<SymmetricPool.Block> blocks = new ArrayList<>();
            int full = 0;
            for (int step = 0; step < 10_000; step++) {
              if (blocks.isEmpty() || random.nextInt(100) < 55) {
                boolean page = random.nextBoolean();
                long wanted = 1 + random.nextInt(random.nextInt(10) == 0 ? 200_000 : 10_000);
                long unit = page ? SymmetricPool.PAGE : SymmetricPool.LINE;
                long size = (wanted + unit - 1) / unit * unit;
                long expected = model.place(size, page ? SymmetricPool.PAGE : SymmetricPool.LINE);
                if (expected < 0) {
                  full++;
                  assertThrows(
                      OutOfWindowException.class, () -> allocate(pool, wanted, page), where);
                } else {
                  SymmetricPool.Block block = allocate(pool, wanted, page);
                  assertEquals(expected, block.offset(), where + ", step " + step);
                  assertEquals(size, block.bytes(), where);
                  model.set(block.offset(), size, true);
                  blocks.add(block);
                }
              } else {
                SymmetricPool.Block block = blocks.remove(random.nextInt(blocks.size()));
                model.set(block.offset(), block.bytes(), false);
                block.close();
                block.close();
              }
              assertEquals(model.free(), pool.freeBytes(), where + ", step " + step);
            }
            assertTrue(full > 100, where + ": the pool was full only " + full + " times");
            blocks.forEach(SymmetricPool.Block::close);
            try (SymmetricPool.Block all = pool.allocate(BYTES)) {
              assertEquals(0, all.offset(), "all came together again");
            }
          });
    }
  }

  private static SymmetricPool.Block allocate(SymmetricPool pool, long bytes, boolean page) {
    return page ? pool.allocateForWindow(bytes) : pool.allocate(bytes);
  }

  /** The same steps with the same offsets, but in the pool of another window. */
  @Test
  void poolsInAnotherOrderAreToldApart() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            SymmetricPool a = SymmetricPool.over(LsaWindow.create(r.communicator(), BYTES), true);
            SymmetricPool b = SymmetricPool.over(LsaWindow.create(r.communicator(), BYTES), true);
            SymmetricPool first = r.rank() == 0 ? a : b;
            Messages.assertNames(
                assertThrows(LsaException.class, () -> first.allocate(1000)),
                "of the pool in window");
            assertEquals(BYTES, first.freeBytes());
            assertThrows(LsaException.class, first::verify);
            a.verify();
            b.verify();
          });
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {2, 4})
  void aRankThatDivergesIsCaughtOnEveryRankAndNothingIsLost(int ranks) {
    String[] texts = new String[ranks];
    try (LocalWorld world = TestRanks.open(ranks)) {
      world.run(
          r -> {
            boolean odd = r.rank() == ranks - 1;
            LsaWindow window = LsaWindow.create(r.communicator(), BYTES);
            SymmetricPool pool = SymmetricPool.over(window, true);
            SymmetricPool.Block first = pool.allocate(1000);
            SymmetricPool.Block second = pool.allocateForWindow(1000);
            assertEquals(4096, second.offset());
            long free = pool.freeBytes();
            texts[r.rank()] =
                assertThrows(LsaException.class, () -> pool.allocate(odd ? 300 : 200)).getMessage();
            assertThrows(
                LsaException.class,
                () -> {
                  if (odd) {
                    pool.allocate(128).close();
                  } else {
                    first.close();
                  }
                });
            assertEquals(free, pool.freeBytes());
            pool.verify();
            // The address of the block on every rank is that rank's.
            for (int p = 0; p < ranks; p++) {
              assertEquals(window.address(p, 4096, 1024), second.address(p));
            }
            assertEquals(1024, second.local(DataType.FLOAT32).count(), "a whole page");
            second.close();
            first.close();
            assertThrows(IllegalStateException.class, () -> second.address(0));
            assertEquals(BYTES, pool.freeBytes());
          });
    }
    for (String text : texts) {
      assertEquals(texts[0], text);
    }
    Messages.assertNames(
        new Exception(texts[0]),
        "rank 0 allocates 256 bytes at 1024 in step 3",
        "rank " + (ranks - 1) + " allocates 384 bytes at 1024 in step 3");
  }

  @Test
  void anUncheckedPoolFindsOutWhenAsked() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            SymmetricPool pool =
                SymmetricPool.over(LsaWindow.create(r.communicator(), BYTES), false);
            SymmetricPool.Block same = pool.allocate(500);
            pool.verify();
            SymmetricPool.Block different = pool.allocate(500 + 500 * r.rank());
            assertThrows(LsaException.class, pool::verify);
            different.close();
            assertThrows(LsaException.class, pool::verify);
            same.close();
          });
    }
  }

  /** Steps that a weaker hash took for the same. */
  @Test
  void similarStepsAreToldApart() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            SymmetricPool pool =
                SymmetricPool.over(LsaWindow.create(r.communicator(), BYTES), false);
            pool.allocate(r.rank() == 0 ? 128 : 256);
            pool.allocate(r.rank() == 0 ? 8064 : 128);
            assertThrows(LsaException.class, pool::verify);
          });
    }
  }

  @Test
  void wrongSizeOfOneRankIsAnErrorOfAll() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            SymmetricPool pool =
                SymmetricPool.over(LsaWindow.create(r.communicator(), BYTES), true);
            Messages.assertNames(
                assertThrows(LsaException.class, () -> pool.allocate(r.rank() == 0 ? 128 : 0)),
                "rank 0 allocates 128 bytes",
                "rank 1 asks wrongly for 0 bytes");
            assertEquals(BYTES, pool.freeBytes());
            pool.allocate(128).close();
          });
    }
  }

  @Test
  void badSizesAreRefused() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r -> {
            SymmetricPool pool =
                SymmetricPool.over(LsaWindow.create(r.communicator(), 1000), false);
            assertEquals(896, pool.freeBytes(), "whole lines");
            for (long size : new long[] {0, -1, Long.MIN_VALUE}) {
              assertThrows(IllegalArgumentException.class, () -> pool.allocate(size));
            }
            for (long size : new long[] {897, 1000, Long.MAX_VALUE, Long.MAX_VALUE - 100}) {
              Messages.assertNames(
                  assertThrows(OutOfWindowException.class, () -> pool.allocate(size)),
                  "pool of 1000",
                  "896 are free");
            }
          });
    }
  }
}

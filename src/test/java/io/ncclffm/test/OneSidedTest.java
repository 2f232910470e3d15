package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclWindow;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Puts and signals: when the wait is over the data is there, and every signal counts once. What bad
 * input does stands in {@link BadInputTest}.
 */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4, 8})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class OneSidedTest {
  private static final Duration PATIENCE = Duration.ofSeconds(30);

  /** Elements of a slot: each rank has one for every rank to receive in, then one to send from. */
  private static final int SLOT = 257;

  private static final int ROUNDS = 100;

  @Parameter int ranks;

  private LocalWorld world;
  private RankBuffers memory;
  private NcclWindow[] windows;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
    memory = RankBuffers.allocateForWindows(world, DataType.INT64, 2L * ranks * SLOT);
    windows = new NcclWindow[ranks];
    world.run(
        rank -> {
          Communicator comm = rank.communicator();
          assumeTrue(
              comm.properties().hostRmaSupport(), "NCCL has no one-sided operations on this host");
          windows[rank.rank()] =
              comm.registerWindow(memory.of(rank), NcclWindow.Flag.COLLECTIVE_SYMMETRIC);
        });
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    world.close();
    memory.close();
  }

  private long bytesTo(int slot) {
    return (long) slot * SLOT * Long.BYTES;
  }

  private static long[] data(int from, int to, int round) {
    long[] values = new long[SLOT];
    Arrays.setAll(values, i -> Inputs.mix((long) from << 40 | (long) to << 32 | round << 16 | i));
    return values;
  }

  private void put(LocalWorld.Rank rank, long[] values, int sendSlot, int peer, int slot) {
    DeviceBuffer mine = memory.of(rank);
    CudaStream stream = rank.stream();
    mine.copyFrom(MemorySegment.ofArray(values), (long) sendSlot * SLOT, stream);
    rank.communicator()
        .putSignal(
            mine,
            (long) sendSlot * SLOT,
            values.length,
            peer,
            windows[rank.rank()],
            bytesTo(slot),
            stream);
  }

  private long[] received(LocalWorld.Rank rank, int slot) {
    long[] values = new long[SLOT];
    memory.of(rank).copyTo(MemorySegment.ofArray(values), (long) slot * SLOT, rank.stream());
    return values;
  }

  @Test
  void everyRankPutsToEveryRank() {
    world.run(
        rank -> {
          memory.of(rank).fill((byte) -1, rank.stream());
          rank.stream().synchronize();
        });
    world.run(
        rank -> {
          int r = rank.rank();
          for (int peer = 0; peer < ranks; peer++) {
            put(rank, data(r, peer, 0), ranks + peer, peer, r);
          }
          for (int peer = 0; peer < ranks; peer++) {
            rank.communicator().waitSignal(peer, 1, rank.stream());
          }
          for (int peer = 0; peer < ranks; peer++) {
            assertArrayEquals(data(peer, r, 0), received(rank, peer), "from rank " + peer);
          }
        });
  }

  @ParameterizedTest(name = "{0} elements from offset {1} to byte {2}")
  @CsvSource({"0,0,0", "1,3,8", "7,0,40", "200,57,456"})
  void putOfAnyCountAtAnyOffsetWritesNothingElse(int count, int offset, int targetByte) {
    world.run(
        rank -> {
          memory.of(rank).fill((byte) -1, rank.stream());
          rank.stream().synchronize();
        });
    world.run(
        rank -> {
          int r = rank.rank();
          int next = (r + 1) % ranks;
          int previous = (r + ranks - 1) % ranks;
          DeviceBuffer mine = memory.of(rank);
          long from = (long) ranks * SLOT;
          mine.copyFrom(MemorySegment.ofArray(data(r, next, 1)), from, rank.stream());
          rank.communicator()
              .putSignal(mine, from + offset, count, next, windows[r], targetByte, rank.stream());
          rank.communicator().waitSignal(previous, 1, rank.stream());
          long[] expected = new long[SLOT];
          Arrays.fill(expected, -1);
          System.arraycopy(data(previous, r, 1), offset, expected, targetByte / Long.BYTES, count);
          assertArrayEquals(expected, received(rank, 0), "rank " + r);
        });
  }

  @Test
  void everySignalCountsOnce() {
    CyclicBarrier step = new CyclicBarrier(ranks);
    world.run(
        rank -> {
          Communicator comm = rank.communicator();
          CudaStream stream = rank.stream();
          int next = (rank.rank() + 1) % ranks;
          int previous = (rank.rank() + ranks - 1) % ranks;
          for (int i = 0; i < 5; i++) {
            comm.signal(next, stream);
          }
          comm.waitSignal(previous, 2, stream);
          comm.waitSignal(previous, 3, stream);
          stream.synchronize(PATIENCE);
          step.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);

          // All five are used up: only a sixth, which comes later, ends this wait. Not with one
          // rank, whose operations keep their order.
          if (rank.rank() == 0 && ranks > 1) {
            comm.waitSignal(previous, 1, stream);
            assertFalse(stream.isDone(), "a signal counted twice");
          }
          step.await(PATIENCE.toSeconds(), TimeUnit.SECONDS);
          if (next == 0 && ranks > 1) {
            comm.signal(next, stream);
          }
          stream.synchronize(PATIENCE);
        });
  }

  @Test
  void dataGoesBackAndForthAHundredTimes() {
    world.run(
        rank -> {
          int r = rank.rank();
          int peer = ranks == 1 ? 0 : r ^ 1;
          for (int round = 0; round < ROUNDS; round++) {
            boolean sendsFirst = r <= peer;
            if (sendsFirst) {
              put(rank, data(r, peer, round), ranks, peer, 0);
            }
            rank.communicator().waitSignal(peer, 1, rank.stream());
            assertArrayEquals(data(peer, r, round), received(rank, 0), "round " + round);
            if (!sendsFirst) {
              put(rank, data(r, peer, round), ranks, peer, 0);
            }
          }
        });
  }

  @Test
  void putAndWaitInOneGroup() {
    world.run(
        rank -> {
          int r = rank.rank();
          int next = (r + 1) % ranks;
          int previous = (r + ranks - 1) % ranks;
          NcclGroup.run(
              () -> {
                put(rank, data(r, next, 2), ranks, next, 0);
                rank.communicator().waitSignal(previous, 1, rank.stream());
              });
          assertArrayEquals(data(previous, r, 2), received(rank, 0), "rank " + r);
        });
  }
}

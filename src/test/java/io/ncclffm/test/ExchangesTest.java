package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import java.util.Arrays;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** AlltoAll, gather and scatter: the collectives of NCCL 2.28. */
class ExchangesTest {
  private static final int COUNT = 1000;

  private interface Step {
    void enqueue(LocalWorld.Rank rank, DeviceBuffer send, DeviceBuffer recv);
  }

  /** Element i of what rank r sends is r * 100000 + i; returns what every rank received. */
  private static int[][] received(int ranks, int sendCount, int recvCount, Step step) {
    int[][] results = new int[ranks][recvCount];
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers send = RankBuffers.allocate(world, DataType.INT32, sendCount);
        RankBuffers recv = RankBuffers.allocate(world, DataType.INT32, recvCount)) {
      world.run(
          rank -> {
            int[] data = new int[sendCount];
            Arrays.setAll(data, i -> rank.rank() * 100_000 + i);
            send.of(rank).copyFrom(data, rank.stream());
            recv.of(rank).fill((byte) -1, rank.stream());
            step.enqueue(rank, send.of(rank), recv.of(rank));
            recv.of(rank).copyTo(results[rank.rank()], rank.stream());
          });
    }
    return results;
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void alltoAllGivesPartROfEveryRankToRankR(int ranks) {
    int[][] results =
        received(
            ranks,
            ranks * COUNT,
            ranks * COUNT,
            (rank, send, recv) -> rank.communicator().alltoAll(send, recv, rank.stream()));
    for (int r = 0; r < ranks; r++) {
      int me = r;
      int[] expected = new int[ranks * COUNT];
      Arrays.setAll(expected, i -> i / COUNT * 100_000 + me * COUNT + i % COUNT);
      assertArrayEquals(expected, results[r], "rank " + r);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void gatherCollectsOnTheRootOnly(int ranks) {
    int root = ranks - 1;
    int[][] results =
        received(
            ranks,
            COUNT,
            ranks * COUNT,
            (rank, send, recv) -> rank.communicator().gather(send, recv, root, rank.stream()));
    for (int r = 0; r < ranks; r++) {
      boolean isRoot = r == root;
      int[] expected = new int[ranks * COUNT];
      Arrays.setAll(expected, i -> isRoot ? i / COUNT * 100_000 + i % COUNT : -1);
      assertArrayEquals(expected, results[r], "rank " + r);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void scatterGivesPartROfTheRootToRankR(int ranks) {
    int[][] results =
        received(
            ranks,
            ranks * COUNT,
            COUNT,
            (rank, send, recv) -> rank.communicator().scatter(send, recv, 0, rank.stream()));
    for (int r = 0; r < ranks; r++) {
      int me = r;
      int[] expected = new int[COUNT];
      Arrays.setAll(expected, i -> me * COUNT + i);
      assertArrayEquals(expected, results[r], "rank " + r);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {2})
  void lengthsThatDoNotFitAreRefused(int ranks) {
    received(
        ranks,
        3,
        3,
        (rank, send, recv) -> {
          Messages.assertNames(
              assertThrows(
                  IllegalArgumentException.class,
                  () -> rank.communicator().alltoAll(send, recv, rank.stream())),
              "ncclAlltoAll",
              send.toString());
          Messages.assertNames(
              assertThrows(
                  IllegalArgumentException.class,
                  () -> rank.communicator().gather(send, recv, 0, rank.stream())),
              "ncclGather",
              "6 and 3 elements");
        });
  }
}

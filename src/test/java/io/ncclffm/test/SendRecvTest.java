package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Point-to-point transfers, grouped where ranks send and receive at once. */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4, 8})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class SendRecvTest {
  @Parameter int ranks;

  private LocalWorld world;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    world.close();
  }

  @ParameterizedTest(name = "{0} elements from offset {1} to offset {2}")
  @CsvSource({"0,0,0", "1,0,3", "7,5,0", "1023,1,2", "65539,3,1"})
  void ringPassesEveryRanksDataToItsNeighbour(int count, int sendOffset, int recvOffset) {
    long[][] received = new long[ranks][recvOffset + count + 1];
    try (RankBuffers send = RankBuffers.allocate(world, DataType.INT64, sendOffset + count + 1);
        RankBuffers recv = RankBuffers.allocate(world, DataType.INT64, recvOffset + count + 1)) {
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(MemorySegment.ofArray(data(r, count)), sendOffset, rank.stream());
            Arrays.fill(received[r], -1);
            recv.of(r).copyFrom(received[r], rank.stream());
            Communicator comm = rank.communicator();
            int next = (r + 1) % ranks;
            int previous = (r + ranks - 1) % ranks;
            NcclGroup.run(
                () -> {
                  comm.send(send.of(r), sendOffset, count, next, rank.stream());
                  comm.recv(recv.of(r), recvOffset, count, previous, rank.stream());
                });
            recv.of(r).copyTo(received[r], rank.stream());
          });
    }
    for (int r = 0; r < ranks; r++) {
      long[] expected = new long[recvOffset + count + 1];
      Arrays.fill(expected, -1);
      System.arraycopy(data((r + ranks - 1) % ranks, count), 0, expected, recvOffset, count);
      assertArrayEquals(expected, received[r], "rank " + r);
    }
  }

  @Test
  void sendsOfOnePairArriveInOrder() {
    int messages = 5;
    long[][] received = new long[ranks][messages];
    try (RankBuffers send = RankBuffers.allocate(world, DataType.INT64, messages);
        RankBuffers recv = RankBuffers.allocate(world, DataType.INT64, messages)) {
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(data(r, messages), rank.stream());
            NcclGroup.run(
                () -> {
                  for (int m = 0; m < messages; m++) {
                    rank.communicator().send(send.of(r), m, 1, (r + 1) % ranks, rank.stream());
                  }
                  for (int m = 0; m < messages; m++) {
                    rank.communicator()
                        .recv(recv.of(r), m, 1, (r + ranks - 1) % ranks, rank.stream());
                  }
                });
            recv.of(r).copyTo(received[r], rank.stream());
          });
    }
    for (int r = 0; r < ranks; r++) {
      assertArrayEquals(data((r + ranks - 1) % ranks, messages), received[r], "rank " + r);
    }
  }

  @Test
  void everyRankSendsToEveryRankInOneGroup() {
    int count = 129;
    long[][] received = new long[ranks][ranks * count];
    try (RankBuffers send = RankBuffers.allocate(world, DataType.INT64, (long) ranks * count);
        RankBuffers recv = RankBuffers.allocate(world, DataType.INT64, (long) ranks * count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(data(r, ranks * count), rank.stream());
            NcclGroup.run(
                () -> {
                  for (int peer = 0; peer < ranks; peer++) {
                    long offset = (long) peer * count;
                    rank.communicator().send(send.of(r), offset, count, peer, rank.stream());
                    rank.communicator().recv(recv.of(r), offset, count, peer, rank.stream());
                  }
                });
            recv.of(r).copyTo(received[r], rank.stream());
          });
    }
    for (int r = 0; r < ranks; r++) {
      for (int peer = 0; peer < ranks; peer++) {
        assertArrayEquals(
            Arrays.copyOfRange(data(peer, ranks * count), r * count, (r + 1) * count),
            Arrays.copyOfRange(received[r], peer * count, (peer + 1) * count),
            "rank " + r + " from " + peer);
      }
    }
  }

  @Test
  void ungroupedSendAndRecvPassAlongAChain() {
    long[][] received = new long[ranks][1];
    try (RankBuffers x = RankBuffers.allocate(world, DataType.INT64, 1)) {
      world.run(
          rank -> {
            int r = rank.rank();
            x.of(r).copyFrom(new long[] {100 + r}, rank.stream());
            if (r > 0) {
              rank.communicator().recv(x.of(r), r - 1, rank.stream());
            }
            if (r < ranks - 1) {
              rank.communicator().send(x.of(r), r + 1, rank.stream());
            }
            x.of(r).copyTo(received[r], rank.stream());
          });
    }
    for (int r = 0; r < ranks; r++) {
      assertEquals(100, received[r][0], "rank " + r);
    }
  }

  private static long[] data(int rank, int count) {
    long[] values = new long[count];
    for (int i = 0; i < count; i++) {
      values[i] = Inputs.mix((long) rank << 32 | i);
    }
    return values;
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** Ranks that call different things are told so; real NCCL would hang or give wrong data. */
class DisagreementTest {
  private static final int COUNT = 8;

  @BeforeAll
  static void onlyOnCpu() {
    TestRanks.assumeCpu("NCCL does not compare what the ranks call");
  }

  private interface Call {
    void on(Communicator comm, DeviceBuffer x, LocalWorld.Rank rank);
  }

  /** Both ranks get ncclInvalidUsage with the texts, and only closing is left to them. */
  private static void assertBothRanksFail(Call first, Call second, String... texts) {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT32, COUNT)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            NcclException e =
                assertThrows(
                    NcclException.class,
                    () -> {
                      (rank.rank() == 0 ? first : second).on(comm, x.of(rank), rank);
                      rank.stream().synchronize();
                    },
                    "rank " + rank.rank());
            assertEquals("ncclInvalidUsage", NcclException.resultName(e.resultCode()));
            Messages.assertNames(e, texts);
            assertEquals(Communicator.State.FAILED, comm.state());
            NcclException again =
                assertThrows(
                    NcclException.class,
                    () -> comm.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream()));
            assertEquals(e.resultCode(), again.resultCode());
          });
    }
  }

  @Test
  void counts() {
    assertBothRanksFail(
        (comm, x, rank) -> comm.allReduce(x, 0, x, 0, 7, ReduceOp.SUM, rank.stream()),
        (comm, x, rank) -> comm.allReduce(x, 0, x, 0, 8, ReduceOp.SUM, rank.stream()),
        "7",
        "8");
  }

  @Test
  void operations() {
    assertBothRanksFail(
        (comm, x, rank) -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream()),
        (comm, x, rank) -> comm.allReduce(x, x, ReduceOp.MAX, rank.stream()));
  }

  @Test
  void roots() {
    assertBothRanksFail(
        (comm, x, rank) -> comm.broadcast(x, x, 0, rank.stream()),
        (comm, x, rank) -> comm.broadcast(x, x, 1, rank.stream()));
  }

  @Test
  void functions() {
    assertBothRanksFail(
        (comm, x, rank) -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream()),
        (comm, x, rank) -> comm.broadcast(x, x, 0, rank.stream()),
        "AllReduce",
        "Broadcast");
  }

  @Test
  void lengthsOfSendAndRecv() {
    assertBothRanksFail(
        (comm, x, rank) -> comm.send(x, 0, 8, 1, rank.stream()),
        (comm, x, rank) -> comm.recv(x, 0, 7, 0, rank.stream()),
        "8",
        "7");
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import java.time.Duration;
import org.junit.jupiter.api.Test;

/** {@link Communicator#watch}: work that does not end is reported, aborted, and wakes who waits. */
class WatchdogTest {
  private static final Duration LIMIT = Duration.ofMillis(500);
  private static final Duration PATIENCE = Duration.ofSeconds(30);

  @Test
  void rankThatNeverComesIsReportedAndTheWaitEnds() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            if (rank.rank() == 1) {
              return; // never comes
            }
            rank.communicator().watch(LIMIT);
            DeviceBuffer own = x.of(rank);
            rank.communicator().allReduce(own, own, ReduceOp.SUM, rank.stream());
            NcclException e =
                assertThrows(NcclException.class, () -> rank.stream().synchronize(PATIENCE));
            Messages.assertNames(
                e, "watchdog", "ncclAllReduce of 1000 x FLOAT32", "ms old", "WatchdogTest");
            assertEquals(Communicator.State.ABORTED, rank.communicator().state());
          });
    }
  }

  @Test
  void workThatEndsInTimeIsLeftAlone() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          rank -> {
            rank.communicator().watch(PATIENCE);
            DeviceBuffer own = x.of(rank);
            for (int i = 0; i < 100; i++) {
              rank.communicator().allReduce(own, own, ReduceOp.MAX, rank.stream());
            }
            rank.stream().synchronize(PATIENCE);
            assertEquals(Communicator.State.READY, rank.communicator().state());
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> rank.communicator().watch(PATIENCE)),
                "watched already");
          });
      assertTrue(world.size() == 2);
    }
  }
}

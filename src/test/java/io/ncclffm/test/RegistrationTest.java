package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.RegisteredBuffer;
import io.ncclffm.core.Team;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Registered buffers and windows: orders of closing, and the addresses that windows give. */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class RegistrationTest {
  private static final int COUNT = 1 << 16;

  /** In what order a registration, its buffer and its communicator are closed. */
  private enum Closing {
    REGISTRATION_BUFFER_COMMUNICATOR,
    REGISTRATION_COMMUNICATOR_BUFFER,
    COMMUNICATOR_REGISTRATION_BUFFER,
    COMMUNICATOR_BUFFER_REGISTRATION,
    BUFFER_REGISTRATION_COMMUNICATOR
  }

  @Parameter int ranks;

  private LocalWorld world;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    TestRanks.assertWorks(world);
    world.close();
  }

  @Test
  void collectivesWorkInRegisteredBuffers() {
    float[][] results = new float[ranks][COUNT];
    try (RankBuffers x = RankBuffers.allocateForWindows(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            DeviceBuffer mine = x.of(rank);
            try (RegisteredBuffer registered = rank.communicator().register(mine)) {
              assertSame(mine, registered.buffer());
              float[] data = new float[COUNT];
              for (int i = 0; i < COUNT; i++) {
                data[i] = i % 100 + rank.rank();
              }
              mine.copyFrom(data, rank.stream());
              rank.communicator().allReduce(mine, mine, ReduceOp.SUM, rank.stream());
              mine.copyTo(results[rank.rank()], rank.stream());
            }
          });
    }
    for (float[] result : results) {
      for (int i = 0; i < COUNT; i++) {
        assertEquals(i % 100 * ranks + ranks * (ranks - 1) / 2f, result[i], "element " + i);
      }
    }
  }

  // Rows 1, 18 and 32 of the table of known faults: every handle is given back once.
  @ParameterizedTest
  @EnumSource(Closing.class)
  void registrationsMayBeClosedInAnyOrderAndTwice(Closing order) {
    try (LocalWorld other = TestRanks.open(ranks)) {
      RankBuffers x = RankBuffers.allocateForWindows(other, DataType.FLOAT32, COUNT);
      RegisteredBuffer[] registered = new RegisteredBuffer[ranks];
      other.run(r -> registered[r.rank()] = r.communicator().register(x.of(r)));
      String[] steps = order.name().split("_");
      for (String step : steps) {
        switch (step) {
          case "REGISTRATION":
            other.run(r -> registered[r.rank()].close());
            other.run(r -> registered[r.rank()].close());
            break;
          case "BUFFER":
            x.close();
            x.close();
            break;
          default:
            other.run(r -> r.communicator().close());
        }
      }
    }
  }

  @Test
  void aBufferMayBeRegisteredTwiceAndOnlyWhileOpen() {
    try (RankBuffers x = RankBuffers.allocateForWindows(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            RegisteredBuffer first = rank.communicator().register(x.of(rank));
            RegisteredBuffer second = rank.communicator().register(x.of(rank));
            first.close();
            second.close();
          });
      world.run(
          rank -> {
            DeviceBuffer closed = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 1);
            closed.close();
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> rank.communicator().register(closed)),
                closed.toString(),
                "closed");
          });
    }
  }

  @Test
  void windowGivesTheAddressesOfEveryRank() {
    NcclWindow[] windows = new NcclWindow[ranks];
    try (RankBuffers x = RankBuffers.allocateForWindows(world, DataType.UINT8, COUNT)) {
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            NcclWindow window = comm.registerWindow(x.of(rank), NcclWindow.Flag.STRICT_ORDERING);
            windows[rank.rank()] = window;
            assertSame(x.of(rank), window.buffer());
            assertNotEquals(0, window.handle().address());
            assertEquals(x.of(rank).address(0).address(), window.userPointer().address());
            Team lsa = comm.teamLsa();
            for (int peer = 0; peer < ranks; peer++) {
              long start = window.peerPointer(peer, 0).address();
              assertNotEquals(0, start, "ranks of one host reach one another");
              assertEquals(start + COUNT - 1, window.peerPointer(peer, COUNT - 1).address());
              int lsaRank = comm.rankToLsa(comm.teamWorld(), peer);
              assertTrue(lsaRank >= 0 && lsaRank < lsa.size());
              assertEquals(start + 17, window.lsaPointer(lsaRank, 17).address());
            }
            assertThrows(NcclException.class, () -> window.lsaPointer(lsa.size(), 0));
            assertEquals(Communicator.State.READY, comm.state());
            if (!comm.properties().multimemSupport()) {
              try {
                assertEquals(0, window.lsaMultimemPointer(0).address());
              } catch (NcclException e) {
                Messages.assertNames(e, "ncclGetLsaMultimemDevicePointer");
              }
            }
          });
      world.run(r -> windows[r.rank()].close());
      world.run(
          r -> {
            windows[r.rank()].close();
            Messages.assertNames(
                assertThrows(IllegalStateException.class, windows[r.rank()]::userPointer),
                "window",
                "closed");
          });
    }
  }

  @Test
  void windowsMayBeClosedAfterTheirCommunicator() {
    NcclWindow[] windows = new NcclWindow[ranks];
    try (LocalWorld other = TestRanks.open(ranks);
        RankBuffers x = RankBuffers.allocateForWindows(other, DataType.UINT8, COUNT)) {
      other.run(
          r -> {
            windows[r.rank()] = r.communicator().registerWindow(x.of(r));
            r.communicator().close();
            windows[r.rank()].close();
          });
    }
  }
}

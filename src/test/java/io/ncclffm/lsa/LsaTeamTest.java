package io.ncclffm.lsa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Team;
import io.ncclffm.core.bindings.shim.ncclLsa;
import io.ncclffm.core.bindings.shim.ncclLsaWindow;
import io.ncclffm.test.Messages;
import io.ncclffm.test.TestRanks;
import java.lang.foreign.MemorySegment;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Teams that are not the whole communicator, which one host never has: beyond lies the network. */
class LsaTeamTest {
  private static final int BYTES = 1000;

  @Test
  void membersAreTheRanksThatTheTeamHolds() {
    for (int stride = 1; stride <= 4; stride++) {
      for (int size = 1; size <= 5; size++) {
        for (int first = 0; first < 4; first++) {
          List<Integer> members = new ArrayList<>();
          for (int i = 0; i < size; i++) {
            members.add(first + i * stride);
          }
          for (int place = 0; place < size; place++) {
            assertIsTeamOf(
                members, new LsaTeam(new Team(size, place, stride), members.get(place)), place);
          }
        }
      }
    }
  }

  private static void assertIsTeamOf(List<Integer> members, LsaTeam team, int place) {
    String what = team + ", seen from " + members.get(place);
    assertEquals(members.size(), team.size(), what);
    assertEquals(place, team.rank(), what);
    for (int i = 0; i < members.size(); i++) {
      assertEquals(members.get(i), team.worldRank(i), what);
    }
    assertThrows(IndexOutOfBoundsException.class, () -> team.worldRank(members.size()), what);
    assertThrows(IndexOutOfBoundsException.class, () -> team.worldRank(-1), what);
    for (int rank = -3; rank < 30; rank++) {
      int asked = rank;
      assertEquals(members.contains(rank), team.contains(rank), what + ": rank " + rank);
      if (members.contains(rank)) {
        assertEquals(members.indexOf(rank), team.lsaRank(rank), what);
      } else {
        Messages.assertNames(
            assertThrows(IllegalArgumentException.class, () -> team.lsaRank(asked), what),
            "rank " + rank + " is not in the LSA team of " + members.size() + " ranks from");
      }
    }
  }

  @Test
  void teamTellsItsSteps() {
    assertEquals(
        "LSA team of 2 ranks from 3 in steps of 4", new LsaTeam(new Team(2, 1, 4), 7).toString());
    assertEquals("LSA team of 2 ranks from 6", new LsaTeam(new Team(2, 1, 1), 7).toString());
  }

  /** Memory of two neighbours, as NCCL would join them where each pair of ranks has its host. */
  private static final class PairMemory implements WindowMemory {
    private final LocalWorld.Rank rank;
    private final DeviceBuffer local;

    PairMemory(LocalWorld.Rank rank) {
      this.rank = rank;
      local = DeviceBuffer.allocate(rank.device(), DataType.UINT8, BYTES);
    }

    @Override
    public byte[] offer() {
      return new byte[0];
    }

    @Override
    public DeviceBuffer local() {
      return local;
    }

    @Override
    public long[] open(List<Card> ranks, byte[][] offers) {
      int first = rank.rank() / 2 * 2;
      long[] bases = new long[ranks.size()];
      bases[first] = 1L << 40;
      bases[first + 1] = 1L << 41;
      return bases;
    }

    @Override
    public LsaTeam team() {
      return new LsaTeam(new Team(2, rank.rank() % 2, 1), rank.rank());
    }

    @Override
    public void closePeers() {}

    @Override
    public void closeLocal() {
      local.close();
    }
  }

  @Test
  void ranksOutsideTheTeamHaveNoAddress() {
    try (LocalWorld world = TestRanks.open(4)) {
      world.run(
          r -> {
            Exchange exchange = Exchange.of(r.communicator());
            List<Card> ranks = new ArrayList<>();
            for (byte[] record :
                exchange.allGather("test", Card.of(r.communicator(), BYTES, null, "").encode())) {
              ranks.add(Card.decode(record));
            }
            PairMemory memory = new PairMemory(r);
            long[] bases = memory.open(ranks, new byte[0][]);
            LsaWindow window =
                new LsaWindow(
                    r.communicator(), exchange, LsaProvider.NCCL_WINDOW, memory, bases, ranks);
            int mate = r.rank() ^ 1;
            int stranger = r.rank() ^ 2;
            assertEquals(LsaPath.SELF, window.path(r.rank()));
            assertNotEquals(LsaPath.NETWORK, window.path(mate));
            assertEquals(bases[mate] + 17, window.address(mate, 17, BYTES - 17));
            assertEquals(LsaPath.NETWORK, window.path(stranger));
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class, () -> window.address(stranger, 0, BYTES)),
                "rank " + stranger + " is not in the LSA team of 2 ranks from",
                "only the network reaches it");
            assertThrows(IndexOutOfBoundsException.class, () -> window.address(4, 0, 1));
            assertThrows(IndexOutOfBoundsException.class, () -> window.address(stranger, BYTES, 1));
            assertTrue(window.alignmentReport(0, 10, DataType.FLOAT32).vectorBytes() > 0);

            Lsa lsa = Lsa.create(window);
            long[] table = new long[4];
            lsa.peers().copyTo(table, r.stream());
            for (int p = 0; p < 4; p++) {
              assertEquals(p == r.rank() || p == mate ? bases[p] : 0, table[p]);
            }
            // On the ring one neighbour is the mate, the other one is out of reach.
            boolean nextIsMate = mate == (r.rank() + 1) % 4;
            MemorySegment toNext = ncclLsa.y(lsa.struct(), 1);
            MemorySegment toPrevious = ncclLsa.x(lsa.struct(), 1);
            MemorySegment reached = nextIsMate ? toNext : toPrevious;
            MemorySegment beyond = nextIsMate ? toPrevious : toNext;
            assertTrue(ncclLsaWindow.base(reached).address() >= bases[mate]);
            assertEquals(384, ncclLsaWindow.bytes(reached));
            assertEquals(MemorySegment.NULL, ncclLsaWindow.base(beyond));
            assertEquals(0, ncclLsaWindow.bytes(beyond));
            lsa.close();
            window.close();
          });
    }
  }
}

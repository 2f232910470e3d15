package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** From the environment or the caller's own exchange to an id, without native code. */
class BootstrapTest {
  private static final NcclUniqueId ID = NcclUniqueId.fromBytes(TestRanks.id(7));
  private static final Supplier<NcclUniqueId> CREATOR = () -> ID;
  private static final Supplier<NcclUniqueId> NOT_HERE =
      () -> {
        throw new AssertionError("only rank 0 may create an id");
      };

  private final TestRanks threads = new TestRanks();

  @AfterEach
  void close() {
    threads.close();
  }

  private static Supplier<NcclUniqueId> creator(int rank) {
    return rank == 0 ? CREATOR : NOT_HERE;
  }

  @Test
  void fromTorchrunsEnvironmentOverTcp() throws Exception {
    int port;
    try (ServerSocket free = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      port = free.getLocalPort();
    }
    int size = 4;
    List<Future<NcclUniqueId>> ids = new ArrayList<>();
    for (int rank = 0; rank < size; rank++) {
      Map<String, String> env =
          Map.of(
              "RANK", "" + rank,
              "WORLD_SIZE", "" + size,
              "LOCAL_RANK", "" + rank,
              "LOCAL_WORLD_SIZE", "" + size,
              "MASTER_ADDR", "localhost",
              "MASTER_PORT", "" + port,
              "NCCLFFM_SECRET", "a secret of this test");
      Supplier<NcclUniqueId> creator = creator(rank);
      ids.add(
          threads.start(
              () ->
                  Bootstrap.uniqueId(
                      RankInfo.fromEnvironment(env), Duration.ofSeconds(20), env, creator)));
    }
    for (NcclUniqueId id : TestRanks.results(ids)) {
      assertEquals(ID, id);
    }
  }

  /** As the Spark example of {@link UniqueIdExchange}. */
  @Test
  void overAnAllGatherOfStrings() throws Exception {
    int size = 3;
    String[] gathered = new String[size];
    CyclicBarrier barrier = new CyclicBarrier(size);
    HexFormat hex = HexFormat.of();
    List<Future<NcclUniqueId>> ids = new ArrayList<>();
    for (int r = 0; r < size; r++) {
      int rank = r;
      UniqueIdExchange exchange =
          mine -> {
            gathered[rank] = hex.formatHex(mine);
            barrier.await(TestRanks.LIMIT_SECONDS, TimeUnit.SECONDS);
            return hex.parseHex(gathered[0]);
          };
      ids.add(threads.start(() -> Bootstrap.uniqueId(rank, exchange, creator(rank))));
    }
    for (NcclUniqueId id : TestRanks.results(ids)) {
      assertEquals(ID, id);
    }
  }

  @Test
  void oneRankNeedsNeitherSecretNorAddress() {
    RankInfo alone = new RankInfo("test", 0, 1, 0, 1, null, null);
    assertEquals(ID, Bootstrap.uniqueId(alone, Duration.ofSeconds(1), Map.of(), CREATOR));
  }

  @Test
  void severalRanksNeedASecret() {
    RankInfo one =
        new RankInfo("test", 1, 2, 1, 2, InetSocketAddress.createUnresolved("h", 1), null);
    Exception e =
        assertThrows(
            BootstrapException.class,
            () -> Bootstrap.uniqueId(one, Duration.ofSeconds(1), Map.of(), NOT_HERE));
    assertTrue(e.getMessage().contains("NCCLFFM_SECRET"), e.getMessage());
  }

  @Test
  void severalRanksNeedAnAddress() {
    RankInfo one = new RankInfo("Open MPI", 1, 2, 0, 1, null, null);
    Map<String, String> env = Map.of("NCCLFFM_SECRET", "a secret of this test");
    Exception e =
        assertThrows(
            BootstrapException.class,
            () -> Bootstrap.uniqueId(one, Duration.ofSeconds(1), env, NOT_HERE));
    assertTrue(e.getMessage().contains("MASTER_ADDR"), e.getMessage());
    assertTrue(e.getMessage().contains("Open MPI"), e.getMessage());
  }

  @Test
  void exchangeThatGivesSomethingElseIsRefused() {
    Exception e =
        assertThrows(BootstrapException.class, () -> Bootstrap.uniqueId(1, mine -> mine, NOT_HERE));
    assertTrue(e.getMessage().contains("rank 1 0 bytes"), e.getMessage());
    e =
        assertThrows(
            BootstrapException.class,
            () -> Bootstrap.uniqueId(0, mine -> TestRanks.id(8), CREATOR));
    assertTrue(e.getMessage().contains("another id than its own"), e.getMessage());
  }

  @Test
  void exceptionsOfTheExchangeAreKept() {
    IOException io = new IOException("no way");
    BootstrapException e =
        assertThrows(
            BootstrapException.class,
            () ->
                Bootstrap.uniqueId(
                    1,
                    mine -> {
                      throw io;
                    },
                    NOT_HERE));
    assertSame(io, e.getCause());
    IllegalStateException own = new IllegalStateException("own");
    assertSame(
        own,
        assertThrows(
            IllegalStateException.class,
            () ->
                Bootstrap.uniqueId(
                    1,
                    mine -> {
                      throw own;
                    },
                    NOT_HERE)));
  }

  @Test
  void interruptionOfTheExchangeEndsIt() {
    assertThrows(
        DeadlineException.class,
        () ->
            Bootstrap.uniqueId(
                1,
                mine -> {
                  throw new InterruptedException();
                },
                NOT_HERE));
    assertTrue(Thread.interrupted(), "the thread is not interrupted any more");
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
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

/** Windows: the addresses they give are the peers' memory, and no address leaves it. */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class LsaWindowTest {
  private static final long BYTES = 1 << 20;

  @Parameter int ranks;

  private LocalWorld world;
  private LsaWindow[] windows;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
    windows = new LsaWindow[ranks];
    world.run(r -> windows[r.rank()] = LsaWindow.create(r.communicator(), BYTES));
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    world.close();
    for (LsaWindow window : windows) {
      Messages.assertNames(
          assertThrows(IllegalStateException.class, () -> window.address(0, 0, 1)), "closed");
    }
  }

  @Test
  void ownAddressIsTheLocalMemoryZeroed() {
    world.run(
        r -> {
          LsaWindow window = windows[r.rank()];
          assertEquals(BYTES, window.bytes());
          assertEquals(window.local().address(0).address(), window.address(r.rank(), 0, BYTES));
          assertEquals(window.address(r.rank(), 0, 1) + 17, window.address(r.rank(), 17, 1));
        });
    world.run(
        r -> {
          LsaWindow fresh = LsaWindow.create(r.communicator(), 4096);
          byte[] content = new byte[4096];
          content[0] = 1;
          fresh.local().copyTo(MemorySegment.ofArray(content), r.stream());
          assertArrayEquals(new byte[4096], content);
          fresh.close();
          fresh.close();
        });
  }

  @ParameterizedTest
  @CsvSource({
    "0,-1,1",
    "0,0,1048577",
    "0,1048576,1",
    "0,1048577,0",
    "0,0,-1",
    "0,1,9223372036854775807",
    "-1,0,1",
    "99,0,1"
  })
  void addressOutsideOfTheWindowIsRefused(int rank, long offset, long length) {
    assertThrows(IndexOutOfBoundsException.class, () -> windows[0].address(rank, offset, length));
  }

  @Test
  void endOfTheWindowIsAnAddressForNoBytes() {
    assertEquals(windows[0].address(0, 0, 0) + BYTES, windows[0].address(0, BYTES, 0));
  }

  @ParameterizedTest
  @ValueSource(longs = {0, -1})
  void windowOfNoBytesIsRefused(long bytes) {
    world.run(
        r ->
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> LsaWindow.create(r.communicator(), bytes)),
                "window of " + bytes + " bytes"));
    TestRanks.assertWorks(world);
  }

  @Test
  void writesToPeersAddressesArriveAtThePeers() {
    CyclicBarrier written = new CyclicBarrier(ranks);
    long slot = 4096;
    world.run(
        r -> {
          LsaWindow window = windows[r.rank()];
          try (Arena arena = Arena.ofShared()) {
            // Every rank writes its own pattern into its slot on every rank.
            MemorySegment pattern = arena.allocate(slot);
            pattern.fill((byte) (0x10 + r.rank()));
            r.device().makeCurrent();
            for (int peer = 0; peer < ranks; peer++) {
              long to = window.address(peer, slot * r.rank(), slot);
              int rc =
                  CudartH.cudaMemcpyAsync(
                      MemorySegment.ofAddress(to),
                      pattern,
                      slot,
                      CudartH.cudaMemcpyHostToDevice(),
                      r.stream().handle());
              assertEquals(0, rc);
            }
            r.stream().synchronize();
          }
          written.await(20, TimeUnit.SECONDS);
          byte[] content = new byte[Math.toIntExact(slot) * ranks];
          window.local().copyTo(MemorySegment.ofArray(content), r.stream());
          for (int i = 0; i < content.length; i++) {
            int from = i / Math.toIntExact(slot);
            assertEquals((byte) (0x10 + from), content[i], "byte " + i + " from rank " + from);
          }
          written.await(20, TimeUnit.SECONDS);
        });
  }

  @Test
  void closingTheCommunicatorClosesItsWindows() {
    LsaWindow[] owned = new LsaWindow[ranks];
    try (LocalWorld other = TestRanks.open(ranks)) {
      other.run(
          r -> {
            owned[r.rank()] = LsaWindow.create(r.communicator(), BYTES);
            r.communicator().close();
            assertEquals(Communicator.State.CLOSED, r.communicator().state());
          });
    }
    for (LsaWindow window : owned) {
      assertThrows(IllegalStateException.class, () -> window.address(0, 0, 1));
      assertThrows(
          IllegalStateException.class,
          () -> window.local().address(0).get(ValueLayout.JAVA_BYTE, 0));
      window.close();
    }
  }
}

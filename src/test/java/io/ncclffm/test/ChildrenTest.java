package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Communicators made from communicators: who is in them, and who outlives whom. */
class ChildrenTest {
  private static final CommunicatorConfig INHERITED = CommunicatorConfig.DEFAULT;
  // The common pool has one thread on a small machine, and these tasks wait for one another.
  private static final Executor FRESH_THREAD = task -> Thread.ofPlatform().daemon().start(task);
  private static final Duration PATIENCE = Duration.ofSeconds(30);
  private static final Duration NOTICE = Duration.ofSeconds(2);

  private CyclicBarrier everyRank = new CyclicBarrier(1);

  /**
   * After the end of a communicator and before the next collective: where ranks are threads that
   * share a GPU, the memory freed at the end waits for the other ranks' kernels.
   */
  private void meet() throws Exception {
    everyRank.await(30, TimeUnit.SECONDS);
  }

  /** What a rank's task does with its buffer of one INT64. */
  private interface Task {
    void run(LocalWorld.Rank rank, DeviceBuffer x) throws Exception;
  }

  @BeforeAll
  static void prepare() {
    TestRanks.prepare();
  }

  private void onRanks(int size, Task task) {
    everyRank = new CyclicBarrier(size);
    try (LocalWorld world = TestRanks.open(size);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT64, 1)) {
      world.run(rank -> task.run(rank, x.of(rank)));
    }
  }

  /** A collective in which every rank adds its number plus 1. */
  private static void assertWorks(Communicator comm, DeviceBuffer x, CudaStream stream) {
    long[] value = {comm.rank() + 1};
    x.copyFrom(value, stream);
    comm.allReduce(x, x, ReduceOp.SUM, stream);
    x.copyTo(value, stream);
    assertEquals(comm.size() * (comm.size() + 1) / 2, value[0], "sum on " + comm);
  }

  private static void assertPlace(int rank, int size, Communicator comm) {
    assertEquals(Communicator.State.READY, comm.state());
    assertEquals(rank, comm.rank(), comm.toString());
    assertEquals(size, comm.size(), comm.toString());
  }

  @Test
  void splitMakesACommunicatorOfEachColorInTheOrderOfTheKeys() {
    onRanks(
        4,
        (rank, x) -> {
          int r = rank.rank();
          try (Communicator half = rank.communicator().split(r % 2, -r, INHERITED)) {
            assertPlace(r < 2 ? 1 : 0, 2, half);
            assertEquals(rank.device(), half.device());
            assertWorks(half, x, rank.stream());
            assertWorks(rank.communicator(), x, rank.stream());
            assertWorks(half, x, rank.stream());
            meet();
          }
          meet();
          assertWorks(rank.communicator(), x, rank.stream());
        });
  }

  @Test
  void rankThatLeavesASplitHasNoChildAndGoesOn() {
    onRanks(
        3,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          if (rank.rank() == 1) {
            comm.leaveSplit();
          } else {
            try (Communicator child = comm.split(7, 0, INHERITED)) {
              assertPlace(rank.rank() / 2, 2, child);
              assertWorks(child, x, rank.stream());
            }
          }
          meet();
          assertWorks(comm, x, rank.stream());
        });
  }

  @Test
  void splitOfASplitIsClosedWithItsAncestors() {
    List<Communicator> grandchildren = new ArrayList<>();
    onRanks(
        4,
        (rank, x) -> {
          Communicator half = rank.communicator().split(rank.rank() / 2, rank.rank(), INHERITED);
          Communicator alone = half.split(half.rank(), 0, INHERITED);
          assertPlace(0, 1, alone);
          assertWorks(alone, x, rank.stream());
          assertWorks(half, x, rank.stream());
          synchronized (grandchildren) {
            grandchildren.add(alone);
            grandchildren.add(half);
          }
        });
    assertEquals(8, grandchildren.size());
    for (Communicator closed : grandchildren) {
      assertEquals(Communicator.State.CLOSED, closed.state());
    }
  }

  @Test
  void childHasItsOwnConfigurationOrTheParents() {
    onRanks(
        2,
        (rank, x) -> {
          CommunicatorConfig own = CommunicatorConfig.builder().blocking(false).build();
          try (Communicator child = rank.communicator().split(0, rank.rank(), own)) {
            child.awaitReady(PATIENCE);
            assertWorks(child, x, rank.stream());
            // Non-blocking by inheritance: not ready until waited for.
            Communicator grandchild = child.split(0, rank.rank(), INHERITED);
            assertEquals(Communicator.State.INITIALISING, grandchild.state());
            grandchild.awaitReady(PATIENCE);
            assertPlace(rank.rank(), 2, grandchild);
            assertWorks(grandchild, x, rank.stream());
            // Blocking by its own configuration, though its parent's calls return at once.
            CommunicatorConfig blocking = CommunicatorConfig.builder().blocking(true).build();
            Communicator other = child.split(0, rank.rank(), blocking);
            other.awaitReady(PATIENCE);
            assertWorks(other, x, rank.stream());
          }
        });
  }

  // Row 39 of the table of known faults: the handle is there only after the group's end.
  @Test
  void childMadeInAGroupIsPendingUntilTheGroupEnds() {
    onRanks(
        2,
        (rank, x) -> {
          AtomicReference<Communicator> made = new AtomicReference<>();
          NcclGroup.run(
              () -> {
                Communicator child = rank.communicator().split(0, -rank.rank(), INHERITED);
                made.set(child);
                assertEquals(Communicator.State.INITIALISING, child.state());
                for (Runnable use :
                    List.<Runnable>of(
                        child::rank,
                        child::size,
                        child::asyncError,
                        child::close,
                        () -> child.awaitReady(PATIENCE),
                        () -> child.allReduce(x, x, ReduceOp.SUM, rank.stream()),
                        () -> child.split(0, 0, INHERITED))) {
                  Messages.assertNames(
                      assertThrows(IllegalStateException.class, use::run), "group");
                }
              });
          assertPlace(1 - rank.rank(), 2, made.get());
          assertWorks(made.get(), x, rank.stream());
        });
  }

  @Test
  void childOfAGroupThatFailsIsFailed() {
    onRanks(
        2,
        (rank, x) -> {
          AtomicReference<Communicator> made = new AtomicReference<>();
          IllegalStateException thrown = new IllegalStateException("from the body");
          // A group of its own for each rank: nothing is asked of the other.
          assertSame(
              thrown,
              assertThrows(
                  IllegalStateException.class,
                  () ->
                      NcclGroup.run(
                          () -> {
                            made.set(rank.communicator().split(0, 0, INHERITED));
                            throw thrown;
                          })));
          assertEquals(Communicator.State.FAILED, made.get().state());
          assertEquals(Communicator.State.FAILED, rank.communicator().state());
          Messages.assertNames(
              assertThrows(NcclException.class, () -> made.get().awaitReady(PATIENCE)),
              "from the body");
          made.get().close();
        });
  }

  @Test
  void shrinkLeavesRanksOutAndOutlivesTheParent() {
    onRanks(
        4,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          if (rank.rank() % 2 == 1) {
            return;
          }
          try (Communicator smaller = comm.shrink(List.of(3, 1), false, INHERITED)) {
            assertPlace(rank.rank() / 2, 2, smaller);
            comm.close();
            assertWorks(smaller, x, rank.stream());
          }
        });
  }

  @Test
  void survivorsOfARankThatFailsShrinkAndGoOn() {
    onRanks(
        4,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          if (rank.rank() == 2) {
            comm.abort();
            return;
          }
          // The backend notices; a GPU waits for ever, which the time-out ends.
          RuntimeException failure =
              assertThrows(
                  RuntimeException.class,
                  () -> {
                    comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
                    rank.stream().synchronize(NOTICE);
                  });
          if (!(failure instanceof DeadlineException)) {
            assertEquals(NcclException.class, failure.getClass(), failure.toString());
            assertEquals(Communicator.State.FAILED, comm.state());
            assertThrows(NcclException.class, () -> comm.shrink(List.of(2), false, INHERITED));
          }
          try (Communicator smaller = comm.shrink(List.of(2), true, INHERITED)) {
            assertPlace(rank.rank() == 3 ? 2 : rank.rank(), 3, smaller);
            comm.close();
            assertWorks(smaller, x, rank.stream());
          }
        });
  }

  @Test
  void revokedCommunicatorRefusesWorkAndCanBeShrunk() {
    onRanks(
        3,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          comm.revoke();
          assertEquals(Communicator.State.REVOKED, comm.state());
          Messages.assertNames(
              assertThrows(
                  IllegalStateException.class,
                  () -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream())),
              "ncclAllReduce",
              "revoked");
          if (rank.rank() == 2) {
            return;
          }
          try (Communicator smaller = comm.shrink(List.of(2), false, INHERITED)) {
            assertPlace(rank.rank(), 2, smaller);
            comm.close();
            assertEquals(Communicator.State.CLOSED, comm.state());
            assertWorks(smaller, x, rank.stream());
          }
        });
  }

  @Test
  void shrinkRefusesBadLists() {
    onRanks(
        2,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          for (List<Integer> excluded : List.of(List.<Integer>of(), List.of(rank.rank()))) {
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class, () -> comm.shrink(excluded, false, INHERITED)),
                "ncclCommShrink",
                excluded.toString());
          }
          for (int outside : new int[] {-1, 2}) {
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.shrink(List.of(outside), false, INHERITED)),
                "excluded rank " + outside);
          }
          assertWorks(comm, x, rank.stream());
        });
  }

  @Test
  void grownCommunicatorKeepsItsRanksAndTakesNewOnes() {
    CompletableFuture<NcclUniqueId> id = new CompletableFuture<>();
    everyRank = new CyclicBarrier(3);
    try (LocalWorld world = TestRanks.open(2);
        LocalWorld others = TestRanks.open(1);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT64, 1);
        RankBuffers y = RankBuffers.allocate(others, DataType.INT64, 1)) {
      CompletableFuture<Void> joined =
          CompletableFuture.runAsync(
              () ->
                  others.run(
                      rank -> {
                        try (Communicator larger =
                            Communicator.join(
                                id.get(30, TimeUnit.SECONDS), 3, 2, rank.device(), INHERITED)) {
                          assertPlace(2, 3, larger);
                          assertWorks(larger, y.of(rank), rank.stream());
                          meet();
                          meet();
                          assertWorks(larger, y.of(rank), rank.stream());
                          meet();
                        }
                      }),
              FRESH_THREAD);
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            NcclUniqueId made = rank.rank() == 0 ? comm.growthId() : null;
            if (made != null) {
              id.complete(made);
            }
            try (Communicator larger = comm.grow(3, made, INHERITED)) {
              assertPlace(rank.rank(), 3, larger);
              assertWorks(larger, x.of(rank), rank.stream());
              meet();
              comm.close();
              meet();
              assertWorks(larger, x.of(rank), rank.stream());
              meet();
            }
          });
      joined.orTimeout(30, TimeUnit.SECONDS).join();
    }
  }

  @Test
  void growthToFewerRanksIsRefused() {
    onRanks(
        2,
        (rank, x) -> {
          Messages.assertNames(
              assertThrows(
                  IllegalArgumentException.class,
                  () -> rank.communicator().grow(2, null, INHERITED)),
              "ncclCommGrow",
              "more than 2");
          assertThrows(
              IllegalArgumentException.class,
              () -> Communicator.join(NcclUniqueId.create(), 3, 3, rank.device(), INHERITED));
          assertWorks(rank.communicator(), x, rank.stream());
        });
  }

  @Test
  void oneThreadMakesAllRanksOfItsDevices() {
    TestRanks.prepare();
    TestRanks.assumeDevices(2);
    List<CudaDevice> devices = List.of(new CudaDevice(0), new CudaDevice(1));
    List<CudaStream> streams = devices.stream().map(CudaStream::create).toList();
    List<DeviceBuffer> x =
        devices.stream().map(d -> DeviceBuffer.allocate(d, DataType.INT64, 1)).toList();
    List<Communicator> all = Communicator.createAll(devices);
    for (int r = 0; r < 2; r++) {
      assertPlace(r, 2, all.get(r));
      assertEquals(devices.get(r), all.get(r).device());
      x.get(r).copyFrom(new long[] {10 + r}, streams.get(r));
    }
    NcclGroup.run(
        () -> {
          for (int r = 0; r < 2; r++) {
            all.get(r).allReduce(x.get(r), x.get(r), ReduceOp.SUM, streams.get(r));
          }
        });
    for (int r = 0; r < 2; r++) {
      long[] sum = new long[1];
      x.get(r).copyTo(sum, streams.get(r));
      assertEquals(21, sum[0]);
    }
    // A destroy waits for the other ranks' on a GPU of its own, but not for their threads.
    all.forEach(Communicator::close);
    x.forEach(DeviceBuffer::close);
    streams.forEach(CudaStream::close);
  }

  @Test
  void noDeviceAtAllIsRefused() {
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> Communicator.createAll(List.of())),
        "ncclCommInitAll",
        "no device");
  }

  @ParameterizedTest
  @ValueSource(ints = {2, 3})
  void ranksMeetBySeveralIds(int count) {
    List<NcclUniqueId> ids = new ArrayList<>();
    for (int i = 0; i < count; i++) {
      ids.add(NcclUniqueId.create());
    }
    onRanks(
        3,
        (rank, x) -> {
          try (Communicator comm =
              Communicator.create(ids, 3, rank.rank(), rank.device(), INHERITED)) {
            assertPlace(rank.rank(), 3, comm);
            assertWorks(comm, x, rank.stream());
          }
        });
  }

  // Row 19 of the table of known faults: NCCL waits for ever when an id serves a second time.
  @Test
  void idThatServedThisProcessIsRefused() {
    NcclUniqueId first = NcclUniqueId.create();
    NcclUniqueId second = NcclUniqueId.create();
    onRanks(
        2,
        (rank, x) -> {
          CudaDevice device = rank.device();
          Communicator.create(List.of(first, second), 2, rank.rank(), device, INHERITED).close();
          for (NcclUniqueId used : List.of(first, second)) {
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class,
                    () -> Communicator.create(used, 2, rank.rank(), device)),
                "used",
                "create a new one");
          }
        });
  }

  @Test
  void suspendedCommunicatorGivesMemoryBackAndWorksAfterwards() {
    onRanks(
        2,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          assertEquals(0, comm.memoryStatistic(Communicator.MemoryStatistic.SUSPENDED));
          long persistent = comm.memoryStatistic(Communicator.MemoryStatistic.PERSISTENT);
          long suspendable = comm.memoryStatistic(Communicator.MemoryStatistic.SUSPENDABLE);
          assertEquals(
              persistent + suspendable, comm.memoryStatistic(Communicator.MemoryStatistic.TOTAL));
          comm.suspend();
          assertEquals(1, comm.memoryStatistic(Communicator.MemoryStatistic.SUSPENDED));
          comm.resume();
          assertEquals(0, comm.memoryStatistic(Communicator.MemoryStatistic.SUSPENDED));
          assertWorks(comm, x, rank.stream());
        });
  }

  @Test
  void propertiesAndTeamsTellTheRanksPlace() {
    onRanks(
        3,
        (rank, x) -> {
          Communicator comm = rank.communicator();
          var properties = comm.properties();
          assertEquals(rank.rank(), properties.rank());
          assertEquals(3, properties.size());
          assertEquals(rank.device().ordinal(), properties.cudaDevice());
          assertEquals(rank.rank(), comm.teamWorld().rank());
          assertEquals(3, comm.teamWorld().size());
          assertEquals(1, comm.teamWorld().stride());
          var lsa = comm.teamLsa();
          var rail = comm.teamRail();
          assertEquals(3, lsa.size() * rail.size());
          for (int r = 0; r < 3; r++) {
            assertEquals(r, comm.rankToWorld(comm.teamWorld(), r));
          }
          for (int r = 0; r < lsa.size(); r++) {
            assertEquals(r, comm.rankToLsa(lsa, r));
            assertEquals(rank.rank() + (r - lsa.rank()) * lsa.stride(), comm.rankToWorld(lsa, r));
          }
          assertEquals(rank.rank(), comm.rankToWorld(rail, rail.rank()));
        });
  }

  // Row 18 of the table of known faults: a handle that is destroyed twice.
  @Test
  void endingTwiceInAnyWayIsHarmless() {
    onRanks(
        2,
        (rank, x) -> {
          List<Communicator> made = new ArrayList<>();
          for (int i = 0; i < 4; i++) {
            made.add(rank.communicator().split(0, rank.rank(), INHERITED));
          }
          List<Runnable> close = made.stream().<Runnable>map(c -> c::close).toList();
          List<Runnable> abort = made.stream().<Runnable>map(c -> c::abort).toList();
          close.get(0).run();
          close.get(0).run();
          close.get(1).run();
          abort.get(1).run();
          abort.get(2).run();
          close.get(2).run();
          abort.get(3).run();
          abort.get(3).run();
          assertEquals(
              List.of(
                  Communicator.State.CLOSED,
                  Communicator.State.CLOSED,
                  Communicator.State.ABORTED,
                  Communicator.State.ABORTED),
              made.stream().map(Communicator::state).toList());
          meet();
          assertWorks(rank.communicator(), x, rank.stream());
        });
  }

  // Row 18 of the table of known faults: a child destroyed after its parent.
  @ParameterizedTest
  @ValueSource(booleans = {false, true})
  void childEndsWithItsParentAndMayBeClosedAfterIt(boolean abort) {
    onRanks(
        2,
        (rank, x) -> {
          Communicator parent = rank.communicator().split(0, rank.rank(), INHERITED);
          Communicator child = parent.split(0, rank.rank(), INHERITED);
          if (abort) {
            parent.abort();
          } else {
            parent.close();
          }
          assertEquals(
              abort ? Communicator.State.ABORTED : Communicator.State.CLOSED, child.state());
          child.close();
          child.abort();
          Messages.assertNames(
              assertThrows(
                  IllegalStateException.class,
                  () -> child.allReduce(x, x, ReduceOp.SUM, rank.stream())),
              abort ? "aborted" : "closed");
          meet();
          assertWorks(rank.communicator(), x, rank.stream());
        });
  }

  @Test
  void abortOfTheParentEndsAChildWhosePeersNeverCome() {
    CyclicBarrier bothHaveWorked = new CyclicBarrier(2);
    onRanks(
        2,
        (rank, x) -> {
          Communicator parent = rank.communicator();
          Communicator child = parent.split(0, rank.rank(), INHERITED);
          assertWorks(child, x, rank.stream());
          bothHaveWorked.await(30, TimeUnit.SECONDS);
          if (rank.rank() == 1) {
            return; // comes neither to the collective nor, before the other, to a destroy
          }
          child.allReduce(x, x, ReduceOp.SUM, rank.stream());
          parent.abort();
          assertEquals(Communicator.State.ABORTED, child.state());
        });
  }
}

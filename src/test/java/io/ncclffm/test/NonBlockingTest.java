package io.ncclffm.test;

import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

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
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.BooleanSupplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Non-blocking communicators: calls that go on after they have returned, and their ends. */
class NonBlockingTest {
  private static final CommunicatorConfig NON_BLOCKING =
      CommunicatorConfig.builder().blocking(false).build();
  private static final CommunicatorConfig INHERITED = CommunicatorConfig.DEFAULT;
  // The common pool has one thread on a small machine, and these tasks wait for one another.
  private static final Executor FRESH_THREAD = task -> Thread.ofPlatform().daemon().start(task);
  private static final Duration PATIENCE = Duration.ofSeconds(30);
  private static final Duration TOO_SHORT = Duration.ofMillis(20);
  private static final int LATE_MILLIS = 2000;
  private static final int IN_PROGRESS = 7;

  /** What a rank's task does with its own non-blocking communicator and a buffer of one INT64. */
  private interface Task {
    void run(LocalWorld.Rank rank, Communicator comm, DeviceBuffer x) throws Exception;
  }

  /** The communicator is closed after the task. */
  private static void onRanks(int size, Task task) {
    NcclUniqueId id = NcclUniqueId.create();
    CyclicBarrier allReady = new CyclicBarrier(size);
    try (LocalWorld world = TestRanks.open(size);
        RankBuffers x = RankBuffers.allocate(world, DataType.INT64, 1)) {
      world.run(
          rank -> {
            try (Communicator comm =
                Communicator.create(id, size, rank.rank(), rank.device(), NON_BLOCKING)) {
              comm.awaitReady(PATIENCE);
              allReady.await(30, TimeUnit.SECONDS); // before one of them aborts
              task.run(rank, comm, x.of(rank));
            }
          });
    }
  }

  private static void assertWorks(Communicator comm, DeviceBuffer x, CudaStream stream) {
    long[] value = {comm.rank() + 1};
    x.copyFrom(value, stream);
    comm.allReduce(x, x, ReduceOp.SUM, stream);
    x.copyTo(value, stream);
    assertEquals(comm.size() * (comm.size() + 1) / 2, value[0], "sum on " + comm);
  }

  private static void letBeLate(String function) {
    Faults.inject(function + ":late_ms=" + LATE_MILLIS);
  }

  @BeforeAll
  static void prepare() {
    TestRanks.prepare();
  }

  @AfterEach
  void clearFaults() {
    Faults.clear();
  }

  private static void arrive(CyclicBarrier barrier) {
    try {
      barrier.await(30, TimeUnit.SECONDS);
    } catch (Exception e) {
      throw new AssertionError(e);
    }
  }

  private static void await(BooleanSupplier condition) {
    long deadline = System.nanoTime() + PATIENCE.toNanos();
    while (!condition.getAsBoolean()) {
      assertTrue(System.nanoTime() < deadline, "not within " + PATIENCE);
      Thread.onSpinWait();
    }
  }

  /** Native memory of the size of a pointer, taken at once after some was freed. */
  private static final class Sentinels implements AutoCloseable {
    private static final long PATTERN = 0x5e47_1e15_5e47_1e15L;
    private final Arena arena = Arena.ofShared();
    private final List<MemorySegment> all = new ArrayList<>();

    Sentinels() {
      for (int i = 0; i < 1000; i++) {
        MemorySegment one = arena.allocate(JAVA_LONG);
        one.set(JAVA_LONG, 0, PATTERN);
        all.add(one);
      }
    }

    void assertUntouched() {
      for (MemorySegment one : all) {
        assertEquals(
            Long.toHexString(PATTERN),
            Long.toHexString(one.get(JAVA_LONG, 0)),
            "written after it was freed");
      }
    }

    @Override
    public void close() {
      arena.close();
    }
  }

  @Test
  void creationGoesOnUntilTheLastRankHasCome() {
    TestRanks.prepare();
    NcclUniqueId id = NcclUniqueId.create();
    CudaDevice device = new CudaDevice(0);
    CudaDevice other = new CudaDevice(1 % CudaDevice.count());
    try (Communicator first = Communicator.create(id, 2, 0, device, NON_BLOCKING)) {
      assertEquals(Communicator.State.INITIALISING, first.state());
      assertEquals(IN_PROGRESS, first.asyncError());
      Messages.assertNames(
          assertThrows(DeadlineException.class, () -> first.awaitReady(TOO_SHORT)), "awaitReady");
      assertEquals(Communicator.State.INITIALISING, first.state());
      Messages.assertNames(
          assertThrows(IllegalStateException.class, first::properties),
          "initialising",
          "awaitReady");
      try (Communicator second = Communicator.create(id, 2, 1, other, NON_BLOCKING)) {
        first.awaitReady(PATIENCE);
        second.awaitReady(PATIENCE);
        second.awaitReady(PATIENCE);
        assertEquals(List.of(0, 1), List.of(first.rank(), second.rank()));
        assertEquals(0, first.asyncError());
        // Not READY and then an abort: a destroy of both on this thread would be as good.
        first.abort();
      }
    }
  }

  @Test
  void creationThatIsLateIsWaitedForAgain() {
    NcclUniqueId id = NcclUniqueId.create();
    letBeLate("ncclCommInitRankConfig");
    try (Communicator comm = Communicator.create(id, 1, 0, new CudaDevice(0), NON_BLOCKING)) {
      assertThrows(DeadlineException.class, () -> comm.awaitReady(TOO_SHORT));
      assertEquals(IN_PROGRESS, comm.asyncError());
      comm.awaitReady(PATIENCE);
      assertEquals(1, comm.size());
    }
  }

  @ParameterizedTest
  @ValueSource(booleans = {false, true})
  void creationThatWaitsForARankIsEndedByAbortOrClose(boolean abort) {
    TestRanks.prepare();
    Communicator comm =
        Communicator.create(NcclUniqueId.create(), 2, 0, new CudaDevice(0), NON_BLOCKING);
    if (abort) {
      comm.abort();
    } else {
      comm.close();
    }
    assertThrows(IllegalStateException.class, () -> comm.awaitReady(PATIENCE));
    assertThrows(IllegalStateException.class, comm::asyncError);
  }

  @Test
  void abortOfAnotherThreadWakesTheOneThatAwaitsReadiness() throws Exception {
    TestRanks.prepare();
    Communicator comm =
        Communicator.create(NcclUniqueId.create(), 2, 0, new CudaDevice(0), NON_BLOCKING);
    AtomicReference<Thread> waiter = new AtomicReference<>();
    CompletableFuture<Void> waiting =
        CompletableFuture.runAsync(
            () -> {
              waiter.set(Thread.currentThread());
              comm.awaitReady(PATIENCE);
            },
            FRESH_THREAD);
    // It parks between its looks once it has spun for a while.
    await(() -> waiter.get() != null && waiter.get().getState() == Thread.State.TIMED_WAITING);
    comm.abort();
    Throwable thrown =
        assertThrows(ExecutionException.class, () -> waiting.get(5, TimeUnit.SECONDS)).getCause();
    assertInstanceOf(IllegalStateException.class, thrown);
    Messages.assertNames(thrown, "awaitReady", "aborted");
  }

  @Test
  void abortOfAnotherThreadWakesTheOneThatWaitsForTheStream() {
    CyclicBarrier bothHaveWorked = new CyclicBarrier(2);
    CyclicBarrier aborted = new CyclicBarrier(2);
    onRanks(
        2,
        (rank, comm, x) -> {
          assertWorks(comm, x, rank.stream());
          bothHaveWorked.await(30, TimeUnit.SECONDS);
          if (rank.rank() == 1) {
            aborted.await(30, TimeUnit.SECONDS); // without coming to the collective
            return;
          }
          comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
          Thread me = Thread.currentThread();
          CompletableFuture<Void> aborting =
              CompletableFuture.runAsync(
                  () -> {
                    await(() -> me.getState() == Thread.State.TIMED_WAITING);
                    comm.abort();
                  },
                  FRESH_THREAD);
          Messages.assertNames(
              assertThrows(IllegalStateException.class, () -> rank.stream().synchronize(PATIENCE)),
              "aborted");
          aborting.orTimeout(30, TimeUnit.SECONDS).join();
          aborted.await(30, TimeUnit.SECONDS);
        });
  }

  @Test
  void collectivesAreSetUpWhenTheCallReturns() {
    onRanks(
        2,
        (rank, comm, x) -> {
          for (int i = 0; i < 3; i++) {
            assertWorks(comm, x, rank.stream());
          }
          long[] value = {rank.rank()};
          x.copyFrom(value, rank.stream());
          NcclGroup.run(() -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream()));
          x.copyTo(value, rank.stream());
          assertEquals(1, value[0]);
          assertEquals(0, comm.asyncError());
        });
  }

  @ParameterizedTest
  @ValueSource(strings = {"alone", "in a group"})
  void collectiveThatIsLateIsWaitedFor(String how) {
    TestRanks.prepare();
    letBeLate("ncclAllReduce");
    onRanks(
        2,
        (rank, comm, x) -> {
          long[] value = {5};
          x.copyFrom(value, rank.stream());
          Runnable call = () -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
          long start = System.nanoTime();
          if (how.equals("alone")) {
            call.run();
          } else {
            NcclGroup.run(call);
          }
          long millis = (System.nanoTime() - start) / 1_000_000;
          assertTrue(millis >= LATE_MILLIS, "returned after " + millis + " ms");
          x.copyTo(value, rank.stream());
          assertEquals(10, value[0]);
        });
  }

  private static Communicator derive(String function, LocalWorld.Rank rank, Communicator comm) {
    return function.equals("ncclCommSplit")
        ? comm.split(0, rank.rank(), INHERITED)
        : comm.shrink(List.of(2), false, INHERITED);
  }

  // Row 37 of the table of known faults: the handle is written when the call has long returned.
  @ParameterizedTest
  @ValueSource(strings = {"ncclCommSplit", "ncclCommShrink"})
  void childWrittenLateIsWaitedForAgain(String function) {
    onLateChildren(
        function,
        (rank, comm, x) -> {
          try (Communicator child = derive(function, rank, comm)) {
            assertEquals(Communicator.State.INITIALISING, child.state());
            assertThrows(IllegalStateException.class, child::asyncError);
            assertThrows(DeadlineException.class, () -> child.awaitReady(TOO_SHORT));
            assertEquals(IN_PROGRESS, comm.asyncError());
            child.awaitReady(PATIENCE);
            assertEquals(rank.rank(), child.rank());
            assertEquals(2, child.size());
            assertWorks(child, x, rank.stream());
          }
        });
  }

  // Row 37 of the table of known faults: nobody waits for the handle, and it is written all the
  // same.
  @ParameterizedTest
  @ValueSource(strings = {"ncclCommSplit", "ncclCommShrink"})
  void childThatIsClosedBeforeItIsWrittenIsWrittenToMemoryThatLives(String function) {
    onLateChildren(
        function,
        (rank, comm, x) -> {
          Communicator child = derive(function, rank, comm);
          assertThrows(DeadlineException.class, () -> child.awaitReady(TOO_SHORT));
          child.abort();
          child.close();
          try (Sentinels sentinels = new Sentinels()) {
            await(() -> comm.asyncError() != IN_PROGRESS);
            assertEquals(0, comm.asyncError());
            sentinels.assertUntouched();
          }
          assertThrows(IllegalStateException.class, () -> child.awaitReady(PATIENCE));
          if (function.equals("ncclCommSplit")) {
            // The parent is as good as ever.
            try (Communicator next = comm.split(0, -rank.rank(), INHERITED)) {
              next.awaitReady(PATIENCE);
              assertWorks(next, x, rank.stream());
            }
          }
        });
  }

  // Row 37 of the table of known faults: the parent ends first, and with it the writing.
  @ParameterizedTest
  @ValueSource(strings = {"ncclCommSplit", "ncclCommShrink"})
  void parentThatEndsBeforeAChildIsWrittenEndsItsMaking(String function) {
    CyclicBarrier begun = new CyclicBarrier(2);
    onLateChildren(
        function,
        (rank, comm, x) -> {
          Communicator child = derive(function, rank, comm);
          begun.await(30, TimeUnit.SECONDS);
          if (rank.rank() == 0) {
            comm.abort();
          } else {
            comm.close();
          }
          RuntimeException unmade =
              assertThrows(RuntimeException.class, () -> child.awaitReady(PATIENCE));
          assertTrue(
              unmade instanceof IllegalStateException || unmade instanceof NcclException,
              unmade.toString());
          child.close();
          try (Sentinels sentinels = new Sentinels()) {
            Thread.sleep(LATE_MILLIS); // what is not to come has no sign that could be waited for
            sentinels.assertUntouched();
          }
        });
  }

  /** Ranks 0 and 1 of 2, or, where the third is to be left out, of 3. */
  private static void onLateChildren(String function, Task task) {
    int size = function.equals("ncclCommSplit") ? 2 : 3;
    CyclicBarrier done = new CyclicBarrier(size);
    TestRanks.prepare();
    letBeLate(function);
    onRanks(
        size,
        (rank, comm, x) -> {
          if (rank.rank() < 2) {
            task.run(rank, comm, x);
          }
          done.await(30, TimeUnit.SECONDS);
        });
  }

  @Test
  void grownCommunicatorThatIsLateIsWaitedFor() {
    TestRanks.prepare();
    CompletableFuture<NcclUniqueId> id = new CompletableFuture<>();
    letBeLate("ncclCommGrow");
    try (LocalWorld joining = TestRanks.open(1);
        RankBuffers y = RankBuffers.allocate(joining, DataType.INT64, 1)) {
      CompletableFuture<Void> joined =
          CompletableFuture.runAsync(
              () ->
                  joining.run(
                      rank -> {
                        try (Communicator larger =
                            Communicator.join(
                                id.get(30, TimeUnit.SECONDS), 3, 2, rank.device(), NON_BLOCKING)) {
                          assertThrows(DeadlineException.class, () -> larger.awaitReady(TOO_SHORT));
                          larger.awaitReady(PATIENCE);
                          assertWorks(larger, y.of(rank), rank.stream());
                        }
                      }),
              FRESH_THREAD);
      onRanks(
          2,
          (rank, comm, x) -> {
            NcclUniqueId made = rank.rank() == 0 ? comm.growthId() : null;
            if (made != null) {
              id.complete(made);
            }
            try (Communicator larger = comm.grow(3, made, INHERITED)) {
              assertThrows(DeadlineException.class, () -> larger.awaitReady(TOO_SHORT));
              larger.awaitReady(PATIENCE);
              assertEquals(3, larger.size());
              assertWorks(larger, x, rank.stream());
            }
          });
      joined.orTimeout(30, TimeUnit.SECONDS).join();
    }
  }

  // Row 37 of the table of known faults, for windows.
  @Test
  void windowThatIsWrittenLateIsWaitedFor() {
    TestRanks.prepare();
    letBeLate("ncclCommWindowRegister");
    onRanks(
        2,
        (rank, comm, x) -> {
          try (DeviceBuffer memory =
                  DeviceBuffer.allocateForWindow(rank.device(), DataType.INT64, 512);
              NcclWindow window = comm.registerWindow(memory)) {
            assertEquals(memory.address(0), window.userPointer());
          }
        });
  }

  // Row 37 of the table of known faults, for windows: the out-parameter outlives an abort.
  @Test
  void abortDuringALateRegistrationEndsIt() {
    TestRanks.prepare();
    // Longer than any displaced thread: an abort ends the lateness too.
    Faults.inject("ncclCommWindowRegister:late_ms=10000");
    CyclicBarrier bothUnderWay = new CyclicBarrier(2);
    onRanks(
        2,
        (rank, comm, x) -> {
          try (DeviceBuffer memory =
              DeviceBuffer.allocateForWindow(rank.device(), DataType.INT64, 512)) {
            CompletableFuture<Void> aborting =
                CompletableFuture.runAsync(
                    () -> {
                      await(() -> comm.asyncError() == IN_PROGRESS);
                      arrive(bothUnderWay);
                      comm.abort();
                    },
                    FRESH_THREAD);
            assertThrows(RuntimeException.class, () -> comm.registerWindow(memory));
            aborting.orTimeout(30, TimeUnit.SECONDS).join();
            try (Sentinels sentinels = new Sentinels()) {
              Thread.sleep(LATE_MILLIS); // what is not to come has no sign
              sentinels.assertUntouched();
            }
          }
        });
  }

  @Test
  void finalizationThatIsLateIsWaitedForAgain() {
    TestRanks.prepare();
    letBeLate("ncclCommFinalize");
    onRanks(
        2,
        (rank, comm, x) -> {
          assertWorks(comm, x, rank.stream());
          assertThrows(DeadlineException.class, () -> comm.finalizeAndClose(TOO_SHORT));
          assertEquals(Communicator.State.FINALIZING, comm.state());
          Messages.assertNames(
              assertThrows(
                  IllegalStateException.class,
                  () -> comm.allReduce(x, x, ReduceOp.SUM, rank.stream())),
              "finalizing");
          comm.finalizeAndClose(PATIENCE);
          assertEquals(Communicator.State.CLOSED, comm.state());
        });
  }

  @Test
  void finalizationThatIsLateIsEndedByClose() {
    TestRanks.prepare();
    letBeLate("ncclCommFinalize");
    onRanks(
        2,
        (rank, comm, x) -> {
          assertThrows(DeadlineException.class, () -> comm.finalizeAndClose(TOO_SHORT));
          comm.close();
          assertEquals(Communicator.State.CLOSED, comm.state());
        });
  }

  @Test
  void finalizeAndCloseEndsAHealthyOne() {
    onRanks(
        2,
        (rank, comm, x) -> {
          Communicator child = comm.split(0, rank.rank(), INHERITED);
          child.awaitReady(PATIENCE);
          assertWorks(comm, x, rank.stream());
          comm.finalizeAndClose(PATIENCE);
          assertEquals(Communicator.State.CLOSED, comm.state());
          assertEquals(Communicator.State.CLOSED, child.state());
        });
  }

  @Test
  void splitWhosePeerFailsIsAnException() {
    TestRanks.assumeCpu("NCCL notices a peer in the same process late");
    onRanks(
        2,
        (rank, comm, x) -> {
          if (rank.rank() == 1) {
            comm.abort();
            return;
          }
          NcclException e =
              assertThrows(
                  NcclException.class, () -> comm.split(0, 0, INHERITED).awaitReady(PATIENCE));
          Messages.assertNames(e, "rank 1");
          assertEquals(Communicator.State.FAILED, comm.state());
        });
  }
}

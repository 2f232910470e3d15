package io.ncclffm.lsa;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.test.Messages;
import io.ncclffm.test.TestRanks;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** Where the ranks of a process meet. */
class ExchangeTest {
  private static final int RANKS = 3;

  /** Ranks that come and go at different times each take along what they have put there. */
  @Test
  void noPlaceToMeetIsLeftBehind() {
    int before = Exchange.meetings();
    try (LocalWorld world = TestRanks.open(RANKS)) {
      for (int i = 0; i < 30; i++) {
        // NCCL does not tell the others of an abort, which then wait for the rank for a minute.
        int round = TestRanks.onCpu() ? i : i / 3 * 3;
        world.run(
            r -> {
              Communicator child = r.communicator().split(0, r.rank(), CommunicatorConfig.DEFAULT);
              if (round % 3 == 2 && r.rank() == 0) {
                // Leaves when it has found the others, who may not have come to the place yet.
                Exchange.of(child);
                child.abort();
                return;
              }
              try {
                LsaWindow.create(child, 4096, LsaProvider.CUDA_IPC);
              } catch (RuntimeException e) {
                assertTrue(round % 3 == 2, () -> "round " + round + ": " + e);
              }
              if (round % 3 == 0) {
                child.close();
              } else {
                child.abort();
              }
            });
      }
    }
    assertEquals(before, Exchange.meetings());
  }

  /** While a rank makes a window, another thread may abort its communicator but not use it so. */
  @Test
  void secondThreadIsRefusedWhileARankMakesAWindow() {
    AtomicReference<LocalWorld.Rank> first = new AtomicReference<>();
    AtomicReference<LsaWindow> window = new AtomicReference<>();
    AtomicReference<Thread> waiting = new AtomicReference<>();
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            LsaWindow mine = LsaWindow.create(r.communicator(), 4096);
            SymmetricPool pool = SymmetricPool.over(mine, true);
            if (r.rank() == 0) {
              first.set(r);
              window.set(mine);
              waiting.set(Thread.currentThread());
            } else {
              awaitMeeting(waiting);
              for (Executable use :
                  List.<Executable>of(
                      () -> LsaWindow.create(first.get().communicator(), 8192),
                      () -> LsaWindow.prepare(first.get().communicator()),
                      () -> window.get().close(),
                      () -> SymmetricPool.over(window.get(), true).allocate(128))) {
                Messages.assertNames(
                    assertThrows(IllegalStateException.class, use),
                    "is inside a call; a communicator takes one thread at a time");
              }
            }
            LsaWindow next = LsaWindow.create(r.communicator(), 8192);
            next.verify("test");
            mine.verify("a close that was refused closed nothing");
            pool.allocate(128);
          });
    }
  }

  @Test
  void windowOfACommunicatorThatHasEndedIsRefused() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            Communicator child = r.communicator().split(0, r.rank(), CommunicatorConfig.DEFAULT);
            child.close();
            Messages.assertNames(
                assertThrows(IllegalStateException.class, () -> LsaWindow.create(child, 4096)),
                "LSA window",
                "the communicator is closed");
          });
    }
  }

  /** Until a thread waits for others in {@link Meeting#exchange}, where it stays for minutes. */
  private static void awaitMeeting(AtomicReference<Thread> thread) {
    long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
    while (!isInMeeting(thread.get())) {
      if (System.nanoTime() - deadline > 0) {
        throw new AssertionError("rank 0 does not wait for rank 1");
      }
      LockSupport.parkNanos(100_000);
    }
  }

  private static boolean isInMeeting(Thread thread) {
    if (thread == null) {
      return false;
    }
    for (StackTraceElement frame : thread.getStackTrace()) {
      if (frame.getClassName().equals(Meeting.class.getName())) {
        return thread.getState() == Thread.State.TIMED_WAITING;
      }
    }
    return false;
  }
}

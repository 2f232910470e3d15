package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordingFile;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** What happens around the making of a window: choice, refusals, and what is left as it was. */
class LsaMakingTest {
  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @AfterEach
  void clearFaults() {
    if (TestRanks.onCpu()) {
      Faults.clear();
    }
  }

  private static int enableAccess(CudaDevice from, CudaDevice to) {
    from.makeCurrent();
    int rc = CudartH.cudaDeviceEnablePeerAccess(to.ordinal(), 0);
    int unused = CudartH.cudaGetLastError(); // clears it
    return rc;
  }

  private static int disableAccess(CudaDevice from, CudaDevice to) {
    from.makeCurrent();
    int rc = CudartH.cudaDeviceDisablePeerAccess(to.ordinal());
    int unused = CudartH.cudaGetLastError(); // clears it
    return rc;
  }

  @Test
  void peerAccessIsLeftAsItWasFound() {
    TestRanks.prepare();
    TestRanks.assumeDevices(2);
    CudaDevice first = new CudaDevice(0);
    CudaDevice second = new CudaDevice(1);
    try (LocalWorld world = TestRanks.open(2)) {
      assertEquals(0, enableAccess(first, second), "off at first");
      // On from 0 to 1 and off from 1 to 0, and so it is again after two windows.
      world.run(
          r -> {
            LsaWindow one = LsaWindow.create(r.communicator(), 4096, LsaProvider.CUDA_IPC);
            LsaWindow two = LsaWindow.create(r.communicator(), 4096, LsaProvider.CUDA_IPC);
            one.close();
            two.verify("the other window needs the access still");
            two.close();
          });
      assertEquals(
          CudartH.cudaErrorPeerAccessAlreadyEnabled(),
          enableAccess(first, second),
          "what was on stays on");
      assertEquals(
          CudartH.cudaErrorPeerAccessNotEnabled(),
          disableAccess(second, first),
          "what was off is off");
      assertEquals(0, disableAccess(first, second));
    }
  }

  @Test
  void hostStagedWindowsHaveNoFileAnyMore() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            try (LsaWindow window =
                LsaWindow.create(r.communicator(), 1 << 20, LsaProvider.HOST_STAGED)) {
              window.verify("test");
              assertEquals(List.of(), openWindowFiles());
            }
          });
    }
  }

  private static List<String> openWindowFiles() {
    try (Stream<Path> descriptors = Files.list(Path.of("/proc/self/fd"))) {
      return descriptors
          .map(LsaMakingTest::target)
          .filter(file -> file.contains("ncclffm-window"))
          .toList();
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  private static String target(Path descriptor) {
    try {
      return Files.readSymbolicLink(descriptor).toString();
    } catch (IOException e) {
      return ""; // closed meanwhile
    }
  }

  /** NCCL reports success and gives no window where symmetric memory is not supported. */
  @Test
  void windowThatTheLibraryDoesNotGiveIsAnErrorOnEveryRank() {
    TestRanks.assumeCpu("the fault is injected");
    String[] texts = new String[3];
    try (LocalWorld world = TestRanks.open(3)) {
      Faults.inject("ncclCommWindowRegister:result=0");
      world.run(
          r ->
              texts[r.rank()] =
                  assertThrows(
                          LsaException.class,
                          () -> LsaWindow.create(r.communicator(), 4096, LsaProvider.CPU))
                      .getMessage());
      assertTrue(texts[0].contains("CPU: rank 0: ") && texts[0].contains("no window"), texts[0]);
      assertEquals(List.of(texts[0], texts[0], texts[0]), List.of(texts));
      // Left to themselves the ranks take the next provider.
      world.run(
          r -> {
            try (LsaWindow window = LsaWindow.create(r.communicator(), 4096)) {
              assertEquals(LsaProvider.CUDA_IPC, window.provider());
            }
          });
      Faults.clear();
      world.run(
          r -> {
            try (LsaWindow window = LsaWindow.create(r.communicator(), 4096)) {
              assertEquals(LsaProvider.CPU, window.provider());
            }
          });
    }
  }

  @Test
  void rankWithoutMemoryFailsAllAndNothingIsTaken() {
    TestRanks.assumeCpu("the fault is injected");
    try (LocalWorld world = TestRanks.open(2)) {
      Faults.inject("ncclMemAlloc:result=2,times=1");
      String[] texts = new String[2];
      world.run(
          r ->
              texts[r.rank()] =
                  assertThrows(
                          LsaException.class,
                          () -> LsaWindow.create(r.communicator(), 4096, LsaProvider.CPU))
                      .getMessage());
      assertEquals(texts[0], texts[1]);
      assertTrue(texts[0].contains("ncclMemAlloc"), texts[0]);
      Faults.clear();
      TestRanks.assertWorks(world);
    }
  }

  /** The abort waits for the step under way, and what that made is freed all the same. */
  @Test
  void abortInTheMiddleOfMakingAWindowLeavesNothing() throws IOException {
    TestRanks.assumeCpu("the fault is injected");
    abortWhileAllocating();
    Resources before = Resources.now();
    for (int round = 0; round < 5; round++) {
      abortWhileAllocating();
    }
    before.assertNoMoreThan(2, "after aborts in the middle of making a window");
  }

  private static void abortWhileAllocating() {
    try (LocalWorld world = TestRanks.open(2)) {
      Faults.inject("ncclMemAlloc:delay_ms=800");
      world.run(
          r -> {
            Thread maker = Thread.currentThread();
            Thread aborter =
                Thread.ofPlatform()
                    .start(
                        () -> {
                          awaitCall(maker, "ncclMemAlloc");
                          r.communicator().abort();
                        });
            assertThrows(
                RuntimeException.class,
                () -> LsaWindow.create(r.communicator(), 1 << 20, LsaProvider.CPU));
            assertTrue(aborter.join(Duration.ofSeconds(20)), "the abort ends");
          });
    } finally {
      Faults.inject("");
    }
  }

  private static void awaitCall(Thread thread, String method) {
    long deadline = System.nanoTime() + Duration.ofSeconds(10).toNanos();
    while (Stream.of(thread.getStackTrace()).noneMatch(f -> f.getMethodName().equals(method))) {
      assertTrue(System.nanoTime() - deadline < 0, "no call of " + method);
      Thread.onSpinWait();
    }
  }

  @Test
  void wrongSizeOfOneRankIsAnErrorOfAll() {
    try (LocalWorld world = TestRanks.open(3)) {
      world.run(
          r ->
              Messages.assertNames(
                  assertThrows(
                      IllegalArgumentException.class,
                      () -> LsaWindow.create(r.communicator(), r.rank() == 1 ? 0 : 4096)),
                  "rank 0 for 4096 bytes",
                  "rank 1 for 0 bytes"));
      TestRanks.assertWorks(world);
    }
  }

  /** The rank that waits leaves; the one that comes late must not take its leaving for consent. */
  @Test
  void rankThatIsInterruptedWhileItWaitsEndsTheMeetingForAll() {
    CountDownLatch left = new CountDownLatch(1);
    CyclicBarrier bothSeen = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            LsaWindow before = LsaWindow.create(r.communicator(), 4096);
            if (r.rank() == 0) {
              Thread.currentThread().interrupt();
              assertThrows(DeadlineException.class, () -> LsaWindow.create(r.communicator(), 8192));
              assertTrue(Thread.interrupted());
              left.countDown();
            } else {
              assertTrue(left.await(30, TimeUnit.SECONDS));
              Messages.assertNames(
                  assertThrows(LsaException.class, () -> LsaWindow.create(r.communicator(), 8192)),
                  "interrupted while it waited");
            }
            before.verify("what was there is there");
            bothSeen.await(30, TimeUnit.SECONDS);
            r.communicator().abort();
          });
    }
  }

  @Test
  void ranksThatCloseDifferentWindowsAreToldSo() {
    CyclicBarrier bothSeen = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            LsaWindow one = LsaWindow.create(r.communicator(), 4096, LsaProvider.CUDA_IPC);
            LsaWindow two = LsaWindow.create(r.communicator(), 4096, LsaProvider.CUDA_IPC);
            Messages.assertNames(
                assertThrows(LsaException.class, () -> (r.rank() == 0 ? one : two).close()),
                "rank 0 closes the window",
                "rank 1 closes the window");
            bothSeen.await(30, TimeUnit.SECONDS);
            r.communicator().abort();
          });
    }
  }

  /**
   * The first all-gather of the ranks is a kernel that waits for all: on one GPU it must not run
   * while another rank still loads its kernels.
   */
  @Test
  void ranksMeetBeforeTheyLoadTheirKernels() {
    TestRanks.assumeCpu("the fault is injected");
    try (LocalWorld world = TestRanks.open(2)) {
      Faults.inject("cudaMemsetAsync:result=1"); // what a rank does before it loads them
      world.run(
          r ->
              Messages.assertNames(
                  assertThrows(
                      CudaException.class, () -> DeviceCommunicator.create(r.communicator())),
                  "cudaMemsetAsync"));
      Faults.inject("ncclAllGather:result=3");
      world.run(
          r -> {
            try (LsaWindow window = LsaWindow.create(r.communicator(), 4096)) {
              window.verify("the ranks met on the host");
            }
          });
      Faults.clear();
      world.run(r -> DeviceCommunicator.create(r.communicator()).close());
    }
  }

  @Test
  void windowInAGroupIsRefused() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r -> {
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class,
                    () -> NcclGroup.run(() -> LsaWindow.create(r.communicator(), 4096))),
                "inside a group");
          });
    }
  }

  @Test
  void flightRecorderTellsProviderAndSize(@TempDir Path folder) throws Exception {
    Path file = folder.resolve("windows.jfr");
    try (Recording recording = new Recording();
        LocalWorld world = TestRanks.open(2)) {
      recording.enable("io.ncclffm.LsaWindow");
      recording.start();
      world.run(r -> LsaWindow.create(r.communicator(), 12_345, LsaProvider.HOST_STAGED).close());
      recording.stop();
      recording.dump(file);
    }
    List<RecordedEvent> events =
        RecordingFile.readAllEvents(file).stream()
            .filter(event -> event.getEventType().getName().equals("io.ncclffm.LsaWindow"))
            .toList();
    assertEquals(2, events.size(), events.toString());
    for (RecordedEvent event : events) {
      assertEquals("HOST_STAGED", event.getString("provider"));
      assertEquals(12_345, event.getLong("bytes"));
      assertEquals(2, event.getInt("size"));
      assertTrue(event.getDuration().toNanos() > 0);
    }
  }
}

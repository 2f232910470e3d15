package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclGroup;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Graphs of one stream's work; see {@link GraphCollectivesTest} for those of several ranks. */
class CudaGraphTest {
  private static final int UNSUPPORTED_IN_CAPTURE = 900;
  private static final int CAPTURE_INVALIDATED = 901;
  private static final int CAPTURE_UNJOINED = 904;

  private CudaDevice device;
  private CudaStream stream;
  private CudaStream second;
  private DeviceBuffer x;
  private HostBuffer source;
  private HostBuffer target;

  @BeforeEach
  void open() {
    TestRanks.prepare();
    device = new CudaDevice(0);
    stream = CudaStream.create(device);
    second = CudaStream.create(device);
    x = DeviceBuffer.allocate(device, DataType.INT32, 1);
    source = HostBuffer.allocate(device, Integer.BYTES);
    target = HostBuffer.allocate(device, Integer.BYTES);
  }

  @AfterEach
  void close() {
    target.close();
    source.close();
    x.close();
    second.close();
    stream.close();
  }

  private void copyThrough(CudaStream on) {
    x.copyFrom(source.segment(), on);
    x.copyTo(target.segment(), on);
  }

  private void assertCopies(CudaGraph graph, CudaStream on, int value) {
    source.segment().set(ValueLayout.JAVA_INT, 0, value);
    graph.launch(on);
    on.synchronize(Duration.ofSeconds(20));
    assertEquals(value, target.segment().get(ValueLayout.JAVA_INT, 0));
  }

  private int valueOfX() {
    int[] value = new int[1];
    x.copyTo(value, stream);
    return value[0];
  }

  /** Neither stream is captured any more, and both do their work. */
  private void assertUsable() {
    for (CudaStream each : new CudaStream[] {stream, second}) {
      assertFalse(each.isCapturing());
      x.copyFrom(new int[] {42}, each);
      each.synchronize(Duration.ofSeconds(20));
      assertEquals(42, valueOfX());
    }
  }

  @Test
  void fillAndCopiesRunAtEveryLaunchAndNotBefore() {
    x.copyFrom(new int[] {7}, stream);
    try (CudaGraph filling = CudaGraph.capture(stream, () -> x.fill((byte) 1, stream));
        CudaGraph copying = CudaGraph.capture(stream, () -> copyThrough(stream))) {
      assertEquals(7, valueOfX(), "nothing ran in the capture");
      for (int i = 0; i < 20; i++) {
        filling.launch(stream);
        assertEquals(0x01010101, valueOfX());
        assertCopies(copying, i % 3 == 0 ? second : stream, i);
      }
    }
  }

  @Test
  void emptyGraphCanBeLaunched() {
    try (CudaGraph empty = CudaGraph.capture(stream, () -> {})) {
      empty.launch(stream);
      stream.synchronize(Duration.ofSeconds(20));
    }
  }

  @Test
  void graphLaunchedInACaptureIsRefusedAndTheCaptureGoesOn() {
    CudaGraph inner = CudaGraph.capture(stream, () -> copyThrough(stream));
    CudaGraph outer =
        CudaGraph.capture(
            stream,
            () -> {
              Messages.assertNames(
                  assertThrows(IllegalStateException.class, () -> inner.launch(stream)),
                  "being captured");
              copyThrough(stream);
            });
    try (inner;
        outer) {
      assertCopies(outer, second, 5);
    }
  }

  // ------------------------------------------------------------------ captures that fail

  @Test
  void exceptionOfTheWorkEndsTheCaptureAndComesOut() {
    IllegalStateException thrown = new IllegalStateException("no more");
    assertSame(
        thrown,
        assertThrows(
            IllegalStateException.class,
            () ->
                CudaGraph.capture(
                    stream,
                    () -> {
                      x.fill((byte) 1, stream);
                      throw thrown;
                    })));
    assertEquals(0, thrown.getSuppressed().length);
    assertUsable();
  }

  @Test
  void waitingForACapturedStreamSpoilsTheCapture() {
    CudaException e =
        assertThrows(
            CudaException.class, () -> CudaGraph.capture(stream, () -> stream.synchronize()));
    assertEquals(UNSUPPORTED_IN_CAPTURE, e.errorCode());
    Messages.assertNames(e, "cudaStreamQuery", "device 0");
    assertEquals(1, e.getSuppressed().length);
    Messages.assertNames(e.getSuppressed()[0], "cudaStreamEndCapture");
    assertUsable();
  }

  @Test
  void spoiltCaptureIsReportedThoughTheWorkHidIt() {
    CudaException e =
        assertThrows(
            CudaException.class,
            () ->
                CudaGraph.capture(
                    stream,
                    () ->
                        assertThrows(
                            CudaException.class,
                            () -> DeviceBuffer.allocate(device, DataType.INT8, 1 << 20))));
    assertEquals(CAPTURE_INVALIDATED, e.errorCode());
    Messages.assertNames(e, "cudaStreamEndCapture", "device 0", "waited for captured work");
    assertUsable();
  }

  @Test
  void captureOfACapturedStreamIsRefusedAndTheOuterOneGoesOn() {
    try (CudaGraph graph =
        CudaGraph.capture(
            stream,
            () -> {
              assertTrue(stream.isCapturing());
              IllegalStateException e =
                  assertThrows(
                      IllegalStateException.class, () -> CudaGraph.capture(stream, () -> {}));
              Messages.assertNames(e, "cudaStreamBeginCapture", "captured already");
              copyThrough(stream);
            })) {
      assertCopies(graph, stream, 3);
    }
    assertUsable();
  }

  @Test
  void arraysAreRefusedInACaptureAndDoNotSpoilIt() {
    try (CudaGraph graph =
        CudaGraph.capture(
            stream,
            () -> {
              int[] array = new int[1];
              Messages.assertNames(
                  assertThrows(IllegalStateException.class, () -> x.copyFrom(array, stream)),
                  "HostBuffer");
              Messages.assertNames(
                  assertThrows(IllegalStateException.class, () -> x.copyTo(array, stream)),
                  "HostBuffer");
              copyThrough(stream);
            })) {
      assertCopies(graph, stream, 4);
    }
  }

  @Test
  void streamCannotBeClosedInACapture() {
    try (CudaGraph graph =
        CudaGraph.capture(
            stream,
            () ->
                Messages.assertNames(
                    assertThrows(IllegalStateException.class, stream::close),
                    "cudaStreamDestroy",
                    "being captured"))) {
      graph.launch(stream);
      assertUsable();
    }
  }

  @Test
  void captureInsideAGroupIsRefused() {
    NcclGroup.run(
        () ->
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> CudaGraph.capture(stream, () -> {})),
                "cudaStreamBeginCapture",
                "put the group into the capture"));
  }

  @Test
  void captureOnAVirtualThreadIsRefused() throws Exception {
    CompletableFuture<CudaGraph> made = new CompletableFuture<>();
    Thread.ofVirtual()
        .start(
            () -> {
              try {
                made.complete(CudaGraph.capture(stream, () -> {}));
              } catch (RuntimeException e) {
                made.completeExceptionally(e);
              }
            });
    ExecutionException e =
        assertThrows(ExecutionException.class, () -> made.get(20, TimeUnit.SECONDS));
    Messages.assertNames(e.getCause(), "virtual thread", "platform");
  }

  @Test
  void otherThreadsAreNotDisturbedNorDisturb() throws Exception {
    try (CudaGraph graph =
        CudaGraph.capture(
            stream,
            () -> {
              x.copyFrom(source.segment(), stream);
              CompletableFuture.runAsync(
                      () -> {
                        try (DeviceBuffer other = DeviceBuffer.allocate(device, DataType.INT32, 1);
                            CudaStream own = CudaStream.create(device)) {
                          other.copyFrom(new int[] {1}, own);
                        }
                      })
                  .join();
              x.copyTo(target.segment(), stream);
            })) {
      assertCopies(graph, stream, 9);
    }
  }

  // ------------------------------------------------------------------ two streams

  @Test
  void captureFollowsEventsToAnotherStreamAndBack() {
    try (CudaEvent fork = CudaEvent.create(device);
        CudaEvent join = CudaEvent.create(device)) {
      try (CudaGraph graph =
          CudaGraph.capture(
              stream,
              () -> {
                x.copyFrom(source.segment(), stream);
                fork.record(stream);
                second.await(fork);
                assertTrue(second.isCapturing());
                x.copyTo(target.segment(), second);
                join.record(second);
                stream.await(join);
              })) {
        assertFalse(second.isCapturing());
        for (int i = 0; i < 20; i++) {
          assertCopies(graph, stream, i);
        }
      }
      assertUsable();
      join.record(second); // an event as any other again
      stream.await(join);
      assertUsable();
    }
  }

  @Test
  void streamThatIsNotJoinedIsNamed() {
    try (CudaEvent fork = CudaEvent.create(device)) {
      CudaException e =
          assertThrows(
              CudaException.class,
              () ->
                  CudaGraph.capture(
                      stream,
                      () -> {
                        fork.record(stream);
                        second.await(fork);
                        x.fill((byte) 1, second);
                      }));
      assertEquals(CAPTURE_UNJOINED, e.errorCode());
      Messages.assertNames(e, "cudaStreamEndCapture", "await an event of every other stream");
      assertUsable();
    }
  }

  // ------------------------------------------------------------------ life

  @Test
  void launchAfterCloseIsRefusedAndClosingTwiceIsNot() {
    CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream));
    graph.close();
    graph.close();
    Messages.assertNames(
        assertThrows(IllegalStateException.class, () -> graph.launch(stream)),
        "cudaGraphLaunch",
        "graph on device 0 is closed");
  }

  @Test
  void launchOnWrongStreamsIsRefused() {
    try (CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream))) {
      CudaStream closed = CudaStream.create(device);
      closed.close();
      Messages.assertNames(
          assertThrows(IllegalStateException.class, () -> graph.launch(closed)),
          "cudaGraphLaunch",
          "closed");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> graph.launch(null)),
          "cudaGraphLaunch",
          "null");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> CudaGraph.capture(null, () -> {})),
          "cudaStreamBeginCapture",
          "null");
      Messages.assertNames(
          assertThrows(IllegalStateException.class, () -> CudaGraph.capture(closed, () -> {})),
          "cudaStreamBeginCapture",
          "closed");
      assertCopies(graph, stream, 1);
    }
  }

  @Test
  void launchOnAnotherDeviceIsRefused() {
    TestRanks.assumeDevices(2);
    try (CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream));
        CudaStream elsewhere = CudaStream.create(new CudaDevice(1))) {
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> graph.launch(elsewhere)),
          "cudaGraphLaunch",
          "device 1",
          "another device");
    }
  }

  @Test
  void launchesUnderWayOutliveTheGraph() {
    int[] result = new int[1];
    try (CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream))) {
      source.segment().set(ValueLayout.JAVA_INT, 0, 77);
      graph.launch(stream);
    }
    x.copyTo(result, stream);
    assertArrayEquals(new int[] {77}, result);
  }

  @Test
  void anUpdatePutsOtherWorkIntoTheGraph() {
    try (CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream));
        HostBuffer other = HostBuffer.allocate(device, Integer.BYTES)) {
      assertCopies(graph, stream, 5);
      for (int round = 6; round < 9; round++) {
        other.segment().set(ValueLayout.JAVA_INT, 0, 10 * round);
        graph.update(
            stream,
            () -> {
              x.copyFrom(other.segment(), stream);
              x.copyTo(target.segment(), stream);
            });
        graph.launch(stream);
        stream.synchronize(Duration.ofSeconds(20));
        assertEquals(10 * round, target.segment().get(ValueLayout.JAVA_INT, 0));
        graph.update(stream, () -> copyThrough(stream));
        assertCopies(graph, second, round);
      }
    }
    assertUsable();
  }

  @Test
  void anUpdateOfAnotherShapeLeavesTheGraphAsItWas() {
    CudaGraph graph = CudaGraph.capture(stream, () -> copyThrough(stream));
    CudaException e =
        assertThrows(
            CudaException.class,
            () -> graph.update(stream, () -> x.copyFrom(source.segment(), stream)));
    Messages.assertNames(e, "cudaGraphExecUpdate", "make a new graph");
    assertThrows(
        ArithmeticException.class,
        () ->
            graph.update(
                stream,
                () -> {
                  throw new ArithmeticException();
                }));
    assertCopies(graph, stream, 7);
    graph.close();
    assertThrows(IllegalStateException.class, () -> graph.update(stream, () -> {}));
    assertUsable();
  }
}

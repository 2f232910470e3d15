package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.RegisteredBuffer;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.FieldSource;

/**
 * Every native function that a Java method reaches, failing with every result code.
 *
 * <p>Row 35 of the table of known faults: an error that became another kind of exception, or none.
 */
class FailingCallsTest {
  private static final CommunicatorConfig DEFAULT = CommunicatorConfig.DEFAULT;
  private static final int INVALID_ARGUMENT = 4;
  private static final int IN_PROGRESS = 7;
  private static final int[] NCCL_CODES = {1, 2, 3, INVALID_ARGUMENT, 5, 6, IN_PROGRESS, 8, 77};
  // Invalid value, out of memory, launch time-out, unknown, and one that CUDA does not know.
  private static final int[] CUDA_CODES = {1, 2, 46, 999, 12345};

  private static @Nullable LeakLog leaks;

  /** What the calls are made with: two ranks of this thread, and what lives on rank 0. */
  private static final class Setup implements AutoCloseable {
    final CudaDevice device = new CudaDevice(0);
    final List<Communicator> ranks = Communicator.createAll(List.of(device, new CudaDevice(1)));
    final Communicator comm = ranks.get(0);
    final CudaStream stream = CudaStream.create(device);
    final CudaStream otherStream = CudaStream.create(new CudaDevice(1));
    final DeviceBuffer one = DeviceBuffer.allocate(device, DataType.FLOAT32, 1);
    final DeviceBuffer two = DeviceBuffer.allocate(device, DataType.FLOAT32, 2);
    final DeviceBuffer otherTwo = DeviceBuffer.allocate(device, DataType.FLOAT32, 2);
    final DeviceBuffer otherOne = DeviceBuffer.allocate(new CudaDevice(1), DataType.FLOAT32, 1);
    private final List<AutoCloseable> own = new ArrayList<>();

    <T extends AutoCloseable> T closeLater(T made) {
      own.add(made);
      return made;
    }

    /** A communicator of one rank, on which windows can be made by one thread. */
    Communicator alone() {
      return closeLater(Communicator.create(NcclUniqueId.create(), 1, 0, device));
    }

    void assertUsable() {
      NcclGroup.run(
          () -> {
            comm.allReduce(one, one, ReduceOp.SUM, stream);
            ranks.get(1).allReduce(otherOne, otherOne, ReduceOp.SUM, otherStream);
          });
      stream.synchronize(Duration.ofSeconds(20));
      otherStream.synchronize(Duration.ofSeconds(20));
    }

    @Override
    public void close() {
      List<AutoCloseable> all =
          new ArrayList<>(List.of(stream, otherStream, one, two, otherTwo, otherOne));
      all.addAll(ranks);
      all.addAll(own);
      @Nullable RuntimeException first = null;
      for (int i = all.size() - 1; i >= 0; i--) {
        try {
          closeUnchecked(all.get(i));
        } catch (RuntimeException e) {
          first = first == null ? e : first;
        }
      }
      for (Communicator rank : ranks) {
        assertTrue(
            rank.state() == Communicator.State.CLOSED || rank.state() == Communicator.State.ABORTED,
            rank + " is " + rank.state());
      }
      if (first != null) {
        throw first;
      }
    }
  }

  /** What a failure does to the communicator. */
  private enum Effect {
    /** Stays usable after ncclInvalidArgument, else fails. */
    FAILS,
    /** Ends all the same. */
    ENDS,
    /** None, whatever the result. */
    NONE
  }

  /**
   * A native function and how Java reaches it.
   *
   * @param prepare gives the call; runs before the function fails
   */
  private record Case(String function, Effect effect, Preparation prepare) {
    @Override
    public String toString() {
      return function;
    }
  }

  private interface Preparation {
    Call prepare(Setup setup);
  }

  /** A call, and the communicator that it concerns. */
  private record Call(Communicator comm, Runnable run) {}

  private static Case fails(String function, Consumer<Setup> call) {
    return new Case(function, Effect.FAILS, s -> new Call(s.comm, () -> call.accept(s)));
  }

  private static Case ends(String function, Consumer<Setup> call) {
    return new Case(function, Effect.ENDS, s -> new Call(s.comm, () -> call.accept(s)));
  }

  private static Case hasNoEffect(String function, Consumer<Setup> call) {
    return new Case(function, Effect.NONE, s -> new Call(s.comm, () -> call.accept(s)));
  }

  /** With a window of a communicator of one rank. */
  private static Case window(String function, Consumer<NcclWindow> call) {
    return new Case(
        function,
        Effect.FAILS,
        s -> {
          DeviceBuffer memory =
              s.closeLater(DeviceBuffer.allocateForWindow(s.device, DataType.FLOAT32, 1024));
          Communicator alone = s.alone();
          NcclWindow made = alone.registerWindow(memory);
          return new Call(alone, () -> call.accept(made));
        });
  }

  private static void onFreshThread(Runnable run) {
    try {
      CompletableFuture<@Nullable Void> done = new CompletableFuture<>();
      Thread.ofPlatform()
          .start(
              () -> {
                try {
                  run.run();
                  done.complete(null);
                } catch (RuntimeException | Error e) {
                  done.completeExceptionally(e);
                }
              });
      done.get(20, TimeUnit.SECONDS);
    } catch (ExecutionException e) {
      if (e.getCause() instanceof RuntimeException r) {
        throw r;
      }
      throw new AssertionError(e.getCause());
    } catch (Exception e) {
      throw new AssertionError(e);
    }
  }

  static final List<Case> NCCL =
      List.of(
          fails("ncclAllReduce", s -> s.comm.allReduce(s.one, s.one, ReduceOp.SUM, s.stream)),
          fails("ncclReduce", s -> s.comm.reduce(s.one, s.one, ReduceOp.SUM, 0, s.stream)),
          fails("ncclBroadcast", s -> s.comm.broadcast(s.one, s.one, 0, s.stream)),
          fails("ncclAllGather", s -> s.comm.allGather(s.one, s.two, s.stream)),
          fails(
              "ncclReduceScatter", s -> s.comm.reduceScatter(s.two, s.one, ReduceOp.SUM, s.stream)),
          fails("ncclAlltoAll", s -> s.comm.alltoAll(s.two, s.otherTwo, s.stream)),
          fails("ncclGather", s -> s.comm.gather(s.one, s.two, 0, s.stream)),
          fails("ncclScatter", s -> s.comm.scatter(s.two, s.one, 0, s.stream)),
          fails("ncclSend", s -> s.comm.send(s.one, 1, s.stream)),
          fails("ncclRecv", s -> s.comm.recv(s.one, 1, s.stream)),
          fails("ncclSignal", s -> s.comm.signal(1, s.stream)),
          fails("ncclWaitSignal", s -> s.comm.waitSignal(1, 1, s.stream)),
          new Case(
              "ncclPutSignal",
              Effect.FAILS,
              s -> {
                DeviceBuffer memory =
                    s.closeLater(DeviceBuffer.allocateForWindow(s.device, DataType.FLOAT32, 1024));
                Communicator alone = s.alone();
                NcclWindow window = alone.registerWindow(memory);
                return new Call(alone, () -> alone.putSignal(memory, 0, 1, 0, window, 0, s.stream));
              }),
          fails("ncclCommRegister", s -> s.comm.register(s.one)),
          new Case(
              "ncclCommDeregister",
              Effect.FAILS,
              s -> {
                RegisteredBuffer registered = s.comm.register(s.one);
                return new Call(s.comm, registered::close);
              }),
          new Case(
              "ncclCommWindowRegister",
              Effect.FAILS,
              s -> {
                DeviceBuffer memory =
                    s.closeLater(DeviceBuffer.allocateForWindow(s.device, DataType.FLOAT32, 1024));
                Communicator alone = s.alone();
                return new Call(alone, () -> alone.registerWindow(memory));
              }),
          window("ncclCommWindowDeregister", NcclWindow::close),
          window("ncclWinGetUserPtr", NcclWindow::userPointer),
          window("ncclGetLsaDevicePointer", w -> w.lsaPointer(0, 0)),
          window("ncclGetPeerDevicePointer", w -> w.peerPointer(0, 0)),
          window("ncclGetLsaMultimemDevicePointer", w -> w.lsaMultimemPointer(0)),
          fails("ncclRedOpCreatePreMulSum", s -> s.comm.createPreMulSum(DataType.FLOAT32, 0.5)),
          new Case(
              "ncclRedOpDestroy",
              Effect.FAILS,
              s -> {
                ReduceOp op = s.comm.createPreMulSum(DataType.FLOAT32, 0.5);
                return new Call(s.comm, op::close);
              }),
          fails("ncclCommQueryProperties", s -> s.comm.properties()),
          fails(
              "ncclCommMemStats", s -> s.comm.memoryStatistic(Communicator.MemoryStatistic.TOTAL)),
          fails("ncclCommSuspend", s -> s.comm.suspend()),
          fails("ncclCommResume", s -> s.comm.resume()),
          fails("ncclCommRevoke", s -> s.comm.revoke()),
          fails("ncclCommGetUniqueId", s -> s.comm.growthId()),
          fails("ncclCommSplit", s -> s.comm.split(0, 0, DEFAULT)),
          fails("ncclCommSplit", s -> s.comm.leaveSplit()),
          fails("ncclCommShrink", s -> s.closeLater(s.comm.shrink(List.of(1), false, DEFAULT))),
          fails("ncclCommGrow", s -> s.closeLater(s.comm.grow(3, null, DEFAULT))),
          fails("ncclCommFinalize", s -> s.comm.finalizeAndClose(Duration.ofSeconds(20))),
          fails("ncclCommGetAsyncError", s -> s.comm.throwIfFailed()),
          ends("ncclCommAbort", s -> s.comm.abort()),
          ends("ncclCommDestroy", s -> s.comm.close()),
          hasNoEffect(
              "ncclCommUserRank", s -> NcclGroup.run(() -> s.ranks.forEach(FailingCallsTest::cut))),
          hasNoEffect(
              "ncclCommCount", s -> NcclGroup.run(() -> s.ranks.forEach(FailingCallsTest::cut))),
          hasNoEffect("ncclGetUniqueId", s -> NcclUniqueId.create()),
          hasNoEffect(
              "ncclCommInitRankConfig",
              s -> s.closeLater(Communicator.create(NcclUniqueId.create(), 1, 0, s.device))),
          hasNoEffect(
              "ncclCommInitRankScalable",
              s ->
                  s.closeLater(
                      Communicator.create(
                          List.of(NcclUniqueId.create(), NcclUniqueId.create()),
                          2,
                          0,
                          s.device,
                          DEFAULT))),
          hasNoEffect("ncclCommInitAll", s -> Communicator.createAll(List.of(s.device))),
          hasNoEffect(
              "ncclCommGrow",
              s ->
                  s.closeLater(
                      Communicator.join(s.ranks.get(1).growthId(), 3, 2, s.device, DEFAULT))),
          hasNoEffect(
              "ncclMemAlloc",
              s -> DeviceBuffer.allocateForWindow(s.device, DataType.FLOAT32, 1024)),
          new Case(
              "ncclMemFree",
              Effect.NONE,
              s -> {
                DeviceBuffer memory =
                    DeviceBuffer.allocateForWindow(s.device, DataType.FLOAT32, 1024);
                return new Call(s.comm, memory::close);
              }),
          hasNoEffect("ncclGroupStart", s -> NcclGroup.run(() -> {})),
          // The backend's thread stays in the group when its end does nothing.
          hasNoEffect("ncclGroupEnd", s -> onFreshThread(() -> NcclGroup.run(() -> {}))),
          hasNoEffect(
              "ncclGroupSimulateEnd", s -> onFreshThread(() -> NcclGroup.simulate(() -> {}))));

  private static void cut(Communicator comm) {
    comm.split(0, 0, DEFAULT);
  }

  @BeforeAll
  static void warmUp() {
    TestRanks.prepare();
    TestRanks.assumeCpu("faults are injected");
    for (int i = 0; i < 3; i++) {
      try (Setup warm = new Setup()) {
        warm.assertUsable();
      }
    }
    leaks = LeakLog.start();
  }

  @AfterAll
  static void everythingWasClosed() {
    @Nullable LeakLog log = leaks;
    if (log != null) {
      log.assertNothingDropped();
      log.close();
    }
  }

  @AfterEach
  void clearFaults() {
    Faults.clear();
  }

  @ParameterizedTest
  @FieldSource("NCCL")
  void ncclFunctionThatFailsIsAnNcclException(Case failing) throws Exception {
    Resources before = Resources.now();
    for (int code : NCCL_CODES) {
      if (code == IN_PROGRESS) {
        assertEndsSomehow(failing);
        continue;
      }
      try (Setup setup = new Setup()) {
        Call call = failing.prepare.prepare(setup);
        Faults.inject(failing.function + ":result=" + code + ",times=1");
        NcclException e = assertThrows(NcclException.class, call.run::run, "code " + code);
        assertTells(failing, code, call.comm, e);
        assertAfterwards(failing, code, setup, call);
        Faults.clear();
      }
    }
    assertNothingLeft(failing, before);
  }

  /** Where nothing is in progress, it is either over, or visibly nothing came of it. */
  private static void assertEndsSomehow(Case failing) {
    try (Setup setup = new Setup()) {
      Call call = failing.prepare.prepare(setup);
      Faults.inject(failing.function + ":result=" + IN_PROGRESS + ",times=1");
      call.run.run();
    } catch (NcclException | DeadlineException e) {
      assertNotNull(e.getMessage());
    } finally {
      Faults.clear();
    }
  }

  /** Fewer than one for each result code; some leave things by nature. */
  private static void assertNothingLeft(Case failing, Resources before) throws IOException {
    if (!LEAVING.contains(failing.function)) {
      before.assertNoMoreThan(3, failing.function);
    }
  }

  private static final List<String> LEAVING =
      List.of(
          "ncclCommAbort",
          "ncclCommDestroy",
          "ncclMemFree",
          "cudaFree",
          "cudaFreeHost",
          "cudaStreamDestroy",
          "cudaEventDestroy",
          // The id was made and not used: it waits for its ranks until the process ends.
          "ncclCommInitRankConfig",
          "ncclCommInitRankScalable",
          "ncclCommGrow");

  private static void assertTells(Case failing, int code, Communicator comm, NcclException e) {
    assertEquals(code, e.resultCode());
    assertTrue(e.operation().startsWith(failing.function), e.operation());
    Messages.assertNames(
        e,
        failing.function,
        NcclException.resultName(code) + " (" + code + ")",
        failing.function + ": injected fault");
    if (failing.effect != Effect.NONE) {
      Messages.assertNames(e, comm.toString().replace("communicator", ""));
    }
  }

  private static void assertAfterwards(Case failing, int code, Setup setup, Call call) {
    switch (failing.effect) {
      case FAILS:
        if (code == INVALID_ARGUMENT) {
          assertEquals(Communicator.State.READY, call.comm.state());
          setup.assertUsable();
        } else {
          assertEquals(Communicator.State.FAILED, call.comm.state(), "code " + code);
          NcclException again =
              assertThrows(NcclException.class, () -> call.comm.split(0, 0, DEFAULT));
          assertEquals(code, again.resultCode());
          Messages.assertNames(again, "failed earlier", failing.function, "injected fault");
        }
        break;
      case ENDS:
        assertFalse(call.comm.state() == Communicator.State.READY);
        call.comm.close();
        call.comm.abort();
        break;
      case NONE:
        assertEquals(Communicator.State.READY, call.comm.state());
        setup.assertUsable();
        break;
    }
  }

  static final List<Case> CUDA =
      List.of(
          hasNoEffect("cudaGetDeviceCount", s -> CudaDevice.count()),
          hasNoEffect("cudaGetDeviceCount", s -> new CudaDevice(0)),
          hasNoEffect("cudaSetDevice", s -> s.device.makeCurrent()),
          hasNoEffect("cudaSetDevice", s -> s.comm.allReduce(s.one, s.one, ReduceOp.SUM, s.stream)),
          hasNoEffect("cudaSetDevice", s -> s.comm.split(0, 0, DEFAULT)),
          hasNoEffect("cudaSetDevice", s -> s.stream.isDone()),
          ends("cudaSetDevice", s -> s.comm.close()),
          ends("cudaSetDevice", s -> s.comm.abort()),
          hasNoEffect("cudaGetDeviceProperties", s -> s.device.name()),
          hasNoEffect("cudaDeviceGetAttribute", s -> s.device.multiProcessorCount()),
          hasNoEffect("cudaRuntimeGetVersion", s -> Nccl.versions()),
          hasNoEffect("cudaStreamCreateWithFlags", s -> CudaStream.create(s.device)),
          hasNoEffect("cudaHostAlloc", s -> CudaStream.create(s.device)),
          hasNoEffect("cudaHostAlloc", s -> HostBuffer.allocate(s.device, 8)),
          hasNoEffect("cudaHostGetDevicePointer", s -> HostBuffer.allocate(s.device, 8)),
          closing("cudaStreamDestroy", s -> CudaStream.create(s.device)),
          closing("cudaFreeHost", s -> HostBuffer.allocate(s.device, 8)),
          closing("cudaFreeHost", s -> CudaStream.create(s.device)),
          closing("cudaFree", s -> DeviceBuffer.allocate(s.device, DataType.INT8, 8)),
          closing("cudaEventDestroy", s -> CudaEvent.create(s.device)),
          hasNoEffect("cudaStreamQuery", s -> s.stream.isDone()),
          hasNoEffect("cudaStreamQuery", s -> s.stream.synchronize()),
          withEvent("cudaStreamWaitEvent", (s, event) -> s.stream.await(event)),
          hasNoEffect("cudaEventCreateWithFlags", s -> CudaEvent.create(s.device)),
          withEvent("cudaEventRecord", (s, event) -> event.record(s.stream)),
          withEvent("cudaEventQuery", (s, event) -> event.isDone()),
          withEvent("cudaEventQuery", (s, event) -> event.synchronize(Duration.ofSeconds(20))),
          withEvent("cudaEventElapsedTime", (s, event) -> event.millisSince(event)),
          hasNoEffect("cudaStreamBeginCapture", s -> CudaGraph.capture(s.stream, () -> {})),
          new Case(
              "cudaStreamEndCapture",
              Effect.NONE,
              s -> {
                CudaStream own = s.closeLater(CudaStream.create(s.device)); // captured until closed
                return new Call(s.comm, () -> CudaGraph.capture(own, () -> {}));
              }),
          hasNoEffect("cudaGraphInstantiateWithFlags", s -> CudaGraph.capture(s.stream, () -> {})),
          hasNoEffect("cudaGraphUpload", s -> CudaGraph.capture(s.stream, () -> {})),
          hasNoEffect("cudaGraphDestroy", s -> CudaGraph.capture(s.stream, () -> {})),
          closing("cudaGraphExecDestroy", s -> CudaGraph.capture(s.stream, () -> {})),
          new Case(
              "cudaGraphLaunch",
              Effect.NONE,
              s -> {
                CudaGraph graph =
                    s.closeLater(CudaGraph.capture(s.stream, () -> s.one.fill((byte) 0, s.stream)));
                return new Call(s.comm, () -> graph.launch(s.stream));
              }),
          new Case(
              "cudaGraphExecUpdate",
              Effect.NONE,
              s -> {
                CudaGraph graph =
                    s.closeLater(CudaGraph.capture(s.stream, () -> s.one.fill((byte) 0, s.stream)));
                return new Call(
                    s.comm, () -> graph.update(s.stream, () -> s.one.fill((byte) 1, s.stream)));
              }),
          hasNoEffect("cudaMalloc", s -> DeviceBuffer.allocate(s.device, DataType.FLOAT32, 1)),
          hasNoEffect("cudaMemcpyAsync", s -> s.two.copyFrom(new float[2], s.stream)),
          hasNoEffect("cudaMemcpyAsync", s -> s.two.copyTo(new float[2], s.stream)),
          hasNoEffect("cudaMemsetAsync", s -> s.two.fill((byte) 1, s.stream)));

  private interface EventCall {
    void run(Setup setup, CudaEvent event);
  }

  private static Case withEvent(String function, EventCall call) {
    return new Case(
        function,
        Effect.NONE,
        s -> {
          CudaEvent event = s.closeLater(CudaEvent.create(s.device));
          event.record(s.stream);
          s.stream.synchronize();
          return new Call(s.comm, () -> call.run(s, event));
        });
  }

  private interface Maker {
    AutoCloseable make(Setup setup);
  }

  /** Closing fails once, and is over. */
  private static Case closing(String function, Maker maker) {
    return new Case(
        function,
        Effect.NONE,
        s -> {
          AutoCloseable made = s.closeLater(maker.make(s));
          return new Call(s.comm, () -> closeUnchecked(made));
        });
  }

  private static void closeUnchecked(AutoCloseable made) {
    try {
      made.close();
    } catch (RuntimeException e) {
      throw e;
    } catch (Exception e) {
      throw new AssertionError(e);
    }
  }

  @ParameterizedTest
  @FieldSource("CUDA")
  void cudaFunctionThatFailsIsACudaException(Case failing) throws Exception {
    Resources before = Resources.now();
    for (int code : CUDA_CODES) {
      try (Setup setup = new Setup()) {
        Call call = failing.prepare.prepare(setup);
        Faults.inject(failing.function + ":result=" + code + ",times=1");
        CudaException e = assertThrows(CudaException.class, call.run::run, "code " + code);
        assertEquals(code, e.errorCode());
        assertTrue(e.operation().startsWith(failing.function), e.operation());
        Messages.assertNames(e, failing.function, "(" + code + ")");
        assertAfterwards(failing, code, setup, call);
        Faults.clear();
      }
    }
    assertNothingLeft(failing, before);
  }
}

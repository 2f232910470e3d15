package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.cudart.CudartH;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/** Threads: fresh ones, pooled ones, virtual ones, and two at once. */
class ThreadsTest {
  private static final long SECONDS = 30;
  private static final int VIRTUAL = 2 * Runtime.getRuntime().availableProcessors();

  /** Runs each call somewhere. */
  private interface Where {
    <T> T call(Callable<T> call) throws Exception;
  }

  @BeforeAll
  static void prepareForSeveralRanks() {
    TestRanks.prepare();
  }

  @AfterEach
  void clearFaults() {
    Faults.clear();
  }

  private static <T> T onFreshThread(Callable<T> call) throws Exception {
    CompletableFuture<T> result = new CompletableFuture<>();
    Thread.ofPlatform()
        .start(
            () -> {
              try {
                result.complete(call.call());
              } catch (Throwable t) {
                result.completeExceptionally(t);
              }
            });
    return result.get(SECONDS, TimeUnit.SECONDS);
  }

  // Row 8 of the table of known faults: a new thread starts on device 0.
  @Test
  void everyCallFromAFreshThreadUsesTheRightDevice() throws Exception {
    useEverything(ThreadsTest::onFreshThread);
  }

  // Row 8 of the table of known faults.
  @Test
  void everyCallFromAPoolUsesTheRightDevice() throws Exception {
    try (ExecutorService pool = Executors.newFixedThreadPool(3)) {
      useEverything(
          new Where() {
            @Override
            public <T> T call(Callable<T> call) throws Exception {
              return pool.submit(
                      () -> {
                        new CudaDevice(0).makeCurrent(); // as another task left it
                        return call.call();
                      })
                  .get(SECONDS, TimeUnit.SECONDS);
            }
          });
    }
  }

  /** Each call on a thread of its own, on a device that is not the default. */
  private static void useEverything(Where where) throws Exception {
    TestRanks.assumeDevices(2);
    CudaDevice device = new CudaDevice(1);
    Checked checked = new Checked(where, device);
    NcclUniqueId id = NcclUniqueId.create();
    CudaStream stream = checked.call(() -> CudaStream.create(device));
    Communicator comm = checked.call(() -> Communicator.create(id, 1, 0, device));
    assertEquals(1, comm.properties().cudaDevice());
    DeviceBuffer x = checked.call(() -> DeviceBuffer.allocate(device, DataType.FLOAT32, 16));
    DeviceBuffer memory =
        checked.call(() -> DeviceBuffer.allocateForWindow(device, DataType.FLOAT32, 1024));
    HostBuffer host = checked.call(() -> HostBuffer.allocate(device, 64));
    CudaEvent start = checked.call(() -> CudaEvent.create(device));
    CudaEvent end = checked.call(() -> CudaEvent.create(device));
    checked.run(() -> start.record(stream));
    checked.run(() -> x.fill((byte) 0, stream));
    checked.run(() -> x.copyFrom(new float[] {1, 2, 3}, stream));
    checked.run(() -> comm.allReduce(x, x, ReduceOp.SUM, stream));
    checked.run(() -> comm.broadcast(x, x, 0, stream));
    checked.run(() -> comm.reduce(x, x, ReduceOp.MAX, 0, stream));
    checked.run(() -> comm.allGather(x, x, stream));
    checked.run(() -> comm.reduceScatter(x, x, ReduceOp.MIN, stream));
    checked.run(
        () ->
            NcclGroup.run(
                () -> {
                  comm.send(x, 0, stream);
                  comm.recv(x, 0, stream);
                }));
    NcclWindow window = checked.call(() -> comm.registerWindow(memory));
    checked.call(window::userPointer);
    ReduceOp op = checked.call(() -> comm.createPreMulSum(DataType.FLOAT32, 2));
    checked.run(() -> comm.allReduce(x, x, op, stream));
    Communicator child = checked.call(() -> comm.split(0, 0, CommunicatorConfig.DEFAULT));
    checked.run(() -> child.allReduce(x, x, ReduceOp.SUM, stream));
    checked.call(comm::properties);
    checked.call(comm::teamWorld);
    checked.run(() -> end.record(stream));
    checked.run(() -> stream.await(end));
    checked.run(() -> end.synchronize(Duration.ofSeconds(SECONDS)));
    checked.run(stream::synchronize);
    checked.call(() -> end.millisSince(start));
    float[] result = new float[3];
    checked.run(() -> x.copyTo(result, stream));
    assertEquals(List.of(2f, 4f, 6f), List.of(result[0], result[1], result[2]));
    checked.run(child::close);
    checked.run(op::close);
    checked.run(window::close);
    checked.run(comm::close);
    List.<Runnable>of(start::close, end::close, host::close, memory::close, x::close, stream::close)
        .forEach(checked::run);
  }

  /** Looks after every call whether the thread's device is the right one. */
  private record Checked(Where where, CudaDevice device) {
    <T> T call(Callable<T> call) {
      try {
        return where.call(
            () -> {
              T result = call.call();
              try (Arena arena = Arena.ofConfined()) {
                MemorySegment out = arena.allocate(ValueLayout.JAVA_INT);
                assertEquals(0, CudartH.cudaGetDevice(out));
                assertEquals(device.ordinal(), out.get(ValueLayout.JAVA_INT, 0), "device");
              }
              return result;
            });
      } catch (Exception e) {
        throw new AssertionError(e);
      }
    }

    void run(Runnable call) {
      call(
          () -> {
            call.run();
            return 0;
          });
    }
  }

  // Row 2 of the table of known faults: two threads in one native object.
  @Test
  void secondThreadOnACommunicatorIsRefusedBeforeAnyNativeCall() throws Exception {
    CudaDevice device = new CudaDevice(0);
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, 1);
        Communicator comm = Communicator.create(NcclUniqueId.create(), 1, 0, device)) {
      CountDownLatch inside = new CountDownLatch(1);
      CountDownLatch leave = new CountDownLatch(1);
      Thread first =
          Thread.ofPlatform()
              .name("the first")
              .start(
                  () ->
                      comm.call(
                          "a long call",
                          handle -> {
                            inside.countDown();
                            try {
                              leave.await(SECONDS, TimeUnit.SECONDS);
                            } catch (InterruptedException e) {
                              return 3;
                            }
                            return 0;
                          }));
      inside.await(SECONDS, TimeUnit.SECONDS);
      if (TestRanks.onCpu()) {
        Faults.inject("ncclAllReduce:result=5,times=1;ncclCommAbort:result=5,times=1");
      }
      for (Runnable call :
          List.<Runnable>of(
              () -> comm.allReduce(x, x, ReduceOp.SUM, stream),
              () -> comm.split(0, 0, CommunicatorConfig.DEFAULT),
              comm::properties,
              comm::abort,
              comm::close)) {
        Messages.assertNames(
            assertThrows(IllegalStateException.class, call::run), "the first", "inside a call");
      }
      assertEquals(Communicator.State.READY, comm.state());
      leave.countDown();
      first.join(Duration.ofSeconds(SECONDS));
      if (TestRanks.onCpu()) {
        // Its first call from Java is this one.
        assertThrows(NcclException.class, () -> comm.allReduce(x, x, ReduceOp.SUM, stream));
      } else {
        comm.allReduce(x, x, ReduceOp.SUM, stream);
        stream.synchronize();
      }
      Faults.clear();
    }
  }

  @Test
  void groupsOnManyVirtualThreadsAreRefusedAndDisturbNoOther() throws Exception {
    try (ExecutorService virtual = Executors.newVirtualThreadPerTaskExecutor()) {
      List<Future<?>> all = new ArrayList<>();
      for (int i = 0; i < VIRTUAL; i++) {
        all.add(
            virtual.submit(
                () ->
                    NcclGroup.run(
                        () -> {
                          Thread.yield();
                          throw new AssertionError("the body must not run");
                        })));
      }
      for (Future<?> one : all) {
        Throwable cause =
            assertThrows(ExecutionException.class, () -> one.get(SECONDS, TimeUnit.SECONDS))
                .getCause();
        assertEquals(IllegalStateException.class, cause.getClass(), cause.toString());
        Messages.assertNames(cause, "virtual thread", "platform thread");
      }
    }
    NcclGroup.run(() -> {});
  }

  @Test
  void collectivesOnManyVirtualThreadsKeepTheirDevices() throws Exception {
    int devices = CudaDevice.count();
    try (ExecutorService virtual = Executors.newVirtualThreadPerTaskExecutor()) {
      List<Future<?>> all = new ArrayList<>();
      for (int i = 0; i < VIRTUAL; i++) {
        int number = i;
        all.add(
            virtual.submit(
                () -> {
                  useWithYields(new CudaDevice(number % devices), number);
                  return null;
                }));
      }
      for (Future<?> one : all) {
        one.get(SECONDS, TimeUnit.SECONDS);
      }
    }
  }

  private static void useWithYields(CudaDevice device, int number) {
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT32, 1);
        Communicator comm = Communicator.create(NcclUniqueId.create(), 1, 0, device)) {
      for (int i = 0; i < 50; i++) {
        int[] value = {number + i};
        x.copyFrom(value, stream);
        Thread.yield();
        comm.allReduce(x, x, ReduceOp.SUM, stream);
        Thread.yield();
        stream.synchronize();
        value[0] = -1;
        x.copyTo(value, stream);
        assertEquals(number + i, value[0]);
        try (DeviceBuffer other = DeviceBuffer.allocate(device, DataType.INT32, 1)) {
          Thread.yield();
          comm.allReduce(x, other, ReduceOp.SUM, stream);
          stream.synchronize();
        }
      }
    }
  }
}

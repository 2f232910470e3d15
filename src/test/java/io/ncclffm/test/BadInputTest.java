package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import java.util.function.BiConsumer;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Bad input gets an exception that names the operation, the value and, where there is one, the
 * remedy. Nothing else happens: after every test the communicators do a real all-reduce.
 */
class BadInputTest {
  private static final int RANKS = 2;
  private static final int COUNT = 8;

  private static LocalWorld world;
  private static RankBuffers buffers;

  /** Rank 0 of the world, used by the tests' own thread while no rank's task runs. */
  private static LocalWorld.Rank rank;

  private static Communicator comm;
  private static CudaStream stream;
  private static DeviceBuffer x;

  @BeforeAll
  static void openWorld() {
    world = TestRanks.open(RANKS);
    buffers = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
    LocalWorld.Rank[] ranks = new LocalWorld.Rank[RANKS];
    world.run(r -> ranks[r.rank()] = r);
    rank = ranks[0];
    comm = rank.communicator();
    stream = rank.stream();
    x = buffers.of(0);
  }

  @AfterAll
  static void closeWorld() {
    buffers.close();
    world.close();
  }

  @AfterEach
  void communicatorsStillWork() {
    assertEquals(Communicator.State.READY, comm.state());
    TestRanks.assertWorks(world);
  }

  private static void assertRefused(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(IllegalArgumentException.class, call::run), texts);
  }

  private static void assertTooLate(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(IllegalStateException.class, call::run), texts);
  }

  // ------------------------------------------------------------------ ranks and ids

  @ParameterizedTest
  @CsvSource({"2,-1", "2,2", "0,0", "-3,0"})
  void rankOutsideOfTheSize(int size, int wrong) {
    NcclUniqueId id = NcclUniqueId.fromBytes(new byte[NcclUniqueId.BYTES]);
    assertRefused(
        () -> Communicator.create(id, size, wrong, rank.device()),
        "ncclCommInitRank",
        "rank " + wrong + " of " + size,
        "0 to size - 1");
  }

  @Test
  void sameIdTwice() {
    NcclUniqueId id = NcclUniqueId.create();
    try (Communicator first = Communicator.create(id, 1, 0, rank.device())) {
      assertEquals(1, first.size());
      assertTooLate(
          () -> Communicator.create(id, 1, 0, rank.device()), "ncclCommInitRank", "create a new");
    }
    assertTooLate(
        () -> Communicator.create(id, 1, 0, rank.device()), "ncclCommInitRank", "create a new");
  }

  @ParameterizedTest
  @ValueSource(ints = {0, -1})
  void worldWithoutRanks(int size) {
    assertRefused(() -> LocalWorld.open(size), size + " ranks", "positive");
  }

  // ------------------------------------------------------------------ counts, offsets, ranges

  @ParameterizedTest
  @ValueSource(longs = {-1, Long.MIN_VALUE})
  void negativeCount(long count) {
    assertRefused(() -> allReduce(0, 0, count), "ncclAllReduce", count + " elements", x.toString());
    assertRefused(
        () -> comm.allGather(x, 0, x, 0, count, stream), "ncclAllGather", count + " elements");
    assertRefused(
        () -> comm.reduceScatter(x, 0, x, 0, count, ReduceOp.SUM, stream),
        "ncclReduceScatter",
        count + " elements");
    assertRefused(() -> comm.send(x, 0, count, 1, stream), "ncclSend", count + " elements");
    assertRefused(() -> comm.recv(x, 0, count, 1, stream), "ncclRecv", count + " elements");
  }

  @ParameterizedTest
  @CsvSource({"-1,1", "9,0", "1,8", "8,1", "9223372036854775807,1", "1,9223372036854775807"})
  void rangeOutsideOfTheBuffer(long offset, long count) {
    String[] texts = {count + " elements", "offset " + offset, x.toString()};
    assertRefused(() -> allReduce(offset, 0, count), texts);
    assertRefused(() -> allReduce(0, offset, count), count + " elements", x.toString());
    assertRefused(() -> comm.broadcast(x, offset, x, 0, count, 0, stream), texts);
    assertRefused(() -> comm.reduce(x, offset, x, 0, count, ReduceOp.MAX, 0, stream), texts);
    assertRefused(() -> comm.send(x, offset, count, 1, stream), texts);
    assertRefused(() -> comm.recv(x, offset, count, 1, stream), texts);
  }

  @Test
  void countTimesRanksOverflows() {
    long count = Long.MAX_VALUE / 2 + 1;
    assertRefused(
        () -> comm.allGather(x, 0, x, 0, count, stream), "ncclAllGather", count + " elements");
    assertRefused(
        () -> comm.reduceScatter(x, 0, x, 0, count, ReduceOp.SUM, stream),
        "ncclReduceScatter",
        count + " elements");
  }

  @Test
  void gatheredBufferTooShort() {
    assertRefused(
        () -> comm.allGather(x, 0, x, 0, COUNT, stream), "ncclAllGather", 2 * COUNT + " elements");
    assertRefused(
        () -> comm.reduceScatter(x, 0, x, 0, COUNT, ReduceOp.SUM, stream),
        "ncclReduceScatter",
        2 * COUNT + " elements");
    try (DeviceBuffer other = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, COUNT)) {
      String[] texts = {2 * COUNT + " elements", x.toString()};
      assertRefused(() -> comm.alltoAll(x, 0, other, 0, COUNT, stream), texts);
      assertRefused(() -> comm.gather(x, 0, other, 0, COUNT, comm.rank(), stream), texts);
      assertRefused(() -> comm.scatter(x, 0, other, 0, COUNT, comm.rank(), stream), texts);
    }
  }

  private static void allReduce(long sendOffset, long recvOffset, long count) {
    comm.allReduce(x, sendOffset, x, recvOffset, count, ReduceOp.SUM, stream);
  }

  @Test
  void lengthsThatDoNotMatch() {
    try (DeviceBuffer longer = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, COUNT + 1)) {
      String[] texts = {"do not match", x.toString(), longer.toString()};
      assertRefused(() -> comm.allReduce(x, longer, ReduceOp.SUM, stream), texts);
      assertRefused(() -> comm.broadcast(x, longer, 0, stream), texts);
      assertRefused(() -> comm.reduce(longer, x, ReduceOp.SUM, 0, stream), texts);
      assertRefused(() -> comm.allGather(x, longer, stream), texts);
      assertRefused(() -> comm.reduceScatter(longer, x, ReduceOp.SUM, stream), texts);
      assertRefused(() -> comm.gather(x, longer, 0, stream), texts);
      assertRefused(() -> comm.scatter(longer, x, 0, stream), texts);
      assertRefused(() -> comm.alltoAll(x, longer, stream), texts);
    }
  }

  @Test
  void alltoAllThatDoesNotDivideOrIsInPlace() {
    try (DeviceBuffer odd = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 3);
        DeviceBuffer other = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 3)) {
      assertRefused(
          () -> comm.alltoAll(odd, other, stream), "ncclAlltoAll", odd.toString(), "divide");
    }
    assertRefused(() -> comm.alltoAll(x, x, stream), "ncclAlltoAll", x.toString(), "in place");
    assertRefused(
        () -> comm.alltoAll(x, 0, x, 3, 2, stream), "ncclAlltoAll", x.toString(), "in place");
  }

  @Test
  void typesThatDiffer() {
    try (DeviceBuffer ints = DeviceBuffer.allocate(rank.device(), DataType.INT32, COUNT)) {
      String[] texts = {"differ in type", x.toString(), ints.toString()};
      assertRefused(() -> comm.allReduce(x, ints, ReduceOp.SUM, stream), texts);
      assertRefused(() -> comm.broadcast(x, ints, 0, stream), texts);
      assertRefused(() -> comm.reduce(x, ints, ReduceOp.SUM, 0, stream), texts);
      assertRefused(() -> comm.allGather(x, 0, ints, 0, 1, stream), texts);
      assertRefused(() -> comm.reduceScatter(x, 0, ints, 0, 1, ReduceOp.SUM, stream), texts);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {-1, RANKS, Integer.MAX_VALUE})
  void rootOrPeerThatDoesNotExist(int wrong) {
    assertRefused(
        () -> comm.broadcast(x, x, wrong, stream), "ncclBroadcast", "root " + wrong, "0 to 1");
    assertRefused(
        () -> comm.reduce(x, x, ReduceOp.SUM, wrong, stream), "ncclReduce", "root " + wrong);
    assertRefused(() -> comm.send(x, wrong, stream), "ncclSend", "peer " + wrong, "0 to 1");
    assertRefused(() -> comm.recv(x, wrong, stream), "ncclRecv", "peer " + wrong, "0 to 1");
  }

  // ------------------------------------------------------------------ one-sided

  /** Windows of 64 elements on both ranks, used by rank 0 and closed in the end. */
  private static void withWindows(BiConsumer<DeviceBuffer, NcclWindow> use) {
    NcclWindow[] windows = new NcclWindow[RANKS];
    try (RankBuffers memory = RankBuffers.allocateForWindows(world, DataType.FLOAT32, 64)) {
      register(world, memory, windows);
      use.accept(memory.of(0), windows[0]);
      world.run(r -> windows[r.rank()].close());
    }
  }

  private static void register(LocalWorld ranks, RankBuffers memory, NcclWindow[] windows) {
    ranks.run(
        r ->
            windows[r.rank()] =
                r.communicator()
                    .registerWindow(memory.of(r), NcclWindow.Flag.COLLECTIVE_SYMMETRIC));
  }

  @Test
  void putOutsideOfTheBufferOrTheWindow() {
    withWindows(
        (mine, window) -> {
          String put = "ncclPutSignal";
          for (long count : new long[] {-1, 65, Long.MAX_VALUE / 4 + 1, Long.MAX_VALUE}) {
            assertRefused(
                () -> comm.putSignal(mine, 0, count, 1, window, 0, stream),
                put,
                count + " elements",
                mine.toString());
          }
          assertRefused(() -> comm.putSignal(mine, -1, 1, 1, window, 0, stream), put, "offset -1");
          for (long target : new long[] {-1, Long.MIN_VALUE, 253, 256, Long.MAX_VALUE}) {
            assertRefused(
                () -> comm.putSignal(mine, 0, 1, 1, window, target, stream),
                put,
                "4 bytes at byte " + target,
                "window of the " + mine);
          }
        });
  }

  @ParameterizedTest
  @ValueSource(ints = {-1, RANKS, Integer.MIN_VALUE})
  void signalToOrFromNobody(int wrong) {
    withWindows(
        (mine, window) -> {
          assertRefused(
              () -> comm.putSignal(mine, 0, 1, wrong, window, 0, stream),
              "ncclPutSignal",
              "peer " + wrong,
              "0 to 1");
          assertRefused(() -> comm.signal(wrong, stream), "ncclSignal", "peer " + wrong);
          assertRefused(() -> comm.waitSignal(wrong, 1, stream), "ncclWaitSignal", "peer " + wrong);
        });
  }

  @ParameterizedTest
  @ValueSource(ints = {0, -1})
  void waitForNoSignals(int count) {
    assertRefused(
        () -> comm.waitSignal(1, count, stream), "ncclWaitSignal", count + " signals", "positive");
  }

  @Test
  void putIntoAClosedWindowOrAnotherCommunicators() {
    NcclWindow[] closed = new NcclWindow[1];
    withWindows((mine, window) -> closed[0] = window);
    assertTooLate(
        () -> comm.putSignal(x, 0, 1, 1, closed[0], 0, stream),
        "ncclPutSignal",
        "window",
        "closed");
    assertTooLate(closed[0]::handle, "window", "closed");
    assertTooLate(() -> closed[0].peerPointer(0, 0), "window", "closed");
    closed[0].close();

    NcclWindow[] elsewhere = new NcclWindow[RANKS];
    try (LocalWorld other = TestRanks.open(RANKS);
        RankBuffers memory = RankBuffers.allocateForWindows(other, DataType.FLOAT32, 64)) {
      register(other, memory, elsewhere);
      assertRefused(
          () -> comm.putSignal(memory.of(0), 0, 1, 1, elsewhere[0], 0, stream),
          "ncclPutSignal",
          "window of the " + memory.of(0),
          "belongs to");
      other.run(r -> elsewhere[r.rank()].close());
    }
  }

  @Test
  void putFromMemoryWithoutAWindow() {
    withWindows(
        (mine, window) -> {
          assumeTrue(comm.properties().hostRmaSupport(), "NCCL has no one-sided operations here");
          NcclException e =
              assertThrows(
                  NcclException.class, () -> comm.putSignal(x, 0, 1, 1, window, 0, stream));
          Messages.assertNames(e, "ncclPutSignal", "rank 0", "ncclInvalidArgument", "window");
        });
  }

  @Test
  void pointersOutsideOfTheWindow() {
    withWindows(
        (mine, window) -> {
          for (long offset : new long[] {-1, 256, Long.MAX_VALUE}) {
            String[] texts = {"offset " + offset, "window of the " + mine};
            assertRefused(() -> window.peerPointer(0, offset), texts);
            assertRefused(() -> window.lsaPointer(0, offset), texts);
            assertRefused(() -> window.lsaMultimemPointer(offset), texts);
          }
          assertRefused(() -> window.peerPointer(RANKS, 0), "peer " + RANKS, "0 to 1");
          assertRefused(() -> window.peerPointer(-1, 0), "peer -1");
        });
  }

  // ------------------------------------------------------------------ null, closed, elsewhere

  @Test
  void nullStream() {
    assertRefused(
        () -> comm.allReduce(x, x, ReduceOp.SUM, null),
        "ncclAllReduce",
        "stream is null",
        "CudaStream.create");
    assertRefused(() -> x.fill((byte) 0, null), x.toString(), "stream is null");
  }

  @Test
  void closedBuffer() {
    DeviceBuffer closed = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, COUNT);
    closed.close();
    closed.close();
    String[] texts = {"ncclAllReduce", closed.toString(), "closed"};
    assertTooLate(() -> comm.allReduce(closed, x, ReduceOp.SUM, stream), texts);
    assertTooLate(() -> comm.allReduce(x, closed, ReduceOp.SUM, stream), texts);
    assertTooLate(() -> closed.copyTo(new float[COUNT], stream), closed.toString(), "closed");
    assertTooLate(() -> closed.copyFrom(new float[COUNT], stream), closed.toString(), "closed");
  }

  @Test
  void closedStream() {
    CudaStream closed = CudaStream.create(rank.device());
    closed.close();
    closed.close();
    assertTooLate(
        () -> comm.allReduce(x, x, ReduceOp.SUM, closed), "ncclAllReduce", "stream", "closed");
    assertTooLate(() -> x.copyTo(new float[COUNT], closed), "stream", "closed");
    assertTooLate(() -> x.fill((byte) 0, closed), "stream", "closed");
    assertTooLate(closed::isDone, "stream", "closed");
    assertTooLate(closed::synchronize, "stream", "closed");
  }

  @Test
  void closedEvent() {
    CudaEvent closed = CudaEvent.create(rank.device());
    closed.close();
    closed.close();
    assertTooLate(() -> closed.record(stream), "event", "closed");
    assertTooLate(() -> stream.await(closed), "event", "closed");
    assertTooLate(closed::isDone, "event", "closed");
  }

  @Test
  void bufferOnAnotherDevice() {
    TestRanks.assumeDevices(2);
    try (DeviceBuffer elsewhere =
        DeviceBuffer.allocate(new CudaDevice(1), DataType.FLOAT32, COUNT)) {
      String[] texts = {elsewhere.toString(), "another device"};
      assertRefused(() -> comm.allReduce(elsewhere, x, ReduceOp.SUM, stream), texts);
      assertRefused(() -> comm.allReduce(x, elsewhere, ReduceOp.SUM, stream), texts);
      assertRefused(() -> comm.send(elsewhere, 1, stream), "ncclSend", "another device");
      assertRefused(
          () -> elsewhere.copyTo(new float[COUNT], stream), elsewhere.toString(), "take a stream");
    }
  }

  @Test
  void streamOnAnotherDevice() {
    TestRanks.assumeDevices(2);
    try (CudaStream elsewhere = CudaStream.create(new CudaDevice(1))) {
      assertRefused(
          () -> comm.allReduce(x, x, ReduceOp.SUM, elsewhere),
          "ncclAllReduce",
          elsewhere.toString(),
          "another device");
    }
  }

  // ------------------------------------------------------------------ devices, memory, streams

  @Test
  void deviceThatDoesNotExist() {
    int count = CudaDevice.count();
    assertRefused(() -> new CudaDevice(count), "device " + count, "0 to " + (count - 1));
    assertRefused(() -> new CudaDevice(-1), "device -1");
  }

  @ParameterizedTest
  @ValueSource(longs = {0, -1, Long.MAX_VALUE / 2})
  void bufferOfNoOrTooManyElements(long count) {
    assertRefused(
        () -> DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count),
        "buffer of " + count + " x FLOAT32");
  }

  @Test
  void moreMemoryThanTheDeviceHas() {
    long bytes = 1L << 50;
    CudaException e =
        assertThrows(
            CudaException.class, () -> DeviceBuffer.allocate(rank.device(), DataType.INT8, bytes));
    Messages.assertNames(e, "cudaMalloc", "" + bytes, "device 0", "cudaErrorMemoryAllocation");
  }

  @Test
  void hostBufferOfNoBytes() {
    assertRefused(() -> HostBuffer.allocate(rank.device(), 0), "cudaHostAlloc", "0 bytes");
  }

  @Test
  void copyThatDoesNotFit() {
    assertRefused(
        () -> x.copyFrom(MemorySegment.ofArray(new byte[5]), stream), x.toString(), "5 bytes");
    assertRefused(() -> x.copyFrom(new float[COUNT + 1], stream), x.toString(), "" + (COUNT + 1));
    assertRefused(
        () -> x.copyTo(MemorySegment.ofArray(new float[2]), COUNT - 1, stream),
        x.toString(),
        "2 elements from offset " + (COUNT - 1));
    assertRefused(
        () -> x.copyTo(MemorySegment.ofArray(new float[2]), -1, stream), x.toString(), "offset -1");
  }

  @Test
  void copyWithAnotherTypesArray() {
    assertRefused(() -> x.copyFrom(new double[COUNT], stream), x.toString(), "double[]");
    assertRefused(() -> x.copyTo(new int[COUNT], stream), x.toString(), "int[]", "MemorySegment");
    assertRefused(
        () -> x.copyTo(MemorySegment.ofArray(new float[COUNT]).asReadOnly(), stream),
        x.toString(),
        "read-only");
  }

  @Test
  void timeoutThatIsNotPositive() {
    assertRefused(() -> stream.synchronize(Duration.ZERO), "timeout", "positive");
    assertRefused(() -> stream.synchronize(Duration.ofNanos(-1)), "timeout", "positive");
  }

  // ------------------------------------------------------------------ threads and states

  @Test
  void secondThreadInsideOneCommunicator() throws Exception {
    CountDownLatch inside = new CountDownLatch(1);
    CountDownLatch release = new CountDownLatch(1);
    Thread first =
        Thread.ofPlatform()
            .name("the-first-one")
            .start(
                () ->
                    comm.call(
                        "a long call",
                        handle -> {
                          inside.countDown();
                          await(release);
                          return 0;
                        }));
    try {
      inside.await();
      String[] texts = {"the-first-one", "inside a call"};
      assertTooLate(() -> comm.allReduce(x, x, ReduceOp.SUM, stream), texts);
      assertTooLate(() -> comm.send(x, 1, stream), texts);
      assertTooLate(comm::abort, texts);
      assertTooLate(comm::close, texts);
    } finally {
      release.countDown();
      first.join();
    }
  }

  private static void await(CountDownLatch latch) {
    try {
      latch.await();
    } catch (InterruptedException e) {
      throw new IllegalStateException(e);
    }
  }

  @Test
  void closedOrAbortedCommunicator() {
    try (LocalWorld ended = TestRanks.open(RANKS);
        RankBuffers y = RankBuffers.allocate(ended, DataType.FLOAT32, COUNT)) {
      ended.run(
          r -> {
            Communicator c = r.communicator();
            c.close();
            c.close();
            c.abort();
            assertEquals(Communicator.State.CLOSED, c.state());
            assertTooLate(
                () -> c.allReduce(y.of(r), y.of(r), ReduceOp.SUM, r.stream()),
                "ncclAllReduce",
                "closed");
            assertTooLate(c::handle, "closed");
          });
    }
    try (LocalWorld ended = TestRanks.open(RANKS);
        RankBuffers y = RankBuffers.allocate(ended, DataType.FLOAT32, COUNT)) {
      ended.run(
          r -> {
            Communicator c = r.communicator();
            c.abort();
            c.abort();
            c.close();
            assertEquals(Communicator.State.ABORTED, c.state());
            assertTooLate(
                () -> c.allReduce(y.of(r), y.of(r), ReduceOp.SUM, r.stream()),
                "ncclAllReduce",
                "aborted");
            assertTooLate(c::handle, "aborted");
          });
    }
  }

  @Test
  void closedWorld() {
    LocalWorld closed = TestRanks.open(1);
    closed.close();
    closed.close();
    assertTooLate(() -> closed.run(r -> {}), "closed");
  }

  @Test
  void exceptionOfOneRankEndsTheOthersWait() {
    IllegalArgumentException thrown = new IllegalArgumentException("rank 1 gives up");
    try (LocalWorld broken = TestRanks.open(RANKS);
        RankBuffers y = RankBuffers.allocate(broken, DataType.FLOAT32, COUNT)) {
      RuntimeException e =
          assertThrows(
              RuntimeException.class,
              () ->
                  broken.run(
                      r -> {
                        if (r.rank() == 1) {
                          throw thrown;
                        }
                        r.communicator().allReduce(y.of(r), y.of(r), ReduceOp.SUM, r.stream());
                        r.stream().synchronize();
                      }));
      Messages.assertNames(e, "rank 1 gives up");
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.lsa.LsaPath;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.time.Duration;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** What device collectives refuse, before anything is launched, and how they say what would run. */
class DeviceInputTest {
  private static final int RANKS = 2;
  private static final int COUNT = 8;
  private static final Duration START = Duration.ofSeconds(60);
  private static final DeviceCommunicatorConfig CONFIG =
      DeviceCommunicatorConfig.builder().channels(4).slotBytes(1024).build();
  private static final LaunchChoice AUTO = LaunchChoice.AUTO;

  private static LocalWorld world;
  private static RankBuffers floats;
  private static RankBuffers more;

  /** Rank 0, used by the tests' own thread while no rank's task runs: nothing is launched. */
  private static DeviceCommunicator comm;

  private static CudaStream stream;
  private static DeviceBuffer x;
  private static DeviceBuffer y;
  private static LsaWindow window;
  private static LsaWindow foreign;
  private static LsaWindow closed;

  @BeforeAll
  static void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(RANKS);
    floats = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
    more = RankBuffers.allocate(world, DataType.FLOAT32, 2 * COUNT + 1);
    world.run(
        rank -> {
          DeviceCommunicator mine = DeviceCommunicator.create(rank.communicator(), CONFIG);
          LsaWindow open = LsaWindow.create(rank.communicator(), 256);
          LsaWindow shut = LsaWindow.create(rank.communicator(), 256);
          shut.close();
          Communicator child = rank.communicator().split(0, 0, CommunicatorConfig.DEFAULT);
          LsaWindow other = LsaWindow.create(child, 256);
          if (rank.rank() == 0) {
            comm = mine;
            stream = rank.stream();
            window = open;
            closed = shut;
            foreign = other;
          }
        });
    x = floats.of(0);
    y = more.of(0);
  }

  @AfterAll
  static void closeWorld() {
    if (world != null) {
      world.run( // nothing of all that was launched
          rank -> {
            DeviceCommunicator c =
                rank.rank() == 0
                    ? comm
                    : DeviceCommunicator.class.cast(
                        rank.communicator().child(DeviceCommunicator.class));
            float[] ones = {1, 1, 1, 1, 1, 1, 1, 1};
            floats.of(rank).copyFrom(ones, rank.stream());
            c.allReduce(floats.of(rank), floats.of(rank), ReduceOp.SUM, rank.stream());
            floats.of(rank).copyTo(ones, rank.stream());
            assertEquals(RANKS, ones[COUNT - 1]);
          });
      world.close();
      floats.close();
      more.close();
    }
  }

  private static void refused(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(IllegalArgumentException.class, call::run), texts);
  }

  private static void refusedByTheShim(Runnable call, String... texts) {
    NcclException e = assertThrows(NcclException.class, call::run);
    assertEquals("ncclInvalidArgument", NcclException.resultName(e.resultCode()));
    Messages.assertNames(e, texts);
  }

  @Test
  void lengthsThatDoNotMatch() {
    ReduceOp sum = ReduceOp.SUM;
    refused(() -> comm.allReduce(x, y, sum, stream), "ncclFfmAllReduce", "8 and 17");
    refused(() -> comm.reduceScatter(y, x, sum, stream), "ncclFfmReduceScatter", "17 and 16");
    refused(() -> comm.allGather(x, y, stream), "ncclFfmAllGather", "16 and 17");
    refused(() -> comm.broadcast(x, y, 0, stream), "ncclFfmBroadcast", "8 and 17");
    refused(() -> comm.reduce(x, y, sum, 0, stream), "ncclFfmReduce", "8 and 17");
    refused(() -> comm.allToAll(x, y, stream), "ncclFfmAllToAll", "8 and 17");
    refused(() -> comm.allToAll(y, y, stream), "ncclFfmAllToAll", "does not divide");
    refused(() -> comm.sendRecv(x, 1, y, 1, stream), "ncclFfmSendRecv", "8 and 17");
    refused(
        () -> comm.hierarchicalAllReduce(x, y, sum, 1, stream),
        "ncclFfmHierarchicalAllReduce",
        "8 and 17");
  }

  @Test
  void rangesThatLeaveTheBuffer() {
    ReduceOp sum = ReduceOp.SUM;
    String all = "from offset 1 do not lie in";
    refused(() -> comm.reduceScatter(y, 1, x, 0, 9, sum, stream), "18 elements " + all);
    refused(() -> comm.allGather(x, 0, y, 1, 9, stream), "9 elements from offset 0");
    refused(() -> comm.allToAll(y, 1, y, 0, 9, stream), "18 elements " + all);
    refused(() -> comm.send(x, 1, 8, 1, stream), "ncclFfmSend", "8 elements " + all);
    refused(() -> comm.recv(x, 1, 8, 1, stream), "ncclFfmRecv", "8 elements " + all);
    refused(() -> comm.broadcast(x, 0, x, 0, -1, 0, stream), "-1 elements");
    refused(() -> comm.reduceScatter(x, 0, y, 0, Long.MAX_VALUE, sum, stream), "each of 2 ranks");
    refused(() -> comm.send(x, -1, 1, 1, stream), "offset -1");
  }

  @Test
  void rootsPeersAndGroupsThatAreNone() {
    refused(() -> comm.broadcast(x, x, 2, stream), "ncclFfmBroadcast", "root 2", "0 to 1");
    refused(() -> comm.broadcast(x, x, -1, stream), "root -1");
    refused(() -> comm.reduce(x, x, ReduceOp.SUM, 2, stream), "ncclFfmReduce", "root 2");
    refused(() -> comm.send(x, 0, stream), "ncclFfmSend", "peer 0", "another rank");
    refused(() -> comm.recv(x, 2, stream), "ncclFfmRecv", "peer 2");
    refused(() -> comm.sendRecv(x, 1, x, 0, stream), "ncclFfmSendRecv", "peer 0");
    refused(
        () -> comm.hierarchicalAllReduce(x, x, ReduceOp.SUM, 0, stream), "groups of 0", "divide");
  }

  @Test
  void typesOperationsAndBuffersOfOthers() {
    for (DataType type : new DataType[] {DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2}) {
      DeviceBuffer small = DeviceBuffer.wrap(x.device(), type, COUNT, x.address(0));
      refused(() -> comm.allReduce(small, small, ReduceOp.SUM, stream), type.name());
      refused(() -> comm.send(small, 1, stream), "ncclFfmSend", type.name());
    }
    DeviceBuffer ints = DeviceBuffer.wrap(x.device(), DataType.INT32, COUNT, x.address(0));
    refused(() -> comm.allReduce(x, ints, ReduceOp.SUM, stream), "differ in type");
    try (ReduceOp half = comm.communicator().createPreMulSum(DataType.FLOAT32, 0.5)) {
      refused(() -> comm.reduce(x, x, half, 0, stream), "ncclFfmReduce", "NCCL's own");
    }
    if (CudaDevice.count() > 1) {
      DeviceBuffer other =
          DeviceBuffer.wrap(new CudaDevice(1), DataType.FLOAT32, COUNT, x.address(0));
      refused(() -> comm.allReduce(x, other, ReduceOp.SUM, stream), "is on another device");
    }
    refusedByTheShim(
        () -> comm.allReduce(y, 0, y, 4, 8, ReduceOp.SUM, stream), "ncclFfmAllReduce", "overlap");
    refusedByTheShim(() -> comm.allToAll(y, 0, y, 0, 8, stream), "ncclFfmAllToAll", "overlap");
    refused(() -> comm.barrier(null), "ncclFfmBarrier", "stream is null");
  }

  @Test
  void choicesThatTheFunctionDoesNotHave() {
    LaunchChoice ring = AUTO.with(DeviceAlgorithm.RING);
    refusedByTheShim(
        () -> comm.reduce(x, 0, x, 0, 8, ReduceOp.SUM, 0, stream, ring),
        "Reduce does not have algorithm 3");
    refusedByTheShim(() -> comm.barrier(stream, AUTO.withBlocks(99)), "99 blocks", "of 4 channels");
    refused(() -> AUTO.withBlocks(-1), "blocks -1");
    LaunchChoice ll = AUTO.with(LsaProtocol.LL);
    refused(
        () -> comm.allReduce(window, 0, window, 0, DataType.FLOAT32, 4, ReduceOp.SUM, stream, ll),
        "ncclFfmAllReduce on windows",
        "SIMPLE only");
  }

  private static void onWindow(LsaWindow send, long at, DataType type, long count, String... why) {
    refused(() -> comm.allReduce(send, at, window, 128, type, count, ReduceOp.SUM, stream), why);
  }

  @Test
  void windowsThatAreClosedForeignOrTooSmall() {
    onWindow(foreign, 0, DataType.INT8, 1, "ncclFfmAllReduce", "belongs to");
    onWindow(window, 252, DataType.FLOAT32, 2, "2 x FLOAT32 at byte 252", "256 bytes");
    onWindow(window, 2, DataType.FLOAT32, 1, "at byte 2", "a multiple of 4");
    onWindow(window, -4, DataType.FLOAT32, 1, "at byte -4");
    onWindow(window, 0, DataType.FLOAT32, -1, "-1 x FLOAT32");
    onWindow(window, 0, DataType.FLOAT64, Long.MAX_VALUE, "FLOAT64 at byte 0");
    onWindow(window, 0, DataType.FLOAT8_E5M2, 1, "FLOAT8_E5M2");
    refused(
        () -> comm.allGather(window, 0, window, 128, DataType.INT8, 65, stream),
        "ncclFfmAllGather",
        "130 x INT8 at byte 128");
    refusedByTheShim(
        () -> comm.allReduce(window, 0, window, 4, DataType.INT32, 4, ReduceOp.SUM, stream),
        "overlap");
    Messages.assertNames(
        assertThrows(
            IllegalStateException.class,
            () -> comm.broadcast(closed, 0, window, 0, DataType.INT8, 1, 0, stream)),
        "ncclFfmBroadcast",
        "closed");
  }

  @Test
  void configurationsThatAreNone() {
    DeviceCommunicatorConfig.Builder builder = DeviceCommunicatorConfig.builder();
    refused(() -> builder.channels(0), "channels 0");
    refused(() -> builder.slotBytes(1000), "slotBytes 1000", "multiple of 512");
    refused(() -> builder.slotBytes(0), "slotBytes 0");
    refused(() -> builder.slotBytes(1 << 27), "up to 67108864");
    DeviceCommunicatorConfig many = DeviceCommunicatorConfig.builder().channels(5000).build();
    world.run(
        rank ->
            Messages.assertNames(
                assertThrows(
                    NcclException.class,
                    () -> DeviceCommunicator.create(rank.communicator(), many)),
                "5000 channels",
                "1024"));
  }

  @Test
  void theStructHoldsWhatAllRanksAgreedOn() {
    assertTrue(ncclFfmDevComm.sizeof() <= 256, "a kernel takes it by value");
    assertEquals(1024, ncclFfmDevComm.slotBytes(comm.struct()));
    assertEquals(4, ncclFfmDevComm.nChannels(comm.struct()));
    int sharing = comm.window().ranksPerDevice();
    assertEquals(CudaDevice.count() >= RANKS ? 1 : RANKS, sharing);
    assertEquals(sharing, ncclFfmDevComm.ranksPerDevice(comm.struct()));
    LsaPath path = comm.window().poorestPath();
    assertEquals(comm.window().path(1), path);
  }

  @ParameterizedTest
  @EnumSource(DeviceFunction.class)
  void everyFunctionSaysHowItWouldRun(DeviceFunction function) {
    LaunchChoice small = comm.choose(function, DataType.FLOAT32, 16, AUTO);
    assertEquals(LsaProtocol.LL, small.protocol());
    assertEquals(1, small.blocks());
    LaunchChoice large = comm.choose(function, DataType.FLOAT32, 1 << 24, AUTO);
    if (function != DeviceFunction.BARRIER) {
      assertEquals(LsaProtocol.SIMPLE, large.protocol());
      assertTrue(large.blocks() > 1, large.toString());
    }
    LaunchChoice given = AUTO.with(LsaProtocol.SIMPLE).withBlocks(2);
    LaunchChoice chosen = comm.choose(function, DataType.FLOAT32, 16, given);
    assertEquals(LsaProtocol.SIMPLE, chosen.protocol());
    assertEquals(2, chosen.blocks());
    assertTrue(chosen.toString().contains("protocol=SIMPLE"), chosen.toString());
    if (!DeviceCase.algorithms(function, true).isEmpty()) {
      assertEquals(
          LsaProtocol.SIMPLE,
          comm.chooseOnWindows(function, DataType.FLOAT32, 16, AUTO).protocol());
    }
  }

  @Test
  void defaultsOfTheCommunicatorStandInForOpenChoices() {
    DeviceCommunicatorConfig config =
        DeviceCommunicatorConfig.builder()
            .channels(2)
            .slotBytes(512)
            .protocol(LsaProtocol.SIMPLE)
            .algorithm(DeviceAlgorithm.RING)
            .build();
    world.run(
        rank -> {
          DeviceCommunicator c = DeviceCommunicator.create(rank.communicator(), config);
          LaunchChoice chosen = c.choose(DeviceFunction.ALL_REDUCE, DataType.INT8, 1, AUTO);
          assertEquals(DeviceAlgorithm.RING, chosen.algorithm());
          assertEquals(LsaProtocol.SIMPLE, chosen.protocol());
          LaunchChoice reduce = c.choose(DeviceFunction.REDUCE, DataType.INT8, 1, AUTO);
          assertEquals(DeviceAlgorithm.ONE_SHOT, reduce.algorithm());
          c.close();
        });
  }

  @ParameterizedTest(name = "{0}={1}")
  @CsvSource({
    "NCCLFFM_PROTO,Simple,CHOICE LaunchChoice[protocol=SIMPLE",
    "NCCLFFM_PROTO,ll128x,REFUSED environment variable NCCLFFM_PROTO=ll128x: must be one of",
    "NCCLFFM_ALGO,ring,'CHOICE LaunchChoice[protocol=LL, algorithm=RING'",
    "NCCLFFM_ALGO,tree,REFUSED environment variable NCCLFFM_ALGO=tree: must be one of"
  })
  void environmentSetsTheDefaults(String variable, String value, String answer) throws Exception {
    try (ChildJvm child =
        ChildJvm.of(DeviceProcess.class, "0", "1", "choose").environment(variable, value).start()) {
      child.awaitLine(answer, START);
      assertEquals(0, child.exitStatus(START), child.output());
    }
  }
}

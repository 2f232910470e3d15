package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import java.lang.foreign.MemorySegment;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Sends and receives by kernels, alone, in rings, to all peers at once, and beside a collective.
 */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {2, 3, 4, 8})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class DeviceSendRecvTest {
  private static final long SEED = 0x5eed_2027L;

  /** Two slots are on the way at most: sends of more than 2 KiB wait for their receiver. */
  private static final DeviceCommunicatorConfig CONFIG =
      DeviceCommunicatorConfig.builder().channels(4).slotBytes(1024).build();

  /** Where all ranks' kernels of several streams must be on the GPU at once. */
  private static final LaunchChoice ONE_BLOCK = LaunchChoice.AUTO.withBlocks(1);

  @Parameter int ranks;

  private final Queue<String> failures = new ConcurrentLinkedQueue<>();
  private LocalWorld world;
  private DeviceCommunicator[] comms;

  /** A stream for each peer, made before anything spins. */
  private CudaStream[][] sending;

  private CudaStream[][] receiving;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(ranks);
    comms = new DeviceCommunicator[ranks];
    sending = new CudaStream[ranks][ranks];
    receiving = new CudaStream[ranks][ranks];
    int devices = CudaDevice.count();
    for (int r = 0; r < ranks; r++) {
      for (int p = 0; p < (TestRanks.onCpu() || ranks <= 3 ? ranks : 1); p++) {
        sending[r][p] = CudaStream.create(new CudaDevice(r % devices));
        receiving[r][p] = CudaStream.create(new CudaDevice(r % devices));
      }
    }
    world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator(), CONFIG));
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    if (world != null) {
      world.close();
      for (int r = 0; r < ranks; r++) {
        for (int p = 0; p < ranks && sending[r][p] != null; p++) {
          sending[r][p].close();
          receiving[r][p].close();
        }
      }
    }
  }

  private void assertNoFailures() {
    List<String> all = List.copyOf(failures);
    failures.clear();
    assertEquals(List.of(), all, "seed " + SEED);
  }

  private static MemorySegment segment(byte[] bytes) {
    return MemorySegment.ofArray(bytes);
  }

  private void compare(Inputs inputs, int from, int index, int count, byte[] result, String what) {
    @Nullable String wrong = inputs.mismatchWithInput(from, index, count, Elements.view(result), 0);
    if (wrong != null) {
      failures.add(what + ": " + wrong);
    }
  }

  @ParameterizedTest(name = "{0} x {1} from offset {2} to offset {3}")
  @CsvSource({
    "INT8,1,0,3",
    "INT8,1001,1,0",
    "FLOAT16,0,0,0",
    "BFLOAT16,517,3,1",
    "FLOAT32,4099,1,2",
    "UINT64,3,2,1",
    "FLOAT64,3001,1,1",
    "INT64,128,0,0"
  })
  void everyProtocolMovesAnyTypeAndCount(DataType type, int count, int sendAt, int recvAt) {
    Inputs inputs = new Inputs(type, ReduceOp.SUM, ranks, count, SEED);
    for (LaunchChoice choice :
        DeviceCase.choices(DeviceFunction.SEND, false, DeviceCase.carriesLl128(comms[0]))) {
      try (RankBuffers send = RankBuffers.allocate(world, type, count + 8);
          RankBuffers recv = RankBuffers.allocate(world, type, count + 8)) {
        world.run(
            rank -> {
              int r = rank.rank();
              send.of(r).copyFrom(segment(inputs.bytes(r)), sendAt, rank.stream());
              byte[] around = new byte[(count + 8) * type.bytes()];
              recv.of(r).copyFrom(segment(around), rank.stream());
              // A chain from rank to rank: nobody sends and receives at the same time.
              if (r > 0) {
                comms[r].recv(recv.of(r), recvAt, count, r - 1, rank.stream(), choice);
              }
              if (r < ranks - 1) {
                comms[r].send(send.of(r), sendAt, count, r + 1, rank.stream(), choice);
              }
              recv.of(r).copyTo(segment(around), rank.stream());
              if (r > 0) {
                byte[] result = new byte[count * type.bytes()];
                System.arraycopy(around, recvAt * type.bytes(), result, 0, result.length);
                compare(inputs, r - 1, 0, count, result, choice + " to rank " + r);
                for (int i = 0; i < around.length; i++) {
                  if ((i < recvAt * type.bytes() || i >= (recvAt + count) * type.bytes())
                      && around[i] != 0) {
                    failures.add(choice + ": byte " + i + " beside the result was changed");
                  }
                }
              }
            });
      }
      assertNoFailures();
    }
  }

  @Test
  void sendsThatFitTwoSlotsNeedNoReceiver() {
    int count = 128; // half a slot, by LL
    Inputs inputs = new Inputs(DataType.INT32, ReduceOp.SUM, ranks, count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.INT32, count);
        RankBuffers y = RankBuffers.allocate(world, DataType.INT32, count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            int next = (r + 1) % ranks;
            int previous = Math.floorMod(r - 1, ranks);
            x.of(r).copyFrom(segment(inputs.bytes(r)), rank.stream());
            comms[r].send(x.of(r), 0, count, next, rank.stream(), ONE_BLOCK);
            comms[r].recv(y.of(r), 0, count, previous, rank.stream(), ONE_BLOCK);
            byte[] result = new byte[count * Integer.BYTES];
            y.of(r).copyTo(segment(result), rank.stream());
            compare(inputs, previous, 0, count, result, "to rank " + r);
          });
    }
    assertNoFailures();
  }

  @Test
  void ringOfSendRecvsOfManySlotsDoesNotStandStill() {
    int count = 20_001;
    Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, count);
        RankBuffers y = RankBuffers.allocate(world, DataType.FLOAT32, count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            x.of(r).copyFrom(segment(inputs.bytes(r)), rank.stream());
            byte[] result = new byte[count * Float.BYTES];
            for (int distance = 1; distance < ranks; distance++) {
              int to = (r + distance) % ranks;
              int from = Math.floorMod(r - distance, ranks);
              comms[r].sendRecv(x.of(r), to, y.of(r), from, rank.stream());
              y.of(r).copyTo(segment(result), rank.stream());
              compare(inputs, from, 0, count, result, from + " to " + r);
            }
          });
    }
    assertNoFailures();
  }

  @Test
  void sendsAndReceivesOfAllPeersRunAtOnceBesideCollectives() {
    assumeTrue(
        TestRanks.onCpu() || ranks <= 3, "a GPU has 32 queues: more streams wait for one another");
    int count = 3001; // many slots: a send ends only with its receive
    int rounds = 5;
    Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, ranks * count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, (long) ranks * count);
        RankBuffers y = RankBuffers.allocate(world, DataType.FLOAT32, (long) ranks * count);
        RankBuffers sum = RankBuffers.allocate(world, DataType.FLOAT32, count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            x.of(r).copyFrom(segment(inputs.bytes(r)), rank.stream());
            rank.stream().synchronize();
            byte[] result = new byte[count * Float.BYTES];
            for (int round = 0; round < rounds; round++) {
              for (int p = 0; p < ranks; p++) {
                if (p != r) {
                  long sendAt = (long) p * count;
                  comms[r].send(x.of(r), sendAt, count, p, sending[r][p], ONE_BLOCK);
                }
              }
              comms[r].allReduce(
                  x.of(r), 0, sum.of(r), 0, count, ReduceOp.SUM, rank.stream(), ONE_BLOCK);
              for (int p = 0; p < ranks; p++) {
                if (p != r) {
                  long recvAt = (long) p * count;
                  comms[r].recv(y.of(r), recvAt, count, p, receiving[r][p], ONE_BLOCK);
                }
              }
              for (int p = 0; p < ranks; p++) {
                if (p != r) {
                  y.of(r).copyTo(segment(result), (long) p * count, receiving[r][p]);
                  compare(inputs, p, r * count, count, result, p + " to " + r);
                }
              }
              sum.of(r).copyTo(segment(result), rank.stream());
              @Nullable String wrong =
                  inputs.mismatchWithReduction(0, count, Elements.view(result), 0);
              if (wrong != null) {
                failures.add("sum on rank " + r + ": " + wrong);
              }
            }
            for (int p = 0; p < ranks; p++) {
              sending[r][p].synchronize();
            }
          });
    }
    assertNoFailures();
  }

  @Test
  void aSendRecvMeetsASendAndAReceive() {
    int count = 2001;
    Inputs inputs = new Inputs(DataType.INT64, ReduceOp.SUM, ranks, count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.INT64, count);
        RankBuffers y = RankBuffers.allocate(world, DataType.INT64, count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            x.of(r).copyFrom(segment(inputs.bytes(r)), rank.stream());
            rank.stream().synchronize();
            if (r == 0) {
              comms[0].sendRecv(x.of(0), 0, 1, y.of(0), 0, 1, count, rank.stream(), ONE_BLOCK);
            } else if (r == 1) {
              comms[1].send(x.of(1), 0, count, 0, sending[1][0], ONE_BLOCK);
              comms[1].recv(y.of(1), 0, count, 0, rank.stream(), ONE_BLOCK);
            }
            if (r < 2) {
              byte[] result = new byte[count * Long.BYTES];
              y.of(r).copyTo(segment(result), rank.stream());
              compare(inputs, 1 - r, 0, count, result, "to rank " + r);
              sending[r][0].synchronize();
            }
          });
    }
    assertNoFailures();
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.FusedKernels;
import java.nio.ByteBuffer;
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

/** Collectives inside kernels: right for all counts and offsets, call after call. */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4, 8})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class DeviceRouteTest {
  private static final long SEED = 0x5eed_2025L;

  @Parameter int ranks;

  private final Queue<String> failures = new ConcurrentLinkedQueue<>();
  private LocalWorld world;
  private DeviceCommunicator[] comms;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(ranks);
    comms = new DeviceCommunicator[ranks];
    world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator()));
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    if (world != null) {
      world.close(); // with its device communicators
      for (DeviceCommunicator comm : comms) {
        assertThrows(IllegalStateException.class, comm::struct);
      }
    }
  }

  private void assertNoFailures() {
    List<String> all = List.copyOf(failures);
    failures.clear();
    assertEquals(List.of(), all, "seed " + SEED);
  }

  private static java.lang.foreign.MemorySegment segment(byte[] bytes) {
    return java.lang.foreign.MemorySegment.ofArray(bytes);
  }

  private void compare(Inputs inputs, byte[] result, int count, String what) {
    @Nullable String wrong = inputs.mismatchWithReduction(0, count, Elements.view(result), 0);
    if (wrong != null) {
      failures.add(what + ", " + wrong);
    }
  }

  @ParameterizedTest(name = "{0} elements from offset {1} to offset {2}")
  @CsvSource({"0,0,0", "1,0,3", "3,1,1", "257,2,1", "4097,3,0", "300001,1,3"})
  void allReduceOfAnyCountAtAnyOffsetMatchesFloat64(int count, int sendOffset, int recvOffset) {
    Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, count, SEED);
    long capacity = count + 8;
    try (RankBuffers send = RankBuffers.allocate(world, DataType.FLOAT32, capacity);
        RankBuffers recv = RankBuffers.allocate(world, DataType.FLOAT32, capacity)) {
      world.run(
          rank -> {
            byte[] guarded = new byte[Math.toIntExact(recv.of(rank).bytes())];
            recv.of(rank).copyFrom(segment(guarded), rank.stream());
            DeviceBuffer x = send.of(rank);
            x.copyFrom(segment(inputs.bytes(rank.rank())), sendOffset, rank.stream());
            comms[rank.rank()].allReduce(
                x, sendOffset, recv.of(rank), recvOffset, count, ReduceOp.SUM, rank.stream());
            byte[] result = new byte[count * Float.BYTES];
            recv.of(rank).copyTo(segment(result), recvOffset, rank.stream());
            compare(inputs, result, count, "out of place, rank " + rank.rank());

            float[] around = new float[count + 8];
            recv.of(rank).copyTo(around, rank.stream());
            for (int i = 0; i < around.length; i++) {
              if ((i < recvOffset || i >= recvOffset + count) && around[i] != 0) {
                failures.add("rank " + rank.rank() + " wrote element " + i + " beside the result");
              }
            }

            comms[rank.rank()].allReduce(
                x, sendOffset, x, sendOffset, count, ReduceOp.SUM, rank.stream());
            x.copyTo(segment(result), sendOffset, rank.stream());
            compare(inputs, result, count, "in place, rank " + rank.rank());
          });
    }
    assertNoFailures();
  }

  @Test
  void backToBackCallsKeepTheirPayloadsApart() {
    int calls = 500;
    int count = 37;
    try (RankBuffers send = RankBuffers.allocate(world, DataType.FLOAT32, (long) calls * count);
        RankBuffers recv = RankBuffers.allocate(world, DataType.FLOAT32, (long) calls * count)) {
      Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, calls * count, SEED);
      world.run(
          rank -> {
            int r = rank.rank();
            send.of(r).copyFrom(segment(inputs.bytes(r)), rank.stream());
            for (int call = 0; call < calls; call++) {
              long offset = (long) call * count;
              comms[r].allReduce(
                  send.of(r), offset, recv.of(r), offset, count, ReduceOp.SUM, rank.stream());
            }
            byte[] result = new byte[calls * count * Float.BYTES];
            recv.of(r).copyTo(segment(result), rank.stream());
            compare(inputs, result, calls * count, "rank " + r);
          });
    }
    assertNoFailures();
  }

  @Test
  void callsOfChangingSizeKeepTheirChannelsInStep() {
    int[] counts = {1, 40_000, 2, 5_000, 17_001, 0, 3, 60_001, 1024, 1025};
    int largest = 60_001;
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, largest)) {
      for (int count : counts) {
        Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, count, SEED + count);
        world.run(
            rank -> {
              int r = rank.rank();
              DeviceBuffer mine = x.of(r);
              mine.copyFrom(segment(inputs.bytes(r)), rank.stream());
              comms[r].allReduce(mine, 0, mine, 0, count, ReduceOp.SUM, rank.stream());
              byte[] result = new byte[count * Float.BYTES];
              mine.copyTo(segment(result), rank.stream());
              compare(inputs, result, count, count + " elements, rank " + r);
            });
      }
    }
    assertNoFailures();
  }

  @Test
  void alternatesWithHostCollectivesOnOneStream() {
    int steps = 20;
    long[] expected = new long[1];
    float[][] results = new float[ranks][1];
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1)) {
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceBuffer mine = x.of(r);
            Communicator host = rank.communicator();
            mine.copyFrom(new float[] {r + 1}, rank.stream());
            for (int step = 0; step < steps; step++) {
              // Sum, then average: every rank ends with the mean of what they had, times ranks.
              comms[r].allReduce(mine, mine, ReduceOp.SUM, rank.stream());
              host.allReduce(mine, mine, ReduceOp.AVG, rank.stream());
            }
            mine.copyTo(results[r], rank.stream());
          });
    }
    // The first step sums 1..n; each later one multiplies by n and stays exact for n = 2^k.
    expected[0] = (long) ranks * (ranks + 1) / 2;
    double value = expected[0] * Math.pow(ranks, steps - 1);
    for (float[] result : results) {
      assertEquals(value, result[0]);
    }
  }

  @ParameterizedTest(name = "{0} elements from offset {1}")
  @CsvSource({"0,0", "1,1", "257,3", "4097,2", "300001,1"})
  void fusedKernelMatchesFloat64(int count, int offset) {
    float a = 2;
    float b = 1;
    Inputs inputs = new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, count + 8)) {
      world.run(
          rank -> {
            int r = rank.rank();
            x.of(r).copyFrom(segment(inputs.bytes(r)), offset, rank.stream());
            FusedKernels.scaleAllReduceSqrt(comms[r], x.of(r), offset, count, a, b, rank.stream());
            byte[] result = new byte[count * Float.BYTES];
            x.of(r).copyTo(segment(result), offset, rank.stream());
            checkFused(inputs, result, count, a, b, r);
          });
    }
    assertNoFailures();
  }

  private void checkFused(Inputs inputs, byte[] result, int count, float a, float b, int rank) {
    ByteBuffer view = Elements.view(result);
    for (int i = 0; i < count; i++) {
      double sum = 0;
      for (int r = 0; r < ranks; r++) {
        sum += a * (double) Elements.view(inputs.bytes(r)).getFloat(i * Float.BYTES) + b;
      }
      // Compared before the root, whose slope at 0 has no bound. Every summand is below 3.
      double square = (double) view.getFloat(i * 4) * view.getFloat(i * 4);
      double allowed = 3.0 * ranks * (ranks + 2) * Math.ulp(1f);
      if (!(Math.abs(square - Math.abs(sum)) <= allowed)) {
        failures.add(
            "rank " + rank + ", element " + i + ": sqrt|" + sum + "|, got " + view.getFloat(i * 4));
        return;
      }
    }
  }

  @Test
  void badArgumentsAreRefusedAndChangeNothing() {
    try (RankBuffers floats = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers longer = RankBuffers.allocate(world, DataType.FLOAT32, 9);
        RankBuffers ints = RankBuffers.allocate(world, DataType.INT32, 8)) {
      world.run(
          rank -> {
            DeviceCommunicator comm = comms[rank.rank()];
            DeviceBuffer x = floats.of(rank);
            DeviceBuffer i = ints.of(rank);
            DeviceBuffer y = longer.of(rank);
            DeviceBuffer small =
                DeviceBuffer.wrap(rank.device(), DataType.FLOAT8_E4M3, 8, x.address(0));
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(small, small, ReduceOp.SUM, rank.stream())),
                "ncclFfmAllReduce",
                "FLOAT8_E4M3");
            ReduceOp half = rank.communicator().createPreMulSum(DataType.FLOAT32, 0.5);
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(x, x, half, rank.stream())),
                "ncclFfmAllReduce",
                half.toString(),
                "NCCL's own");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(x, y, ReduceOp.SUM, rank.stream())),
                "ncclFfmAllReduce",
                x.toString(),
                y.toString());
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(x, i, ReduceOp.SUM, rank.stream())),
                "differ in type");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(x, 1, x, 1, 8, ReduceOp.SUM, rank.stream())),
                "ncclFfmAllReduce",
                "8 elements from offset 1",
                x.toString());
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(x, 0, x, 0, -1, ReduceOp.SUM, rank.stream())),
                "ncclFfmAllReduce",
                "-1 elements");
            Messages.assertNames(
                assertThrows(
                    RuntimeException.class,
                    () -> comm.allReduce(y, 0, y, 1, 8, ReduceOp.SUM, rank.stream())),
                "ncclFfmAllReduce",
                "overlap");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class, () -> comm.allReduce(x, x, ReduceOp.SUM, null)),
                "ncclFfmAllReduce",
                "stream is null");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> FusedKernels.scaleAllReduceSqrt(comm, i, 1, 1, rank.stream())),
                "FLOAT32",
                i.toString());

            // Nothing of that was launched: the channels are still in step.
            x.copyFrom(new float[] {1, 2, 3, 4, 5, 6, 7, 8}, rank.stream());
            comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
            float[] result = new float[8];
            x.copyTo(result, rank.stream());
            assertEquals(8f * ranks, result[7]);
          });
    }
  }

  @Test
  void closedCommunicatorIsRefused() {
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          rank -> {
            DeviceCommunicator closed = DeviceCommunicator.create(rank.communicator());
            closed.close();
            closed.close();
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class,
                    () -> closed.allReduce(x.of(rank), x.of(rank), ReduceOp.SUM, rank.stream())),
                "closed");
            closed.abort();
            assertTrue(rank.communicator().state() == Communicator.State.READY);
          });
    }
    TestRanks.assertWorks(world);
  }
}

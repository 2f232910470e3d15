package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.ReduceOp;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * {@link Communicator#createPreMulSum}: every rank multiplies by a factor of its own. All types,
 * with factors on the host and on the device; 8-bit floats on the device only, and on a GPU not
 * with one rank, for the reason given in {@link CollectivesTest}.
 */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 4})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class PreMulSumTest {
  private static final int COUNT = 1023;

  @Parameter int ranks;

  private LocalWorld world;

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    world.close();
  }

  /** Small values, whose weighted sums every type holds exactly. */
  private static int value(int rank, int i) {
    return (rank + i) % 3;
  }

  private static int factor(int rank) {
    return 1 + rank % 2;
  }

  private static byte[] elements(DataType type, int count, java.util.function.IntUnaryOperator of) {
    ByteBuffer bytes = Elements.view(new byte[count * type.bytes()]);
    for (int i = 0; i < count; i++) {
      if (Elements.isFloat(type)) {
        Elements.putFloat(bytes, type, i, of.applyAsInt(i));
      } else {
        Elements.putInteger(bytes, type, i, of.applyAsInt(i));
      }
    }
    return bytes.array();
  }

  private interface MakeOp {
    ReduceOp make(LocalWorld.Rank rank);
  }

  private void assertReducesWeighted(DataType type, MakeOp make) {
    int[] expected = new int[COUNT];
    for (int i = 0; i < COUNT; i++) {
      for (int r = 0; r < ranks; r++) {
        expected[i] += factor(r) * value(r, i);
      }
    }
    byte[][] results = new byte[ranks][COUNT * type.bytes()];
    try (RankBuffers x = RankBuffers.allocate(world, type, COUNT)) {
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceBuffer mine = x.of(rank);
            mine.copyFrom(
                MemorySegment.ofArray(elements(type, COUNT, i -> value(r, i))), rank.stream());
            try (ReduceOp op = make.make(rank)) {
              rank.communicator().allReduce(mine, mine, op, rank.stream());
              mine.copyTo(MemorySegment.ofArray(results[r]), rank.stream());
            }
          });
    }
    for (byte[] result : results) {
      assertArrayEquals(elements(type, COUNT, i -> expected[i]), result);
    }
  }

  private void assumeTaken(DataType type) {
    assumeFalse(
        Elements.isFloat8(type) && ranks == 1 && !TestRanks.onCpu(),
        "NCCL has no 8-bit pre-multiplied sum for one rank");
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void factorOnTheHost(DataType type) {
    if (Elements.isFloat8(type)) {
      world.run(
          rank ->
              Messages.assertNames(
                  assertThrows(
                      IllegalArgumentException.class,
                      () -> rank.communicator().createPreMulSum(type, 2)),
                  type.toString(),
                  "device buffer"));
      return;
    }
    assertReducesWeighted(
        type, rank -> rank.communicator().createPreMulSum(type, factor(rank.rank())));
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void factorOnTheDevice(DataType type) {
    assumeTaken(type);
    try (RankBuffers factors = RankBuffers.allocate(world, type, 1)) {
      world.run(
          rank ->
              factors
                  .of(rank)
                  .copyFrom(
                      MemorySegment.ofArray(elements(type, 1, i -> factor(rank.rank()))),
                      rank.stream()));
      assertReducesWeighted(type, rank -> rank.communicator().createPreMulSum(factors.of(rank)));
    }
  }

  @Test
  void factorThatIsNoWholeNumberMatchesFloat64() {
    float[][] results = new float[ranks][COUNT];
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      world.run(
          rank -> {
            float[] mine = new float[COUNT];
            for (int i = 0; i < COUNT; i++) {
              mine[i] = rank.rank() + i * 0.125f;
            }
            x.of(rank).copyFrom(mine, rank.stream());
            Communicator comm = rank.communicator();
            try (ReduceOp op = comm.createPreMulSum(DataType.FLOAT32, 0.1)) {
              comm.allReduce(x.of(rank), x.of(rank), op, rank.stream());
              x.of(rank).copyTo(results[rank.rank()], rank.stream());
            }
          });
    }
    for (float[] result : results) {
      for (int i = 0; i < COUNT; i++) {
        double expected = 0;
        for (int r = 0; r < ranks; r++) {
          expected += 0.1 * (r + i * 0.125);
        }
        assertEquals(expected, result[i], 2 * ranks * 0x1p-24 * expected, "element " + i);
      }
    }
  }

  @Test
  void closedBeforeTheGroupEndsIsCarriedOut() {
    int[][] results = new int[ranks][1];
    try (RankBuffers x = RankBuffers.allocate(world, DataType.INT32, 1)) {
      world.run(
          rank -> {
            x.of(rank).copyFrom(new int[] {1 + rank.rank()}, rank.stream());
            NcclGroup.run(
                () -> {
                  try (ReduceOp op = rank.communicator().createPreMulSum(DataType.INT32, 3)) {
                    rank.communicator().allReduce(x.of(rank), x.of(rank), op, rank.stream());
                  }
                });
            x.of(rank).copyTo(results[rank.rank()], rank.stream());
          });
    }
    for (int[] result : results) {
      assertEquals(3 * ranks * (ranks + 1) / 2, result[0]);
    }
  }

  @ParameterizedTest
  @CsvSource({"INT32,0.5", "INT8,128", "UINT8,-1", "UINT32,4294967296", "INT64,NaN", "UINT64,1e30"})
  void factorThatTheTypeDoesNotHoldIsRefused(DataType type, double factor) {
    world.run(
        rank ->
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> rank.communicator().createPreMulSum(type, factor)),
                "factor " + factor,
                type.toString()));
  }

  @Test
  void ofAnotherTypeOrCommunicatorOrClosedIsRefused() {
    try (LocalWorld other = TestRanks.open(ranks);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers ints = RankBuffers.allocate(world, DataType.INT32, 8)) {
      ReduceOp[] foreign = new ReduceOp[ranks];
      other.run(r -> foreign[r.rank()] = r.communicator().createPreMulSum(DataType.FLOAT32, 2));
      world.run(
          rank -> {
            Communicator comm = rank.communicator();
            ReduceOp op = comm.createPreMulSum(DataType.FLOAT32, 2);
            DeviceBuffer wrong = ints.of(rank);
            DeviceBuffer right = x.of(rank);
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.allReduce(wrong, wrong, op, rank.stream())),
                "ncclAllReduce",
                "made for FLOAT32",
                "not for INT32");
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> comm.reduce(right, right, foreign[rank.rank()], 0, rank.stream())),
                "ncclReduce",
                "made for FLOAT32 on communicator");
            op.close();
            op.close();
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class,
                    () -> comm.reduceScatter(right, 0, right, 0, 1, op, rank.stream())),
                "ncclReduceScatter",
                "closed");
            ReduceOp.SUM.close(); // built in: nothing happens
            comm.allReduce(right, right, ReduceOp.SUM, rank.stream());
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void closingTheCommunicatorClosesItsOperators() {
    List<ReduceOp> left = new ArrayList<>();
    try (LocalWorld other = TestRanks.open(1)) {
      other.run(
          rank -> {
            Communicator comm = rank.communicator();
            for (int i = 0; i < 5; i++) {
              left.add(comm.createPreMulSum(DataType.FLOAT32, i));
            }
            comm.close();
          });
    }
    left.forEach(ReduceOp::close);
    assertEquals(5, left.size());
    for (ReduceOp op : left) {
      assertTrue(op.ncclValue() > ReduceOp.AVG.ncclValue());
    }
  }

  @Test
  void factorInAClosedBufferIsRefused() {
    world.run(
        rank -> {
          DeviceBuffer closed = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 1);
          closed.close();
          Messages.assertNames(
              assertThrows(
                  IllegalStateException.class, () -> rank.communicator().createPreMulSum(closed)),
              "closed",
              closed.toString());
        });
  }
}

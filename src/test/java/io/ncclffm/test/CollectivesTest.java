package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.stream.IntStream;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Every host collective with every element type and operation, in place and out of place, at odd
 * offsets and counts, against a reference in exact or double arithmetic.
 *
 * <table>
 * <caption>What is covered where</caption>
 * <tr><td>CPU backend<td>1 to 8 ranks<td>counts 0, 1, 7, 1023: the full product
 * <tr><td>CPU backend<td>2 and 8 ranks<td>count 2^20 + 3: every type with one operation, and every
 * collective; with 8 ranks only those where a rank sends no more than that
 * <tr><td>GPU, or with {@code -Dncclffm.test.full=true}<td>1, 2, 4, 8 ranks<td>the full product
 * </table>
 *
 * <p>Left out, because NCCL has none: all-to-all in place; the average of 8-bit floats on one rank.
 */
@ParameterizedClass(name = "{0} ranks")
@MethodSource("sizes")
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class CollectivesTest {
  private static final long SEED = 0x5eed_2025L;
  private static final List<Integer> SMALL_COUNTS = List.of(0, 1, 7, 1023);
  private static final int LARGE_COUNT = (1 << 20) + 3;

  private static final List<ReduceOp> OPS =
      List.of(ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG);

  private static final int SEND_OFFSET = 3;
  private static final int RECV_OFFSET = 1;

  /** Elements behind the largest result, which must stay as they are. */
  private static final int GUARD = 5;

  private static final byte UNTOUCHED = (byte) 0xa5;

  /** Whether nothing is left out: minutes on a GPU machine, hours on two cores. */
  private static final boolean FULL = !TestRanks.onCpu() || Boolean.getBoolean("ncclffm.test.full");

  @Parameter int ranks;

  private final Queue<String> failures = new ConcurrentLinkedQueue<>();
  private LocalWorld world;

  static IntStream sizes() {
    return FULL ? IntStream.of(1, 2, 4, 8) : IntStream.rangeClosed(1, TestRanks.MOST);
  }

  @BeforeParameterizedClassInvocation
  void openWorld() {
    world = TestRanks.open(ranks);
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    world.close();
  }

  /**
   * NCCL 2.30.7 refuses the average of 8-bit floats on a single rank: the cases stand behind {@code
   * __CUDA_ARCH__} in a host function (src/device/onerank.cu) and are never compiled.
   */
  private List<ReduceOp> opsFor(DataType type) {
    boolean refused = Elements.isFloat8(type) && ranks == 1 && !TestRanks.onCpu();
    return refused ? OPS.subList(0, OPS.indexOf(ReduceOp.AVG)) : OPS;
  }

  /** The collective under test, on one rank. */
  private interface Call {
    void enqueue(
        LocalWorld.Rank rank,
        DeviceBuffer send,
        long sendOffset,
        DeviceBuffer recv,
        long recvOffset,
        int count);
  }

  /** What a rank's result must be: null if it is, or what is wrong first. */
  private interface Check {
    @Nullable String mismatch(Inputs inputs, int rank, int count, ByteBuffer result, int offset);
  }

  /** Part r of the result, count elements, is what rank r has from an offset on. */
  private interface SourceOffset {
    int of(int rank, int count);
  }

  private Check gathered(SourceOffset source) {
    return (inputs, rank, n, result, at) -> {
      for (int r = 0; r < ranks; r++) {
        @Nullable String wrong =
            inputs.mismatchWithInput(r, source.of(rank, n), n, result, at + r * n);
        if (wrong != null) {
          return "part " + r + ", " + wrong;
        }
      }
      return null;
    };
  }

  /**
   * A collective: how many counts of elements a rank sends and receives, and which rank alone
   * receives (-1: all do).
   */
  private record Collective(
      String name, int sendParts, int recvParts, int receiver, Call call, Check check) {
    boolean hasInPlaceForm() {
      return !name.equals("alltoAll");
    }
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void allReduceGivesEveryRankTheReduction(DataType type) {
    for (ReduceOp op : opsFor(type)) {
      Call call =
          (rank, send, so, recv, ro, n) ->
              rank.communicator().allReduce(send, so, recv, ro, n, op, rank.stream());
      Check check = (inputs, rank, n, result, at) -> inputs.mismatchWithReduction(0, n, result, at);
      exercise(new Collective("allReduce " + op, 1, 1, -1, call, check), type, op);
    }
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void reduceGivesOnlyTheRootTheReduction(DataType type) {
    int root = ranks - 1;
    for (ReduceOp op : opsFor(type)) {
      Call call =
          (rank, send, so, recv, ro, n) ->
              rank.communicator().reduce(send, so, recv, ro, n, op, root, rank.stream());
      Check check = (inputs, rank, n, result, at) -> inputs.mismatchWithReduction(0, n, result, at);
      exercise(new Collective("reduce " + op, 1, 1, root, call, check), type, op);
    }
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void reduceScatterGivesEveryRankItsPartOfTheReduction(DataType type) {
    for (ReduceOp op : opsFor(type)) {
      Call call =
          (rank, send, so, recv, ro, n) ->
              rank.communicator().reduceScatter(send, so, recv, ro, n, op, rank.stream());
      Check check =
          (inputs, rank, n, result, at) -> inputs.mismatchWithReduction(rank * n, n, result, at);
      exercise(new Collective("reduceScatter " + op, ranks, 1, -1, call, check), type, op);
    }
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void broadcastGivesEveryRankTheRootsData(DataType type) {
    int root = ranks / 2;
    Call call =
        (rank, send, so, recv, ro, n) ->
            rank.communicator().broadcast(send, so, recv, ro, n, root, rank.stream());
    Check check = (inputs, rank, n, result, at) -> inputs.mismatchWithInput(root, 0, n, result, at);
    exercise(new Collective("broadcast", 1, 1, -1, call, check), type, ReduceOp.SUM);
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void allGatherGivesEveryRankAllDataInRankOrder(DataType type) {
    Call call =
        (rank, send, so, recv, ro, n) ->
            rank.communicator().allGather(send, so, recv, ro, n, rank.stream());
    Check check = gathered((rank, n) -> 0);
    exercise(new Collective("allGather", 1, ranks, -1, call, check), type, ReduceOp.SUM);
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void alltoAllGivesPartROfEveryRankToRankR(DataType type) {
    Call call =
        (rank, send, so, recv, ro, n) ->
            rank.communicator().alltoAll(send, so, recv, ro, n, rank.stream());
    Check check = gathered((rank, n) -> rank * n);
    exercise(new Collective("alltoAll", ranks, ranks, -1, call, check), type, ReduceOp.SUM);
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void gatherCollectsAllDataOnTheRootOnly(DataType type) {
    int root = ranks - 1;
    Call call =
        (rank, send, so, recv, ro, n) ->
            rank.communicator().gather(send, so, recv, ro, n, root, rank.stream());
    Check check = gathered((rank, n) -> 0);
    exercise(new Collective("gather", 1, ranks, root, call, check), type, ReduceOp.SUM);
  }

  @ParameterizedTest
  @EnumSource(DataType.class)
  void scatterGivesPartROfTheRootToRankR(DataType type) {
    int root = ranks / 2;
    Call call =
        (rank, send, so, recv, ro, n) ->
            rank.communicator().scatter(send, so, recv, ro, n, root, rank.stream());
    Check check =
        (inputs, rank, n, result, at) -> inputs.mismatchWithInput(root, rank * n, n, result, at);
    exercise(new Collective("scatter", ranks, 1, -1, call, check), type, ReduceOp.SUM);
  }

  @ParameterizedTest
  @EnumSource(
      value = DataType.class,
      names = {"FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"})
  void allReduceIsBitIdenticalOnAllRanks(DataType type) {
    int count = 1023;
    byte[][] results = new byte[ranks][count * type.bytes()];
    Inputs inputs = new Inputs(type, ReduceOp.SUM, ranks, count, SEED);
    try (RankBuffers x = RankBuffers.allocate(world, type, count)) {
      world.run(
          rank -> {
            DeviceBuffer mine = x.of(rank);
            mine.copyFrom(segment(inputs.bytes(rank.rank())), rank.stream());
            rank.communicator().allReduce(mine, mine, ReduceOp.SUM, rank.stream());
            mine.copyTo(segment(results[rank.rank()]), rank.stream());
          });
    }
    for (int r = 1; r < ranks; r++) {
      assertEquals(
          -1, Arrays.mismatch(results[0], results[r]), "first byte of rank " + r + " that differs");
    }
  }

  private static java.lang.foreign.MemorySegment segment(byte[] bytes) {
    return java.lang.foreign.MemorySegment.ofArray(bytes);
  }

  /** Runs all counts, out of place and in place; fails with the first wrong element of each. */
  private void exercise(Collective collective, DataType type, ReduceOp op) {
    failures.clear();
    List<Integer> counts = new ArrayList<>(SMALL_COUNTS);
    boolean some = ranks == 2 || ranks == TestRanks.MOST && collective.sendParts == 1;
    if (FULL || some && op == onlyLargeOp(collective, type)) {
      counts.add(LARGE_COUNT);
    }
    int largest = counts.get(counts.size() - 1);
    long sendCapacity = (long) largest * collective.sendParts + SEND_OFFSET + GUARD;
    long recvCapacity = (long) largest * collective.recvParts + RECV_OFFSET + GUARD;
    long both = Math.max(sendCapacity, recvCapacity);
    try (RankBuffers send = RankBuffers.allocate(world, type, both);
        RankBuffers recv = RankBuffers.allocate(world, type, recvCapacity)) {
      for (int count : counts) {
        int elements = count * collective.sendParts;
        Inputs inputs = new Inputs(type, op, ranks, elements, SEED + count);
        world.run(
            rank -> {
              outOfPlace(collective, inputs, rank, send.of(rank), recv.of(rank), count);
              if (collective.hasInPlaceForm()) {
                inPlace(collective, inputs, rank, send.of(rank), count);
              }
            });
      }
    }
    assertEquals(List.of(), List.copyOf(failures), "seed " + SEED);
  }

  /** Each type and each reducing collective with another one, so that all have their turn. */
  private static ReduceOp onlyLargeOp(Collective collective, DataType type) {
    boolean reduces = collective.name.contains("educe");
    int shift = collective.sendParts + collective.receiver;
    return reduces ? OPS.get(Math.floorMod(type.ordinal() + shift, OPS.size())) : ReduceOp.SUM;
  }

  private void outOfPlace(
      Collective collective,
      Inputs inputs,
      LocalWorld.Rank rank,
      DeviceBuffer send,
      DeviceBuffer recv,
      int count) {
    int r = rank.rank();
    byte[] input = inputs.bytes(r);
    send.copyFrom(segment(input), SEND_OFFSET, rank.stream());
    int received = collective.recvParts * count;
    byte[] result = new byte[(received + RECV_OFFSET + GUARD) * recv.type().bytes()];
    Arrays.fill(result, UNTOUCHED);
    recv.copyFrom(segment(result), rank.stream());

    collective.call.enqueue(rank, send, SEND_OFFSET, recv, RECV_OFFSET, count);

    recv.copyTo(segment(result), rank.stream());
    String what = describe(collective, recv.type(), rank, count, "out of place");
    boolean receives = collective.receiver < 0 || collective.receiver == r;
    if (receives) {
      compare(collective, inputs, r, count, result, RECV_OFFSET, what);
    }
    checkUntouched(result, recv.type().bytes(), RECV_OFFSET, receives ? received : 0, what);
    byte[] sent = new byte[input.length];
    send.copyTo(segment(sent), SEND_OFFSET, rank.stream());
    if (!Arrays.equals(sent, input)) {
      failures.add(what + ": the send buffer was changed");
    }
  }

  private void inPlace(
      Collective collective, Inputs inputs, LocalWorld.Rank rank, DeviceBuffer buffer, int count) {
    int r = rank.rank();
    int sendOffset = RECV_OFFSET + (collective.recvParts > 1 ? r * count : 0);
    int recvOffset = RECV_OFFSET + (collective.sendParts > 1 ? r * count : 0);
    buffer.copyFrom(segment(inputs.bytes(r)), sendOffset, rank.stream());

    collective.call.enqueue(rank, buffer, sendOffset, buffer, recvOffset, count);

    int bytes = buffer.type().bytes();
    byte[] result = new byte[(recvOffset + collective.recvParts * count) * bytes];
    buffer.copyTo(segment(result), rank.stream());
    if (collective.receiver < 0 || collective.receiver == r) {
      String what = describe(collective, buffer.type(), rank, count, "in place");
      compare(collective, inputs, r, count, result, recvOffset, what);
    }
  }

  private static String describe(
      Collective collective, DataType type, LocalWorld.Rank rank, int count, String placement) {
    return collective.name
        + " of "
        + count
        + " x "
        + type
        + " on rank "
        + rank.rank()
        + ", "
        + placement;
  }

  private void compare(
      Collective collective,
      Inputs inputs,
      int rank,
      int count,
      byte[] result,
      int offset,
      String what) {
    @Nullable String wrong =
        collective.check.mismatch(inputs, rank, count, Elements.view(result), offset);
    if (wrong != null) {
      failures.add(what + ", " + wrong);
    }
  }

  private void checkUntouched(byte[] result, int bytes, int offset, int received, String what) {
    for (int b = 0; b < result.length; b++) {
      boolean inResult = b >= offset * bytes && b < (offset + received) * bytes;
      if (!inResult && result[b] != UNTOUCHED) {
        failures.add(what + ": wrote byte " + b + ", outside of the result");
        return;
      }
    }
  }
}

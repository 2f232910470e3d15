package io.ncclffm.test;

import io.ncclffm.core.DataType;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.stream.IntStream;
import java.util.zip.CRC32;
import org.jspecify.annotations.Nullable;

/**
 * Device collectives of one type that are enqueued one behind the other, each with a result of its
 * own, and looked at afterwards; so are the bytes around the results, which must stay as they were.
 *
 * <p>They are a function of a fixed seed: ranks in other processes make the same ones.
 */
final class DeviceCases {
  static final long SEED = 0x5eed_2026L;

  /** Small slots: calls of some hundred elements go through them many times. */
  static final DeviceCommunicatorConfig CONFIG =
      DeviceCommunicatorConfig.builder().channels(4).slotBytes(1024).build();

  static final List<ReduceOp> OPS =
      List.of(ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG);

  static final List<DeviceFunction> FUNCTIONS =
      List.of(
          DeviceFunction.ALL_REDUCE,
          DeviceFunction.REDUCE_SCATTER,
          DeviceFunction.ALL_GATHER,
          DeviceFunction.BROADCAST,
          DeviceFunction.REDUCE,
          DeviceFunction.ALL_TO_ALL,
          DeviceFunction.HIERARCHICAL_ALL_REDUCE,
          DeviceFunction.SEND_RECV);

  /** Elements of a rank's inputs; the largest part is an eighth. */
  static final int INPUTS = 8 * 450;

  /** What the inputs of any type take, at any of the places where they begin. */
  static final int SEND_BYTES = (INPUTS + 8) * Long.BYTES;

  /** What the results of all calls of a type and operation take at most on 8 ranks. */
  static final int RESULT_BYTES = 4 << 20;

  private static final byte UNTOUCHED = (byte) 0xa5;

  private final DataType type;
  private final int ranks;
  private final Inputs inputs;
  private final List<DeviceCase> all;
  private byte @Nullable [] first;

  DeviceCases(DataType type, int ranks, Inputs inputs, List<DeviceCase> all) {
    this.type = type;
    this.ranks = ranks;
    this.inputs = inputs;
    this.all = all;
  }

  static List<DataType> types() {
    return Arrays.stream(DataType.values()).filter(type -> !Elements.isFloat8(type)).toList();
  }

  /** All calls for an operation; those that do not reduce only with sums. */
  static DeviceCases make(
      DataType type, ReduceOp op, int ranks, boolean onWindows, boolean withLl128) {
    long ofType = type.ordinal() * (onWindows ? 37L : 31L);
    Random random = new Random(SEED + ofType + op.ncclValue() + ranks * 1000L);
    Inputs inputs = new Inputs(type, op, ranks, INPUTS, SEED + random.nextInt(1000));
    return new DeviceCases(type, ranks, inputs, casesFor(op, ranks, onWindows, withLl128, random));
  }

  /** The same calls on other data. */
  DeviceCases with(Inputs others) {
    return new DeviceCases(type, ranks, others, all);
  }

  private static List<DeviceCase> casesFor(
      ReduceOp op, int ranks, boolean onWindows, boolean withLl128, Random random) {
    List<DeviceCase> cases = new ArrayList<>();
    for (DeviceFunction function : FUNCTIONS) {
      if (function == DeviceFunction.SEND_RECV && ranks == 1
          || !DeviceCase.reduces(function) && op != ReduceOp.SUM
          || DeviceCase.algorithms(function, onWindows).isEmpty()) {
        continue;
      }
      for (LaunchChoice choice : DeviceCase.choices(function, onWindows, withLl128)) {
        for (boolean inPlace : new boolean[] {false, true}) {
          if (inPlace && !DeviceCase.hasInPlaceForm(function)) {
            continue;
          }
          for (int root : rootsFor(function, ranks, random)) {
            int count = randomCount(random);
            int sendCount = count * DeviceCase.sendParts(function, ranks);
            int sendAt = random.nextInt(INPUTS - sendCount + 1);
            LaunchChoice some = choice.withBlocks(random.nextInt(3));
            cases.add(
                new DeviceCase(function, some, op, root, inPlace, onWindows, count, sendAt, 0));
          }
        }
      }
    }
    Collections.shuffle(cases, random);
    // Each result in a place of its own, at any offset.
    long next = 0;
    for (int i = 0; i < cases.size(); i++) {
      DeviceCase c = cases.get(i);
      next += 1 + random.nextInt(16);
      cases.set(
          i,
          new DeviceCase(
              c.function(),
              c.choice(),
              c.op(),
              c.root(),
              c.inPlace(),
              onWindows,
              c.count(),
              c.sendAt(),
              next));
      next += c.regionCount(ranks);
    }
    return cases;
  }

  private static int[] rootsFor(DeviceFunction function, int ranks, Random random) {
    switch (function) {
      case HIERARCHICAL_ALL_REDUCE:
        return IntStream.rangeClosed(1, ranks).filter(g -> ranks % g == 0).toArray();
      case SEND_RECV:
        return new int[] {1 + random.nextInt(ranks - 1)};
      default:
        return new int[] {random.nextInt(ranks)};
    }
  }

  private static int randomCount(Random random) {
    switch (random.nextInt(6)) {
      case 0:
        return random.nextInt(2);
      case 1:
        return 2 + random.nextInt(8);
      case 2:
        return 16 * (1 + random.nextInt(20));
      default:
        return 1 + random.nextInt(INPUTS / 8);
    }
  }

  List<DeviceCase> all() {
    return all;
  }

  /** What a rank sends in the calls that are not in place. */
  byte[] inputs(int rank) {
    return inputs.bytes(rank);
  }

  /** A rank's memory before the calls: the inputs of those in place, and a pattern around. */
  byte[] image(int rank) {
    int bytes = type.bytes();
    DeviceCase last = all.get(all.size() - 1);
    byte[] image = new byte[Math.toIntExact(last.recvAt() + last.regionCount(ranks) + 16) * bytes];
    Arrays.fill(image, UNTOUCHED);
    for (DeviceCase c : all) {
      if (c.inPlace()) {
        int elements = c.count() * DeviceCase.sendParts(c.function(), ranks);
        int at = Math.toIntExact(c.inPlaceInputAt(rank)) * bytes;
        System.arraycopy(inputs.bytes(rank), c.sendAt() * bytes, image, at, elements * bytes);
      }
    }
    return image;
  }

  /**
   * What is wrong with a rank's memory after the calls. Ranks that ask the same object are compared
   * bit by bit too, where all have the same result.
   */
  List<String> check(int rank, byte[] before, byte[] after) {
    List<String> failures = new ArrayList<>();
    int bytes = type.bytes();
    ByteBuffer view = Elements.view(after);
    byte[] around = after.clone();
    byte[] others = firstOf(after);
    for (DeviceCase c : all) {
      String what = c + " of " + type + ", rank " + rank + " of " + ranks + ": ";
      if (c.receives(rank)) {
        @Nullable String wrong =
            c.mismatch(inputs, rank, ranks, view, Math.toIntExact(c.resultAt(rank)));
        if (wrong != null) {
          failures.add(what + wrong);
        }
      }
      int from = Math.toIntExact(c.recvAt()) * bytes;
      // What is left of an input in place is nobody's business.
      if (c.inPlace() || c.receives(rank)) {
        int to = from + Math.toIntExact(c.regionCount(ranks)) * bytes;
        System.arraycopy(before, from, around, from, to - from);
      }
      int to = from + c.count() * bytes;
      if (isAllReduce(c) && !Arrays.equals(others, from, to, after, from, to)) {
        failures.add(what + "is not bit-identical on all ranks");
      }
    }
    int other = Arrays.mismatch(before, around);
    if (other >= 0) {
      failures.add(
          type
              + ", rank "
              + rank
              + ": byte "
              + other % bytes
              + " of element "
              + other / bytes
              + ", beside all results, was changed; the next result is of "
              + all.stream().filter(c -> c.recvAt() * bytes > other).findFirst());
    }
    return failures;
  }

  private synchronized byte[] firstOf(byte[] after) {
    byte[] known = first == null ? after.clone() : first;
    first = known;
    return known;
  }

  private static boolean isAllReduce(DeviceCase c) {
    return c.function() == DeviceFunction.ALL_REDUCE
        || c.function() == DeviceFunction.HIERARCHICAL_ALL_REDUCE;
  }

  /** Adds all results that are the same on all ranks. */
  void addTo(CRC32 sum, byte[] after) {
    for (DeviceCase c : all) {
      if (isAllReduce(c)) {
        sum.update(after, Math.toIntExact(c.recvAt()) * type.bytes(), c.count() * type.bytes());
      }
    }
  }
}

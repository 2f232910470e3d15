package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Every device collective with every element type, operation, protocol and algorithm, in place and
 * out of place, in buffers and in windows, at odd offsets and counts, against a reference in exact
 * or double arithmetic.
 *
 * <p>All calls of a type and operation are enqueued one behind the other, each with a result of its
 * own, and looked at afterwards; so are the bytes around the results, which must stay as they were.
 * On a GPU, or with {@code -Dncclffm.test.full=true}, also with counts up to 2^24 + 5.
 */
@ParameterizedClass(name = "{0} ranks")
@MethodSource("sizes")
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class DeviceCollectivesTest {
  private static final boolean FULL = !TestRanks.onCpu() || Boolean.getBoolean("ncclffm.test.full");

  private static final int[] LARGE_COUNTS = {4099, (1 << 20) + 3, (1 << 24) + 5};

  @Parameter int ranks;

  private final Queue<String> failures = new ConcurrentLinkedQueue<>();
  private LocalWorld world;
  private DeviceCommunicator[] comms;

  static IntStream sizes() {
    return IntStream.rangeClosed(1, TestRanks.MOST);
  }

  @BeforeParameterizedClassInvocation
  void openWorld() {
    TestRanks.assumeShim();
    world = TestRanks.open(ranks);
    comms = new DeviceCommunicator[ranks];
    world.run(
        r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator(), DeviceCases.CONFIG));
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    if (world != null) {
      world.close();
    }
  }

  private static MemorySegment segment(byte[] bytes) {
    return MemorySegment.ofArray(bytes);
  }

  private void assertNoFailures() {
    List<String> all = List.copyOf(failures);
    failures.clear();
    assertEquals(List.of(), all.subList(0, Math.min(5, all.size())), "seed " + DeviceCases.SEED);
  }

  @Test
  void everyCallInBuffersMatchesTheReference() {
    boolean withLl128 = DeviceCase.carriesLl128(comms[0]);
    for (DataType type : DeviceCases.types()) {
      for (ReduceOp op : DeviceCases.OPS) {
        runInBuffers(DeviceCases.make(type, op, ranks, false, withLl128), type);
        assertNoFailures();
      }
    }
  }

  private void runInBuffers(DeviceCases cases, DataType type) {
    byte[][] images = new byte[ranks][];
    for (int r = 0; r < ranks; r++) {
      images[r] = cases.image(r);
    }
    long elements = images[0].length / type.bytes();
    long sendElements = cases.inputs(0).length / type.bytes() + 8L;
    try (RankBuffers send = RankBuffers.allocate(world, type, sendElements);
        RankBuffers recv = RankBuffers.allocate(world, type, elements)) {
      world.run(
          rank -> {
            int r = rank.rank();
            int inputsAt = r * 3 % 8; // each rank's data is aligned differently
            send.of(r).copyFrom(segment(cases.inputs(r)), inputsAt, rank.stream());
            recv.of(r).copyFrom(segment(images[r]), rank.stream());
            for (DeviceCase c : cases.all()) {
              c.enqueue(comms[r], send.of(r), inputsAt, recv.of(r), rank.stream());
            }
            byte[] after = new byte[images[r].length];
            recv.of(r).copyTo(segment(after), rank.stream());
            rank.stream().synchronize();
            failures.addAll(cases.check(r, images[r], after));
            byte[] sent = new byte[cases.inputs(r).length];
            send.of(r).copyTo(segment(sent), inputsAt, rank.stream());
            if (!Arrays.equals(sent, cases.inputs(r))) {
              failures.add(type + ", rank " + r + ": a send buffer was changed");
            }
          });
    }
  }

  @Test
  void everyCallOfAGraphMatchesTheReferenceWithTheDataOfEachLaunch() {
    DataType type = DataType.FLOAT32;
    DeviceCases cases =
        DeviceCases.make(type, ReduceOp.SUM, ranks, false, DeviceCase.carriesLl128(comms[0]));
    long elements = cases.image(0).length / type.bytes();
    try (RankBuffers send = RankBuffers.allocate(world, type, DeviceCases.INPUTS + 8L);
        RankBuffers recv = RankBuffers.allocate(world, type, elements)) {
      CudaGraph[] graphs = new CudaGraph[ranks];
      world.run(
          rank -> {
            int r = rank.rank();
            graphs[r] =
                CudaGraph.capture(
                    rank.stream(),
                    () ->
                        cases
                            .all()
                            .forEach(
                                c ->
                                    c.enqueue(comms[r], send.of(r), r, recv.of(r), rank.stream())));
          });
      for (int launch = 0; launch < 3; launch++) {
        DeviceCases now =
            cases.with(
                new Inputs(
                    type, ReduceOp.SUM, ranks, DeviceCases.INPUTS, DeviceCases.SEED + launch));
        byte[][] images = new byte[ranks][];
        world.run(
            rank -> {
              int r = rank.rank();
              images[r] = now.image(r);
              send.of(r).copyFrom(segment(now.inputs(r)), r, rank.stream());
              recv.of(r).copyFrom(segment(images[r]), rank.stream());
            });
        world.run(
            rank -> {
              int r = rank.rank();
              graphs[r].launch(rank.stream());
              byte[] after = new byte[images[r].length];
              recv.of(r).copyTo(segment(after), rank.stream());
              rank.stream().synchronize();
              failures.addAll(now.check(r, images[r], after));
            });
        assertNoFailures();
      }
      world.run(rank -> graphs[rank.rank()].close());
    }
  }

  @Test
  void everyCallInWindowsMatchesTheReference() {
    boolean withLl128 = DeviceCase.carriesLl128(comms[0]);
    LsaWindow[] send = new LsaWindow[ranks];
    LsaWindow[] recv = new LsaWindow[ranks];
    world.run(
        rank -> {
          send[rank.rank()] = LsaWindow.create(rank.communicator(), DeviceCases.SEND_BYTES);
          recv[rank.rank()] = LsaWindow.create(rank.communicator(), DeviceCases.RESULT_BYTES);
        });
    for (DataType type : DeviceCases.types()) {
      for (ReduceOp op : DeviceCases.OPS) {
        DeviceCases cases = DeviceCases.make(type, op, ranks, true, withLl128);
        world.run(
            rank -> {
              int r = rank.rank();
              byte[] image = cases.image(r);
              DeviceBuffer to = recv[r].local();
              send[r].local().copyFrom(segment(cases.inputs(r)), rank.stream());
              to.copyFrom(segment(image), rank.stream());
              comms[r].barrier(rank.stream()); // peers store where the image went
              for (DeviceCase c : cases.all()) {
                c.enqueue(comms[r], type, send[r], recv[r], rank.stream());
              }
              byte[] after = new byte[image.length];
              to.copyTo(segment(after), rank.stream());
              rank.stream().synchronize();
              failures.addAll(cases.check(r, image, after));
              comms[r].barrier(rank.stream());
            });
        assertNoFailures();
      }
    }
    world.run(
        rank -> {
          recv[rank.rank()].close();
          send[rank.rank()].close();
        });
  }

  /** NaN, infinities, the signed zeros, the largest and the smallest numbers. */
  @ParameterizedTest
  @EnumSource(
      value = DataType.class,
      names = {"FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"})
  void specialValuesGoThroughAsInArithmetic(DataType type) {
    double[] specials = specialsOf(type);
    int count = specials.length * (ranks + 1);
    boolean withLl128 = DeviceCase.carriesLl128(comms[0]);
    try (RankBuffers x = RankBuffers.allocate(world, type, count);
        RankBuffers y = RankBuffers.allocate(world, type, count)) {
      for (ReduceOp op : DeviceCases.OPS) {
        for (LaunchChoice choice :
            DeviceCase.choices(DeviceFunction.ALL_REDUCE, false, withLl128)) {
          world.run(
              rank -> {
                int r = rank.rank();
                byte[] data = new byte[count * type.bytes()];
                for (int i = 0; i < count; i++) {
                  double value = special(specials, i, r);
                  if (Double.isNaN(value)) {
                    putNan(Elements.view(data), type, i);
                  } else {
                    Elements.putFloat(Elements.view(data), type, i, value);
                  }
                }
                x.of(r).copyFrom(segment(data), rank.stream());
                comms[r].allReduce(x.of(r), 0, y.of(r), 0, count, op, rank.stream(), choice);
                y.of(r).copyTo(segment(data), rank.stream());
                compareSpecials(specials, type, op, choice, data, r);
              });
        }
      }
    }
    assertNoFailures();
  }

  private static double[] specialsOf(DataType type) {
    int bits = Elements.significantBits(type);
    int exponent = type == DataType.FLOAT64 ? 1023 : type == DataType.FLOAT16 ? 15 : 127;
    double max = (2 - Math.scalb(1.0, 1 - bits)) * Math.scalb(1.0, exponent);
    double least = Math.scalb(1.0, 2 - exponent - bits); // the smallest subnormal
    return new double[] {
      Double.NaN,
      Double.POSITIVE_INFINITY,
      Double.NEGATIVE_INFINITY,
      -0.0,
      0.0,
      max,
      -max,
      least,
      -least,
      1.0
    };
  }

  /** Element i: a special value on one rank and 1 on the others, or on all of them. */
  private double special(double[] specials, int i, int rank) {
    double value = specials[i % specials.length];
    int owner = i / specials.length;
    return owner == ranks || owner == rank ? value : 1;
  }

  private static void putNan(ByteBuffer bytes, DataType type, int index) {
    switch (type) {
      case FLOAT64 -> bytes.putDouble(index * 8, Double.NaN);
      case FLOAT32 -> bytes.putFloat(index * 4, Float.NaN);
      case FLOAT16 -> bytes.putShort(index * 2, (short) 0x7e00);
      default -> bytes.putShort(index * 2, (short) 0x7fc0);
    }
  }

  private void compareSpecials(
      double[] specials, DataType type, ReduceOp op, LaunchChoice choice, byte[] data, int rank) {
    for (int i = 0; i < specials.length * (ranks + 1); i++) {
      double special = specials[i % specials.length];
      boolean onAll = i / specials.length == ranks;
      int n = ranks;
      double expected;
      if (op == ReduceOp.MIN || op == ReduceOp.MAX) {
        // A number is preferred to a NaN.
        expected = special;
        if (!onAll && n > 1) {
          expected =
              Double.isNaN(special)
                  ? 1
                  : op == ReduceOp.MIN ? Math.min(special, 1) : Math.max(special, 1);
        }
      } else if (op == ReduceOp.PROD) {
        expected = onAll ? power(special, n) : special;
      } else {
        expected = onAll || n == 1 ? special * n : special + (n - 1);
        expected /= op == ReduceOp.AVG ? n : 1;
      }
      double actual = Elements.getFloat(Elements.view(data), type, i);
      double max = specials[5];
      boolean right;
      if (Double.isNaN(expected)) {
        right = Double.isNaN(actual);
      } else if (n > 1 && Math.abs(expected) >= max && Math.abs(expected) < max * 1.01) {
        // Rounded to the largest, or beyond where a ring rounds on the way.
        right = Math.abs(actual) >= max && Math.signum(actual) == Math.signum(expected);
      } else if (Math.abs(expected) > max) {
        right = actual == (expected > 0 ? Double.POSITIVE_INFINITY : Double.NEGATIVE_INFINITY);
      } else {
        double allowed =
            Math.abs(expected) * 2 * n * Math.scalb(1.0, -Elements.significantBits(type));
        allowed += Math.abs(specials[7]) / 2 * n;
        right = Math.abs(actual - expected) <= allowed;
        boolean signCounts = op == ReduceOp.SUM || op == ReduceOp.PROD;
        if (signCounts && expected == 0 && special == 0) {
          right &= Double.doubleToRawLongBits(actual) == Double.doubleToRawLongBits(expected);
        }
      }
      if (!right) {
        failures.add(
            type
                + " "
                + op
                + " "
                + choice
                + ", rank "
                + rank
                + ", element "
                + i
                + " ("
                + special
                + (onAll ? " on all" : "")
                + "): expected "
                + expected
                + ", got "
                + actual);
        return;
      }
    }
  }

  private static double power(double x, int n) {
    double result = x;
    for (int i = 1; i < n; i++) {
      result *= x;
    }
    return result;
  }

  @Test
  void largeCallsMatchTheReference() {
    assumeTrue(FULL, "minutes on two cores: on a GPU, or with -Dncclffm.test.full=true");
    assumeTrue(Integer.bitCount(ranks) == 1, "at 1, 2, 4 and 8 ranks");
    DeviceCommunicator[] small = comms.clone();
    world.run(r -> comms[r.rank()] = DeviceCommunicator.create(r.communicator()));
    try {
      for (int count : LARGE_COUNTS) {
        Inputs inputs =
            new Inputs(DataType.FLOAT32, ReduceOp.SUM, ranks, count + 1, DeviceCases.SEED + count);
        for (DeviceFunction function : DeviceCases.FUNCTIONS) {
          boolean isLarge = count == LARGE_COUNTS[2];
          if (function == DeviceFunction.SEND_RECV && ranks == 1) {
            continue;
          }
          for (LaunchChoice choice :
              DeviceCase.choices(function, false, DeviceCase.carriesLl128(comms[0]))) {
            if (isLarge && choice != LaunchChoice.AUTO && choice.protocol() != LsaProtocol.SIMPLE) {
              continue;
            }
            int parts =
                Math.max(
                    DeviceCase.sendParts(function, ranks), DeviceCase.recvParts(function, ranks));
            int each = count / parts;
            int root =
                function == DeviceFunction.HIERARCHICAL_ALL_REDUCE
                    ? Math.max(1, ranks / 2)
                    : ranks > 1 ? 1 : 0;
            DeviceCase only =
                new DeviceCase(function, choice, ReduceOp.SUM, root, false, false, each, 1, 3);
            runInBuffers(
                new DeviceCases(DataType.FLOAT32, ranks, inputs, List.of(only)), DataType.FLOAT32);
            assertNoFailures();
          }
        }
      }
    } finally {
      DeviceCommunicator[] large = comms;
      comms = small;
      world.run(r -> large[r.rank()].close());
    }
  }

  /** What a rank stored before a barrier, all read after it. */
  @Test
  void barrierPutsAllRanksStreamsInOrder() {
    LsaWindow[] windows = new LsaWindow[ranks];
    world.run(rank -> windows[rank.rank()] = LsaWindow.create(rank.communicator(), 4096));
    world.run(
        rank -> {
          int r = rank.rank();
          DeviceBuffer mine = windows[r].local();
          for (int round = 1; round <= 20; round++) {
            mine.fill((byte) (round * 8 + r), rank.stream());
            comms[r].barrier(rank.stream());
            byte[] found = new byte[1];
            for (int p = 0; p < ranks; p++) {
              long base = windows[r].address(p, 1000, 1);
              DeviceBuffer.wrap(rank.device(), DataType.UINT8, 1, MemorySegment.ofAddress(base))
                  .copyTo(segment(found), rank.stream());
              if (found[0] != (byte) (round * 8 + p)) {
                failures.add("round " + round + ": rank " + r + " saw " + found[0] + " of " + p);
              }
            }
            comms[r].barrier(rank.stream());
          }
        });
    world.run(rank -> windows[rank.rank()].close());
    assertNoFailures();
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.AdamW;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.OptimizerState;
import io.ncclffm.device.Sgd;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Kernels that compute, all-reduce and go on: bit for bit what the steps give one after the other,
 * by every protocol and algorithm, and close to float64.
 */
@ParameterizedClass(name = "{0} ranks")
@ValueSource(ints = {1, 2, 3, 8})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class FusedKernelsTest {
  private static final long SEED = 0x5eed_2027L;
  private static final Duration PATIENCE = Duration.ofSeconds(60);
  private static final float EPS = 1e-5f;

  private static final List<LaunchChoice> CHOICES = choices();

  @Parameter int ranks;

  private LocalWorld world;
  private DeviceCommunicator[] comms;

  private static List<LaunchChoice> choices() {
    List<LaunchChoice> all = new ArrayList<>(List.of(LaunchChoice.AUTO));
    for (LsaProtocol protocol : new LsaProtocol[] {LsaProtocol.LL, LsaProtocol.SIMPLE}) {
      for (DeviceAlgorithm algorithm :
          new DeviceAlgorithm[] {DeviceAlgorithm.ONE_SHOT, DeviceAlgorithm.TWO_SHOT}) {
        all.add(LaunchChoice.AUTO.with(protocol).with(algorithm));
      }
    }
    return all;
  }

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
      world.close();
    }
  }

  /** Rounded to the nearest value of a type, as the kernels round. */
  private static float round(DataType type, float x) {
    switch (type) {
      case FLOAT16:
        return Float.float16ToFloat(Float.floatToFloat16(x));
      case BFLOAT16:
        int bits = Float.floatToRawIntBits(x);
        return Float.intBitsToFloat((bits + 0x7fff + (bits >>> 16 & 1)) & 0xffff0000);
      default:
        return x;
    }
  }

  private static float sqrt(float x) {
    return (float) Math.sqrt(x);
  }

  /** In (-1, 1), values of the type. */
  private static float[] inputs(DataType type, int who, int count) {
    float[] values = new float[count];
    for (int i = 0; i < count; i++) {
      long h = Inputs.mix(SEED + who * 0x632BE59BD9B4E019L + i * 0x9E3779B97F4A7C15L);
      values[i] = round(type, (float) (h >> 40) / (1 << 23));
    }
    return values;
  }

  private static MemorySegment bytes(DataType type, float[] values) {
    byte[] array = new byte[values.length * type.bytes()];
    ByteBuffer view = Elements.view(array);
    for (int i = 0; i < values.length; i++) {
      Elements.putFloat(view, type, i, values[i]);
    }
    return MemorySegment.ofArray(array);
  }

  private static void put(DeviceBuffer buffer, long offset, float[] values, CudaStream stream) {
    buffer.copyFrom(bytes(buffer.type(), values), offset, stream);
  }

  private static float[] get(DeviceBuffer buffer, long offset, int count, CudaStream stream) {
    byte[] array = new byte[count * buffer.type().bytes()];
    buffer.copyTo(MemorySegment.ofArray(array), offset, stream);
    float[] values = new float[count];
    for (int i = 0; i < count; i++) {
      values[i] = (float) Elements.getFloat(Elements.view(array), buffer.type(), i);
    }
    return values;
  }

  /** The sum in rank order, or the average, rounded: the middle step. */
  private float[] reduced(DataType type, float[][] sent, boolean average) {
    float[] result = sent[0].clone();
    for (int i = 0; i < result.length; i++) {
      for (int r = 1; r < ranks; r++) {
        result[i] += sent[r][i];
      }
      result[i] = round(type, average ? result[i] / ranks : result[i]);
    }
    return result;
  }

  private float[] scaled(DataType type, int count, float a, float b) {
    float[][] sent = new float[ranks][];
    for (int r = 0; r < ranks; r++) {
      sent[r] = inputs(type, r, count);
      for (int i = 0; i < count; i++) {
        sent[r][i] = round(type, Math.fma(a, sent[r][i], b));
      }
    }
    float[] result = reduced(type, sent, false);
    for (int i = 0; i < count; i++) {
      result[i] = round(type, sqrt(Math.abs(result[i])));
    }
    return result;
  }

  private static double ulp(DataType type) {
    return Math.scalb(1.0, -Elements.significantBits(type));
  }

  @ParameterizedTest(name = "{0}")
  @EnumSource(names = {"FLOAT32", "FLOAT16", "BFLOAT16"})
  void scaleAllReduceSqrt(DataType type) {
    float a = 1.5f;
    float b = -0.25f;
    int largest = 40_001;
    try (RankBuffers x = RankBuffers.allocate(world, type, largest + 8);
        RankBuffers y = RankBuffers.allocate(world, type, largest + 8)) {
      for (int count : new int[] {1, 7, 4097, largest}) {
        float[] expected = scaled(type, count, a, b);
        assertCloseToFloat64(type, expected, a, b);
        for (LaunchChoice choice : CHOICES) {
          int offset = choice.protocol() == null ? 3 : 0;
          world.run(
              rank -> {
                int r = rank.rank();
                CudaStream stream = rank.stream();
                put(x.of(r), offset, inputs(type, r, count), stream);
                FusedKernels.scaleAllReduceSqrt(
                    comms[r], x.of(r), offset, y.of(r), 1, count, a, b, stream, choice);
                assertArrayEquals(expected, get(y.of(r), 1, count, stream), "out of place");
                FusedKernels.scaleAllReduceSqrt(
                    comms[r], x.of(r), offset, x.of(r), offset, count, a, b, stream, choice);
                assertArrayEquals(expected, get(x.of(r), offset, count, stream), "in place");
              });
        }
      }
    }
  }

  private void assertCloseToFloat64(DataType type, float[] result, float a, float b) {
    for (int i = 0; i < result.length; i++) {
      double sum = 0;
      double magnitude = 0;
      for (int r = 0; r < ranks; r++) {
        double x = a * (double) input(type, r, i) + b;
        sum += x;
        magnitude += Math.abs(x);
      }
      double square = (double) result[i] * result[i];
      double allowed = ulp(type) * (magnitude * (ranks + 2) + 4 * square) + Float.MIN_NORMAL;
      assertTrue(Math.abs(square - Math.abs(sum)) <= allowed, "element " + i + ": " + sum);
    }
  }

  private static float input(DataType type, int who, int i) {
    long h = Inputs.mix(SEED + who * 0x632BE59BD9B4E019L + i * 0x9E3779B97F4A7C15L);
    return round(type, (float) (h >> 40) / (1 << 23));
  }

  @ParameterizedTest(name = "{0}")
  @EnumSource(names = {"FLOAT32", "FLOAT16", "BFLOAT16"})
  void allReduceRmsNorm(DataType type) {
    int[][] shapes = {{1, 1}, {3, 13}, {1, 4096}, {5, 250}, {19, 512}};
    for (int[] shape : shapes) {
      int tokens = shape[0];
      int hidden = shape[1];
      int count = tokens * hidden;
      float[][] sent = new float[ranks][];
      for (int r = 0; r < ranks; r++) {
        sent[r] = inputs(type, r, count);
      }
      float[] sum = reduced(type, sent, false);
      float[] before = inputs(type, 100, count);
      float[] weight = inputs(type, 101, hidden);
      float[] expected = new float[count];
      for (int i = 0; i < count; i++) {
        expected[i] = round(type, before[i] + sum[i]);
      }
      // A buffer may hold more tokens.
      try (RankBuffers x = RankBuffers.allocate(world, type, count + hidden);
          RankBuffers residual = RankBuffers.allocate(world, type, count + hidden);
          RankBuffers weights = RankBuffers.allocate(world, type, hidden);
          RankBuffers apart = RankBuffers.allocate(world, type, count + hidden)) {
        for (LaunchChoice choice : CHOICES) {
          boolean inPlace = choice.protocol() == LsaProtocol.LL;
          float[][] results = new float[ranks][];
          world.run(
              rank -> {
                int r = rank.rank();
                CudaStream stream = rank.stream();
                DeviceBuffer out = inPlace ? x.of(r) : apart.of(r);
                put(x.of(r), 0, sent[r], stream);
                put(residual.of(r), 0, before, stream);
                put(weights.of(r), 0, weight, stream);
                FusedKernels.allReduceRmsNorm(
                    comms[r],
                    x.of(r),
                    residual.of(r),
                    weights.of(r),
                    out,
                    tokens,
                    EPS,
                    stream,
                    choice);
                results[r] = get(out, 0, count, stream);
                assertArrayEquals(expected, get(residual.of(r), 0, count, stream), "residual");
              });
          for (float[] result : results) {
            assertArrayEquals(results[0], result, "ranks differ");
          }
          assertNormed(type, results[0], expected, weight, tokens, hidden);
        }
      }
    }
  }

  private static void assertNormed(
      DataType type, float[] result, float[] residual, float[] weight, int tokens, int hidden) {
    for (int t = 0; t < tokens; t++) {
      double squares = 0;
      for (int k = 0; k < hidden; k++) {
        squares += (double) residual[t * hidden + k] * residual[t * hidden + k];
      }
      double scale = 1 / Math.sqrt(squares / hidden + EPS);
      for (int k = 0; k < hidden; k++) {
        double exact = residual[t * hidden + k] * scale * weight[k];
        double allowed = Math.abs(exact) * (ulp(type) + 1e-5) + 1e-7;
        assertEquals(exact, result[t * hidden + k], allowed, "token " + t + ", element " + k);
      }
    }
  }

  /** A model of one rank, on the device and, by the steps one after the other, here. */
  private final class Model implements AutoCloseable {
    final DeviceBuffer gradients;
    final DeviceBuffer scratch;
    final DeviceBuffer weights;
    final DeviceBuffer momentum;
    final DeviceBuffer variance;
    final DeviceBuffer copy;
    final DeviceBuffer steps;
    final float[] w;
    final float[] m;
    final float[] v;

    Model(LocalWorld.Rank rank, DataType type, int count) {
      gradients = DeviceBuffer.allocate(rank.device(), type, count);
      scratch = DeviceBuffer.allocate(rank.device(), type, count);
      weights = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count);
      momentum = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count);
      variance = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count);
      copy = DeviceBuffer.allocate(rank.device(), DataType.BFLOAT16, count);
      steps = DeviceBuffer.allocate(rank.device(), DataType.UINT32, 1);
      w = inputs(DataType.FLOAT32, 77, count);
      m = new float[count];
      v = new float[count];
    }

    void start(CudaStream stream) {
      weights.copyFrom(w, stream);
      momentum.fill((byte) 0, stream);
      variance.fill((byte) 0, stream);
      steps.fill((byte) 0, stream);
    }

    OptimizerState state() {
      return OptimizerState.ofAdamW(weights, momentum, variance).withWeightCopy(copy);
    }

    /** What the documents say, from an averaged gradient. */
    void updateHere(float[] gradient, AdamW s, boolean isAdamW, int step) {
      double squares = 0;
      for (float g : gradient) {
        squares += (double) g * g;
      }
      float norm = sqrt((float) squares);
      float clip = s.maxNorm() == 0 ? 1 : Math.min(1, s.maxNorm() / (norm + 1e-6f));
      float rate = (float) (s.learningRate() / (1 - Math.pow(s.beta1(), step)));
      float root = 1 / sqrt((float) (1 - Math.pow(s.beta2(), step)));
      for (int i = 0; i < w.length; i++) {
        float g = gradient[i] * clip;
        w[i] = Math.fma(-(s.learningRate() * s.weightDecay()), w[i], w[i]);
        if (isAdamW) {
          m[i] = Math.fma(s.beta1(), m[i], (1 - s.beta1()) * g);
          v[i] = Math.fma(s.beta2(), v[i], (1 - s.beta2()) * g * g);
          w[i] = Math.fma(-rate, m[i] / Math.fma(sqrt(v[i]), root, s.eps()), w[i]);
        } else {
          m[i] = Math.fma(s.beta1(), m[i], g);
          w[i] = Math.fma(-s.learningRate(), m[i], w[i]);
        }
      }
    }

    @Override
    public void close() {
      for (DeviceBuffer buffer :
          List.of(gradients, scratch, weights, momentum, variance, copy, steps)) {
        buffer.close();
      }
    }
  }

  /** Each rank wants other weights, and sees them through noise. */
  private static float[] gradient(DataType type, float[] weights, int rank, int step) {
    float[] g = inputs(DataType.FLOAT32, 1000 + rank, weights.length);
    float[] noise = inputs(DataType.FLOAT32, 5000 + 10 * step + rank, weights.length);
    for (int i = 0; i < g.length; i++) {
      g[i] = round(type, weights[i] - g[i] + noise[i] / 64);
    }
    return g;
  }

  private void train(DataType type, AdamW settings, boolean isAdamW, int count, int steps) {
    Sgd sgd =
        new Sgd(
            settings.learningRate(), settings.beta1(), settings.weightDecay(), settings.maxNorm());
    Model[] models = new Model[ranks];
    float[][] ends = new float[ranks][];
    // Where ranks share a GPU, nothing is allocated while another rank's kernels run.
    world.run(rank -> models[rank.rank()] = new Model(rank, type, count));
    try {
      world.run(
          rank -> {
            int r = rank.rank();
            CudaStream stream = rank.stream();
            Model model = models[r];
            model.start(stream);
            float[] fused = model.w.clone();
            for (int step = 1; step <= steps; step++) {
              put(model.gradients, 0, gradient(type, fused, r, step), stream);
              put(model.scratch, 0, gradient(type, model.w, r, step), stream);
              if (isAdamW) {
                FusedKernels.adamW(
                    comms[r], model.gradients, model.state(), settings, step, stream);
              } else {
                FusedKernels.sgd(comms[r], model.gradients, model.state(), sgd, stream);
              }
              comms[r].allReduce(model.scratch, model.scratch, ReduceOp.AVG, stream);
              model.updateHere(get(model.scratch, 0, count, stream), settings, isAdamW, step);
              model.weights.copyTo(fused, stream);
              if (settings.maxNorm() == 0) {
                assertArrayEquals(model.w, fused, "step " + step);
              } else { // squares are added in another order
                assertArrayEquals(model.w, fused, 1e-4f, "step " + step);
              }
            }
            ends[r] = fused;
            float[] copy = get(model.copy, 0, count, stream);
            for (int i = 0; i < count; i++) {
              assertEquals(round(DataType.BFLOAT16, fused[i]), copy[i], "copy, element " + i);
            }
          });
      for (float[] end : ends) {
        assertArrayEquals(ends[0], end, "ranks differ");
      }
      if (steps >= 1000) {
        assertTrained(ends[0], count);
      }
    } finally {
      world.run(rank -> models[rank.rank()].close());
    }
  }

  private void assertTrained(float[] weights, int count) {
    float[] first = inputs(DataType.FLOAT32, 77, count);
    double missed = 0;
    double missedAtFirst = 0;
    for (int i = 0; i < count; i++) {
      double wanted = 0;
      for (int r = 0; r < ranks; r++) {
        wanted += (double) input(DataType.FLOAT32, 1000 + r, i) / ranks;
      }
      missed += Math.abs(weights[i] - wanted);
      missedAtFirst += Math.abs(first[i] - wanted);
    }
    assertTrue(
        missed < missedAtFirst / 4, missed + " from what is wanted, at first " + missedAtFirst);
  }

  private static final AdamW ADAMW = new AdamW(0.01f);
  private static final AdamW CLIPPED = new AdamW(0.01f, 0.9f, 0.99f, 1e-8f, 0.001f, 1.5f);

  @ParameterizedTest(name = "{0}")
  @EnumSource(names = {"FLOAT32", "FLOAT16", "BFLOAT16"})
  void updatesOfOddCounts(DataType type) {
    for (int count : new int[] {1, 7, 4097}) {
      for (boolean isAdamW : new boolean[] {true, false}) {
        train(type, ADAMW, isAdamW, count, 2);
        train(type, CLIPPED, isAdamW, count, 2);
      }
    }
  }

  /** A thousand, where the processors are enough for them not to take long. */
  private int steps() {
    return ranks == 2 ? 1000 : 50;
  }

  @Test
  void stepsOfAdamWAreThoseOfTheUnfusedSequence() {
    train(DataType.BFLOAT16, ranks == 3 ? CLIPPED : ADAMW, true, 51, steps());
  }

  @Test
  void stepsOfSgdAreThoseOfTheUnfusedSequence() {
    train(DataType.FLOAT32, ranks == 3 ? CLIPPED : ADAMW, false, 51, steps());
  }

  @Test
  void windowsGiveTheSame() {
    int count = 5003;
    DataType type = DataType.FLOAT32;
    float[] expected = scaled(type, count, 2, 1);
    Model[] models = new Model[ranks];
    LsaWindow[] windows = new LsaWindow[ranks];
    world.run(rank -> models[rank.rank()] = new Model(rank, type, count));
    try {
      world.run(
          rank -> windows[rank.rank()] = LsaWindow.create(rank.communicator(), 2 * 32 * 1024));
      world.run(
          rank -> {
            int r = rank.rank();
            CudaStream stream = rank.stream();
            LsaWindow window = windows[r];
            DeviceBuffer inWindow =
                DeviceBuffer.wrap(
                    rank.device(),
                    type,
                    2 * 8192,
                    MemorySegment.ofAddress(window.address(r, 0, 65536)));
            put(inWindow, 4, inputs(type, r, count), stream);
            FusedKernels.scaleAllReduceSqrt(
                comms[r], window, 16, window, 32768, type, count, 2, 1, stream, LaunchChoice.AUTO);
            assertArrayEquals(expected, get(inWindow, 8192, count, stream));

            Model model = models[r];
            model.start(stream);
            for (int step = 1; step <= 3; step++) {
              float[] g = gradient(type, model.w, r, step);
              put(inWindow, 4, g, stream);
              put(model.scratch, 0, g, stream);
              FusedKernels.adamW(comms[r], window, 16, type, model.state(), ADAMW, step, stream);
              comms[r].allReduce(model.scratch, model.scratch, ReduceOp.AVG, stream);
              model.updateHere(get(model.scratch, 0, count, stream), ADAMW, true, step);
              assertArrayEquals(model.w, get(model.weights, 0, count, stream), "step " + step);
            }
            put(inWindow, 4, gradient(type, model.w, r, 4), stream);
            put(model.scratch, 0, gradient(type, model.w, r, 4), stream);
            FusedKernels.sgd(
                comms[r], window, 16, type, model.state(), new Sgd(0.01f, 0.9f), stream);
            comms[r].allReduce(model.scratch, model.scratch, ReduceOp.AVG, stream);
            AdamW same = new AdamW(0.01f, 0.9f, 0, 0, 0, 0);
            model.updateHere(get(model.scratch, 0, count, stream), same, false, 1);
            assertArrayEquals(model.w, get(model.weights, 0, count, stream), "SGD");
          });
      world.run(rank -> windows[rank.rank()].close());
    } finally {
      world.run(rank -> models[rank.rank()].close());
    }
  }

  @Test
  void replayedGraphsGoOnWhereTheyWere() {
    int count = 600;
    int hidden = 150;
    int steps = 5;
    DataType type = DataType.FLOAT32;
    Model[] models = new Model[ranks];
    world.run(rank -> models[rank.rank()] = new Model(rank, type, count));
    CyclicBarrier captured = new CyclicBarrier(ranks);
    try (RankBuffers x = RankBuffers.allocate(world, type, count);
        RankBuffers residual = RankBuffers.allocate(world, type, count);
        RankBuffers weight = RankBuffers.allocate(world, type, hidden);
        RankBuffers out = RankBuffers.allocate(world, type, count)) {
      world.run(
          rank -> {
            int r = rank.rank();
            DeviceCommunicator comm = comms[r];
            CudaStream stream = rank.stream();
            Model model = models[r];
            model.start(stream);
            OptimizerState state = model.state().withSteps(model.steps);
            float[] g = inputs(type, r, count);
            float[] ofNorm = inputs(type, 200 + r, count);
            put(residual.of(r), 0, new float[count], stream);
            put(weight.of(r), 0, inputs(type, 300, hidden), stream);
            try (CudaStream own = CudaStream.create(rank.device());
                CudaGraph graph =
                    CudaGraph.capture(
                        own,
                        () -> {
                          FusedKernels.adamW(comm, model.gradients, state, CLIPPED, 0, own);
                          FusedKernels.scaleAllReduceSqrt(comm, model.scratch, 2, 1, own);
                          FusedKernels.allReduceRmsNorm(
                              comm,
                              x.of(r),
                              residual.of(r),
                              weight.of(r),
                              out.of(r),
                              count / hidden,
                              EPS,
                              own);
                        })) {
              await(captured);
              float[][] sent = new float[ranks][];
              float[] expectedResidual = new float[count];
              for (int step = 1; step <= steps; step++) {
                put(model.gradients, 0, g, stream);
                put(model.scratch, 0, g, stream);
                put(x.of(r), 0, ofNorm, stream);
                stream.synchronize(PATIENCE);
                graph.launch(own);
                own.synchronize(PATIENCE);
                for (int p = 0; p < ranks; p++) {
                  sent[p] = inputs(type, p, count);
                }
                model.updateHere(reduced(type, sent, true), CLIPPED, true, step);
                assertArrayEquals(
                    model.w, get(model.weights, 0, count, stream), 1e-5f, "step " + step);
                assertArrayEquals(
                    scaled(type, count, 2, 1), get(model.scratch, 0, count, stream), "scale");
                for (int p = 0; p < ranks; p++) {
                  sent[p] = inputs(type, 200 + p, count);
                }
                float[] sum = reduced(type, sent, false);
                for (int i = 0; i < count; i++) {
                  expectedResidual[i] += sum[i];
                }
                assertArrayEquals(expectedResidual, get(residual.of(r), 0, count, stream), "sum");
              }
              int[] counted = new int[1];
              model.steps.copyTo(counted, stream);
              assertEquals(steps, counted[0]);
            }
          });
    } finally {
      world.run(rank -> models[rank.rank()].close());
    }
  }

  private static void await(CyclicBarrier barrier) {
    try {
      barrier.await(60, TimeUnit.SECONDS);
    } catch (Exception e) {
      throw new IllegalStateException(e);
    }
  }

  private static void assertRefused(Runnable call, String... texts) {
    Messages.assertNames(assertThrows(RuntimeException.class, call::run), texts);
  }

  @Test
  void badInputIsRefusedAndLosesNothing() {
    try (RankBuffers floats = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers others = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers more = RankBuffers.allocate(world, DataType.FLOAT32, 8);
        RankBuffers weight = RankBuffers.allocate(world, DataType.FLOAT32, 4);
        RankBuffers halves = RankBuffers.allocate(world, DataType.BFLOAT16, 8);
        RankBuffers ints = RankBuffers.allocate(world, DataType.INT32, 8)) {
      world.run(
          rank -> {
            DeviceCommunicator c = comms[rank.rank()];
            CudaStream s = rank.stream();
            DeviceBuffer x = floats.of(rank);
            DeviceBuffer y = others.of(rank);
            DeviceBuffer z = more.of(rank);
            DeviceBuffer w = weight.of(rank);
            DeviceBuffer h = halves.of(rank);
            x.copyFrom(new float[] {1, 2, 3, 4, 5, 6, 7, 8}, s);
            LaunchChoice ring = LaunchChoice.AUTO.with(DeviceAlgorithm.RING);
            LaunchChoice ll128 = LaunchChoice.AUTO.with(LsaProtocol.LL128);

            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, null, 1, 1, s), "Sqrt", "x is null");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 1, 1, null), "Sqrt", "stream is null");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, ints.of(rank), 1, 1, s), "INT32");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 1, 8, 1, 1, s), "8 elements", "1");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 0, h, 0, 8, 1, 1, s, LaunchChoice.AUTO),
                "differ in type");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 0, x, 1, 7, 1, 1, s, LaunchChoice.AUTO),
                "overlap");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 0, x, 0, 8, 1, 1, s, ring),
                "algorithm 3");
            assertRefused(
                () -> FusedKernels.scaleAllReduceSqrt(c, x, 0, x, 0, 8, 1, 1, s, ll128),
                "protocol 2");
            DeviceBuffer odd =
                DeviceBuffer.wrap(
                    rank.device(),
                    DataType.FLOAT32,
                    4,
                    MemorySegment.ofAddress(x.address(0).address() + 2));
            assertRefused(() -> FusedKernels.scaleAllReduceSqrt(c, odd, 1, 1, s), "aligned");

            assertRefused(() -> norm(c, x, y, w, z, 2, -1, s), "RmsNorm", "eps -1");
            assertRefused(() -> norm(c, x, y, w, z, 2, Float.NaN, s), "eps");
            assertRefused(() -> norm(c, x, y, w, z, -1, EPS, s), "-1 tokens");
            assertRefused(() -> norm(c, x, y, w, z, 3, EPS, s), "12 elements");
            assertRefused(() -> norm(c, x, y, w, z, Long.MAX_VALUE / 2, EPS, s), "tokens");
            assertRefused(() -> norm(c, x, x, w, z, 2, EPS, s), "sendbuff", "recvbuff", "overlap");
            assertRefused(() -> norm(c, x, y, w, y, 2, EPS, s), "out", "overlap");
            assertRefused(() -> norm(c, x, y, null, z, 2, EPS, s), "weight is null");
            assertRefused(() -> norm(c, x, h, w, z, 2, EPS, s), "residual", "differ in type");

            assertRefused(() -> new AdamW(-1), "learningRate -1");
            assertRefused(() -> new AdamW(1, 1, 0.9f, 0, 0, 0), "beta1 1");
            assertRefused(() -> new AdamW(1, 0.9f, -0.1f, 0, 0, 0), "beta2 -0.1");
            assertRefused(() -> new AdamW(1, 0.9f, 0.9f, -1, 0, 0), "eps -1");
            assertRefused(() -> new AdamW(1, 0.9f, 0.9f, 0, 0, Float.NaN), "maxNorm NaN");
            assertRefused(() -> new Sgd(1, 1), "momentum 1");
            assertRefused(() -> OptimizerState.ofSgd(null, y), "weights is null", "FLOAT32");
            assertRefused(() -> OptimizerState.ofSgd(h, y), "weights", "FLOAT32");
            assertRefused(() -> OptimizerState.ofSgd(y, w), "momentum", "as long as");
            OptimizerState state = OptimizerState.ofSgd(y, z);
            Sgd sgd = new Sgd(0.1f, 0.9f);
            assertRefused(() -> FusedKernels.sgd(c, w, state, sgd, s), "as many as the weights");
            assertRefused(() -> FusedKernels.sgd(c, y, state, sgd, s), "weights", "overlap");
            assertRefused(() -> FusedKernels.adamW(c, x, state, ADAMW, 1, s), "no variance");
            OptimizerState same = OptimizerState.ofAdamW(y, z, z);
            assertRefused(() -> FusedKernels.adamW(c, x, same, ADAMW, 0, s), "step 0");
            assertRefused(() -> FusedKernels.adamW(c, x, same, ADAMW, -1, s), "step -1");
            assertRefused(
                () -> FusedKernels.adamW(c, x, same, ADAMW, 1, s), "momentum", "variance");

            // Nothing of that was launched: the channels are still in step.
            FusedKernels.scaleAllReduceSqrt(c, x, 0, 0, 1, 1, s); // nor was this: there is nothing
            assertArrayEquals(new float[] {1, 2, 3, 4, 5, 6, 7, 8}, get(x, 0, 8, s));
            FusedKernels.scaleAllReduceSqrt(c, x, 2, 0, s);
            assertEquals(sqrt(16 * ranks), get(x, 7, 1, s)[0]);
          });
    }
  }

  private static void norm(
      DeviceCommunicator comm,
      DeviceBuffer x,
      DeviceBuffer residual,
      DeviceBuffer weight,
      DeviceBuffer out,
      long tokens,
      float eps,
      CudaStream stream) {
    FusedKernels.allReduceRmsNorm(comm, x, residual, weight, out, tokens, eps, stream);
  }
}

package io.ncclffm.benchmarks;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.FusedKernels;
import java.time.Duration;
import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * The demo as one rank runs it: the same code in a thread and in a process. Ranks agree on every
 * step and on the verdict by collectives, and rank 0 prints.
 */
final class DemoTable {
  static final long LARGEST_BYTES = 64 << 20;

  private static final long[] SIZES = {
    512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20
  };
  private static final float A = 2;
  private static final float B = 1;

  /** Samples of which the median is printed. */
  private static final int SAMPLES = 5;

  private final Communicator communicator;
  private final CudaStream stream;
  private final int rank;
  private final int ranks;

  DemoTable(Communicator communicator, CudaStream stream) {
    this.communicator = communicator;
    this.stream = stream;
    this.rank = communicator.rank();
    this.ranks = communicator.size();
  }

  /** Runs all sizes; the same answer on every rank. */
  boolean run(long maxBytes) {
    boolean passed = true;
    try (Routes routes = new Routes()) {
      print(
          "%10s | %31s | %31s | %31s | %s%n", "", "ncclAllReduce", "LL kernel", "fused kernel", "");
      String unit = "      us     GB/s  largest error";
      print("%10s |%s |%s |%s |%n", "bytes", unit, unit, unit);
      for (long bytes : SIZES) {
        if (bytes <= maxBytes) {
          passed &= routes.row(bytes);
        }
      }
    }
    return passed;
  }

  private void print(String format, Object... arguments) {
    if (rank == 0) {
      System.out.printf(format, arguments);
      System.out.flush();
    }
  }

  /** A route's work: one all-reduce of the first {@code count} elements. */
  private interface Step {
    void enqueue(long count);
  }

  /** What a route computes from the sum of the ranks' inputs, in float64, and what may differ. */
  private interface Reference {
    /**
     * @param input rank r's element
     */
    double summand(double input);

    /** How far a result is from what the exact sum gives. */
    double error(float result, double sum);
  }

  private static final Reference SUM =
      new Reference() {
        @Override
        public double summand(double input) {
          return input;
        }

        @Override
        public double error(float result, double sum) {
          return Math.abs(result - sum);
        }
      };

  private static final Reference SCALED_ROOT =
      new Reference() {
        @Override
        public double summand(double input) {
          return A * input + B;
        }

        @Override
        public double error(float result, double sum) {
          // Compared before the root, whose slope at 0 has no bound.
          return Math.abs((double) result * result - Math.abs(sum));
        }
      };

  /** The three routes and their buffers. */
  private final class Routes implements AutoCloseable {
    private final long largest = LARGEST_BYTES / Float.BYTES;
    private final DeviceBuffer input =
        DeviceBuffer.allocate(communicator.device(), DataType.FLOAT32, largest);
    private final DeviceBuffer output =
        DeviceBuffer.allocate(communicator.device(), DataType.FLOAT32, largest);
    private final DeviceBuffer verdict =
        DeviceBuffer.allocate(communicator.device(), DataType.FLOAT64, 1);
    private final CudaEvent start = CudaEvent.create(communicator.device());
    private final CudaEvent stop = CudaEvent.create(communicator.device());
    private @Nullable DeviceCommunicator device;

    Routes() {
      try {
        device = DeviceCommunicator.create(communicator);
      } catch (UnsupportedByLibraryException | NativeLibraryException e) {
        print("no kernel columns: %s%n%n", e.getMessage());
      }
    }

    boolean row(long bytes) {
      long count = bytes / Float.BYTES;
      print("%10d |", bytes);
      boolean passed =
          column(
              count,
              SUM,
              n -> communicator.allReduce(input, 0, output, 0, n, ReduceOp.SUM, stream));
      @Nullable DeviceCommunicator comm = device;
      if (comm != null) {
        passed &=
            column(count, SUM, n -> comm.allReduce(input, 0, output, 0, n, ReduceOp.SUM, stream));
        passed &=
            column(
                count,
                SCALED_ROOT,
                n -> FusedKernels.scaleAllReduceSqrt(comm, output, 0, n, A, B, stream));
      } else {
        print(" %31s | %31s |", "-", "-");
      }
      print(" %s%n", passed ? "PASS" : "FAIL");
      return passed;
    }

    private boolean column(long count, Reference reference, Step step) {
      float[] values = new float[Math.toIntExact(count)];
      for (int i = 0; i < values.length; i++) {
        values[i] = DemoTable.value(rank, i);
      }
      input.copyFrom(values, stream);
      output.copyFrom(values, stream); // the in-place route starts from here
      step.enqueue(count);
      output.copyTo(values, stream);
      double error = 0;
      for (int i = 0; i < values.length; i++) {
        double sum = 0;
        for (int r = 0; r < ranks; r++) {
          sum += reference.summand(DemoTable.value(r, i));
        }
        double e = reference.error(values[i], sum);
        error = e <= error ? error : e; // a NaN stays
      }
      double worst = largestOfAllRanks(error);
      // Each of the ranks' roundings is at most half a unit in the last place of a sum <= 3*ranks,
      // and the root's rounding counts twice when squared.
      boolean passed = worst <= 8.0 * ranks * ranks * Math.ulp(1f);
      double micros = time(count, step);
      double gigabytes = count * Float.BYTES / micros / 1e3;
      print(" %10.1f %8.2f %10.1e%s |", micros, gigabytes, worst, passed ? " ok" : " !!");
      return passed;
    }

    /** Microseconds an operation, back to back; the median of some samples of rank 0's events. */
    private double time(long count, Step step) {
      long repeats = Math.max(2, Math.min(50, (4 << 20) / (count * Float.BYTES)));
      step.enqueue(count);
      stream.synchronize();
      double[] samples = new double[SAMPLES];
      for (int s = 0; s < SAMPLES; s++) {
        largestOfAllRanks(0); // all start together
        start.record(stream);
        for (long i = 0; i < repeats; i++) {
          step.enqueue(count);
        }
        stop.record(stream);
        stream.synchronize(Duration.ofMinutes(2));
        samples[s] = stop.millisSince(start) * 1e3 / repeats;
      }
      Arrays.sort(samples);
      return samples[SAMPLES / 2];
    }

    private double largestOfAllRanks(double mine) {
      double[] value = {Double.isNaN(mine) ? Double.MAX_VALUE : mine};
      verdict.copyFrom(value, stream);
      communicator.allReduce(verdict, verdict, ReduceOp.MAX, stream);
      verdict.copyTo(value, stream);
      return value[0];
    }

    @Override
    public void close() {
      if (device != null) {
        device.close();
      }
      start.close();
      stop.close();
      input.close();
      output.close();
      verdict.close();
    }
  }

  /** An input in [-1, 1), different for every rank and index, exact in float32. */
  private static float value(int rank, int index) {
    int h = index * 0x9E3779B1 ^ rank * 0x85EBCA77;
    h ^= h >>> 15;
    h *= 0x2C1B3C6D;
    h ^= h >>> 12;
    return (h >> 8) * 0x1p-23f;
  }
}

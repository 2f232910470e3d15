package io.ncclffm.benchmarks;

import static java.lang.foreign.ValueLayout.ADDRESS;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NativeLibraryException;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.Versions;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.device.KernelCompiler;
import io.ncclffm.device.KernelSource;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.IntSupplier;
import java.util.stream.Collectors;

/**
 * A process that measures: one fork of one group. Samples go to the standard output, one line for
 * each {@link Row}.
 */
public final class Measure {
  private static final Duration TIMEOUT = Duration.ofMinutes(8);

  /** Downcalls that have a C twin. */
  static final List<String> CALLS =
      List.of("ncclGetVersion", "ncclCommCount", "cudaGetDevice", "ncclGroupStart+End");

  private static final String ONE_WAY =
      """
      #include "ncclffm/device.h"
      using namespace ncclffm;
      extern "C" __global__ void step(DevComm comm, const float *in, float *out, uint64_t n) {
        const BlockShare share = shareOf(n, sizeof(float), blockIdx.x, gridDim.x);
        if (share.count == 0) return;
        ChannelSession<CoopBlock> session(CoopBlock(), comm, blockIdx.x, ncclFfmFunctionAllReduce);
        Call call = makeCall(ncclFfmFunctionAllReduce, in + share.first, out + share.first,
                             share.count, ncclFloat32, ncclSum, 0, 0);
        call.protocol = ncclFfmProtocolLL;
        call.algorithm = ncclFfmAlgorithmOneShot;
        fusedAllReduceLsa<float>(session, call, ScaleAdd{2, 1}, SqrtAbs());
      }
      """;
  private static final String EVERY_WAY =
      """
      #include "ncclffm/device.h"
      using namespace ncclffm;
      extern "C" __global__ void step(DevComm comm, const float *in, float *out, uint64_t n,
                                      int *results) {
        results[blockIdx.x] = fusedAllReduceKernel<float>(
            CoopBlock(), comm, blockIdx.x, gridDim.x, in, out, n, ncclSum, ScaleAdd{2, 1}, SqrtAbs());
      }
      """;

  private Measure() {}

  /**
   * {@code facts}, {@code calls QUICK CALL}, {@code world QUICK RANKS}, {@code start QUICK NS},
   * {@code compile}.
   */
  public static void main(String[] arguments) {
    long now = System.nanoTime();
    boolean quick = arguments.length > 1 && Boolean.parseBoolean(arguments[1]);
    switch (arguments[0]) {
      case "facts" -> facts();
      case "calls" -> calls(quick, arguments[2]);
      case "world" -> world(quick, Integer.parseInt(arguments[2]));
      case "compile" -> compile();
      case "start" -> start(now, Long.parseLong(arguments[2]));
      default -> throw new IllegalArgumentException("unknown group " + arguments[0]);
    }
  }

  /** What {@link Bench} has to know, and to write down. */
  private static void facts() {
    Versions versions = Nccl.versions();
    Map<String, Object> facts = new LinkedHashMap<>();
    facts.put("backend", backend());
    facts.put("device", new CudaDevice(0).name());
    facts.put("devices", CudaDevice.count());
    facts.put("libnccl", versions.nccl().file());
    facts.put("libcudart", versions.cudart().file());
    facts.put("versions", versions.toString().replaceAll("\\s+", " "));
    facts.forEach((name, value) -> System.out.println("fact\t" + name + "\t" + value));
  }

  static String backend() {
    return Nccl.versions().backend().name().toLowerCase(Locale.ROOT);
  }

  /** Prints the samples of one fork. */
  static void print(
      String route, String operation, int ranks, long bytes, String unit, double... samples) {
    print(backend(), "java", route, operation, ranks, bytes, unit, samples);
  }

  static void print(
      String backend,
      String language,
      String route,
      String operation,
      int ranks,
      long bytes,
      String unit,
      double... samples) {
    String values =
        Arrays.stream(samples)
            .mapToObj(sample -> String.format(Locale.ROOT, "%.4f", sample))
            .collect(Collectors.joining(" "));
    System.out.println(
        String.join(
            "\t",
            Row.MARK,
            backend,
            language,
            route,
            operation,
            Integer.toString(ranks),
            Long.toString(bytes),
            unit,
            values));
  }

  private static void world(boolean quick, int ranks) {
    try (LocalWorld world = LocalWorld.open(ranks)) {
      WorldBenchmark benchmark = new WorldBenchmark(ranks, quick);
      world.run(benchmark::run, TIMEOUT);
    }
  }

  /** A downcall that does next to nothing, with one rank; one a process, so that it is inlined. */
  private static void calls(boolean quick, String name) {
    try (LocalWorld world = LocalWorld.open(1)) {
      // Each call would count itself in and out of a shared arena, which takes longer than the
      // call.
      MemorySegment out = Arena.global().allocate(ADDRESS);
      Runnable nothing = () -> {};
      world.run(
          rank -> {
            MemorySegment comm = rank.communicator().handle();
            switch (name) {
              case "ncclGetVersion" -> call("host", name, quick, () -> NcclH.ncclGetVersion(out));
              case "ncclCommCount" ->
                  call("host", name, quick, () -> NcclH.ncclCommCount(comm, out));
              case "cudaGetDevice" -> call("host", name, quick, () -> CudartH.cudaGetDevice(out));
              case "ncclGroupStart+End" ->
                  call("host", name, quick, () -> NcclH.ncclGroupStart() | NcclH.ncclGroupEnd());
              case "api" ->
                  call(
                      "api",
                      "ncclGroupStart+End",
                      quick,
                      () -> {
                        NcclGroup.run(nothing);
                        return 0;
                      });
              default -> throw new IllegalArgumentException("unknown call " + name);
            }
          },
          TIMEOUT);
    }
  }

  private static void call(String route, String name, boolean quick, IntSupplier call) {
    print(route, name, 1, 0, "ns", nanos(name, quick, call));
  }

  /** What a call takes that gives 0; called once in a process, so that it is compiled for that. */
  static double[] nanos(String name, boolean quick, IntSupplier call) {
    int batch = quick ? 1_000 : 100_000;
    int warmUp = quick ? 20 : 30;
    double[] ns = new double[quick ? 5 : 30];
    for (int i = -warmUp; i < ns.length; i++) {
      long start = System.nanoTime();
      int results = 0;
      for (int k = 0; k < batch; k++) {
        results |= call.getAsInt();
      }
      long took = System.nanoTime() - start;
      if (results != 0) {
        throw new IllegalStateException(name + " failed");
      }
      if (i >= 0) {
        ns[i] = (double) took / batch;
      }
    }
    return ns;
  }

  /** NVRTC, for an H100 or H200, whether one is here or not; the cache has to be empty. */
  private static void compile() {
    try {
      KernelCompiler.architectures();
    } catch (NativeLibraryException e) {
      System.out.println("nothing is compiled: " + e.getMessage());
      return;
    }
    for (boolean every : new boolean[] {false, true}) {
      KernelSource source = KernelSource.of(every ? EVERY_WAY : ONE_WAY);
      String what = every ? "compile for every protocol" : "compile for one protocol";
      double[] ms = new double[6];
      for (int i = 0; i < ms.length; i++) {
        long start = System.nanoTime();
        KernelCompiler.compile(source, "sm_90");
        ms[i] = (System.nanoTime() - start) / 1e6;
      }
      print("nvrtc", what, 1, 0, "ms", ms[0]);
      print("nvrtc", what + ", from the cache", 1, 0, "ms", Arrays.copyOfRange(ms, 1, ms.length));
    }
  }

  /**
   * From the start of the virtual machine to the first all-reduce of one rank.
   *
   * @param started System.nanoTime() of the process that started this one, which on Linux counts
   *     from the same moment
   */
  private static void start(long main, long started) {
    String unit = "ms";
    Nccl.versions();
    long libraries = System.nanoTime();
    CudaDevice device = new CudaDevice(0);
    try (LocalWorld world = LocalWorld.open(1);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, 1)) {
      long communicator = System.nanoTime();
      world.run(
          rank -> {
            rank.communicator().allReduce(x, x, ReduceOp.SUM, rank.stream());
            rank.stream().synchronize();
          });
      long done = System.nanoTime();
      print("host", "start: virtual machine", 1, 0, unit, (main - started) / 1e6);
      print("host", "start: load libraries", 1, 0, unit, (libraries - main) / 1e6);
      print("host", "start: communicator", 1, 0, unit, (communicator - libraries) / 1e6);
      print("host", "start: first all-reduce", 1, 0, unit, (done - communicator) / 1e6);
      print("host", "start", 1, 0, unit, (done - started) / 1e6);
    }
  }
}

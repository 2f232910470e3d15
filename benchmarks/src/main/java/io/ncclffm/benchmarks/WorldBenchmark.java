package io.ncclffm.benchmarks;

import com.sun.management.ThreadMXBean;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclDeviceCommunicator;
import io.ncclffm.core.NcclDeviceRequirements;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.KernelLaunch;
import io.ncclffm.device.KernelModule;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.TaskOverlap;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.MemorySegment;
import java.lang.management.ManagementFactory;
import java.lang.module.ModuleDescriptor.Version;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.Locale;
import java.util.function.IntToDoubleFunction;
import java.util.function.LongUnaryOperator;

/**
 * What the ranks of one process measure together: a time is that of the slowest rank. Every
 * configuration's result is checked before it is timed. Inputs are small whole numbers, so that
 * sums are exact.
 */
final class WorldBenchmark {
  private static final Duration PATIENCE = Duration.ofMinutes(2);

  /** Elements of the input repeat after so many. */
  private static final int PERIOD = 7;

  /** Elements checked at each end of a result. */
  private static final int CHECKED = 64 << 10;

  private static final TaskSymbol SYMBOL = TaskSymbol.of("benchmark");
  private static final int TASKS = 64;
  private static final int OVERLAP_BLOCKS = 2;

  /** As many as the device route has; compiled with the headers of this version. */
  private static final int LSA_KERNEL_BLOCKS = 16;

  private static final Version LSA_KERNEL_NCCL = Version.parse("2.30.7");

  private final int ranks;
  private final boolean quick;
  private final long[] sizes;
  private final Meeting meeting;
  private final double[] latest;

  WorldBenchmark(int ranks, boolean quick) {
    this.ranks = ranks;
    this.quick = quick;
    this.sizes =
        quick
            ? new long[] {64, 4 << 10}
            : new long[] {8, 64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20};
    this.meeting = new Meeting(ranks);
    this.latest = new double[ranks];
  }

  /** Called on every rank's thread. */
  void run(LocalWorld.Rank rank) {
    boolean done = false;
    try {
      new OfRank(rank).run();
      done = true;
    } finally {
      if (!done) {
        meeting.callOff();
      }
    }
  }

  private interface Operation {
    void enqueue(long count);
  }

  /** How many elements of recv are written when the larger buffer has n, and what they are. */
  private record Expected(LongUnaryOperator written, IntToDoubleFunction value) {}

  private final class OfRank {
    private final LocalWorld.Rank rank;
    private final int r;
    private final Communicator comm;
    private final CudaStream stream;
    private final long maxCount = sizes[sizes.length - 1] / Float.BYTES;

    OfRank(LocalWorld.Rank rank) {
      this.rank = rank;
      this.r = rank.rank();
      this.comm = rank.communicator();
      this.stream = rank.stream();
    }

    void run() {
      boolean hasDevice = Nccl.versions().shim() != null;
      try (DeviceBuffer send =
              DeviceBuffer.allocateForWindow(rank.device(), DataType.FLOAT32, maxCount);
          DeviceBuffer recv =
              DeviceBuffer.allocateForWindow(rank.device(), DataType.FLOAT32, maxCount)) {
        fill(send);
        host("host", send, recv);
        allocated("host", () -> comm.allReduce(send, 0, recv, 0, 16, ReduceOp.SUM, stream));
        if (hasDevice && ranks > 1) {
          device(send, recv);
        }
        if (ranks > 1) {
          NcclWindow.Flag flag = NcclWindow.Flag.COLLECTIVE_SYMMETRIC;
          NcclWindow in = comm.registerWindow(send, flag);
          NcclWindow out = comm.registerWindow(recv, flag);
          try {
            allReduce(
                "host-symmetric",
                recv,
                n -> comm.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream));
            if (hasDevice) {
              lsaKernel(in, out, recv);
            }
            meeting.await(PATIENCE);
          } finally {
            out.close();
            in.close();
          }
        }
      }
    }

    // What is measured.

    private void host(String route, DeviceBuffer send, DeviceBuffer recv) {
      allReduce(route, recv, n -> comm.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream));
      if (ranks == 1) {
        return;
      }
      int next = (r + 1) % ranks;
      int previous = (r + ranks - 1) % ranks;
      functions(
          route,
          recv,
          new Operation[] {
            n -> comm.reduceScatter(send, 0, recv, 0, n / ranks, ReduceOp.SUM, stream),
            n -> comm.allGather(send, 0, recv, 0, n / ranks, stream),
            n -> comm.broadcast(send, 0, recv, 0, n, 0, stream),
            n -> comm.reduce(send, 0, recv, 0, n, ReduceOp.SUM, 0, stream),
            n -> comm.alltoAll(send, 0, recv, 0, n / ranks, stream),
            n ->
                NcclGroup.run(
                    () -> {
                      comm.send(send, 0, n, next, stream);
                      comm.recv(recv, 0, n, previous, stream);
                    })
          });
      single(
          route,
          "single allReduce",
          recv,
          n -> comm.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream),
          stream::synchronize);
    }

    private void device(DeviceBuffer send, DeviceBuffer recv) {
      try (DeviceCommunicator dev = DeviceCommunicator.create(comm, PATIENCE);
          LsaWindow in = LsaWindow.create(comm, maxCount * Float.BYTES);
          LsaWindow out = LsaWindow.create(comm, maxCount * Float.BYTES)) {
        allReduce("device", recv, n -> dev.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream));
        for (LsaProtocol protocol : LsaProtocol.values()) {
          for (DeviceAlgorithm algorithm : DeviceAlgorithm.values()) {
            LaunchChoice choice = LaunchChoice.AUTO.with(protocol).with(algorithm);
            allReduce(
                "device " + protocol + " " + algorithm,
                recv,
                n -> dev.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream, choice));
          }
        }
        int next = (r + 1) % ranks;
        int previous = (r + ranks - 1) % ranks;
        functions(
            "device",
            recv,
            new Operation[] {
              n -> dev.reduceScatter(send, 0, recv, 0, n / ranks, ReduceOp.SUM, stream),
              n -> dev.allGather(send, 0, recv, 0, n / ranks, stream),
              n -> dev.broadcast(send, 0, recv, 0, n, 0, stream),
              n -> dev.reduce(send, 0, recv, 0, n, ReduceOp.SUM, 0, stream),
              n -> dev.allToAll(send, 0, recv, 0, n / ranks, stream),
              n -> dev.sendRecv(send, 0, next, recv, 0, previous, n, stream)
            });
        single(
            "device",
            "single allReduce",
            recv,
            n -> dev.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream),
            stream::synchronize);
        allocated("device", () -> dev.allReduce(send, 0, recv, 0, 16, ReduceOp.SUM, stream));
        fill(floats(in));
        allReduce(
            "device window",
            floats(out),
            n -> dev.allReduce(in, 0, out, 0, DataType.FLOAT32, n, ReduceOp.SUM, stream));
        for (long bytes : sizes) {
          measure(
              "fused",
              "2x+1, allReduce, sqrt",
              bytes,
              recv,
              new Expected(n -> n, i -> (float) Math.sqrt(2 * sum(i) + ranks)),
              n ->
                  FusedKernels.scaleAllReduceSqrt(
                      dev, send, 0, recv, 0, n, 2, 1, stream, LaunchChoice.AUTO));
        }
        allocated(
            "fused",
            () ->
                FusedKernels.scaleAllReduceSqrt(
                    dev, send, 0, recv, 0, 16, 2, 1, stream, LaunchChoice.AUTO));
        tasks(dev, send, recv);
        dev.throwIfFailed();
        meeting.await(PATIENCE);
      }
      DeviceCommunicatorConfig config =
          DeviceCommunicatorConfig.builder().timeout(PATIENCE).hostSignal(true).build();
      try (DeviceCommunicator dev = DeviceCommunicator.create(comm, config)) {
        single(
            "device",
            "single allReduce, told by the kernel",
            recv,
            n -> dev.allReduce(send, 0, recv, 0, n, ReduceOp.SUM, stream),
            dev::awaitKernels);
        meeting.await(PATIENCE);
      }
    }

    /** A user's kernel against NCCL's own device API, in the style of NCCL's example. */
    private void lsaKernel(NcclWindow in, NcclWindow out, DeviceBuffer recv) {
      String file = System.getProperty("ncclffm.bench.ncclKernel");
      if (file == null
          || !Files.exists(Path.of(file))
          || Version.parse(Nccl.versions().nccl().version()).compareTo(LSA_KERNEL_NCCL) < 0
          || !comm.properties().deviceApiSupport()
          || comm.teamLsa().size() < ranks) {
        return;
      }
      NcclDeviceRequirements requirements =
          NcclDeviceRequirements.builder().lsaBarrierCount(LSA_KERNEL_BLOCKS).build();
      try (KernelModule module = KernelModule.load(rank.device(), Path.of(file))) {
        meeting.await(PATIENCE); // to load one may wait for the device
        lsaKernel(module, requirements, in, out, recv);
        meeting.await(PATIENCE);
      }
    }

    private void lsaKernel(
        KernelModule module,
        NcclDeviceRequirements requirements,
        NcclWindow in,
        NcclWindow out,
        DeviceBuffer recv) {
      try (NcclDeviceCommunicator device = comm.createDeviceCommunicator(requirements);
          DeviceBuffer results =
              DeviceBuffer.allocate(rank.device(), DataType.INT32, LSA_KERNEL_BLOCKS)) {
        results.fill((byte) 0, stream);
        KernelLaunch launch =
            module
                .kernel("lsaAllReduce")
                .prepare(device, in, out, 0L, results)
                .grid(LSA_KERNEL_BLOCKS)
                .block(512);
        launch.run(stream); // nothing to do: the first may wait for the device
        stream.synchronize();
        meeting.await(PATIENCE);
        allReduce("nccl-lsa", recv, n -> launch.set(3, n).run(stream));
        int[] codes = new int[LSA_KERNEL_BLOCKS];
        results.copyTo(codes, stream);
        if (!Arrays.equals(codes, new int[LSA_KERNEL_BLOCKS])) {
          throw new IllegalStateException("a barrier timed out: " + Arrays.toString(codes));
        }
        meeting.await(PATIENCE);
      }
    }

    private void tasks(DeviceCommunicator dev, DeviceBuffer send, DeviceBuffer recv) {
      try (TaskQueue queue = TaskQueue.create(dev)) {
        Ticket[] tickets = new Ticket[TASKS];
        Arrays.setAll(tickets, i -> queue.ticket());
        Ticket ticket = tickets[0];
        long bytes = 4 << 10;
        int count = (int) bytes / Float.BYTES;
        Runnable one =
            () -> {
              queue.allReduce(SYMBOL, 0, send, 0, recv, 0, count, ReduceOp.SUM, ticket);
              queue.launch(stream);
              ticket.await(PATIENCE);
            };
        check("task", recv, new Expected(n -> n, this::sum), count, one);
        print("task", "single allReduce", bytes, "us", time(quick ? 5 : 200, 1, one));
        double[] appended = new double[quick ? 3 : 30];
        Runnable many =
            () -> {
              long start = System.nanoTime();
              for (Ticket t : tickets) {
                queue.allReduce(SYMBOL, 0, send, 0, recv, 0, count, ReduceOp.SUM, t);
              }
              queue.launch(stream);
              appended[appended.length - 1] = (System.nanoTime() - start) / 1e3 / TASKS;
              for (Ticket t : tickets) {
                t.await(PATIENCE);
              }
            };
        print("task", "allReduce", bytes, "us", time(appended.length, TASKS, many));
        for (int i = 0; i < appended.length; i++) {
          meeting.await(PATIENCE);
          many.run();
          appended[i] = appended[appended.length - 1];
        }
        print("task", "append", bytes, "us", slowest(appended));
        allocated("task", one);
        overlap(queue);
        meeting.await(PATIENCE);
      }
    }

    /** All-reduce of each iteration while the next one is computed; f(x) = x, so sums are exact. */
    private void overlap(TaskQueue queue) {
      int count = quick ? 1 << 10 : 64 << 10;
      int iterations = quick ? 4 : 50;
      int rounds = quick ? 4 : 256;
      try (DeviceBuffer in = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count);
          DeviceBuffer out = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, count);
          DeviceBuffer work = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 4L * count)) {
        fill(in);
        work.fill((byte) 0, stream);
        stream.synchronize();
        meeting.await(PATIENCE);
        for (TaskOverlap.Parts parts :
            new TaskOverlap.Parts[] {
              TaskOverlap.Parts.BOTH, TaskOverlap.Parts.COMPUTE, TaskOverlap.Parts.COMMUNICATE
            }) {
          TaskOverlap todo =
              new TaskOverlap(in, out, work, iterations, rounds, 1, 0, OVERLAP_BLOCKS, parts);
          Runnable run = () -> queue.overlap(SYMBOL, todo, stream).await(PATIENCE);
          if (parts == TaskOverlap.Parts.BOTH) {
            double added = ranks * iterations * (iterations - 1) / 2.0;
            check(
                "overlap", out, new Expected(n -> n, i -> iterations * sum(i) + added), count, run);
          }
          print(
              "task",
              "overlap: " + parts.name().toLowerCase(Locale.ROOT),
              (long) count * Float.BYTES,
              "us",
              time(quick ? 3 : 15, iterations, run));
        }
      }
    }

    private void allReduce(String route, DeviceBuffer recv, Operation operation) {
      for (long bytes : sizes) {
        measure(route, "allReduce", bytes, recv, new Expected(n -> n, this::sum), operation);
      }
      if (!route.contains(" ")) {
        launch(route, operation);
      }
    }

    private void functions(String route, DeviceBuffer recv, Operation[] operations) {
      String[] names = {
        "reduceScatter", "allGather", "broadcast", "reduce", "allToAll", "sendRecv"
      };
      for (int k = 0; k < names.length; k++) {
        for (long bytes : sizes) {
          if (bytes < (long) Float.BYTES * ranks) {
            continue;
          }
          int part = (int) (bytes / Float.BYTES / ranks);
          int previous = (r + ranks - 1) % ranks;
          Expected expected =
              switch (names[k]) {
                case "reduceScatter" -> new Expected(n -> n / ranks, i -> sum(r * part + i));
                case "allGather" -> new Expected(n -> n, i -> input(i / part, i % part));
                case "broadcast" -> new Expected(n -> n, i -> input(0, i));
                case "reduce" -> new Expected(n -> r == 0 ? n : 0, this::sum);
                case "allToAll" -> new Expected(n -> n, i -> input(i / part, r * part + i % part));
                default -> new Expected(n -> n, i -> input(previous, i));
              };
          measure(route, names[k], bytes, recv, expected, operations[k]);
        }
      }
    }

    /** Launch and wait, as a program does that needs the result at once. */
    private void single(
        String route, String name, DeviceBuffer recv, Operation operation, Runnable wait) {
      long bytes = 4 << 10;
      long count = bytes / Float.BYTES;
      Runnable one =
          () -> {
            operation.enqueue(count);
            wait.run();
          };
      check(route, recv, new Expected(n -> n, this::sum), count, one);
      print(route, name, bytes, "us", time(quick ? 5 : 200, 1, one));
    }

    /** What the call takes until it returns. */
    private void launch(String route, Operation operation) {
      int times = 20;
      double[] us = new double[quick ? 3 : 100];
      for (int i = -us.length; i < us.length; i++) {
        meeting.await(PATIENCE);
        long start = System.nanoTime();
        for (int k = 0; k < times; k++) {
          operation.enqueue(16);
        }
        double took = (System.nanoTime() - start) / 1e3 / times;
        stream.synchronize();
        if (i >= 0) {
          us[i] = took;
        }
      }
      print(route, "launch allReduce", 64, "us", slowest(us));
    }

    private void measure(
        String route,
        String operation,
        long bytes,
        DeviceBuffer recv,
        Expected expected,
        Operation enqueue) {
      long count = bytes / Float.BYTES;
      check(route + " " + operation, recv, expected, count, () -> enqueue.enqueue(count));
      boolean large = bytes >= 16 << 20;
      int times = quick || large ? 3 : 40;
      int repetitions = quick ? 3 : large ? 5 : 15;
      double[] device = new double[repetitions];
      double[] wall = new double[repetitions];
      try (CudaEvent start = CudaEvent.create(rank.device());
          CudaEvent end = CudaEvent.create(rank.device())) {
        for (int i = -2; i < repetitions; i++) {
          meeting.await(PATIENCE);
          long from = System.nanoTime();
          start.record(stream);
          for (int k = 0; k < times; k++) {
            enqueue.enqueue(count);
          }
          end.record(stream);
          stream.synchronize();
          if (i >= 0) {
            wall[i] = (System.nanoTime() - from) / 1e3 / times;
            device[i] = end.millisSince(start) * 1e3 / times;
          }
        }
        meeting.await(PATIENCE); // an event that is freed may wait for the device
      }
      print(route, operation, bytes, "us", slowest(wall));
      print(route, operation, bytes, "us by events", slowest(device));
    }

    /** Samples in us for one of {@code times} that a run does. */
    private double[] time(int repetitions, int times, Runnable run) {
      double[] us = new double[repetitions];
      for (int i = -Math.min(repetitions, 20); i < repetitions; i++) {
        meeting.await(PATIENCE);
        long start = System.nanoTime();
        run.run();
        if (i >= 0) {
          us[i] = (System.nanoTime() - start) / 1e3 / times;
        }
      }
      return slowest(us);
    }

    /** Bytes on the Java heap for one operation, once it is compiled. */
    private void allocated(String route, Runnable operation) {
      ThreadMXBean threads = (ThreadMXBean) ManagementFactory.getThreadMXBean();
      int batch = 50;
      int warmUp = quick ? 20 : 400;
      double[] bytes = new double[quick ? 3 : 50];
      for (int i = -warmUp; i < bytes.length; i++) {
        meeting.await(PATIENCE);
        long before = threads.getCurrentThreadAllocatedBytes();
        for (int k = 0; k < batch; k++) {
          operation.run();
        }
        long after = threads.getCurrentThreadAllocatedBytes();
        stream.synchronize();
        if (i >= 0) {
          bytes[i] = (double) (after - before) / batch;
        }
      }
      print(route, "allocated by allReduce", 64, "B", slowest(bytes));
    }

    // How.

    private void print(String route, String operation, long bytes, String unit, double[] samples) {
      if (r == 0) {
        Measure.print(route, operation, ranks, bytes, unit, samples);
      }
    }

    /** For each sample that of the rank which has most. */
    private double[] slowest(double[] mine) {
      double[] most = mine.clone();
      for (int i = 0; i < mine.length; i++) {
        latest[r] = mine[i];
        meeting.await(PATIENCE);
        most[i] = Arrays.stream(latest).max().getAsDouble();
        meeting.await(PATIENCE);
      }
      return most;
    }

    private double input(int of, int i) {
      return i % PERIOD + of + 1;
    }

    private double sum(int i) {
      return ranks * (i % PERIOD) + ranks * (ranks + 1) / 2.0;
    }

    private DeviceBuffer floats(LsaWindow window) {
      MemorySegment start = window.local().address(0);
      return DeviceBuffer.wrap(
          rank.device(), DataType.FLOAT32, window.bytes() / Float.BYTES, start);
    }

    private void fill(DeviceBuffer buffer) {
      float[] part = new float[PERIOD << 17];
      for (int i = 0; i < part.length; i++) {
        part[i] = (float) input(r, i);
      }
      for (long done = 0; done < buffer.count(); done += part.length) {
        long n = Math.min(part.length, buffer.count() - done);
        MemorySegment source = MemorySegment.ofArray(part).asSlice(0, n * Float.BYTES);
        buffer.copyFrom(source, done, stream);
      }
      stream.synchronize();
    }

    /** Runs it once on cleared memory and looks at both ends of what it leaves. */
    private void check(
        String what, DeviceBuffer recv, Expected expected, long count, Runnable operation) {
      recv.fill((byte) 0xff, stream); // NaN
      stream.synchronize();
      meeting.await(PATIENCE);
      operation.run();
      stream.synchronize();
      meeting.await(PATIENCE);
      long filled = expected.written.applyAsLong(count);
      float[] got = new float[(int) Math.min(filled, CHECKED)];
      for (long from : new long[] {0, filled - got.length}) {
        if (got.length > 0) {
          recv.copyTo(MemorySegment.ofArray(got), from, stream);
          stream.synchronize();
        }
        for (int i = 0; i < got.length; i++) {
          double want = expected.value.applyAsDouble((int) from + i);
          if (Math.abs(got[i] - want) > 1e-6 * want || Float.isNaN(got[i])) {
            throw new IllegalStateException(
                String.format(
                    "%s, rank %d of %d, %d elements: element %d is %s, not %s",
                    what, r, ranks, count, from + i, got[i], want));
          }
        }
      }
      meeting.await(PATIENCE);
    }
  }
}

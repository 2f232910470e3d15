package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import com.sun.management.ThreadMXBean;
import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclDeviceCommunicator;
import io.ncclffm.core.NcclDeviceRequirements;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.Kernel;
import io.ncclffm.device.KernelCompiler;
import io.ncclffm.device.KernelImage;
import io.ncclffm.device.KernelLaunch;
import io.ncclffm.device.KernelModule;
import io.ncclffm.device.KernelSource;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.lang.module.ModuleDescriptor.Version;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Kernels of one's own, from text to result; only a GPU runs them. */
class KernelModuleTest {
  private static final Duration PATIENCE = Duration.ofSeconds(20);
  private static final int BLOCKS = 4;
  private static final int THREADS = 256;
  private static final int COUNT = 4096 + 7;

  private CudaDevice device;

  @BeforeAll
  static void needAGpu() throws IOException {
    TestRanks.prepare();
    assumeTrue(Nccl.versions().backend() == Backend.CUDA, "the CPU backend runs no CUDA code");
    NvrtcHere.assumePresent();
  }

  private CudaDevice device() {
    if (device == null) {
      device = new CudaDevice(0);
    }
    return device;
  }

  private int capability() {
    return device().attribute(CudartH.cudaDevAttrComputeCapabilityMajor()) * 10
        + device().attribute(CudartH.cudaDevAttrComputeCapabilityMinor());
  }

  private void assertScales(KernelModule module) {
    try (CudaStream stream = CudaStream.create(device());
        DeviceBuffer x = DeviceBuffer.allocate(device(), DataType.FLOAT32, 1000)) {
      float[] values = new float[1000];
      Arrays.fill(values, 3);
      x.copyFrom(values, stream);
      KernelLaunch launch = module.kernel("scale").prepare(x, 1000L, 2f).grid(4).block(256);
      launch.run(stream);
      launch.set(1, 10L).set(2, 5f).set(0, x, 990).run(stream);
      x.copyTo(values, stream);
      assertEquals(6, values[0]);
      assertEquals(6, values[989]);
      assertEquals(30, values[990]);
      assertEquals(30, values[999]);
    }
  }

  // ------------------------------------------------------------------ loading

  @Test
  void fromTextAndFromEveryFormOfImage(@TempDir Path folder) throws IOException {
    try (KernelModule module = KernelModule.compile(device(), KernelCompilerTest.SCALE)) {
      assertEquals(List.of("scale"), module.names());
      assertTrue(module.kernel("scale").mostThreads() >= 256);
      assertScales(module);
    }
    KernelSource source = KernelSource.of(KernelCompilerTest.SCALE);
    for (String architecture : new String[] {"sm_" + capability(), "compute_80"}) {
      KernelImage image = KernelCompiler.compile(source, architecture);
      try (KernelModule module = KernelModule.load(device(), image)) {
        assertScales(module);
      }
      Path file =
          Files.write(
              folder.resolve(KernelCompilerTest.fileName("kernels ü ") + architecture),
              image.toBytes());
      try (KernelModule module = KernelModule.load(device(), file)) {
        assertScales(module);
      }
    }
  }

  @Test
  void aNameThatDoesNotExistIsToldWithThoseThatDo() {
    String text = KernelCompilerTest.SCALE + "__global__ void mangled(float *x) { *x = 1; }";
    KernelModule module = KernelModule.compile(device(), text);
    try {
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> module.kernel("scael")),
          "has no kernel scael",
          "scale",
          "_Z7mangledPf");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> module.kernel("mangled")),
          "extern \"C\"");
      Kernel kernel = module.kernel("scale");
      KernelLaunch launch = kernel.prepare(0L, 0L, 1f).grid(1).block(32);
      module.close();
      assertThrows(IllegalStateException.class, () -> module.kernel("scale"));
      assertThrows(IllegalStateException.class, () -> kernel.prepare(0L, 0L, 1f));
      try (CudaStream stream = CudaStream.create(device())) {
        Messages.assertNames(
            assertThrows(IllegalStateException.class, () -> launch.run(stream)), "closed", "scale");
      }
    } finally {
      module.close();
    }
  }

  @Test
  void argumentsAndShapesAreChecked() {
    try (KernelModule module = KernelModule.compile(device(), KernelCompilerTest.SCALE);
        CudaStream stream = CudaStream.create(device())) {
      Kernel kernel = module.kernel("scale");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> kernel.prepare(0L, 0L)),
          "kernel scale takes 3 arguments",
          "[8, 8, 4]");
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> kernel.prepare(0L, 0, 1f)),
          "argument 1",
          "an int takes 4 bytes, the kernel's parameter 8");
      KernelLaunch launch = kernel.prepare(0L, 0L, 1f);
      assertThrows(IllegalArgumentException.class, () -> launch.block(1025));
      assertThrows(IllegalArgumentException.class, () -> launch.grid(0));
      assertThrows(IllegalStateException.class, () -> launch.run(stream), "no grid");
      Messages.assertNames(
          assertThrows(RuntimeException.class, () -> launch.sharedBytes(10 << 20)),
          "bytes of shared memory",
          "kernel scale");
      launch.sharedBytes(64 << 10).grid(1).block(32).run(stream); // more than 48 KiB is asked for
      // More blocks than can run at the same time.
      launch.sharedBytes(0).grid(1 << 20).cooperative(true);
      Messages.assertNames(
          assertThrows(RuntimeException.class, () -> launch.run(stream)),
          "kernel scale",
          "at the same time");
      launch.grid(2).run(stream);
      stream.synchronize(PATIENCE);
    }
  }

  @Test
  void whatTheDeviceCannotRunIsTold() {
    String ptx =
        """
        .version 8.0
        .target sm_999
        .address_size 64
        .visible .entry f() { ret; }
        """;
    Messages.assertNames(
        assertThrows(
            IllegalArgumentException.class,
            () -> KernelModule.load(device(), KernelImage.of(bytes(ptx)))),
        "PTX 8.0 for sm_999",
        "sm_" + capability());
    Messages.assertNames(
        assertThrows(
            RuntimeException.class,
            () ->
                KernelModule.load(
                    device(),
                    KernelImage.of(bytes(ptx.replace("999", "80").replace("ret", "nonsense"))))),
        "cudaLibraryLoadData",
        "PTX 8.0 for sm_80");
  }

  private static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.US_ASCII);
  }

  // ------------------------------------------------------------------ communicating

  /** What a rank needs, made and primed before any rank's kernel waits for another's. */
  private static final class Prepared {
    DeviceCommunicator comm;
    KernelModule module;
    KernelLaunch launch;
  }

  private static Prepared[] prepare(LocalWorld world, RankBuffers in, RankBuffers out) {
    Prepared[] all = new Prepared[world.size()];
    // All modules first: to load one may wait for the device, and a device communicator is made by
    // all ranks together.
    world.run(
        r -> {
          all[r.rank()] = new Prepared();
          all[r.rank()].module = KernelModule.compile(r.device(), KernelCompilerTest.FUSED);
        });
    world.run(r -> prepare(all[r.rank()], r, in, out));
    return all;
  }

  private static void prepare(
      Prepared made, LocalWorld.Rank rank, RankBuffers in, RankBuffers out) {
    made.comm = DeviceCommunicator.create(rank.communicator(), PATIENCE);
    made.launch =
        made.module
            .kernel("fused")
            .prepare(made.comm, in.of(rank), out.of(rank), 0L)
            .grid(BLOCKS)
            .block(THREADS);
    made.launch.run(rank.stream()); // nothing to do: the first launch may wait for the device
    rank.stream().synchronize(PATIENCE);
    made.launch.set(3, (long) COUNT);
  }

  private static float[] input(int rank, int round) {
    float[] values = new float[COUNT];
    for (int i = 0; i < COUNT; i++) {
      values[i] = i % 13 + rank - round;
    }
    return values;
  }

  private static float[] expected(int ranks, int round) {
    float[] sums = new float[COUNT];
    for (int r = 0; r < ranks; r++) {
      float[] values = input(r, round);
      for (int i = 0; i < COUNT; i++) {
        sums[i] += 2 * values[i] + 1;
      }
    }
    for (int i = 0; i < COUNT; i++) {
      sums[i] = (float) Math.sqrt(Math.abs(sums[i]));
    }
    return sums;
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void aKernelComputesAllReducesAndGoesOnComputing(int ranks) {
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers in = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers out = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      Prepared[] all = prepare(world, in, out);
      world.run(
          r -> {
            float[] result = new float[COUNT];
            for (int round = 0; round < 20; round++) {
              in.of(r).copyFrom(input(r.rank(), round), r.stream());
              all[r.rank()].launch.run(r.stream());
              r.stream().synchronize(PATIENCE);
              out.of(r).copyTo(result, r.stream());
              assertArrayEquals(expected(ranks, round), result, 1e-5f);
            }
          });
      world.run(r -> all[r.rank()].module.close());
      TestRanks.assertWorks(world);
    }
  }

  /**
   * @param withHost a collective of the host behind the kernel; else the kernel alone, and updated
   */
  @ParameterizedTest
  @CsvSource({"2, true", "4, true", "2, false", "4, false"})
  void inAGraph(int ranks, boolean withHost) {
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers in = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers out = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers other = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      Prepared[] all = prepare(world, in, out);
      CudaGraph[] graphs = new CudaGraph[ranks];
      world.run(
          r ->
              graphs[r.rank()] =
                  CudaGraph.capture(
                      r.stream(),
                      () -> {
                        all[r.rank()].launch.run(r.stream());
                        if (withHost) {
                          r.communicator()
                              .allReduce(out.of(r), out.of(r), ReduceOp.SUM, r.stream());
                        }
                      }));
      world.run(r -> replay(r, graphs[r.rank()], in, out, withHost ? ranks : 1));
      if (!withHost) {
        world.run(
            r -> {
              KernelLaunch launch = all[r.rank()].launch.set(2, other.of(r));
              graphs[r.rank()].update(r.stream(), () -> launch.run(r.stream()));
            });
        world.run(r -> replay(r, graphs[r.rank()], in, other, 1));
      }
      world.run(
          r -> {
            graphs[r.rank()].close();
            all[r.rank()].module.close();
          });
      TestRanks.assertWorks(world);
    }
  }

  private static void replay(
      LocalWorld.Rank r, CudaGraph graph, RankBuffers in, RankBuffers out, int times) {
    float[] result = new float[COUNT];
    for (int round = 0; round < 10; round++) {
      in.of(r).copyFrom(input(r.rank(), round), r.stream());
      graph.launch(r.stream());
      r.stream().synchronize(PATIENCE);
      out.of(r).copyTo(result, r.stream());
      float[] expected = expected(r.communicator().size(), round);
      for (int i = 0; i < COUNT; i++) {
        assertEquals(times * expected[i], result[i], 1e-4f);
      }
    }
  }

  @Test
  void aRankThatDoesNotComeIsReportedByTheStream() {
    Duration deadline = Duration.ofSeconds(1);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers in = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers out = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      Prepared[] all = prepare(world, in, out);
      world.run(
          r -> {
            Prepared made = all[r.rank()];
            made.comm.close();
            made.comm = DeviceCommunicator.create(r.communicator(), deadline);
            KernelLaunch closed = made.launch;
            assertThrows(IllegalStateException.class, () -> closed.run(r.stream()));
            made.launch =
                made.module
                    .kernel("fused")
                    .prepare(made.comm, in.of(r), out.of(r), (long) COUNT)
                    .grid(BLOCKS)
                    .block(THREADS);
          });
      world.run(
          r -> {
            if (r.rank() == 0) {
              all[0].launch.run(r.stream());
              DeviceCommException e =
                  assertThrows(DeviceCommException.class, () -> r.stream().synchronize(PATIENCE));
              Messages.assertNames(e, "ncclTimeout");
              assertThrows(DeviceCommException.class, () -> all[0].launch.run(r.stream()));
            }
          });
      world.run(
          r -> {
            all[r.rank()].comm.close();
            all[r.rank()].module.close();
          });
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void cooperativeBlocksOfAllRanksOnADeviceMustFit() {
    assumeTrue(CudaDevice.count() == 1, "the ranks do not share a GPU");
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers in = RankBuffers.allocate(world, DataType.FLOAT32, COUNT);
        RankBuffers out = RankBuffers.allocate(world, DataType.FLOAT32, COUNT)) {
      Prepared[] all = prepare(world, in, out);
      world.run(
          r -> {
            int resident = all[r.rank()].module.kernel("fused").residentBlocks(THREADS, 0);
            assertTrue(resident >= 2, resident + " blocks");
            KernelLaunch launch = all[r.rank()].launch.set(3, 0L).cooperative(true);
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> launch.grid(resident / 2 + 1).run(r.stream())),
                (resident / 2 + 1) + " blocks on each of 2 ranks",
                "only " + resident);
            launch.grid(1).run(r.stream());
            r.stream().synchronize(PATIENCE);
          });
      world.run(r -> all[r.rank()].module.close());
      TestRanks.assertWorks(world);
    }
  }

  @Test
  void launchingAllocatesNothing() {
    ThreadMXBean threads = (ThreadMXBean) ManagementFactory.getThreadMXBean();
    try (KernelModule module = KernelModule.compile(device(), KernelCompilerTest.SCALE);
        CudaStream stream = CudaStream.create(device());
        DeviceBuffer x = DeviceBuffer.allocate(device(), DataType.FLOAT32, 64)) {
      KernelLaunch launch = module.kernel("scale").prepare(x, 64L, 1f).grid(1).block(64);
      long last = 0;
      int batches = 200;
      for (int batch = 0; batch < batches; batch++) {
        long before = threads.getCurrentThreadAllocatedBytes();
        for (int i = 0; i < 100; i++) {
          launch.set(0, x).set(1, 64L).set(2, 1f).run(stream);
        }
        if (batch >= batches - 40) {
          last += threads.getCurrentThreadAllocatedBytes() - before;
        }
        stream.synchronize(PATIENCE);
      }
      assertTrue(last < 40 * 100, last / 4000.0 + " bytes a launch");
    }
  }

  // ------------------------------------------------------------------ NCCL's device API

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 4})
  void aKernelAgainstNcclsOwnHeaders(int ranks) {
    String file = System.getProperty("ncclffm.test.ncclKernel");
    assumeTrue(file != null && Files.exists(Path.of(file)), "not compiled here: " + file);
    String version = Nccl.versions().nccl().version();
    assumeTrue(
        Version.parse(version).compareTo(Version.parse("2.30.7")) >= 0,
        "compiled with 2.30.7, loaded is " + version);
    NcclDeviceRequirements requirements =
        NcclDeviceRequirements.builder().lsaBarrierCount(BLOCKS).build();
    try (LocalWorld world = TestRanks.open(ranks);
        RankBuffers in = RankBuffers.allocateForWindows(world, DataType.FLOAT32, COUNT);
        RankBuffers out = RankBuffers.allocateForWindows(world, DataType.FLOAT32, COUNT);
        RankBuffers results = RankBuffers.allocate(world, DataType.INT32, BLOCKS)) {
      KernelModule[] modules = new KernelModule[ranks];
      KernelLaunch[] launches = new KernelLaunch[ranks];
      NcclDeviceCommunicator[] comms = new NcclDeviceCommunicator[ranks];
      world.run(r -> modules[r.rank()] = KernelModule.load(r.device(), Path.of(file)));
      world.run(
          r -> {
            int me = r.rank();
            assertTrue(r.communicator().properties().deviceApiSupport());
            NcclWindow source = r.communicator().registerWindow(in.of(r));
            NcclWindow target = r.communicator().registerWindow(out.of(r));
            comms[me] = r.communicator().createDeviceCommunicator(requirements);
            assertThrows(
                IllegalArgumentException.class,
                () -> modules[me].kernel("lsaSum").prepare(comms[me], source, target, COUNT, 0L));
            launches[me] =
                modules[me]
                    .kernel("lsaSum")
                    .prepare(comms[me], source, target, 0L, results.of(r))
                    .grid(BLOCKS)
                    .block(THREADS);
            launches[me].run(r.stream()); // nothing to do: the first may wait for the device
            r.stream().synchronize(PATIENCE);
            launches[me].set(3, (long) COUNT);
          });
      world.run(
          r -> {
            float[] result = new float[COUNT];
            int[] codes = new int[BLOCKS];
            for (int round = 0; round < 5; round++) {
              in.of(r).copyFrom(input(r.rank(), round), r.stream());
              results.of(r).fill((byte) -1, r.stream());
              launches[r.rank()].run(r.stream());
              r.stream().synchronize(PATIENCE);
              results.of(r).copyTo(codes, r.stream());
              assertArrayEquals(new int[BLOCKS], codes);
              out.of(r).copyTo(result, r.stream());
              for (int i = 0; i < COUNT; i++) {
                float sum = 0;
                for (int peer = 0; peer < ranks; peer++) {
                  sum += input(peer, round)[i];
                }
                assertEquals(sum, result[i], "element " + i);
              }
            }
          });
      world.run(
          r -> {
            comms[r.rank()].close();
            modules[r.rank()].close();
          });
      TestRanks.assertWorks(world);
    }
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.lang.foreign.MemorySegment;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInstance;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.params.AfterParameterizedClassInvocation;
import org.junit.jupiter.params.BeforeParameterizedClassInvocation;
import org.junit.jupiter.params.Parameter;
import org.junit.jupiter.params.ParameterizedClass;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** Every provider that the machine has: the ranks (threads here) reach one another's memory. */
@ParameterizedClass(name = "{0} ranks, {1}")
@CsvSource({
  "1,NCCL_WINDOW", "1,CPU", "1,CUDA_IPC", "1,HOST_STAGED",
  "2,NCCL_WINDOW", "2,CPU", "2,CUDA_IPC", "2,HOST_STAGED",
  "4,NCCL_WINDOW", "4,CPU", "4,CUDA_IPC", "4,HOST_STAGED",
  "8,NCCL_WINDOW", "8,CPU", "8,CUDA_IPC", "8,HOST_STAGED"
})
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
class LsaProvidersTest {
  @Parameter(0)
  int ranks;

  @Parameter(1)
  LsaProvider provider;

  private LocalWorld world;
  private CyclicBarrier everyRank;

  @BeforeParameterizedClassInvocation
  void openWorld(int ranks, LsaProvider provider) {
    TestRanks.assumeShim();
    ProvidersHere.assume(provider);
    everyRank = new CyclicBarrier(ranks);
    world = TestRanks.open(ranks);
  }

  @AfterParameterizedClassInvocation
  void closeWorld() {
    if (world != null) {
      world.close();
    }
  }

  private void meet() throws Exception {
    everyRank.await(30, TimeUnit.SECONDS);
  }

  private LsaWindow create(LocalWorld.Rank r, long bytes) {
    return LsaWindow.create(r.communicator(), bytes, provider);
  }

  @Test
  void allRanksWriteToAllAndReadAll() {
    world.run(
        r -> {
          try (LsaWindow window = create(r, WindowPatterns.bytes(ranks));
              WindowPatterns patterns = new WindowPatterns(r.communicator(), r.stream())) {
            assertEquals(provider, window.provider());
            WindowPatterns.assertPaths(window);
            for (int round = 0; round < 3; round++) {
              patterns.exchange(window, round);
            }
            window.verify("test");
          }
        });
  }

  @Test
  void neighboursOnTheRingReachTheHalvesThatAreTheirs() {
    world.run(
        r -> {
          // An odd size: the halves are cut to lines of 128 bytes.
          try (LsaWindow window = create(r, 100_001);
              WindowPatterns patterns = new WindowPatterns(r.communicator(), r.stream())) {
            patterns.exchangeWithNeighbours(window.lsa(), 0);
            patterns.exchangeWithNeighbours(window.lsa(), 1);
          }
        });
  }

  /** Protocol LL over device memory and over host memory. */
  @Test
  void deviceCommunicatorsReduceOverIt() {
    int count = 20_000;
    DeviceCommunicatorConfig config =
        DeviceCommunicatorConfig.builder().provider(provider).checked(true).build();
    try (RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, count)) {
      world.run(
          r -> {
            float[] values = new float[count];
            try (DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), config)) {
              assertEquals(provider, comm.window().provider());
              for (int round = 0; round < 5; round++) {
                for (int i = 0; i < count; i++) {
                  values[i] = (i + round) % 1000 * (r.rank() + 1);
                }
                x.of(r).copyFrom(values, r.stream());
                comm.allReduce(x.of(r), x.of(r), ReduceOp.SUM, r.stream());
                x.of(r).copyTo(values, r.stream());
                for (int i = 0; i < count; i++) {
                  int expected = (i + round) % 1000 * (ranks * (ranks + 1) / 2);
                  assertEquals(expected, values[i], "round " + round + ", element " + i);
                }
              }
              meet(); // nobody frees while another's kernel runs on the same GPU
            }
          });
    }
    TestRanks.assertWorks(world);
  }

  @Test
  void theTableForKernelsHoldsEveryAddress() {
    world.run(
        r -> {
          try (LsaWindow window = create(r, 4096)) {
            long[] table = new long[ranks];
            window.lsa().peers().copyTo(table, r.stream());
            for (int p = 0; p < ranks; p++) {
              assertEquals(window.address(p, 0, 1), table[p]);
            }
          }
        });
  }

  @Test
  void memoryIsZeroed() {
    world.run(
        r -> {
          for (int round = 0; round < 2; round++) {
            try (LsaWindow window = create(r, 50_000)) {
              byte[] content = new byte[50_000];
              content[7] = 1;
              window.local().copyTo(MemorySegment.ofArray(content), r.stream());
              for (byte b : content) {
                assertEquals(0, b);
              }
              window.local().fill((byte) 0x55, r.stream());
              r.stream().synchronize();
            }
          }
        });
  }

  /**
   * The order of ranks is reversed: an address that belonged to the old rank would be found out.
   */
  @Test
  void addressesFollowTheRanksOfASplitCommunicator() {
    world.run(
        r -> {
          Communicator parent = r.communicator();
          try (Communicator child =
                  parent.split(parent.rank() % 2, -parent.rank(), CommunicatorConfig.DEFAULT);
              LsaWindow window =
                  LsaWindow.create(child, WindowPatterns.bytes(child.size()), provider);
              WindowPatterns patterns = new WindowPatterns(child, r.stream())) {
            assertTrue(child.size() == 1 || child.rank() == child.size() - 1 - parent.rank() / 2);
            patterns.exchange(window, 0);
            patterns.exchangeWithNeighbours(window.lsa(), 0);
            meet(); // one half must not free while kernels of the other run on the same GPU
          }
        });
    TestRanks.assertWorks(world);
  }

  @Test
  void whatLiesBehindAWrongAddressIsFoundOut() {
    world.run(
        r -> {
          try (LsaWindow window = create(r, 1000)) {
            window.verify("launch");
            meet();
            // A kernel that writes beyond the end of this rank's memory.
            long end = window.address(r.rank(), 1000, 0);
            try (DeviceBuffer behind =
                DeviceBuffer.wrap(r.device(), DataType.UINT8, 152, MemorySegment.ofAddress(end))) {
              behind.fill((byte) 7, r.stream());
              r.stream().synchronize();
            }
            Messages.assertNames(
                assertThrows(LsaException.class, () -> window.verify("launch")),
                "launch",
                "wrote behind the window's end");
            meet();
          }
        });
    TestRanks.assertWorks(world);
  }

  @Test
  void windowsAreClosedInAnyOrderTwiceAndWithTheCommunicator() {
    LsaWindow[][] windows = new LsaWindow[ranks][4];
    try (LocalWorld own = TestRanks.open(ranks)) {
      own.run(
          r -> {
            LsaWindow[] mine = windows[r.rank()];
            for (int i = 0; i < mine.length; i++) {
              mine[i] = LsaWindow.create(r.communicator(), 1000 + i, provider);
            }
            mine[1].close();
            mine[3].close();
            mine[1].close();
            mine[0].verify("still there");
            mine[2].verify("still there");
            r.communicator().close();
          });
    }
    for (LsaWindow[] mine : windows) {
      for (LsaWindow window : mine) {
        assertClosed(window);
        window.close();
      }
    }
  }

  private static void assertClosed(LsaWindow window) {
    for (Executable use :
        List.<Executable>of(
            () -> window.address(0, 0, 1),
            () -> window.lsa(),
            () -> window.handle(),
            () -> window.verify("use"),
            () -> window.check("use", window.communicator()),
            () -> window.alignmentReport(0, 1, DataType.UINT8),
            () -> window.local().address(0))) {
      Messages.assertNames(assertThrows(IllegalStateException.class, use), "closed");
    }
  }

  @Test
  void windowsAreClosedAfterAnAbort() {
    try (LocalWorld own = TestRanks.open(ranks)) {
      own.run(
          r -> {
            LsaWindow window = LsaWindow.create(r.communicator(), 1 << 16, provider);
            r.communicator().abort();
            assertClosed(window);
            window.close();
          });
    }
  }

  @Test
  void manyWindowsLeaveNothingBehind() throws IOException {
    // Several ranks agree on each of their windows; on two cores that is mostly switching threads.
    int rounds = ranks == 1 ? 2000 : Integer.getInteger("ncclffm.test.windows", 400 / ranks);
    turnOver(20);
    long[] before = usage();
    turnOver(rounds);
    long[] after = usage();
    String figures =
        rounds
            + " windows a rank: descriptors "
            + before[0]
            + " -> "
            + after[0]
            + ", mappings "
            + before[1]
            + " -> "
            + after[1]
            + ", device bytes free "
            + before[2]
            + " -> "
            + after[2];
    System.out.println(provider + " with " + ranks + " ranks, " + figures);
    assertTrue(after[0] <= before[0] + 2 && after[1] <= before[1] + 20, figures);
    assertTrue(after[2] >= before[2] - (8 << 20), figures);
  }

  private void turnOver(int rounds) {
    world.run(
        r -> {
          for (int i = 0; i < rounds; i++) {
            create(r, 10_000 + i).close();
          }
        });
  }

  /** Open file descriptors and memory mappings of this process, and free bytes of the device. */
  private static long[] usage() throws IOException {
    try (Stream<Path> descriptors = Files.list(Path.of("/proc/self/fd"));
        Stream<String> mappings = Files.lines(Path.of("/proc/self/maps"))) {
      return new long[] {
        descriptors.count(), mappings.count(), Resources.freeDeviceBytes(new CudaDevice(0))
      };
    }
  }

  @ParameterizedTest
  @EnumSource(LsaProvider.class)
  void ranksThatAskForDifferentThingsAllGetTheSameException(LsaProvider other) {
    if (ranks == 1 || other == provider) {
      return;
    }
    String[] texts = new String[ranks];
    world.run(
        r -> {
          boolean last = r.rank() == ranks - 1;
          texts[r.rank()] =
              assertThrows(
                      IllegalArgumentException.class,
                      () -> LsaWindow.create(r.communicator(), 4096, last ? other : provider))
                  .getMessage();
        });
    for (String text : texts) {
      assertEquals(texts[0], text);
      assertTrue(text.contains("rank " + (ranks - 1) + " for 4096 bytes by " + other), text);
    }
    TestRanks.assertWorks(world);
  }

  @Test
  void ranksThatAskForDifferentSizesAllGetTheSameException() {
    if (ranks == 1) {
      return;
    }
    world.run(
        r ->
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class, () -> create(r, r.rank() == 1 ? 8192 : 4096)),
                "rank 0 for 4096 bytes by " + provider,
                "rank 1 for 8192 bytes"));
    TestRanks.assertWorks(world);
  }
}

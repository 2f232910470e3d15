package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.core.bindings.shim.ncclLsa;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** What would be an illegal memory access of a kernel is an exception before the launch. */
class LaunchChecksTest {
  private static final DeviceCommunicatorConfig CHECKED =
      DeviceCommunicatorConfig.builder().checked(true).build();

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @ParameterizedTest
  @ValueSource(booleans = {false, true})
  void checkedLaunchesWork(boolean chosen) {
    DeviceCommunicatorConfig.Builder config = DeviceCommunicatorConfig.builder().checked(true);
    if (chosen) {
      config.protocol(LsaProtocol.SIMPLE).algorithm(DeviceAlgorithm.RING);
    }
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), config.build());
            float[] ones = new float[1000];
            Arrays.fill(ones, 1);
            x.of(r).copyFrom(ones, r.stream());
            for (int i = 0; i < 5; i++) {
              comm.allReduce(x.of(r), x.of(r), ReduceOp.SUM, r.stream());
            }
            x.of(r).copyTo(ones, r.stream());
            assertEquals(32, ones[999]);
          });
    }
  }

  @Test
  void aWindowThatWasOverrunIsNamedBeforeTheLaunch() {
    try (LocalWorld world = TestRanks.open(1);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), CHECKED);
            long end = comm.window().address(0, comm.window().bytes(), 0);
            DeviceBuffer behind =
                DeviceBuffer.wrap(r.device(), DataType.UINT8, 64, MemorySegment.ofAddress(end));
            behind.fill((byte) 1, r.stream());
            r.stream().synchronize();
            Messages.assertNames(
                assertThrows(
                    LsaException.class,
                    () -> comm.allReduce(x.of(r), x.of(r), ReduceOp.SUM, r.stream())),
                "ncclFfmAllReduce",
                "rank 0",
                "behind the window's end");
          });
    }
  }

  @Test
  void structsOfOthersAndDamagedOnesAreRefused() {
    MemorySegment[] structs = new MemorySegment[2];
    try (LocalWorld world = TestRanks.open(2);
        Arena arena = Arena.ofShared()) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator());
            structs[r.rank()] = arena.allocate(ncclFfmDevComm.layout()).copyFrom(comm.struct());
            comm.verify("own kernel");
            comm.verify("own kernel", structs[r.rank()]);

            MemorySegment damaged = arena.allocate(ncclFfmDevComm.layout()).copyFrom(comm.struct());
            ncclFfmDevComm.magic(damaged, 0);
            refused(comm, damaged, "no ncclFfmDevComm");
            damaged.copyFrom(comm.struct());
            ncclFfmDevComm.version(damaged, 99);
            refused(comm, damaged, "no ncclFfmDevComm");
            damaged.copyFrom(comm.struct());
            ncclFfmDevComm.rank(damaged, 1 - r.rank());
            refused(comm, damaged, "is rank " + (1 - r.rank()) + "'s");
            damaged.copyFrom(comm.struct());
            ncclFfmDevComm.peers(damaged, MemorySegment.ofAddress(4096));
            refused(comm, damaged, "another device communicator's, or was written over");
            comm.close();
            assertThrows(IllegalStateException.class, () -> comm.verify("own kernel"));
            DeviceCommunicator next = DeviceCommunicator.create(r.communicator());
            refused(next, structs[r.rank()], "another device communicator's");
          });
    }
  }

  private static void refused(DeviceCommunicator comm, MemorySegment struct, String why) {
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> comm.verify("own kernel", struct)),
        "own kernel on communicator",
        why);
  }

  /** What tells whose memory it is, behind the end of this rank's window. */
  private static DeviceBuffer stamp(LocalWorld.Rank r, LsaWindow window) {
    long end = window.address(r.rank(), window.bytes(), 0);
    return DeviceBuffer.wrap(r.device(), DataType.UINT8, 128, MemorySegment.ofAddress(end));
  }

  private static byte[] stampOf(LocalWorld.Rank r, LsaWindow window) {
    byte[] content = new byte[128];
    stamp(r, window).copyTo(MemorySegment.ofArray(content), r.stream());
    return content;
  }

  private static void putStamp(LocalWorld.Rank r, LsaWindow window, byte[] content) {
    stamp(r, window).copyFrom(MemorySegment.ofArray(content), r.stream());
  }

  private static String launchRefused(DeviceCommunicator comm, DeviceBuffer x, CudaStream stream) {
    return assertThrows(LsaException.class, () -> comm.allReduce(x, x, ReduceOp.SUM, stream))
        .getMessage();
  }

  @Test
  void anotherRanksOrAnotherWindowsMemoryIsNamedBeforeTheLaunch() {
    CyclicBarrier everyRank = new CyclicBarrier(2);
    byte[][] stamps = new byte[2][];
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), CHECKED);
            LsaWindow other = LsaWindow.create(r.communicator(), comm.window().bytes());
            stamps[r.rank()] = stampOf(r, comm.window());
            byte[] others = stampOf(r, other);
            everyRank.await(30, TimeUnit.SECONDS);
            putStamp(r, comm.window(), others);
            everyRank.await(30, TimeUnit.SECONDS);
            String text = launchRefused(comm, x.of(r), r.stream());
            assertTrue(text.contains("ncclFfmAllReduce: the memory at rank 0's address"), text);
            assertTrue(text.contains("it is another window's"), text);
            everyRank.await(30, TimeUnit.SECONDS);
            // Back to this window's, but the rank that reads it here takes it for the other's.
            putStamp(r, comm.window(), stamps[1 - r.rank()]);
            everyRank.await(30, TimeUnit.SECONDS);
            text = launchRefused(comm, x.of(r), r.stream());
            assertTrue(text.contains("ncclFfmAllReduce: the memory at rank 0's address"), text);
            assertTrue(text.contains("it is rank 1's"), text);
            everyRank.await(30, TimeUnit.SECONDS);
          });
    }
  }

  @Test
  void anAddressTableThatWasWrittenOverIsNamedBeforeTheLaunch() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), CHECKED);
            DeviceBuffer table = comm.window().lsa().peers();
            long[] right = new long[2];
            table.copyTo(right, r.stream());
            table.copyFrom(new long[] {right[1], right[0]}, r.stream()); // each other's
            String text = launchRefused(comm, x.of(r), r.stream());
            assertTrue(text.contains("the table of the ranks' addresses"), text);
          });
    }
  }

  @Test
  void structsOfOtherWindowsAreRefused() {
    MemorySegment[] structs = new MemorySegment[2];
    CyclicBarrier everyRank = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2);
        Arena arena = Arena.ofShared()) {
      world.run(
          r -> {
            LsaWindow window = LsaWindow.create(r.communicator(), 4096);
            LsaWindow other = LsaWindow.create(r.communicator(), 4096);
            MemorySegment mine = window.lsa().struct();
            window.verify("own kernel", mine);
            structs[r.rank()] = arena.allocate(ncclLsa.layout()).copyFrom(mine);
            everyRank.await(30, TimeUnit.SECONDS);
            window.verify("own kernel", structs[r.rank()]);
            refused(window, structs[1 - r.rank()]);
            refused(window, other.lsa().struct());
            refused(window, arena.allocate(ncclLsa.layout()));
            refused(window, mine.asSlice(8));
            MemorySegment closed = other.lsa().struct();
            other.close();
            refused(window, closed);
            Messages.assertNames(
                assertThrows(IllegalStateException.class, () -> other.verify("own kernel", closed)),
                "is closed");
            assertThrows(IllegalArgumentException.class, () -> ncclLsa.x(mine, 0).fill((byte) 0));
          });
    }
  }

  private static void refused(LsaWindow window, MemorySegment struct) {
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> window.verify("own kernel", struct)),
        "own kernel",
        "is not the ncclLsa of the LSA window of 4096 bytes");
  }

  @Test
  void whatIsClosedIsRefusedBeforeTheLaunch() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          r -> {
            Communicator child = r.communicator().split(0, r.rank(), CommunicatorConfig.DEFAULT);
            DeviceCommunicator first = DeviceCommunicator.create(child, CHECKED);
            DeviceCommunicator second = DeviceCommunicator.create(child, CHECKED);
            LsaWindow window = first.window();
            first.close();
            closedIs("device communicator", first, x.of(r), r.stream());
            Messages.assertNames(
                assertThrows(IllegalStateException.class, () -> window.verify("own kernel")),
                "own kernel",
                "is closed");
            second.allReduce(x.of(r), x.of(r), ReduceOp.SUM, r.stream());
            r.stream().synchronize();
            child.close();
            closedIs("communicator", second, x.of(r), r.stream());
          });
    }
  }

  private static void closedIs(
      String what, DeviceCommunicator comm, DeviceBuffer x, CudaStream stream) {
    Messages.assertNames(
        assertThrows(IllegalStateException.class, () -> comm.allReduce(x, x, ReduceOp.SUM, stream)),
        "ncclFfmAllReduce",
        what,
        "is closed");
    Messages.assertNames(
        assertThrows(IllegalStateException.class, () -> comm.verify("own kernel")), "is closed");
  }

  /** A launch of the library's makes its device current; one's own kernel needs it to be. */
  @Test
  void anotherCurrentDeviceIsNamed() {
    TestRanks.prepare();
    TestRanks.assumeDevices(2);
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 8)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), CHECKED);
            CudaDevice other = new CudaDevice(1 - r.device().ordinal());
            other.makeCurrent();
            for (Executable verify :
                List.<Executable>of(
                    () -> comm.verify("own kernel"), () -> comm.window().verify("own kernel"))) {
              Messages.assertNames(
                  assertThrows(LsaException.class, verify),
                  "own kernel: the current device of this thread is " + other.ordinal(),
                  "the window is on " + r.device());
            }
            comm.allReduce(x.of(r), x.of(r), ReduceOp.SUM, r.stream());
            comm.verify("own kernel");
            r.stream().synchronize();
          });
    }
  }

  @Test
  void aWindowOfAnotherRankIsRefused() {
    LsaWindow[] windows = new LsaWindow[2];
    CyclicBarrier everyRank = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            windows[r.rank()] = LsaWindow.create(r.communicator(), 4096);
            everyRank.await(30, TimeUnit.SECONDS);
            Messages.assertNames(
                assertThrows(
                    IllegalArgumentException.class,
                    () -> windows[1 - r.rank()].check("own kernel", r.communicator())),
                "own kernel",
                "belongs to communicator on rank " + (1 - r.rank()));
            everyRank.await(30, TimeUnit.SECONDS);
          });
    }
  }

  @Test
  void aWindowOfAnotherCommunicatorIsRefused() {
    try (LocalWorld world = TestRanks.open(2)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator());
            try (Communicator child = r.communicator().split(0, 0, CommunicatorConfig.DEFAULT)) {
              Messages.assertNames(
                  assertThrows(
                      IllegalArgumentException.class,
                      () -> comm.window().check("own kernel", child)),
                  "own kernel",
                  "belongs to");
            }
          });
    }
  }
}

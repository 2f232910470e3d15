package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmDevComm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.lsa.LsaException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.Arrays;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** What would be an illegal memory access of a kernel is an exception before the launch. */
class LaunchChecksTest {
  private static final DeviceCommunicatorConfig CHECKED =
      DeviceCommunicatorConfig.builder().checked(true).build();

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @Test
  void checkedLaunchesWork() {
    try (LocalWorld world = TestRanks.open(2);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 1000)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator(), CHECKED);
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

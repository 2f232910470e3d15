package io.ncclffm.test;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import java.util.Arrays;

/**
 * A child JVM's main class: an all-reduce and an all-gather by the device library on whichever
 * libnccl is loaded, and its version.
 */
final class DeviceOnOldLibrary {
  static final String DONE = "DONE ON ";

  private static final int COUNT = 1000;

  private DeviceOnOldLibrary() {}

  public static void main(String[] arguments) {
    try (LocalWorld world = LocalWorld.open(4)) {
      world.run(DeviceOnOldLibrary::reduce);
    }
    System.out.println(DONE + Nccl.versions().nccl().version());
  }

  private static void reduce(LocalWorld.Rank rank) {
    try (DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
        DeviceBuffer x = DeviceBuffer.allocate(rank.device(), DataType.INT32, COUNT);
        DeviceBuffer all = DeviceBuffer.allocate(rank.device(), DataType.INT32, 4L * COUNT)) {
      int[] values = new int[COUNT];
      Arrays.fill(values, rank.rank() + 1);
      x.copyFrom(values, rank.stream());
      comm.allGather(x, all, rank.stream());
      comm.allReduce(x, x, ReduceOp.SUM, rank.stream());
      x.copyTo(values, rank.stream());
      int[] gathered = new int[4 * COUNT];
      all.copyTo(gathered, rank.stream());
      rank.stream().synchronize();
      if (values[0] != 10 || values[COUNT - 1] != 10 || gathered[4 * COUNT - 1] != 4) {
        throw new AssertionError(values[0] + ", " + gathered[4 * COUNT - 1]);
      }
    }
  }
}

package example;

import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;

/** Sums over two ranks: by NCCL, and inside a kernel. */
public final class Main {
  private Main() {}

  public static void main(String[] arguments) {
    try (LocalWorld world = LocalWorld.open(2)) {
      world.run(
          rank -> {
            float[] data = {rank.rank() + 1};
            try (DeviceBuffer x = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, 1);
                DeviceCommunicator kernels = DeviceCommunicator.create(rank.communicator())) {
              x.copyFrom(data, rank.stream());
              rank.communicator().allReduce(x, x, ReduceOp.SUM, rank.stream());
              kernels.allReduce(x, x, ReduceOp.SUM, rank.stream());
              x.copyTo(data, rank.stream());
            }
            if (rank.rank() == 0) {
              System.out.println(String.join(" ", arguments) + ": " + data[0]);
            }
          });
    }
    System.out.println(Nccl.versions());
  }
}

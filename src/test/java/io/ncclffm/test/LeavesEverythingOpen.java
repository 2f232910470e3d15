package io.ncclffm.test;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;

/**
 * A child JVM's main class: returns from main with ranks, streams, events and memory open, and, if
 * asked by the argument "pending", with a collective that waits for a rank that never comes.
 */
final class LeavesEverythingOpen {
  private LeavesEverythingOpen() {}

  public static void main(String[] arguments) {
    LocalWorld world = TestRanks.open(2);
    DeviceBuffer x = DeviceBuffer.allocate(new CudaDevice(0), DataType.FLOAT32, 100);
    CudaStream stream = CudaStream.create(new CudaDevice(0));
    CudaEvent event = CudaEvent.create(new CudaDevice(0));
    x.fill((byte) 0, stream);
    event.record(stream);
    boolean pending = arguments.length > 0 && arguments[0].equals("pending");
    world.run(
        rank -> {
          if (pending && rank.rank() == 0) {
            rank.communicator().allReduce(x, x, ReduceOp.SUM, rank.stream());
          }
        });
    System.out.println("MAIN ENDS");
  }
}

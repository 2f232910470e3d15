package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.util.concurrent.TimeUnit;

/**
 * A child JVM's main class: drops a communicator, a stream, a buffer and a graph without closing
 * them and lets the collector find them. Whatever would free something natively fails, so that the
 * cleaner's thread would be heard; it prints the device memory that is taken before and after.
 */
final class DropsWithoutClosing {
  private DropsWithoutClosing() {}

  public static void main(String[] arguments) throws IOException, InterruptedException {
    long before = drop();
    for (int i = 0; i < 20; i++) {
      System.gc();
      TimeUnit.MILLISECONDS.sleep(20); // the cleaner's thread shows no sign that it is done
    }
    System.out.println("TAKEN " + before + " " + Resources.now().deviceBytes());
  }

  private static long drop() throws IOException {
    CudaDevice device = new CudaDevice(0);
    Communicator comm = Communicator.create(NcclUniqueId.create(), 1, 0, device);
    CudaStream stream = CudaStream.create(device);
    DeviceBuffer buffer = DeviceBuffer.allocate(device, DataType.FLOAT32, 1234);
    CudaGraph graph = CudaGraph.capture(stream, () -> buffer.fill((byte) 0, stream));
    graph.launch(stream);
    if (comm.size() != 1 || stream.isClosed() || buffer.count() != 1234) {
      throw new AssertionError();
    }
    return Resources.now().deviceBytes();
  }
}

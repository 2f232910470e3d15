package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import java.util.List;

/**
 * A child JVM's main class: CUDA answers with cudaErrorLaunchFailure for good, as after a kernel's
 * wild access. Prints what the library makes of it. Every native function that frees something
 * would fail from then on, so that none is called unnoticed.
 */
final class LosesItsDevice {
  private static final List<String> FORBIDDEN =
      List.of(
          "cudaSetDevice",
          "cudaFree",
          "cudaFreeHost",
          "cudaStreamDestroy",
          "cudaEventDestroy",
          "ncclMemFree",
          "ncclCommWindowDeregister",
          "ncclRedOpDestroy",
          "ncclAllReduce",
          "ncclCommDestroy",
          "ncclCommAbort");

  private LosesItsDevice() {}

  public static void main(String[] arguments) {
    CudaDevice device = new CudaDevice(0);
    Communicator comm = Communicator.create(NcclUniqueId.create(), 1, 0, device);
    CudaStream stream = CudaStream.create(device);
    DeviceBuffer x = DeviceBuffer.allocate(device, DataType.FLOAT32, 4);
    DeviceBuffer memory = DeviceBuffer.allocateForWindow(device, DataType.FLOAT32, 1024);
    NcclWindow window = comm.registerWindow(memory);
    ReduceOp op = comm.createPreMulSum(DataType.FLOAT32, 2);
    CudaEvent event = CudaEvent.create(device);
    HostBuffer host = HostBuffer.allocate(device, 8);
    comm.allReduce(x, x, ReduceOp.SUM, stream);
    stream.synchronize();
    Communicator elsewhere = Communicator.create(NcclUniqueId.create(), 1, 0, new CudaDevice(1));

    Faults.inject("cudaStreamQuery:result=719");
    print("WAIT ", stream::synchronize);
    Faults.inject(
        "cudaStreamQuery:result=719;" + String.join(":result=999;", FORBIDDEN) + ":result=999");
    print("COLLECTIVE ", () -> comm.allReduce(x, x, ReduceOp.SUM, stream));
    print("ALLOCATION ", () -> DeviceBuffer.allocate(device, DataType.INT8, 1));
    print("SPLIT ", () -> comm.split(0, 0, CommunicatorConfig.DEFAULT));
    if (arguments[0].equals("abort")) {
      comm.abort();
    }
    for (AutoCloseable resource :
        List.<AutoCloseable>of(window, op, comm, event, host, x, memory, stream)) {
      print("CLOSE ", () -> close(resource));
    }
    Faults.clear();
    elsewhere.close();
    System.out.println("ENDED " + comm.state() + " " + elsewhere.state());
  }

  private static void close(AutoCloseable resource) {
    try {
      resource.close();
    } catch (RuntimeException e) {
      throw e;
    } catch (Exception e) {
      throw new AssertionError(e);
    }
  }

  private static void print(String what, Runnable call) {
    try {
      call.run();
      System.out.println(what + "is quiet");
    } catch (CudaException e) {
      System.out.println(what + e.errorCode() + " " + e.getMessage());
    } catch (RuntimeException e) {
      System.out.println(what + e);
    }
  }
}

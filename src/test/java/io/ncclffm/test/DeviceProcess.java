package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommException;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/**
 * A child JVM's main class: one rank of device collectives. Rank 0 creates the unique id and prints
 * it as {@code ID hex}, the others read it from standard input. Arguments: rank, size, and what to
 * do: {@code loop} all-reduces until something fails and prints {@code RUNNING} after the first
 * right result, {@code FAILED function peer milliseconds} at the end; {@code choose} prints what an
 * all-reduce would run by as {@code CHOICE}, or {@code REFUSED text}.
 */
final class DeviceProcess {
  private static final int COUNT = 4099;
  private static final Duration TIMEOUT = Duration.ofSeconds(2);

  private DeviceProcess() {}

  static NcclUniqueId meet(int rank) throws IOException {
    if (rank == 0) {
      NcclUniqueId id = NcclUniqueId.create();
      System.out.println("ID " + id.toHex());
      return id;
    }
    BufferedReader in =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
    return NcclUniqueId.fromHex(in.readLine());
  }

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id = meet(rank);
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT64, COUNT);
        Communicator communicator = Communicator.create(id, size, rank, device)) {
      if (arguments[2].equals("choose")) {
        try {
          DeviceCommunicator comm = DeviceCommunicator.create(communicator);
          System.out.println(
              "CHOICE "
                  + comm.choose(
                      DeviceFunction.ALL_REDUCE, DataType.INT64, COUNT, LaunchChoice.AUTO));
        } catch (IllegalArgumentException e) {
          System.out.println("REFUSED " + e.getMessage());
        }
        return;
      }
      DeviceCommunicator comm = DeviceCommunicator.create(communicator, TIMEOUT);
      loop(comm, x, stream);
      communicator.abort(); // a peer is gone: a close would wait for it
    }
  }

  private static void loop(DeviceCommunicator comm, DeviceBuffer x, CudaStream stream) {
    int size = comm.communicator().size();
    long[] values = new long[COUNT];
    try {
      for (long step = 0; ; step++) {
        for (int i = 0; i < COUNT; i++) {
          values[i] = (comm.communicator().rank() + 1) * (step + i);
        }
        x.copyFrom(values, stream);
        comm.allReduce(x, x, ReduceOp.SUM, stream);
        x.copyTo(values, stream);
        for (int i = 0; i < COUNT; i++) {
          if (values[i] != (step + i) * size * (size + 1) / 2) {
            throw new AssertionError("step " + step + ", element " + i + ": " + values[i]);
          }
        }
        if (step == 0) {
          System.out.println("RUNNING");
        }
      }
    } catch (NcclException e) { // the communicator may notice first
      DeviceCommException ofKernel = awaitKernel(comm);
      System.out.println(
          "FAILED "
              + ofKernel.operation()
              + " "
              + ofKernel.peer()
              + " "
              + ofKernel.waited().toMillis()
              + " "
              + ofKernel.getMessage());
    }
  }

  private static DeviceCommException awaitKernel(DeviceCommunicator comm) {
    long deadline = System.nanoTime() + TIMEOUT.multipliedBy(5).toNanos();
    while (System.nanoTime() - deadline < 0) {
      try {
        comm.throwIfFailed();
        Thread.onSpinWait();
      } catch (DeviceCommException e) {
        return e;
      }
    }
    throw new DeadlineException("the kernel did not end");
  }
}

package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;

/**
 * A child JVM's main class: one rank. Rank 0 creates the unique id and prints it, the others read
 * it from standard input. Arguments: rank, size, how many steps (0: until something fails).
 *
 * <p>Prints {@code ID hex}, {@code RUNNING} after the first right result, {@code DONE}, or {@code
 * FAILED} with the name of the result code, the milliseconds since the last step, and the message;
 * and {@code ENDED} when all is closed.
 */
final class RankProcess {
  private static final int COUNT = 4099;

  private RankProcess() {}

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    long steps = Long.parseLong(arguments[2]);
    DeviceSharing.prepare(size);
    NcclUniqueId id;
    if (rank == 0) {
      id = NcclUniqueId.create();
      System.out.println("ID " + id.toHex());
    } else {
      BufferedReader in =
          new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
      id = NcclUniqueId.fromHex(in.readLine());
    }
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    long start = System.nanoTime();
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT64, COUNT);
        Communicator communicator = Communicator.create(id, size, rank, device)) {
      run(communicator, x, stream, steps);
    } catch (NcclException e) {
      report(e, start);
    }
    System.out.println("ENDED");
  }

  private static void run(Communicator comm, DeviceBuffer x, CudaStream stream, long steps) {
    long[] values = new long[COUNT];
    long last = System.nanoTime();
    try {
      for (long step = 0; steps == 0 || step < steps; step++) {
        for (int i = 0; i < COUNT; i++) {
          values[i] = (comm.rank() + 1) * (step + i);
        }
        x.copyFrom(values, stream);
        comm.allReduce(x, x, ReduceOp.SUM, stream);
        x.copyTo(values, stream);
        last = System.nanoTime();
        for (int i = 0; i < COUNT; i++) {
          long expected = (step + i) * comm.size() * (comm.size() + 1) / 2;
          if (values[i] != expected) {
            throw new AssertionError(
                "step " + step + ", element " + i + ": " + values[i] + ", not " + expected);
          }
        }
        if (step == 0) {
          System.out.println("RUNNING");
        }
      }
      System.out.println("DONE");
    } catch (NcclException e) {
      report(e, last);
    }
  }

  private static void report(NcclException e, long since) {
    System.out.println(
        "FAILED "
            + NcclException.resultName(e.resultCode())
            + " "
            + (System.nanoTime() - since) / 1_000_000
            + " "
            + e.getMessage());
  }
}

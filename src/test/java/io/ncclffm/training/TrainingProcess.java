package io.ncclffm.training;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclUniqueId;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;

/**
 * One rank as a process: {@code rank size route}. Rank 0 prints {@code ID hex}, which the others
 * read as a line; each prints {@code LOSSES} and {@code ACCURACY}.
 */
public final class TrainingProcess {
  private TrainingProcess() {}

  public static void main(String[] arguments) throws Exception {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id;
    if (rank == 0) {
      id = NcclUniqueId.create();
      System.out.println("ID " + id.toHex());
    } else {
      InputStreamReader in = new InputStreamReader(System.in, StandardCharsets.US_ASCII);
      id = NcclUniqueId.fromHex(new BufferedReader(in).readLine());
    }
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    try (CudaStream stream = CudaStream.create(device);
        Communicator communicator = Communicator.create(id, size, rank, device)) {
      Training.Result result =
          Training.run(communicator, stream, Training.Route.valueOf(arguments[2]));
      StringBuilder losses = new StringBuilder("LOSSES");
      for (double loss : result.losses()) {
        losses.append(' ').append(loss);
      }
      System.out.println(losses);
      System.out.println("ACCURACY " + result.accuracy());
    }
  }
}

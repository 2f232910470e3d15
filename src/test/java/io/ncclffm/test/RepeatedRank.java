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
import java.time.Duration;

/**
 * A child JVM's main class: one rank of one communicator after the other. For each line {@code
 * round rank size id} of its standard input it joins, prints {@code RUNNING round} after the first
 * right result, and runs one collective after the other without a pause until one fails; then it
 * closes everything and prints {@code OVER round}, the milliseconds since the last result, the
 * threads and descriptors it holds, the result's name and the message.
 */
final class RepeatedRank {
  static final Duration WATCHDOG = Duration.ofSeconds(5);

  // 4 MiB: nearly all the time is spent inside of a collective.
  private static final int COUNT = 1 << 19;

  private RepeatedRank() {}

  public static void main(String[] arguments) throws IOException {
    BufferedReader in =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
    DeviceSharing.prepare(Integer.parseInt(arguments[0]), 1);
    CudaDevice.count();
    System.out.println("READY");
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      String[] words = line.split(" ");
      int rank = Integer.parseInt(words[1]);
      String over = round(words[0], rank, Integer.parseInt(words[2]), words[3]);
      System.out.println("OVER " + words[0] + " " + over);
    }
    System.out.println("ENDED");
  }

  private static String round(String round, int rank, int size, String id) throws IOException {
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    String failure;
    long last = System.nanoTime();
    long millis;
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT64, COUNT);
        Communicator comm = Communicator.create(NcclUniqueId.fromHex(id), size, rank, device)) {
      x.fill((byte) 0, stream);
      try {
        for (long step = 0; ; step++) {
          x.copyFrom(new long[] {step + rank}, stream);
          comm.allReduce(x, x, ReduceOp.SUM, stream);
          stream.synchronize();
          last = System.nanoTime();
          if (step == 0) {
            check(x, stream, size);
            comm.watch(WATCHDOG);
            System.out.println("RUNNING " + round);
          }
        }
      } catch (NcclException e) {
        millis = (System.nanoTime() - last) / 1_000_000;
        failure = NcclException.resultName(e.resultCode()) + " " + e.getMessage();
      }
    }
    Resources held = Resources.now();
    return millis + " " + held.threads() + " " + held.descriptors() + " " + failure;
  }

  private static void check(DeviceBuffer x, CudaStream stream, int size) {
    long[] first = new long[1];
    x.copyTo(first, stream);
    long expected = size * (size - 1L) / 2;
    if (first[0] != expected) {
      throw new AssertionError("sum of the ranks is " + first[0] + ", not " + expected);
    }
  }
}

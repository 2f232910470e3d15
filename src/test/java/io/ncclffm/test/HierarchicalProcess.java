package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.HierarchicalAllReduce;
import java.io.IOException;

/**
 * A child JVM's main class: one rank of hierarchical all-reduces. Arguments: rank, size, ranks of a
 * team (0: as NCCL finds them). Meets as {@link DeviceProcess} does; prints {@code TEAMS n teams of
 * m}, then {@code RIGHT} after sums, maxima and averages of several counts.
 */
final class HierarchicalProcess {
  private static final int[] COUNTS = {1, 5, 1000, 1003, 300_001};

  private HierarchicalProcess() {}

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    int teamSize = Integer.parseInt(arguments[2]);
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id = DeviceProcess.meet(rank);
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    int most = COUNTS[COUNTS.length - 1];
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer x = DeviceBuffer.allocate(device, DataType.INT64, most);
        Communicator communicator = Communicator.create(id, size, rank, device);
        HierarchicalAllReduce reducer =
            teamSize == 0
                ? HierarchicalAllReduce.create(communicator)
                : HierarchicalAllReduce.create(
                    communicator, teamSize, DeviceCommunicatorConfig.DEFAULT)) {
      System.out.println("TEAMS " + reducer.teams() + " teams of " + reducer.teamSize());
      for (int count : COUNTS) {
        for (ReduceOp op : new ReduceOp[] {ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG}) {
          check(reducer, x, count, op, rank, size, stream);
        }
      }
      System.out.println("RIGHT");
    }
  }

  private static void check(
      HierarchicalAllReduce reducer,
      DeviceBuffer x,
      int count,
      ReduceOp op,
      int rank,
      int size,
      CudaStream stream) {
    long[] values = new long[count];
    for (int i = 0; i < count; i++) {
      values[i] = value(rank, i);
    }
    x.copyFrom(values, stream);
    reducer.allReduce(x, 0, x, 0, count, op, stream);
    x.copyTo(values, stream);
    for (int i = 0; i < count; i++) {
      long sum = 0;
      long max = Long.MIN_VALUE;
      for (int r = 0; r < size; r++) {
        sum += value(r, i);
        max = Math.max(max, value(r, i));
      }
      long expected = op == ReduceOp.SUM ? sum : op == ReduceOp.MAX ? max : sum / size;
      if (values[i] != expected) {
        throw new AssertionError(
            op + " of " + count + ", element " + i + ": " + values[i] + ", not " + expected);
      }
    }
  }

  private static long value(int rank, int i) {
    return (rank * 37L - 50) * (i + 1) % 10_007;
  }
}

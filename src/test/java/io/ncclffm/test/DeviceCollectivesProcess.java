package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.lang.foreign.MemorySegment;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.zip.CRC32;

/**
 * A child JVM's main class: one rank of all device collectives with all types, in buffers and in
 * windows. Arguments: rank, size. Meets as {@link DeviceProcess} does; prints {@code RIGHT calls},
 * or {@code WRONG} and the first that was, and {@code SUM hex} of all results that must be the same
 * on all ranks.
 */
final class DeviceCollectivesProcess {
  private final DeviceCommunicator comm;
  private final CudaStream stream;
  private final int rank;
  private final List<String> failures = new ArrayList<>();
  private final CRC32 sum = new CRC32();
  private long calls;

  private DeviceCollectivesProcess(DeviceCommunicator comm, CudaStream stream) {
    this.comm = comm;
    this.stream = stream;
    this.rank = comm.communicator().rank();
  }

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id = DeviceProcess.meet(rank);
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    // All memory is allocated before the first kernel that waits for a peer, and freed after the
    // last has ended on all ranks.
    try (CudaStream stream = CudaStream.create(device);
        DeviceBuffer send = DeviceBuffer.allocate(device, DataType.UINT8, DeviceCases.SEND_BYTES);
        DeviceBuffer recv =
            DeviceBuffer.allocate(device, DataType.UINT8, DeviceCases.RESULT_BYTES);
        Communicator communicator = Communicator.create(id, size, rank, device);
        LsaWindow sendWindow = LsaWindow.create(communicator, DeviceCases.SEND_BYTES);
        LsaWindow recvWindow = LsaWindow.create(communicator, DeviceCases.RESULT_BYTES);
        DeviceCommunicator comm = DeviceCommunicator.create(communicator, DeviceCases.CONFIG)) {
      DeviceCollectivesProcess process = new DeviceCollectivesProcess(comm, stream);
      boolean withLl128 = DeviceCase.carriesLl128(comm);
      List<DataType> types = DeviceCases.types();
      List<ReduceOp> others = DeviceCases.OPS.subList(1, DeviceCases.OPS.size());
      for (int i = 0; i < types.size(); i++) {
        DataType type = types.get(i);
        for (ReduceOp op : List.of(ReduceOp.SUM, others.get(i % others.size()))) {
          process.runInBuffers(
              DeviceCases.make(type, op, size, false, withLl128), type, send, recv);
          process.runInWindows(
              DeviceCases.make(type, op, size, true, withLl128), type, sendWindow, recvWindow);
        }
      }
      comm.barrier(stream);
      stream.synchronize();
      System.out.println(
          process.failures.isEmpty()
              ? "RIGHT " + process.calls
              : "WRONG " + process.failures.get(0) + ", seed " + DeviceCases.SEED);
      System.out.printf("SUM %08x%n", process.sum.getValue());
    }
  }

  private static MemorySegment segment(byte[] bytes) {
    return MemorySegment.ofArray(bytes);
  }

  private static DeviceBuffer as(DataType type, DeviceBuffer bytes) {
    return DeviceBuffer.wrap(bytes.device(), type, bytes.bytes() / type.bytes(), bytes.address(0));
  }

  private void runInBuffers(
      DeviceCases cases, DataType type, DeviceBuffer sendBytes, DeviceBuffer recvBytes) {
    DeviceBuffer send = as(type, sendBytes);
    DeviceBuffer recv = as(type, recvBytes);
    int inputsAt = rank * 3 % 8; // each rank's data is aligned differently
    byte[] image = cases.image(rank);
    send.copyFrom(segment(cases.inputs(rank)), inputsAt, stream);
    recv.copyFrom(segment(image), stream);
    for (DeviceCase c : cases.all()) {
      c.enqueue(comm, send, inputsAt, recv, stream);
    }
    check(cases, image, recv);
    byte[] sent = new byte[cases.inputs(rank).length];
    send.copyTo(segment(sent), inputsAt, stream);
    if (!Arrays.equals(sent, cases.inputs(rank))) {
      failures.add(type + ", rank " + rank + ": a send buffer was changed");
    }
  }

  private void runInWindows(DeviceCases cases, DataType type, LsaWindow send, LsaWindow recv) {
    byte[] image = cases.image(rank);
    send.local().copyFrom(segment(cases.inputs(rank)), stream);
    recv.local().copyFrom(segment(image), stream);
    comm.barrier(stream); // peers store where the image went
    for (DeviceCase c : cases.all()) {
      c.enqueue(comm, type, send, recv, stream);
    }
    check(cases, image, recv.local());
    comm.barrier(stream);
  }

  private void check(DeviceCases cases, byte[] image, DeviceBuffer results) {
    byte[] after = new byte[image.length];
    results.copyTo(segment(after), stream);
    stream.synchronize();
    failures.addAll(cases.check(rank, image, after));
    cases.addTo(sum, after);
    calls += cases.all().size();
  }
}

package io.ncclffm.test;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import java.util.ArrayList;
import java.util.List;

/**
 * A buffer for each rank of a world, allocated and freed by the test's own thread while no rank
 * runs: where ranks share a GPU, allocating between two ranks' launches can stall both.
 */
final class RankBuffers implements AutoCloseable {
  private final List<DeviceBuffer> buffers = new ArrayList<>();

  private RankBuffers() {}

  static RankBuffers allocate(LocalWorld world, DataType type, long count) {
    RankBuffers all = new RankBuffers();
    int devices = CudaDevice.count();
    for (int r = 0; r < world.size(); r++) {
      all.buffers.add(DeviceBuffer.allocate(new CudaDevice(r % devices), type, count));
    }
    return all;
  }

  /** Memory that can be registered as windows. */
  static RankBuffers allocateForWindows(LocalWorld world, DataType type, long count) {
    RankBuffers all = new RankBuffers();
    int devices = CudaDevice.count();
    for (int r = 0; r < world.size(); r++) {
      all.buffers.add(DeviceBuffer.allocateForWindow(new CudaDevice(r % devices), type, count));
    }
    return all;
  }

  DeviceBuffer of(LocalWorld.Rank rank) {
    return buffers.get(rank.rank());
  }

  DeviceBuffer of(int rank) {
    return buffers.get(rank);
  }

  @Override
  public void close() {
    buffers.forEach(DeviceBuffer::close);
  }
}

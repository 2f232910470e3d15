package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.KernelModule;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskSymbol;
import java.util.Iterator;
import java.util.Map;

/**
 * What the Java blocks of README.md, docs/ and the Javadoc take for granted: a block that is no
 * class becomes a method of a subclass of this one. Nothing here is run.
 */
abstract class DocumentationSnippet {
  static final TaskSymbol GRADIENTS = TaskSymbol.of("gradients");

  LocalWorld world;
  LocalWorld.Rank rank;
  Communicator communicator;
  CudaDevice device;
  CudaStream stream;
  CudaStream otherStream;
  DeviceCommunicator deviceCommunicator;
  TaskQueue queue;
  KernelModule module;
  DataType type;
  DeviceBuffer buffer;
  DeviceBuffer x;
  DeviceBuffer send;
  DeviceBuffer recv;
  DeviceBuffer in;
  DeviceBuffer out;
  DeviceBuffer residual;
  DeviceBuffer weight;
  DeviceBuffer weights;
  DeviceBuffer bf16Weights;
  DeviceBuffer mean;
  DeviceBuffer variance;
  DeviceBuffer gradients;
  DeviceBuffer results;
  float[] data;
  long[] counts;
  long count;
  long offset;
  long length;
  long tokens;
  int peer;
  int blocks;
  int step;
  int steps;
  int layers;

  abstract void backward(int layer, DeviceBuffer gradient, CudaStream stream);

  abstract void update(DeviceBuffer gradients, CudaStream stream);

  // Of Spark, which the build does not have.

  JavaRDD<float[]> input;

  interface JavaRDD<T> {
    Barrier<T> barrier();
  }

  interface Barrier<T> {
    JavaRDD<float[]> mapPartitions(Work<T> work);
  }

  interface Work<T> {
    Iterator<float[]> call(Iterator<T> rows) throws Exception;
  }

  abstract static class BarrierTaskContext {
    static native BarrierTaskContext get();

    abstract int partitionId();

    abstract Object[] getTaskInfos();

    abstract Map<String, Resource> resourcesJMap();

    abstract String[] allGather(String mine);
  }

  interface Resource {
    String[] addresses();
  }
}

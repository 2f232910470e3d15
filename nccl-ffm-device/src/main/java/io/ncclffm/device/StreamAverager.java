package io.ncclffm.device;

import io.ncclffm.core.CudaEvent;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceBuffer;

/** Beside the stream that computes, in step with it by events. */
final class StreamAverager implements GradientAverager {
  interface AllReduce {
    void enqueue(DeviceBuffer bucket, CudaStream stream);
  }

  private final CudaStream own;
  private final CudaEvent ready;
  private final CudaEvent averaged;
  private final AllReduce allReduce;

  StreamAverager(CudaStream own, AllReduce allReduce) {
    this.own = own;
    this.ready = CudaEvent.create(own.device());
    this.averaged = CudaEvent.create(own.device());
    this.allReduce = allReduce;
  }

  @Override
  public void average(DeviceBuffer bucket, int index, CudaStream stream) {
    ready.record(stream);
    own.await(ready);
    allReduce.enqueue(bucket, own);
  }

  @Override
  public void finish(CudaStream stream) {
    averaged.record(own);
    stream.await(averaged);
  }

  @Override
  public void close() {
    try (ready;
        averaged) {
      own.close();
    }
  }
}

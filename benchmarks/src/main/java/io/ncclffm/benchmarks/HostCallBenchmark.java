package io.ncclffm.benchmarks;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import java.util.concurrent.TimeUnit;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OperationsPerInvocation;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.TearDown;
import org.openjdk.jmh.annotations.Warmup;

/**
 * What a host call costs, with one rank that talks to itself: {@code mvn -Pjmh} shows bytes
 * allocated a call (gc.alloc.rate.norm), which must be nought, and the time, which means something
 * on a GPU only. The stream is waited for after every {@value #BATCH} calls, to keep it short.
 */
@State(Scope.Benchmark)
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.NANOSECONDS)
@Fork(value = 1, jvmArgsAppend = "--enable-native-access=ALL-UNNAMED")
@Warmup(iterations = 5, time = 1)
@Measurement(iterations = 5, time = 1)
public class HostCallBenchmark {
  static final int BATCH = 100;
  private static final int COUNT = 16;

  private CudaStream stream;
  private DeviceBuffer memory;
  private Communicator comm;
  private NcclWindow window;
  private Runnable sendAndRecv;

  @Setup
  public void open() {
    CudaDevice device = new CudaDevice(0);
    stream = CudaStream.create(device);
    memory = DeviceBuffer.allocateForWindow(device, DataType.FLOAT32, 2 * COUNT);
    memory.fill((byte) 0, stream);
    comm = Communicator.create(NcclUniqueId.create(), 1, 0, device);
    window = comm.registerWindow(memory, NcclWindow.Flag.COLLECTIVE_SYMMETRIC);
    sendAndRecv =
        () -> {
          comm.send(memory, 0, COUNT, 0, stream);
          comm.recv(memory, COUNT, COUNT, 0, stream);
        };
  }

  @TearDown
  public void close() {
    comm.close();
    memory.close();
    stream.close();
  }

  @Benchmark
  @OperationsPerInvocation(BATCH)
  public void allReduce() {
    for (int i = 0; i < BATCH; i++) {
      comm.allReduce(memory, 0, memory, COUNT, COUNT, ReduceOp.SUM, stream);
    }
    stream.synchronize();
  }

  @Benchmark
  @OperationsPerInvocation(BATCH)
  public void sendAndRecvInAGroup() {
    for (int i = 0; i < BATCH; i++) {
      NcclGroup.run(sendAndRecv);
    }
    stream.synchronize();
  }

  @Benchmark
  @OperationsPerInvocation(BATCH)
  public void putSignalAndWaitSignal() {
    for (int i = 0; i < BATCH; i++) {
      comm.putSignal(memory, 0, COUNT, 0, window, COUNT * Float.BYTES, stream);
      comm.waitSignal(0, 1, stream);
    }
    stream.synchronize();
  }

  @Benchmark
  @OperationsPerInvocation(BATCH)
  public void signalAndWaitSignal() {
    for (int i = 0; i < BATCH; i++) {
      comm.signal(0, stream);
      comm.waitSignal(0, 1, stream);
    }
    stream.synchronize();
  }
}

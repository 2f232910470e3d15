package io.ncclffm.benchmarks;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.util.concurrent.TimeUnit;
import org.bytedeco.cuda.global.cudart;
import org.bytedeco.cuda.global.nccl;
import org.bytedeco.cuda.nccl.ncclComm;
import org.bytedeco.cuda.nccl.ncclUniqueId;
import org.bytedeco.javacpp.IntPointer;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.TearDown;
import org.openjdk.jmh.annotations.Warmup;

/**
 * What a downcall costs that does next to nothing: through the bindings, through the API, and
 * through JavaCPP's presets of CUDA, which find libnccl.so.2 and libcudart.so.13 by
 * LD_LIBRARY_PATH. {@link Bench} measures the same calls beside their C twins.
 */
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.NANOSECONDS)
@Fork(value = 3, jvmArgsAppend = "--enable-native-access=ALL-UNNAMED")
@Warmup(iterations = 3, time = 1)
@Measurement(iterations = 5, time = 1)
public class DowncallBenchmark {
  /** One rank, and memory for what a call gives. */
  @State(Scope.Benchmark)
  public static class Ffm {
    private final Runnable nothing = () -> {};
    private Communicator comm;
    private MemorySegment handle;
    private MemorySegment out;

    @Setup
    public void open() {
      comm = Communicator.create(NcclUniqueId.create(), 1, 0, new CudaDevice(0));
      handle = comm.handle();
      out = Arena.global().allocate(ValueLayout.JAVA_INT);
    }

    @TearDown
    public void close() {
      comm.close();
    }
  }

  /** The same by JavaCPP. */
  @State(Scope.Benchmark)
  public static class JavaCpp {
    private final ncclComm comm = new ncclComm();
    private final IntPointer out = new IntPointer(1);

    @Setup
    public void open() {
      ncclUniqueId id = new ncclUniqueId();
      int result = nccl.ncclGetUniqueId(id) | nccl.ncclCommInitRank(comm, 1, id, 0);
      if (result != 0) {
        throw new IllegalStateException("no communicator: " + result);
      }
    }

    @TearDown
    public void close() {
      nccl.ncclCommDestroy(comm);
    }
  }

  @Benchmark
  public int ncclGetVersion(Ffm state) {
    return NcclH.ncclGetVersion(state.out);
  }

  @Benchmark
  public int ncclCommCount(Ffm state) {
    return NcclH.ncclCommCount(state.handle, state.out);
  }

  @Benchmark
  public int cudaGetDevice(Ffm state) {
    return CudartH.cudaGetDevice(state.out);
  }

  @Benchmark
  public int ncclGroupStartEnd(Ffm state) {
    return NcclH.ncclGroupStart() | NcclH.ncclGroupEnd();
  }

  @Benchmark
  public void groupThroughTheApi(Ffm state) {
    NcclGroup.run(state.nothing);
  }

  @Benchmark
  public int javaCppNcclGetVersion(JavaCpp state) {
    return nccl.ncclGetVersion(state.out);
  }

  @Benchmark
  public int javaCppNcclCommCount(JavaCpp state) {
    return nccl.ncclCommCount(state.comm, state.out);
  }

  @Benchmark
  public int javaCppCudaGetDevice(JavaCpp state) {
    return cudart.cudaGetDevice(state.out);
  }

  @Benchmark
  public int javaCppNcclGroupStartEnd(JavaCpp state) {
    return nccl.ncclGroupStart() | nccl.ncclGroupEnd();
  }
}

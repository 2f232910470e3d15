package io.ncclffm.benchmarks;

import java.util.function.IntSupplier;
import org.bytedeco.cuda.global.cudart;
import org.bytedeco.cuda.global.nccl;
import org.bytedeco.cuda.nccl.ncclComm;
import org.bytedeco.cuda.nccl.ncclUniqueId;
import org.bytedeco.javacpp.IntPointer;

/**
 * The calls of {@link Measure} through the JavaCPP presets of CUDA: {@code JavaCppCalls QUICK
 * CALL}. A class of its own, since only a process that runs it may load them: they take the
 * system's libcudart and libnccl.
 */
public final class JavaCppCalls {
  private JavaCppCalls() {}

  public static void main(String[] arguments) {
    boolean quick = Boolean.parseBoolean(arguments[0]);
    String name = arguments[1];
    try (IntPointer out = new IntPointer(1);
        ncclUniqueId id = new ncclUniqueId();
        ncclComm comm = new ncclComm()) {
      check("ncclGetUniqueId", nccl.ncclGetUniqueId(id));
      check("ncclCommInitRank", nccl.ncclCommInitRank(comm, 1, id, 0));
      switch (name) {
        case "ncclGetVersion" -> call(name, quick, () -> nccl.ncclGetVersion(out));
        case "ncclCommCount" -> call(name, quick, () -> nccl.ncclCommCount(comm, out));
        case "cudaGetDevice" -> call(name, quick, () -> cudart.cudaGetDevice(out));
        case "ncclGroupStart+End" ->
            call(name, quick, () -> nccl.ncclGroupStart() | nccl.ncclGroupEnd());
        default -> throw new IllegalArgumentException("unknown call " + name);
      }
      check("ncclCommDestroy", nccl.ncclCommDestroy(comm));
    }
  }

  private static void call(String name, boolean quick, IntSupplier call) {
    String backend = System.getenv("NCCLFFM_BACKEND");
    double[] ns = Measure.nanos(name, quick, call);
    Measure.print(backend, "javacpp", "host", name, 1, 0, "ns", ns);
  }

  private static void check(String call, int result) {
    if (result != 0) {
      throw new IllegalStateException(call + " failed: " + result);
    }
  }
}

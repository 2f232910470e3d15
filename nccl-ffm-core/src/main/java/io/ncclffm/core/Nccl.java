package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.JAVA_INT;

import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.internal.Library;
import io.ncclffm.core.internal.NativeLibraries;
import io.ncclffm.core.internal.NativeText;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/** What is loaded, and what it can do. */
public final class Nccl {
  private Nccl() {}

  /**
   * The libraries in use, which are loaded if they are not yet.
   *
   * @throws NativeLibraryException if none can be loaded
   */
  public static Versions versions() {
    NativeLibraries.Loaded loaded = NativeLibraries.load();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(JAVA_INT);
      int rc = CudartH.cudaRuntimeGetVersion(out);
      if (rc != 0) {
        throw new CudaException("cudaRuntimeGetVersion", rc, "");
      }
      int cudart = out.get(JAVA_INT, 0);
      return new Versions(
          loaded.backend(),
          loaded.reason(),
          describe(loaded.cudart(), cudaText(cudart), cudaText(CudartH.CUDART_VERSION())),
          describe(
              loaded.nccl(),
              NativeLibraries.versionText(loaded.ncclVersion()),
              NativeLibraries.versionText(NcclH.NCCL_VERSION_CODE())),
          describeShim(loaded.shim(), out));
    }
  }

  /** What a rank does with its communicator in {@link #run}. */
  @FunctionalInterface
  public interface CommunicatorTask<E extends Exception> {
    void run(Communicator communicator) throws E;
  }

  /**
   * Makes a communicator, runs a task with it, and ends it as befits: finalized and destroyed when
   * the task returns, aborted when it throws, so that the other ranks learn of it instead of
   * waiting in a destroy. (A {@code close()} cannot see the exception.) The communicator is
   * non-blocking unless the configuration says otherwise: only then can the waits have an end.
   *
   * @param timeout for becoming ready and for finalizing
   */
  public static <E extends Exception> void run(
      NcclUniqueId id,
      int size,
      int rank,
      CudaDevice device,
      CommunicatorConfig config,
      Duration timeout,
      CommunicatorTask<E> task)
      throws E {
    Communicator communicator =
        Communicator.create(id, size, rank, device, config.nonBlockingUnlessSet());
    try {
      communicator.awaitReady(timeout);
      task.run(communicator);
      communicator.finalizeAndClose(timeout);
    } catch (Throwable t) {
      try {
        communicator.abort();
      } catch (RuntimeException e) {
        t.addSuppressed(e);
      }
      throw t;
    }
  }

  private static @Nullable LibraryVersion describeShim(@Nullable Library shim, MemorySegment out) {
    if (shim == null) {
      return null;
    }
    int rc = ShimH.ncclFfmGetAbiVersion(out);
    if (rc != 0) {
      throw NcclException.of("ncclFfmGetAbiVersion", rc, "");
    }
    String version =
        "ABI " + out.get(JAVA_INT, 0) + ", " + NativeText.copy(ShimH.ncclFfmGetBuildInfo());
    return describe(shim, version, "ABI " + ShimH.NCCLFFM_ABI_VERSION());
  }

  private static LibraryVersion describe(Library library, String version, String header) {
    return new LibraryVersion(
        version, header, library.file(), library.origin(), NativeLibraries.otherCopies(library));
  }

  private static String cudaText(int code) {
    return code / 1000 + "." + code % 1000 / 10;
  }

  /**
   * Whether the loaded libnccl has a function.
   *
   * @param function a C name, as {@code ncclCommShrink}
   */
  public static boolean supports(String function) {
    return NativeLibraries.ncclHas(function);
  }
}

package io.ncclffm.test;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;

/**
 * A child JVM's main class: two ranks on two devices have a window, then rank 0's device is lost.
 * Both close. Prints what is left: {@code DEVICE} with the free bytes before and after, {@code
 * PINNED} with the number of mappings of windows in host memory.
 */
final class LosesOneDevice {
  private static final String NOTHING_NATIVE =
      String.join(
              ":result=999;",
              "cudaStreamQuery:result=719;cudaSetDevice",
              "cudaFree",
              "ncclMemFree",
              "cudaHostUnregister",
              "cudaIpcCloseMemHandle",
              "cudaDeviceDisablePeerAccess",
              "ncclCommWindowDeregister")
          + ":result=999";

  private LosesOneDevice() {}

  public static void main(String[] arguments) throws IOException {
    LsaProvider provider = LsaProvider.valueOf(arguments[0]);
    CyclicBarrier both = new CyclicBarrier(2);
    try (LocalWorld world = TestRanks.open(2)) {
      long before = Resources.freeDeviceBytes(new CudaDevice(1));
      world.run(
          r -> {
            LsaWindow window = LsaWindow.create(r.communicator(), 64 << 20, provider);
            both.await(30, TimeUnit.SECONDS);
            if (r.rank() == 0) {
              Faults.inject("cudaStreamQuery:result=719");
              try {
                r.stream().synchronize();
                throw new AssertionError("the device is not lost");
              } catch (CudaException e) {
                System.out.println("LOST " + r.device().isLost() + " " + e.getMessage());
              }
              Faults.inject(NOTHING_NATIVE);
              window.close();
              Faults.clear();
            }
            both.await(30, TimeUnit.SECONDS);
            if (r.rank() == 1) {
              try {
                window.close();
              } catch (LsaException e) {
                System.out.println("TOLD " + e.getMessage());
              }
            }
          });
      System.out.println("DEVICE " + before + " " + Resources.freeDeviceBytes(new CudaDevice(1)));
      try (Stream<String> lines = Files.lines(Path.of("/proc/self/maps"))) {
        System.out.println(
            "PINNED " + lines.filter(line -> line.contains("ncclffm-window")).count());
      }
    }
    System.out.println("ENDED");
  }
}

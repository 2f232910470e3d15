package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

/**
 * A child JVM's main class, one of two ranks: both make a window and a device communicator, then
 * rank 0 makes or closes something for which rank 1 does not come. Its wait is cut short by an
 * interrupt, which ends it as the deadline would, with NCCL's kernel still waiting. Then rank 0
 * closes all it has. Arguments: rank, provider, "window", "device" or "close".
 *
 * <p>Rank 0 prints {@code ID hex}, {@code VAIN text}, {@code LEFT} with the free bytes of its
 * device before and after, and {@code ENDED}. Rank 1 aborts when it gets a second line.
 */
final class LsaWaitsInVain {
  private LsaWaitsInVain() {}

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    LsaProvider provider = LsaProvider.valueOf(arguments[1]);
    DeviceSharing.prepare(2, 1);
    BufferedReader in =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
    NcclUniqueId id;
    if (rank == 0) {
      id = NcclUniqueId.create();
      System.out.println("ID " + id.toHex());
    } else {
      id = NcclUniqueId.fromHex(in.readLine());
    }
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    Communicator communicator = Communicator.create(id, 2, rank, device);
    long before = Resources.freeDeviceBytes(device);
    LsaWindow window = LsaWindow.create(communicator, 1 << 20, provider);
    DeviceCommunicatorConfig config = DeviceCommunicatorConfig.builder().provider(provider).build();
    DeviceCommunicator comm = DeviceCommunicator.create(communicator, config);
    if (rank == 1) {
      in.readLine();
      communicator.abort();
      System.out.println("ENDED");
      return;
    }
    interruptInNcclsKernel(Thread.currentThread());
    try {
      switch (arguments[2]) {
        case "window" -> LsaWindow.create(communicator, 1 << 16, provider);
        case "device" -> DeviceCommunicator.create(communicator, config);
        case "close" -> window.close();
        default -> throw new AssertionError(arguments[2]);
      }
      throw new AssertionError("rank 1 did not come, but all is well");
    } catch (DeadlineException e) {
      System.out.println("VAIN " + e.getMessage() + " " + communicator.state());
    }
    Thread.interrupted();
    for (AutoCloseable resource : List.<AutoCloseable>of(window, comm, communicator)) {
      try {
        resource.close();
      } catch (Exception e) {
        throw new AssertionError("close of " + resource, e);
      }
    }
    System.out.println("LEFT " + before + " " + Resources.freeDeviceBytes(device));
    System.out.println("ENDED");
  }

  /** From another thread, once this one waits for the all-gather of the ranks, not for a copy. */
  private static void interruptInNcclsKernel(Thread waiting) {
    Thread.ofPlatform()
        .daemon()
        .start(
            () -> {
              long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
              int seen = 0; // in a row: the wait for a copy is over at once
              while (seen < 200 && System.nanoTime() - deadline < 0) {
                seen = isInNcclsKernel(waiting) ? seen + 1 : 0;
                LockSupport.parkNanos(1_000_000);
              }
              waiting.interrupt();
            });
  }

  private static boolean isInNcclsKernel(Thread waiting) {
    List<String> methods =
        Arrays.stream(waiting.getStackTrace()).map(StackTraceElement::getMethodName).toList();
    return methods.contains("allGatherByNccl") && methods.contains("synchronize");
  }
}

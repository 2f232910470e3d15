package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DeviceSharing;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaPath;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;

/**
 * A child JVM's main class: one rank that makes windows by the provider given, exchanges patterns
 * and closes. Arguments: rank, size, provider or "any", rounds, what to do in between ("" or
 * "abort" or "access").
 *
 * <p>Prints {@code ID hex} on rank 0, {@code PROVIDER name paths}, {@code LEFT} with descriptors,
 * mappings and free bytes of the device before and after the rounds, {@code REFUSED text} if there
 * is no window, and {@code ENDED}.
 */
final class LsaProcess {
  private LsaProcess() {}

  public static void main(String[] arguments) throws IOException {
    int rank = Integer.parseInt(arguments[0]);
    int size = Integer.parseInt(arguments[1]);
    LsaProvider provider = arguments[2].equals("any") ? null : LsaProvider.valueOf(arguments[2]);
    int rounds = Integer.parseInt(arguments[3]);
    DeviceSharing.prepare(size, 1);
    NcclUniqueId id;
    if (rank == 0) {
      id = NcclUniqueId.create();
      System.out.println("ID " + id.toHex());
    } else {
      BufferedReader in =
          new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
      id = NcclUniqueId.fromHex(in.readLine());
    }
    CudaDevice device = new CudaDevice(rank % CudaDevice.count());
    try (CudaStream stream = CudaStream.create(device);
        Communicator communicator = Communicator.create(id, size, rank, device);
        WindowPatterns patterns = new WindowPatterns(communicator, stream)) {
      try {
        exchange(communicator, provider, patterns, 2);
        long[] before = usage(device);
        exchange(communicator, provider, patterns, rounds);
        long[] after = usage(device);
        System.out.printf(
            "LEFT %d %d %d %d %d %d%n",
            before[0], after[0], before[1], after[1], before[2], after[2]);
        if (arguments[4].equals("abort")) {
          abortWithAnOpenWindow(communicator, provider);
        } else if (arguments[4].equals("access")) {
          CudaDevice peer = new CudaDevice((1 - rank) % CudaDevice.count());
          String foundOff = accessWithWindows(communicator, provider, peer);
          enableAccess(device, peer);
          String foundOn = accessWithWindows(communicator, provider, peer);
          System.out.println("ACCESS found off: " + foundOff + "; found on: " + foundOn);
        }
      } catch (LsaException e) {
        System.out.println("REFUSED " + e.getMessage().replace("\n", " | "));
      }
    }
    System.out.println("ENDED");
  }

  private static void abortWithAnOpenWindow(Communicator communicator, LsaProvider provider) {
    LsaWindow open;
    try {
      open = LsaWindow.create(communicator, 1 << 16, provider);
    } catch (NcclException e) { // another rank has made its window and aborted
      communicator.abort();
      return;
    }
    communicator.abort();
    open.close();
  }

  private static String accessWithWindows(
      Communicator communicator, LsaProvider provider, CudaDevice peer) {
    CudaDevice device = communicator.device();
    LsaWindow one = LsaWindow.create(communicator, 4096, provider);
    LsaWindow two = LsaWindow.create(communicator, 4096, provider);
    one.close();
    boolean during = hasAccess(device, peer);
    two.close();
    return "one window "
        + (during ? "on" : "off")
        + ", none "
        + (hasAccess(device, peer) ? "on" : "off");
  }

  private static boolean enableAccess(CudaDevice from, CudaDevice to) {
    from.makeCurrent();
    int rc = CudartH.cudaDeviceEnablePeerAccess(to.ordinal(), 0);
    int unused = CudartH.cudaGetLastError(); // clears it
    return rc == 0;
  }

  /** Leaves it as it is. */
  private static boolean hasAccess(CudaDevice from, CudaDevice to) {
    boolean was = !enableAccess(from, to);
    if (!was) {
      int rc = CudartH.cudaDeviceDisablePeerAccess(to.ordinal());
      if (rc != 0) {
        throw new AssertionError("cudaDeviceDisablePeerAccess returned " + rc);
      }
    }
    return was;
  }

  private static void exchange(
      Communicator communicator, LsaProvider provider, WindowPatterns patterns, int rounds) {
    for (int round = 0; round < rounds; round++) {
      long bytes = WindowPatterns.bytes(communicator.size());
      try (LsaWindow window = LsaWindow.create(communicator, bytes, provider)) {
        patterns.exchange(window, round);
        patterns.exchangeWithNeighbours(window.lsa(), round);
        window.verify("test");
        if (round == 0) {
          StringBuilder paths = new StringBuilder();
          for (int r = 0; r < communicator.size(); r++) {
            LsaPath path = window.path(r);
            paths.append(' ').append(path);
          }
          System.out.println("PROVIDER " + window.provider() + paths);
        }
      }
    }
  }

  private static long[] usage(CudaDevice device) {
    try (Stream<Path> descriptors = Files.list(Path.of("/proc/self/fd"));
        Stream<String> mappings = Files.lines(Path.of("/proc/self/maps"))) {
      return new long[] {descriptors.count(), mappings.count(), Resources.freeDeviceBytes(device)};
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }
}

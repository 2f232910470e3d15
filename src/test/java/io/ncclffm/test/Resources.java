package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.bindings.cudart.CudartH;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Stream;

/**
 * What this process holds, to be compared over time. Device memory is that of device 0, on the CPU
 * backend of all devices.
 *
 * @param deviceBytes taken, not free
 * @param residentKib VmRSS
 * @param mappedKib VmSize
 */
record Resources(
    long threads, long descriptors, long deviceBytes, long residentKib, long mappedKib) {
  private static final long SETTLE_NANOS = 20_000_000_000L;

  static Resources now() throws IOException {
    new CudaDevice(0).makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment free = arena.allocate(ValueLayout.JAVA_LONG);
      MemorySegment total = arena.allocate(ValueLayout.JAVA_LONG);
      assertEquals(0, CudartH.cudaMemGetInfo(free, total), "cudaMemGetInfo");
      return new Resources(
          entries("/proc/self/task"),
          entries("/proc/self/fd"),
          total.get(ValueLayout.JAVA_LONG, 0) - free.get(ValueLayout.JAVA_LONG, 0),
          status("VmRSS:"),
          status("VmSize:"));
    }
  }

  /** What {@code cudaMemGetInfo} says of a device; on the CPU backend of all of this process. */
  static long freeDeviceBytes(CudaDevice device) {
    device.makeCurrent();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment free = arena.allocate(ValueLayout.JAVA_LONG);
      MemorySegment total = arena.allocate(ValueLayout.JAVA_LONG);
      assertEquals(0, CudartH.cudaMemGetInfo(free, total), "cudaMemGetInfo");
      return free.get(ValueLayout.JAVA_LONG, 0);
    }
  }

  private static long entries(String folder) throws IOException {
    try (Stream<Path> files = Files.list(Path.of(folder))) {
      return files.count();
    }
  }

  private static long status(String name) throws IOException {
    List<String> lines = Files.readAllLines(Path.of("/proc/self/status"));
    String line = lines.stream().filter(l -> l.startsWith(name)).findFirst().orElseThrow();
    return Long.parseLong(line.replaceAll("[^0-9]", ""));
  }

  /**
   * Threads and descriptors are what they were, give or take some of the JVM's own, and device
   * memory is not taken. Threads that were told to end take a moment to be gone.
   */
  void assertNoMoreThan(int more, String when) throws IOException {
    long deadline = System.nanoTime() + SETTLE_NANOS;
    Resources now = now();
    while (!now.isWithin(this, more) && System.nanoTime() < deadline) {
      LockSupport.parkNanos(1_000_000);
      now = now();
    }
    assertTrue(now.isWithin(this, more), when + ": " + now + ", before: " + this);
  }

  private boolean isWithin(Resources before, int more) {
    return threads <= before.threads + more
        && descriptors <= before.descriptors + more
        && deviceBytes <= before.deviceBytes;
  }
}

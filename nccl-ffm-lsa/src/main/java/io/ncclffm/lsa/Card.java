package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import org.jspecify.annotations.Nullable;

/**
 * What a rank tells the others before a window is made.
 *
 * @param bytes the size it asks for
 * @param forced ordinal of the provider it insists on, or -1
 * @param host identity of the running system
 * @param namespace of process ids; {@code /proc/<pid>} means the same where it is equal
 * @param process random identity of the process: a pid alone can be another's
 * @param device identity of the GPU
 * @param ordinal of the GPU in that process
 * @param busId of the GPU
 * @param token random; rank 0's becomes the window's
 * @param noNcclWindow why the rank has no {@link LsaProvider#NCCL_WINDOW}, or ""
 */
record Card(
    long bytes,
    int forced,
    UUID host,
    long namespace,
    long pid,
    UUID process,
    UUID device,
    int ordinal,
    String busId,
    long token,
    String noNcclWindow) {

  private static final UUID HOST = readHost();
  private static final long NAMESPACE = readNamespace();
  private static final UUID PROCESS = UUID.randomUUID();

  static Card of(
      Communicator communicator, long bytes, @Nullable LsaProvider forced, String noNcclWindow) {
    return new Card(
        bytes,
        forced == null ? -1 : forced.ordinal(),
        HOST,
        NAMESPACE,
        ProcessHandle.current().pid(),
        PROCESS,
        communicator.device().uuid(),
        communicator.device().ordinal(),
        communicator.device().pciBusId(),
        ThreadLocalRandom.current().nextLong(),
        noNcclWindow);
  }

  private static UUID readHost() {
    try {
      return UUID.fromString(Files.readString(Path.of("/proc/sys/kernel/random/boot_id")).strip());
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  private static long readNamespace() {
    try {
      Path file = Path.of("/proc/self/ns/pid");
      return ((Number) Files.getAttribute(file, "unix:ino")).longValue();
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  boolean isSameHost(Card other) {
    return host.equals(other.host);
  }

  boolean isSameProcess(Card other) {
    return process.equals(other.process);
  }

  /** The most of these ranks that share one device. */
  static int mostOnOneDevice(List<Card> ranks) {
    int most = 0;
    for (Card one : ranks) {
      int here = 0;
      for (Card other : ranks) {
        here += one.isSameHost(other) && one.device.equals(other.device) ? 1 : 0;
      }
      most = Math.max(most, here);
    }
    return most;
  }

  byte[] encode() {
    ByteBuffer out = ByteBuffer.allocate(Exchange.RECORD);
    out.putLong(bytes).putInt(forced);
    put(out, host);
    out.putLong(namespace).putLong(pid);
    put(out, process);
    put(out, device);
    out.putInt(ordinal);
    put(out, busId);
    out.putLong(token);
    put(out, noNcclWindow);
    return out.array();
  }

  static Card decode(byte[] record) {
    ByteBuffer in = ByteBuffer.wrap(record);
    return new Card(
        in.getLong(),
        in.getInt(),
        uuid(in),
        in.getLong(),
        in.getLong(),
        uuid(in),
        uuid(in),
        in.getInt(),
        text(in),
        in.getLong(),
        text(in));
  }

  private static void put(ByteBuffer out, UUID value) {
    out.putLong(value.getMostSignificantBits()).putLong(value.getLeastSignificantBits());
  }

  private static UUID uuid(ByteBuffer in) {
    return new UUID(in.getLong(), in.getLong());
  }

  /** Cut to what fits. */
  static void put(ByteBuffer out, String value) {
    byte[] bytes = value.getBytes(StandardCharsets.UTF_8);
    int length = Math.min(bytes.length, out.remaining() - Short.BYTES);
    out.putShort((short) length).put(bytes, 0, length);
  }

  static String text(ByteBuffer in) {
    byte[] bytes = new byte[in.getShort()];
    in.get(bytes);
    return new String(bytes, StandardCharsets.UTF_8);
  }
}

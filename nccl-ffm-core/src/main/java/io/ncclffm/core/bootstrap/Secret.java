package io.ncclffm.core.bootstrap;

import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/**
 * What all ranks of a run know and nobody else does; {@link TcpExchange} lets in who proves to know
 * it. It should be random, for example {@code export NCCLFFM_SECRET=$(openssl rand -hex 32)} before
 * the launcher. There is no exchange without one, on the loopback interface neither: other users of
 * the host reach that as well.
 */
public final class Secret {
  /** The least length. */
  public static final int MIN_BYTES = 16;

  private static final int MAX_BYTES = 4096;
  private static final String VARIABLE = "NCCLFFM_SECRET";
  private static final String FILE_VARIABLE = "NCCLFFM_SECRET_FILE";

  private final byte[] bytes;

  private Secret(byte[] bytes) {
    this.bytes = bytes;
  }

  /**
   * @param bytes at least 16, copied
   */
  public static Secret of(byte[] bytes) {
    if (bytes.length < MIN_BYTES) {
      throw new IllegalArgumentException(
          "secret of " + bytes.length + " bytes: it needs at least " + MIN_BYTES);
    }
    return new Secret(bytes.clone());
  }

  /**
   * The text of {@code NCCLFFM_SECRET}, or what is in the file named by {@code
   * NCCLFFM_SECRET_FILE}: at most 4096 bytes, without white space at their ends.
   *
   * @throws BootstrapException if neither or both are set, or what they give is too short
   */
  public static Secret fromEnvironment() {
    return fromEnvironment(System.getenv());
  }

  static Secret fromEnvironment(Map<String, String> env) {
    @Nullable String text = env.get(VARIABLE);
    @Nullable String file = env.get(FILE_VARIABLE);
    if (text != null && file != null) {
      throw new BootstrapException(
          VARIABLE + " and " + FILE_VARIABLE + " are both set: unset one of them");
    }
    if (text != null) {
      return checked(text.getBytes(StandardCharsets.UTF_8), VARIABLE);
    }
    if (file != null) {
      return checked(read(file), FILE_VARIABLE + "=" + file);
    }
    throw new BootstrapException(
        "no secret for the exchange of the unique id: set "
            + VARIABLE
            + " to the same random text for all ranks (export "
            + VARIABLE
            + "=$(openssl rand -hex 32) before the launcher), or "
            + FILE_VARIABLE
            + " to a file that holds it");
  }

  private static byte[] read(String file) {
    try (InputStream in = Files.newInputStream(Path.of(file))) {
      byte[] bytes = in.readNBytes(MAX_BYTES + 1);
      if (bytes.length > MAX_BYTES) {
        throw new BootstrapException(
            FILE_VARIABLE + "=" + file + ": longer than " + MAX_BYTES + " bytes");
      }
      return bytes;
    } catch (IOException | InvalidPathException e) {
      throw new BootstrapException(FILE_VARIABLE + "=" + file + ": cannot be read: " + e, e);
    }
  }

  private static Secret checked(byte[] bytes, String source) {
    int from = 0;
    int to = bytes.length;
    while (from < to && isSpace(bytes[from])) {
      from++;
    }
    while (from < to && isSpace(bytes[to - 1])) {
      to--;
    }
    if (to - from < MIN_BYTES) {
      throw new BootstrapException(
          source
              + ": a secret of "
              + (to - from)
              + " bytes; it needs at least "
              + MIN_BYTES
              + ", for example from openssl rand -hex 32");
    }
    return new Secret(Arrays.copyOfRange(bytes, from, to));
  }

  private static boolean isSpace(byte b) {
    return b == ' ' || b >= '\t' && b <= '\r';
  }

  byte[] bytes() {
    return bytes.clone();
  }

  /** Its length only. */
  @Override
  public String toString() {
    return "Secret[" + bytes.length + " bytes]";
  }
}

package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Where the secret comes from. */
class SecretTest {
  private static final String TEXT = "0123456789abcdef";

  @TempDir Path directory;

  private static void assertRefused(Map<String, String> env, String... parts) {
    String message =
        assertThrows(BootstrapException.class, () -> Secret.fromEnvironment(env)).getMessage();
    for (String part : parts) {
      assertTrue(message.contains(part), part + " is not in: " + message);
    }
  }

  @Test
  void variableAndFileGiveTheSame() throws Exception {
    Path file = Files.writeString(directory.resolve("secret"), TEXT + "\n");
    byte[] expected = TEXT.getBytes(StandardCharsets.US_ASCII);
    assertArrayEquals(expected, Secret.fromEnvironment(Map.of("NCCLFFM_SECRET", TEXT)).bytes());
    assertArrayEquals(
        expected, Secret.fromEnvironment(Map.of("NCCLFFM_SECRET_FILE", file.toString())).bytes());
  }

  @Test
  void bytesOfAFileAreKept() throws Exception {
    byte[] bytes = TestRanks.id(1);
    bytes[0] = (byte) 0xff;
    bytes[127] = (byte) 0x80;
    Path file = Files.write(directory.resolve("secret"), bytes);
    assertArrayEquals(
        bytes, Secret.fromEnvironment(Map.of("NCCLFFM_SECRET_FILE", file.toString())).bytes());
  }

  @Test
  void withoutOneTheWayToMakeOneIsSaid() {
    assertRefused(Map.of(), "NCCLFFM_SECRET", "NCCLFFM_SECRET_FILE", "openssl rand -hex 32");
  }

  @Test
  void twoAreOneTooMany() {
    assertRefused(
        Map.of("NCCLFFM_SECRET", TEXT, "NCCLFFM_SECRET_FILE", "x"), "both set", "unset one");
  }

  @Test
  void shortOnesAreRefused() throws Exception {
    assertRefused(Map.of("NCCLFFM_SECRET", "  123456789abcdef\n"), "15 bytes", "at least 16");
    Path empty = Files.writeString(directory.resolve("empty"), " \n");
    assertRefused(Map.of("NCCLFFM_SECRET_FILE", empty.toString()), empty.toString(), "0 bytes");
    assertThrows(IllegalArgumentException.class, () -> Secret.of(new byte[15]));
  }

  @Test
  void unusableFilesAreNamed() throws Exception {
    Path absent = directory.resolve("absent");
    assertRefused(
        Map.of("NCCLFFM_SECRET_FILE", absent.toString()), absent.toString(), "cannot be read");
    Path large = Files.write(directory.resolve("large"), new byte[4097]);
    assertRefused(Map.of("NCCLFFM_SECRET_FILE", large.toString()), "longer than 4096");
  }

  @Test
  void neitherTextNorMessagesShowIt() {
    assertFalse(Secret.fromEnvironment(Map.of("NCCLFFM_SECRET", TEXT)).toString().contains("0123"));
    String message =
        assertThrows(
                BootstrapException.class,
                () -> Secret.fromEnvironment(Map.of("NCCLFFM_SECRET", "hush")))
            .getMessage();
    assertFalse(message.contains("hush"), message);
  }
}

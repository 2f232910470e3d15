package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Locale;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The unique id as bytes and as text; no native code. */
class NcclUniqueIdTest {
  private static byte[] bytes() {
    byte[] bytes = new byte[NcclUniqueId.BYTES];
    for (int i = 0; i < bytes.length; i++) {
      bytes[i] = (byte) (i * 37 + 5);
    }
    return bytes;
  }

  @Test
  void survivesTheWayThroughBytesAndHex() {
    NcclUniqueId id = NcclUniqueId.fromBytes(bytes());
    assertArrayEquals(bytes(), id.toBytes());
    assertEquals(256, id.toHex().length());
    assertEquals(id, NcclUniqueId.fromHex(id.toHex()));
    assertEquals(id, NcclUniqueId.fromHex(id.toHex().toUpperCase(Locale.ROOT)));
  }

  @ParameterizedTest
  @ValueSource(ints = {0, 1, 127, 129, 256})
  void wrongNumberOfBytesIsRefused(int length) {
    Exception e =
        assertThrows(
            IllegalArgumentException.class, () -> NcclUniqueId.fromBytes(new byte[length]));
    assertTrue(e.getMessage().contains(length + " bytes"), e.getMessage());
    assertTrue(e.getMessage().contains("exactly 128"), e.getMessage());
  }

  @ParameterizedTest
  @ValueSource(ints = {0, 128, 255, 257})
  void wrongNumberOfDigitsIsRefused(int length) {
    Exception e =
        assertThrows(
            IllegalArgumentException.class, () -> NcclUniqueId.fromHex("a".repeat(length)));
    assertTrue(e.getMessage().contains(length + " digits"), e.getMessage());
    assertTrue(e.getMessage().contains("exactly 256"), e.getMessage());
  }

  @Test
  void whatIsNoHexIsRefused() {
    String hex = "0".repeat(100) + "g" + "0".repeat(155);
    assertThrows(IllegalArgumentException.class, () -> NcclUniqueId.fromHex(hex));
  }

  @Test
  void isAValue() {
    NcclUniqueId id = NcclUniqueId.fromBytes(bytes());
    NcclUniqueId same = NcclUniqueId.fromBytes(bytes());
    byte[] changed = bytes();
    changed[127] ^= 1;
    assertEquals(id, same);
    assertEquals(id.hashCode(), same.hashCode());
    assertNotEquals(id, NcclUniqueId.fromBytes(changed));
    assertNotEquals(id, null);
  }

  @Test
  void cannotBeChangedThroughItsArrays() {
    byte[] source = bytes();
    NcclUniqueId id = NcclUniqueId.fromBytes(source);
    source[0] ^= 1;
    id.toBytes()[1] ^= 1;
    assertArrayEquals(bytes(), id.toBytes());
  }

  @Test
  void textDoesNotGiveTheSecretAway() {
    NcclUniqueId id = NcclUniqueId.fromBytes(bytes());
    assertFalse(id.toString().contains(id.toHex().substring(8, 20)), id.toString());
    assertTrue(id.toString().length() < 40, id.toString());
  }
}

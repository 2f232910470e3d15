package io.ncclffm.core.bootstrap;

import java.nio.charset.StandardCharsets;
import java.security.GeneralSecurityException;
import java.security.SecureRandom;
import java.util.Arrays;
import java.util.Optional;
import javax.crypto.AEADBadTagException;
import javax.crypto.Cipher;
import javax.crypto.KDF;
import javax.crypto.SecretKey;
import javax.crypto.spec.GCMParameterSpec;
import javax.crypto.spec.HKDFParameterSpec;

/**
 * The keys of one connection: HKDF-SHA256 over the secret, salted with a fresh random nonce of
 * either side, so that nothing recorded from another connection fits this one. A key for each
 * direction, so that neither side's messages can be sent back to it.
 */
final class SessionKeys {
  /** Signs what one side sends, with HMAC-SHA256. */
  static final class Mac {
    private final SecretKey key;

    private Mac(SecretKey key) {
      this.key = key;
    }

    byte[] of(byte[] bytes, int length) {
      try {
        javax.crypto.Mac mac = javax.crypto.Mac.getInstance("HmacSHA256");
        mac.init(key);
        mac.update(bytes, 0, length);
        return mac.doFinal();
      } catch (GeneralSecurityException e) {
        throw missing(e);
      }
    }
  }

  private static final SecureRandom RANDOM = new SecureRandom();
  private static final int TAG_BITS = 128;

  /** The cipher key is used for one message only, the id, so that its IV need not differ. */
  private static final byte[] IV = new byte[12];

  private final Mac client;
  private final Mac server;
  private final SecretKey cipherKey;

  private SessionKeys(Mac client, Mac server, SecretKey cipherKey) {
    this.client = client;
    this.server = server;
    this.cipherKey = cipherKey;
  }

  static byte[] nonce() {
    byte[] nonce = new byte[Frame.NONCE_BYTES];
    RANDOM.nextBytes(nonce);
    return nonce;
  }

  static SessionKeys derive(Secret secret, byte[] clientNonce, byte[] serverNonce) {
    try {
      KDF hkdf = KDF.getInstance("HKDF-SHA256");
      HKDFParameterSpec.Extract extract =
          HKDFParameterSpec.ofExtract()
              .addIKM(secret.bytes())
              .addSalt(clientNonce)
              .addSalt(serverNonce)
              .extractOnly();
      SecretKey root = hkdf.deriveKey("HKDF-PRK", extract);
      return new SessionKeys(
          new Mac(expand(hkdf, root, "HmacSHA256", "client")),
          new Mac(expand(hkdf, root, "HmacSHA256", "server")),
          expand(hkdf, root, "AES", "id"));
    } catch (GeneralSecurityException e) {
      throw missing(e);
    }
  }

  private static SecretKey expand(KDF hkdf, SecretKey root, String algorithm, String purpose)
      throws GeneralSecurityException {
    byte[] info = ("ncclffm bootstrap " + purpose).getBytes(StandardCharsets.US_ASCII);
    return hkdf.deriveKey(algorithm, HKDFParameterSpec.expandOnly(root, info, 32));
  }

  /** Of what the client sends. */
  Mac client() {
    return client;
  }

  /** Of what the server sends. */
  Mac server() {
    return server;
  }

  byte[] encrypt(byte[] plain) {
    try {
      return cipher(Cipher.ENCRYPT_MODE).doFinal(plain);
    } catch (GeneralSecurityException e) {
      throw missing(e);
    }
  }

  /** Empty if this was not encrypted with this key. */
  Optional<byte[]> decrypt(byte[] sealed) {
    try {
      return Optional.of(cipher(Cipher.DECRYPT_MODE).doFinal(sealed));
    } catch (AEADBadTagException e) {
      return Optional.empty();
    } catch (GeneralSecurityException e) {
      throw missing(e);
    }
  }

  static int encryptedBytes(int plainBytes) {
    return plainBytes + TAG_BITS / Byte.SIZE;
  }

  private Cipher cipher(int mode) throws GeneralSecurityException {
    Cipher cipher = Cipher.getInstance("AES/GCM/NoPadding");
    cipher.init(mode, cipherKey, new GCMParameterSpec(TAG_BITS, Arrays.copyOf(IV, IV.length)));
    return cipher;
  }

  private static IllegalStateException missing(GeneralSecurityException e) {
    return new IllegalStateException("this Java runtime lacks HMAC, HKDF or AES-GCM: " + e, e);
  }
}

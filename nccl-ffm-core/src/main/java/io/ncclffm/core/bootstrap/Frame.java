package io.ncclffm.core.bootstrap;

import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.Arrays;

/**
 * One message of {@link TcpExchange}'s protocol. All have the same size, so that nothing read from
 * the wire sizes anything: 7 bytes of magic, version, type, body, and 32 bytes of HMAC-SHA256 over
 * all before it in the types that are {@link #sign signed}. Numbers are big-endian; what is not
 * used is zero.
 *
 * <pre>
 * client                          server
 *   HELLO nonce           ->
 *                         &lt;-       CHALLENGE nonce
 *   CLAIM rank, size,     ->                                    signed: proves the secret
 *     milliseconds left, run
 *                         &lt;-       ACCEPTED | REFUSED text      signed: proves it in return
 *                                 | UNPROVEN
 *                         &lt;-       ID encrypted                 signed; when all ranks are there
 *                                 | LATE text | FAILED text
 *   RECEIVED              ->                                    signed
 * </pre>
 */
final class Frame {
  enum Type {
    HELLO,
    CHALLENGE,
    CLAIM,
    ACCEPTED,
    /** The client can never take part; the text says why. */
    REFUSED,
    /** The client's signature does not fit. Not signed: there is no common key. */
    UNPROVEN,
    ID,
    /** Ranks were missing at rank 0's deadline. */
    LATE,
    /** Rank 0 gave up for another reason. */
    FAILED,
    RECEIVED,
    /** The client speaks another version; that of the server is in the header. Not signed. */
    OTHER_VERSION
  }

  /** The peer speaks another protocol, or another version of this one. */
  static final class ForeignPeerException extends IOException {
    private static final long serialVersionUID = 1;

    final boolean otherVersion;

    ForeignPeerException(boolean otherVersion, String message) {
      super(message);
      this.otherVersion = otherVersion;
    }
  }

  static final int BYTES = 512;
  static final int NONCE_BYTES = 32;
  static final byte VERSION = 1;

  private static final byte[] MAGIC = "NCCLFFM".getBytes(StandardCharsets.US_ASCII);
  private static final int HEADER_BYTES = MAGIC.length + 2;
  private static final int MAC_BYTES = 32;
  private static final int MAC_AT = BYTES - MAC_BYTES;
  private static final int MAX_TEXT_BYTES = MAC_AT - HEADER_BYTES - Short.BYTES;

  private final byte[] bytes;

  private Frame(byte[] bytes) {
    this.bytes = bytes;
  }

  Frame(Type type) {
    this(new byte[BYTES]);
    ByteBuffer.wrap(bytes).put(MAGIC).put(VERSION).put((byte) type.ordinal());
  }

  Type type() {
    return Type.values()[bytes[HEADER_BYTES - 1]];
  }

  /** The part between header and signature; writes go through to the frame. */
  ByteBuffer body() {
    return ByteBuffer.wrap(bytes, HEADER_BYTES, MAC_AT - HEADER_BYTES).slice();
  }

  Frame withText(String text) {
    byte[] utf8 = text.getBytes(StandardCharsets.UTF_8);
    int length = Math.min(utf8.length, MAX_TEXT_BYTES);
    body().putShort((short) length).put(utf8, 0, length);
    return this;
  }

  String text() {
    ByteBuffer body = body();
    byte[] utf8 = new byte[Math.max(0, Math.min(body.getShort(), MAX_TEXT_BYTES))];
    body.get(utf8);
    return new String(utf8, StandardCharsets.UTF_8);
  }

  Frame sign(SessionKeys.Mac key) {
    System.arraycopy(key.of(bytes, MAC_AT), 0, bytes, MAC_AT, MAC_BYTES);
    return this;
  }

  boolean isSignedBy(SessionKeys.Mac key) {
    byte[] mac = Arrays.copyOfRange(bytes, MAC_AT, BYTES);
    return MessageDigest.isEqual(mac, key.of(bytes, MAC_AT));
  }

  void write(Socket socket) throws IOException {
    socket.getOutputStream().write(bytes);
  }

  /**
   * @throws ForeignPeerException if it is no frame, as soon as the magic shows it
   * @throws SocketTimeoutException if the whole frame is not there at the deadline, however slowly
   *     it trickles in
   */
  static Frame read(Socket socket, Deadline deadline) throws IOException {
    byte[] bytes = new byte[BYTES];
    read(socket, bytes, 0, HEADER_BYTES, deadline);
    if (!Arrays.equals(bytes, 0, MAGIC.length, MAGIC, 0, MAGIC.length)) {
      throw new ForeignPeerException(false, "it speaks another protocol");
    }
    read(socket, bytes, HEADER_BYTES, BYTES, deadline);
    if (bytes[MAGIC.length] != VERSION) {
      throw new ForeignPeerException(
          true,
          "it speaks version " + bytes[MAGIC.length] + " of the protocol, this rank " + VERSION);
    }
    int type = bytes[HEADER_BYTES - 1];
    if (type < 0 || type >= Type.values().length) {
      throw new ForeignPeerException(false, "it sent a message of unknown type " + type);
    }
    return new Frame(bytes);
  }

  private static void read(Socket socket, byte[] into, int from, int to, Deadline deadline)
      throws IOException {
    InputStream in = socket.getInputStream();
    int at = from;
    while (at < to) {
      if (deadline.passed()) {
        throw new SocketTimeoutException("no answer within " + deadline);
      }
      socket.setSoTimeout(deadline.millisLeft());
      int n = in.read(into, at, to - at);
      if (n < 0) {
        throw new EOFException("the connection was closed");
      }
      at += n;
    }
  }
}

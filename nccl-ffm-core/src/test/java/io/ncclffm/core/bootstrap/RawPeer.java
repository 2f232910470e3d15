package io.ncclffm.core.bootstrap;

import java.io.IOException;
import java.net.InetAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.time.Duration;

/** A client that speaks the protocol step by step, and so can stop or lie at any of them. */
final class RawPeer implements AutoCloseable {
  static final Deadline LIMIT = Deadline.in(Duration.ofMinutes(5));

  final Socket socket;
  private SessionKeys keys;

  RawPeer(int port) throws IOException {
    socket = new Socket(InetAddress.getLoopbackAddress(), port);
  }

  Frame read() throws IOException {
    return Frame.read(socket, LIMIT);
  }

  /** True if the server has closed, false if it says something. */
  boolean isCut() {
    try {
      socket.setSoTimeout(30_000);
      return socket.getInputStream().read() < 0;
    } catch (SocketTimeoutException e) {
      return false;
    } catch (IOException e) {
      // A reset: the server closed with bytes unread.
      return true;
    }
  }

  /** Claims, and returns the server's answer. */
  Frame claim(RankInfo ranks, Secret secret, int rank) throws IOException {
    Frame hello = new Frame(Frame.Type.HELLO);
    byte[] clientNonce = SessionKeys.nonce();
    hello.body().put(clientNonce);
    hello.write(socket);
    byte[] serverNonce = new byte[Frame.NONCE_BYTES];
    read().body().get(serverNonce);
    keys = SessionKeys.derive(secret, clientNonce, serverNonce);
    Frame claim = new Frame(Frame.Type.CLAIM);
    byte[] run = TcpExchange.runDigest(ranks);
    claim.body().putInt(rank).putInt(ranks.size()).putInt(LIMIT.millisLeft()).put(run);
    claim.sign(keys.client()).write(socket);
    return read();
  }

  byte[] id(Frame frame) {
    byte[] sealed = new byte[SessionKeys.encryptedBytes(128)];
    frame.body().get(sealed);
    return keys.decrypt(sealed).orElseThrow();
  }

  void received() throws IOException {
    new Frame(Frame.Type.RECEIVED).sign(keys.client()).write(socket);
  }

  @Override
  public void close() throws IOException {
    socket.close();
  }
}

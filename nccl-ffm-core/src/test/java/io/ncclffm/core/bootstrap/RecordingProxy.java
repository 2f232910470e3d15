package io.ncclffm.core.bootstrap;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;

/** Stands between one client and a server, and keeps what both say; it can change one byte. */
final class RecordingProxy implements AutoCloseable {
  private final ServerSocket listener = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
  private final int target;
  private final int changedByte;
  private final ByteArrayOutputStream fromClient = new ByteArrayOutputStream();
  private final ByteArrayOutputStream fromServer = new ByteArrayOutputStream();
  private final Thread thread;

  /**
   * @param changedByte index of the byte of the server's that is inverted, or -1
   */
  RecordingProxy(int target, int changedByte) throws IOException {
    this.target = target;
    this.changedByte = changedByte;
    thread = Thread.ofVirtual().start(this::run);
  }

  int port() {
    return listener.getLocalPort();
  }

  private void run() {
    try (Socket client = listener.accept();
        Socket server = new Socket(InetAddress.getLoopbackAddress(), target)) {
      Thread up = Thread.ofVirtual().start(() -> copy(client, server, fromClient, -1));
      copy(server, client, fromServer, changedByte);
      up.join();
    } catch (IOException | InterruptedException e) {
      // The test sees at its own end of the connection what happened.
    }
  }

  private static void copy(Socket from, Socket to, ByteArrayOutputStream copy, int changedByte) {
    try {
      InputStream in = from.getInputStream();
      OutputStream out = to.getOutputStream();
      for (int b = in.read(); b >= 0; b = in.read()) {
        int sent = copy.size() == changedByte ? b ^ 0xff : b;
        copy.write(sent);
        out.write(sent);
      }
      to.shutdownOutput();
    } catch (IOException e) {
      // As above.
    }
  }

  /** All of it, after the client and the server have closed. */
  byte[] fromClient() throws InterruptedException {
    thread.join();
    return fromClient.toByteArray();
  }

  byte[] fromServer() throws InterruptedException {
    thread.join();
    return fromServer.toByteArray();
  }

  @Override
  public void close() throws IOException {
    listener.close();
  }
}

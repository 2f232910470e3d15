package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.jspecify.annotations.Nullable;

/**
 * Every other rank's side of {@link TcpExchange}. A daemon thread does what blocks (resolving
 * names, connecting, reading), so that the caller's wait ends at its deadline and on interruption
 * whatever the system is doing.
 */
final class StoreClient {
  private static final Duration CONNECT_TIMEOUT = Duration.ofSeconds(3);
  private static final int FIRST_PAUSE_MILLIS = 10;
  private static final int LAST_PAUSE_MILLIS = 500;

  private final RankInfo ranks;
  private final Secret secret;
  private final Limits limits;
  private final String name;

  private volatile @Nullable Socket socket;
  private volatile boolean cancelled;
  private volatile boolean accepted;
  private volatile String lastProblem = "none";

  StoreClient(RankInfo ranks, Secret secret, Limits limits) {
    this.ranks = ranks;
    this.secret = secret;
    this.limits = limits;
    this.name = "rank " + ranks.rank() + ": rank 0 at " + ranks.masterText();
  }

  /** Whether rank 0 has taken this one in, and only other ranks are waited for. */
  boolean isAccepted() {
    return accepted;
  }

  byte[] fetch(Deadline deadline) {
    FutureTask<byte[]> task = new FutureTask<>(() -> untilDeadline(deadline));
    Thread thread = Thread.ofPlatform().daemon().name("ncclffm-bootstrap").start(task);
    try {
      return task.get(Math.max(0, deadline.nanosLeft()), TimeUnit.NANOSECONDS);
    } catch (TimeoutException e) {
      throw late(deadline);
    } catch (InterruptedException e) {
      throw Deadline.interrupted("exchange of the unique id with " + name);
    } catch (ExecutionException e) {
      if (e.getCause() instanceof RuntimeException known) {
        throw known;
      }
      throw new BootstrapException(name + ": " + e.getCause(), e.getCause());
    } finally {
      cancelled = true;
      thread.interrupt();
      close(socket);
    }
  }

  private DeadlineException late(Deadline deadline) {
    return new DeadlineException(
        accepted
            ? name + " took it in, but not all others had come within " + deadline
            : name
                + " did not answer within "
                + deadline
                + " (last: "
                + lastProblem
                + "); does it run, is this its address, is the port open to this host?");
  }

  private byte[] untilDeadline(Deadline deadline) {
    long pause = FIRST_PAUSE_MILLIS;
    while (!deadline.passed() && !cancelled) {
      try {
        InetSocketAddress master = Objects.requireNonNull(ranks.master());
        for (InetAddress address : InetAddress.getAllByName(master.getHostString())) {
          byte @Nullable [] id =
              tryOnce(new InetSocketAddress(address, master.getPort()), deadline);
          if (id != null) {
            return id;
          }
        }
      } catch (IOException e) {
        lastProblem = String.valueOf(e.getMessage());
      }
      deadline.pause(pause);
      pause = Math.min(LAST_PAUSE_MILLIS, 2 * pause);
    }
    throw late(deadline);
  }

  /** Null if there is nobody yet, which is worth another try. */
  private byte @Nullable [] tryOnce(InetSocketAddress address, Deadline deadline) {
    try (Socket connection = new Socket()) {
      socket = connection;
      if (cancelled) {
        return null;
      }
      connection.connect(address, deadline.atMost(CONNECT_TIMEOUT).millisLeft());
      if (connection.getLocalSocketAddress().equals(connection.getRemoteSocketAddress())) {
        // TCP connects a port to itself, if it picks the very port that nobody listens on yet.
        lastProblem = "nobody listens";
        return null;
      }
      connection.setTcpNoDelay(true);
      return converse(connection, deadline);
    } catch (IOException e) {
      if (accepted && !cancelled && !deadline.passed()) {
        throw new BootstrapException(
            name + " went away before all ranks had come: " + e.getMessage(), e);
      }
      lastProblem = String.valueOf(e.getMessage());
      return null;
    }
  }

  private byte[] converse(Socket connection, Deadline deadline) throws IOException {
    Deadline handshake = deadline.atMost(limits.handshake());
    byte[] clientNonce = SessionKeys.nonce();
    Frame hello = new Frame(Frame.Type.HELLO);
    hello.body().put(clientNonce);
    hello.write(connection);
    Frame challenge = read(connection, handshake);
    if (challenge.type() != Frame.Type.CHALLENGE) {
      throw foreign("it answered a greeting with " + challenge.type());
    }
    byte[] serverNonce = new byte[Frame.NONCE_BYTES];
    challenge.body().get(serverNonce);
    SessionKeys keys = SessionKeys.derive(secret, clientNonce, serverNonce);

    Frame claim = new Frame(Frame.Type.CLAIM);
    claim
        .body()
        .putInt(ranks.rank())
        .putInt(ranks.size())
        .putInt(millisForRankZero(deadline))
        .put(TcpExchange.runDigest(ranks));
    claim.sign(keys.client()).write(connection);
    Frame answer = read(connection, handshake);
    if (answer.type() == Frame.Type.UNPROVEN) {
      throw new BootstrapException(
          name
              + " has another secret: NCCLFFM_SECRET, or what NCCLFFM_SECRET_FILE holds, must be"
              + " the same for all ranks");
    }
    expect(answer, Frame.Type.ACCEPTED, keys);
    accepted = true;

    Frame result = read(connection, deadline);
    expect(result, Frame.Type.ID, keys);
    byte[] sealed = new byte[SessionKeys.encryptedBytes(NcclUniqueId.BYTES)];
    ByteBuffer body = result.body();
    body.get(sealed);
    byte[] id = keys.decrypt(sealed).orElseThrow(() -> foreign("its id cannot be decrypted"));
    new Frame(Frame.Type.RECEIVED).sign(keys.client()).write(connection);
    return id;
  }

  /** Less than what is left: rank 0's word, which names the missing ranks, must be here in time. */
  private static int millisForRankZero(Deadline deadline) {
    int left = deadline.millisLeft();
    return left - Math.min(1000, left / 10);
  }

  private Frame read(Socket connection, Deadline deadline) throws IOException {
    try {
      return Frame.read(connection, deadline);
    } catch (Frame.ForeignPeerException e) {
      if (e.otherVersion) {
        throw new BootstrapException(
            name + ": " + e.getMessage() + "; all ranks need the same version of nccl-ffm", e);
      }
      throw foreign(String.valueOf(e.getMessage()));
    }
  }

  private void expect(Frame frame, Frame.Type type, SessionKeys keys) {
    if (!frame.isSignedBy(keys.server())) {
      throw foreign("it does not know the secret");
    }
    if (frame.type() == type) {
      return;
    }
    switch (frame.type()) {
      case LATE:
        throw new DeadlineException(name + " gave up: " + frame.text());
      case FAILED:
        throw new BootstrapException(name + " gave up: " + frame.text());
      case REFUSED:
        throw new BootstrapException(name + " refused " + frame.text());
      default:
        throw foreign("it sent " + frame.type() + " instead of " + type);
    }
  }

  private BootstrapException foreign(String what) {
    return new BootstrapException(
        name
            + " is not what listens there: "
            + what
            + "; set NCCLFFM_PORT to another port for all ranks");
  }

  private static void close(@Nullable Socket socket) {
    if (socket != null) {
      try {
        socket.close();
      } catch (IOException e) {
        // Nothing can be done about it, and nothing waits for it.
      }
    }
  }
}

package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.UnknownHostException;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.BitSet;
import java.util.Deque;
import java.util.LinkedHashSet;
import java.util.Objects;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import org.jspecify.annotations.Nullable;

/**
 * Rank 0's side of {@link TcpExchange}. A thread accepts, and a virtual one for each connection
 * speaks with it, and the caller's thread waits, alone decides, and sends the id.
 */
final class StoreServer implements AutoCloseable {
  private static final int PAUSE_MILLIS = 50;
  private static final int MAX_REFUSALS = 4;

  /** One accepted connection. */
  private static final class Connection {
    final Socket socket;

    /** Set once the peer has proven the secret. */
    @Nullable SessionKeys keys;

    /** Of the rank that is at the other end; set with the keys. */
    @Nullable Deadline deadline;

    Connection(Socket socket) {
      this.socket = socket;
    }

    SessionKeys keys() {
      return Objects.requireNonNull(keys);
    }

    String from() {
      return String.valueOf(socket.getRemoteSocketAddress());
    }
  }

  private final ServerSocket listener;
  private final RankInfo ranks;
  private final Secret secret;
  private final Limits limits;

  /** A while after the exchange's own deadline, so that it is that one which decides. */
  private final Deadline afterwards;

  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();

  // All below are guarded by the lock.
  private final Set<Connection> strangers = new LinkedHashSet<>();
  private final @Nullable Connection[] seats;
  private final BitSet missing = new BitSet();

  /** Ranks that have not said that they have the id. */
  private final BitSet waiting = new BitSet();

  /** Until the thread that accepts has seen the close. */
  private boolean accepting = true;

  private final TreeMap<Integer, String> left = new TreeMap<>();
  private final Deque<String> refusals = new ArrayDeque<>();
  private int unproven;
  private String lastUnproven = "";

  private StoreServer(
      ServerSocket listener, RankInfo ranks, Secret secret, Limits limits, Deadline deadline) {
    this.listener = listener;
    this.ranks = ranks;
    this.secret = secret;
    this.limits = limits;
    this.afterwards = deadline.plus(limits.handshake());
    seats = new Connection[ranks.size()];
    missing.set(1, ranks.size());
    waiting.set(1, ranks.size());
  }

  /** Listens at rank 0's address, and is ready for connections on return. */
  static StoreServer listen(RankInfo ranks, Secret secret, Limits limits, Deadline deadline) {
    InetSocketAddress master = Objects.requireNonNull(ranks.master());
    return listen(address(ranks, master), ranks, secret, limits, deadline);
  }

  static StoreServer listen(
      InetSocketAddress address, RankInfo ranks, Secret secret, Limits limits, Deadline deadline) {
    // For a moment, where an earlier run is just ending.
    Deadline patience = deadline.atMost(limits.handshake());
    while (true) {
      try {
        ServerSocket listener = bind(address, ranks.size());
        StoreServer server = new StoreServer(listener, ranks, secret, limits, deadline);
        Thread.ofPlatform().daemon().name("ncclffm-bootstrap-accept").start(server::accept);
        return server;
      } catch (IOException e) {
        if (patience.passed()) {
          throw new BootstrapException(
              "rank 0 cannot listen on port "
                  + address.getPort()
                  + ": "
                  + e.getMessage()
                  + "; set NCCLFFM_PORT to another one for all ranks",
              e);
        }
      }
      patience.pause(PAUSE_MILLIS);
      if (Thread.interrupted()) {
        throw Deadline.interrupted("listening on port " + address.getPort());
      }
    }
  }

  private static ServerSocket bind(InetSocketAddress address, int backlog) throws IOException {
    ServerSocket socket = new ServerSocket();
    try {
      // The connections of an exchange just before may linger for a minute.
      socket.setReuseAddress(true);
      socket.bind(address, Math.max(128, backlog));
      return socket;
    } catch (IOException e) {
      socket.close();
      throw e;
    }
  }

  private static InetSocketAddress address(RankInfo ranks, InetSocketAddress master) {
    InetSocketAddress everywhere = new InetSocketAddress(master.getPort());
    if (!ranks.oneHost()) {
      // Whatever the name stands for here: often a loopback address, on rank 0's host alone.
      return everywhere;
    }
    try {
      InetAddress host = InetAddress.getByName(master.getHostString());
      return host.isLoopbackAddress() ? new InetSocketAddress(host, master.getPort()) : everywhere;
    } catch (UnknownHostException e) {
      // The others' affair: this rank need not connect to itself.
      return everywhere;
    }
  }

  int port() {
    return listener.getLocalPort();
  }

  InetAddress address() {
    return listener.getInetAddress();
  }

  /** Whether a rank came and went away. */
  boolean hasLeft(int rank) {
    lock.lock();
    try {
      return left.containsKey(rank);
    } finally {
      lock.unlock();
    }
  }

  /**
   * Gives the id to all ranks.
   *
   * @throws DeadlineException if they were not there at the deadline, or on interruption
   * @throws BootstrapException if one went away before it had the id
   */
  void serve(byte[] id, Deadline deadline) {
    lock.lock();
    try {
      while (!missing.isEmpty()) {
        await(deadline, "did not come", missing);
      }
      // Before any rank has the id: its next exchange must not find this one still listening.
      stopListening();
      for (int rank = 1; rank < ranks.size(); rank++) {
        send(seats[rank], id);
      }
      while (!waiting.isEmpty()) {
        if (!left.isEmpty()) {
          throw giveUp(
              Frame.Type.FAILED,
              new BootstrapException("exchange of the unique id: ranks went away: " + left));
        }
        await(deadline, "did not take the id", waiting);
      }
    } finally {
      lock.unlock();
    }
  }

  /** To the earliest deadline of all that are there: without its owner nobody gets further. */
  private void await(Deadline own, String what, BitSet which) {
    Deadline earliest = own;
    String when = "within " + own;
    for (int rank = 1; rank < ranks.size(); rank++) {
      @Nullable Connection seat = seats[rank];
      @Nullable Deadline other = seat == null ? null : seat.deadline;
      if (other != null && other.nanosLeft() < earliest.nanosLeft()) {
        earliest = other;
        when = "before the deadline of rank " + rank;
      }
    }
    if (earliest.passed()) {
      String prefix = "exchange of the unique id on port " + port() + " of rank 0:";
      String who = RankText.of(which) + " of " + ranks.size();
      throw giveUp(
          Frame.Type.LATE,
          new DeadlineException(String.join(" ", prefix, who, what, when) + hints()));
    }
    try {
      changed.awaitNanos(earliest.nanosLeft());
    } catch (InterruptedException e) {
      throw giveUp(
          Frame.Type.FAILED,
          Deadline.interrupted("exchange of the unique id on port " + port() + " of rank 0"));
    }
  }

  private String hints() {
    StringBuilder text = new StringBuilder();
    if (!left.isEmpty()) {
      text.append("; came and went away: ").append(left);
    }
    if (!refusals.isEmpty()) {
      text.append("; refused: ").append(String.join("; ", refusals));
    }
    if (unproven > 0) {
      text.append("; connections that did not prove that they know the secret: ")
          .append(unproven)
          .append(", the last from ")
          .append(lastUnproven);
    }
    return text.toString();
  }

  /** Tells all ranks that are there why this ends. */
  private RuntimeException giveUp(Frame.Type type, RuntimeException why) {
    String text = String.valueOf(why.getMessage());
    for (@Nullable Connection seat : seats) {
      if (seat != null) {
        sendSigned(seat, new Frame(type).withText(text));
      }
    }
    return why;
  }

  private void send(@Nullable Connection seat, byte[] id) {
    if (seat != null) {
      Frame frame = new Frame(Frame.Type.ID);
      frame.body().put(seat.keys().encrypt(id));
      sendSigned(seat, frame);
    }
  }

  /** Does not block: a rank is sent three frames in all, which fit into any socket's buffer. */
  private static void sendSigned(Connection seat, Frame frame) {
    try {
      frame.sign(seat.keys().server()).write(seat.socket);
    } catch (IOException e) {
      // It is gone, which the thread that reads from it finds too, and says.
      closeQuietly(seat.socket);
    }
  }

  private void accept() {
    try {
      while (!listener.isClosed()) {
        acceptOne();
      }
    } finally {
      lock.lock();
      try {
        accepting = false;
        changed.signalAll();
      } finally {
        lock.unlock();
      }
    }
  }

  private void acceptOne() {
    try {
      admit(new Connection(listener.accept()));
    } catch (IOException e) {
      // If not the close: as when the process has no file descriptors left. It may find some.
      if (!listener.isClosed()) {
        Deadline.in(limits.handshake()).pause(PAUSE_MILLIS);
      }
    }
  }

  private void admit(Connection connection) {
    lock.lock();
    try {
      if (listener.isClosed()) {
        closeQuietly(connection.socket);
        return;
      }
      if (strangers.size() >= ranks.size() + limits.strangers()) {
        // The oldest: a rank needs milliseconds, and comes again if it is hit.
        Connection oldest = strangers.iterator().next();
        strangers.remove(oldest);
        closeQuietly(oldest.socket);
      }
      strangers.add(connection);
    } finally {
      lock.unlock();
    }
    Thread.ofVirtual().name("ncclffm-bootstrap-" + connection.from()).start(() -> run(connection));
  }

  private void run(Connection connection) {
    int rank = -1;
    try {
      rank = handshake(connection);
      if (rank >= 0) {
        awaitReceived(connection, rank);
      }
    } catch (IOException e) {
      // Concerns this connection alone; if it was a rank's, its seat is free again.
    } finally {
      closeQuietly(connection.socket);
      forget(connection, rank);
    }
  }

  /**
   * Reads who it is.
   *
   * @return the rank that was taken in, or -1
   */
  private int handshake(Connection connection) throws IOException {
    Socket socket = connection.socket;
    Deadline deadline = Deadline.in(limits.handshake());
    socket.setTcpNoDelay(true);
    byte[] clientNonce = new byte[Frame.NONCE_BYTES];
    try {
      Frame hello = Frame.read(socket, deadline);
      if (hello.type() != Frame.Type.HELLO) {
        return -1;
      }
      hello.body().get(clientNonce);
    } catch (Frame.ForeignPeerException e) {
      if (e.otherVersion) {
        new Frame(Frame.Type.OTHER_VERSION).write(socket);
      }
      return -1;
    }
    byte[] serverNonce = SessionKeys.nonce();
    Frame challenge = new Frame(Frame.Type.CHALLENGE);
    challenge.body().put(serverNonce);
    challenge.write(socket);
    SessionKeys keys = SessionKeys.derive(secret, clientNonce, serverNonce);
    Frame claim = Frame.read(socket, deadline);
    if (claim.type() != Frame.Type.CLAIM || !claim.isSignedBy(keys.client())) {
      noteUnproven(connection);
      new Frame(Frame.Type.UNPROVEN).write(socket);
      return -1;
    }
    return seat(connection, keys, claim.body());
  }

  private void noteUnproven(Connection connection) {
    lock.lock();
    try {
      unproven++;
      lastUnproven = connection.from();
    } finally {
      lock.unlock();
    }
  }

  private int seat(Connection connection, SessionKeys keys, ByteBuffer claim) throws IOException {
    int rank = claim.getInt();
    int size = claim.getInt();
    int millisLeft = claim.getInt();
    byte[] run = new byte[TcpExchange.RUN_DIGEST_BYTES];
    claim.get(run);
    lock.lock();
    try {
      if (!strangers.remove(connection)) {
        // Too late: ended for a newer one, or all is over.
        return -1;
      }
      connection.keys = keys;
      connection.deadline = Deadline.in(Duration.ofMillis(Math.max(1, millisLeft)));
      @Nullable String refusal = refusal(rank, size, run);
      if (refusal != null) {
        if (refusals.size() < MAX_REFUSALS) {
          refusals.add(connection.from() + ": " + refusal);
        }
        sendSigned(connection, new Frame(Frame.Type.REFUSED).withText(refusal));
        return -1;
      }
      // Under the lock, so that the id cannot be sent before it.
      new Frame(Frame.Type.ACCEPTED).sign(keys.server()).write(connection.socket);
      seats[rank] = connection;
      missing.clear(rank);
      left.remove(rank);
      changed.signalAll();
      return rank;
    } finally {
      lock.unlock();
    }
  }

  private @Nullable String refusal(int rank, int size, byte[] run) {
    if (!MessageDigest.isEqual(run, TcpExchange.runDigest(ranks))) {
      return "rank "
          + rank
          + " of another run: this one is "
          + ranks.launcher()
          + " "
          + ranks.run();
    }
    if (size != ranks.size()) {
      return "rank " + rank + " of " + size + " ranks: this run has " + ranks.size();
    }
    if (rank < 1 || rank >= size) {
      return "rank " + rank + ": ranks 1.." + (size - 1) + " come here, 0 is the one that listens";
    }
    @Nullable Connection other = seats[rank];
    if (other != null) {
      return "rank " + rank + " came twice: " + other.from() + " has it";
    }
    return null;
  }

  private void awaitReceived(Connection connection, int rank) throws IOException {
    // serve() ends first, and with it this, by closing the socket.
    Frame frame = Frame.read(connection.socket, afterwards);
    if (frame.type() == Frame.Type.RECEIVED && frame.isSignedBy(connection.keys().client())) {
      lock.lock();
      try {
        waiting.clear(rank);
        changed.signalAll();
      } finally {
        lock.unlock();
      }
    }
  }

  private void forget(Connection connection, int rank) {
    lock.lock();
    try {
      strangers.remove(connection);
      if (rank >= 0 && seats[rank] == connection && waiting.get(rank)) {
        seats[rank] = null;
        missing.set(rank);
        left.put(rank, connection.from());
        changed.signalAll();
      }
    } finally {
      lock.unlock();
    }
  }

  private void stopListening() {
    closeQuietly(listener);
    strangers.forEach(stranger -> closeQuietly(stranger.socket));
    strangers.clear();
    // The port stays open until the thread that is in accept has left it.
    Deadline patience = Deadline.in(limits.handshake());
    boolean interrupted = false;
    while (accepting && !patience.passed()) {
      try {
        changed.awaitNanos(patience.nanosLeft());
      } catch (InterruptedException e) {
        interrupted = true;
      }
    }
    if (interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  /** Ends every connection and with them every thread. */
  @Override
  public void close() {
    lock.lock();
    try {
      stopListening();
      for (@Nullable Connection seat : seats) {
        if (seat != null) {
          closeQuietly(seat.socket);
        }
      }
    } finally {
      lock.unlock();
    }
  }

  private static void closeQuietly(AutoCloseable socket) {
    try {
      socket.close();
    } catch (Exception e) {
      // Nothing can be done about it, and nothing waits for it.
    }
  }
}

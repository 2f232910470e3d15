package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DeadlineException;
import java.io.IOException;
import java.io.OutputStream;
import java.net.ConnectException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicBoolean;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * The store on rank 0, its clients, and those that should not be there. Fake ids, no native code.
 */
class TcpExchangeTest {
  private static final Secret SECRET = Secret.of("a secret of this test".getBytes());
  private static final Secret OTHER_SECRET = Secret.of("another secret of this".getBytes());
  private static final byte[] ID = TestRanks.id(42);
  private static final Duration LONG = Duration.ofSeconds(25);
  private static final Duration SHORT = Duration.ofMillis(200);

  private final TestRanks threads = new TestRanks();
  private final List<AutoCloseable> toClose = new ArrayList<>();

  @AfterEach
  void close() throws Exception {
    for (AutoCloseable resource : toClose) {
      resource.close();
    }
    threads.close();
  }

  private <T extends AutoCloseable> T closing(T resource) {
    toClose.add(resource);
    return resource;
  }

  private static RankInfo ranks(int rank, int size, int port) {
    return new RankInfo(
        "test",
        rank,
        size,
        rank,
        size,
        InetSocketAddress.createUnresolved("127.0.0.1", port),
        "run 1");
  }

  private StoreServer listen(int size) {
    return listen(size, 0, Limits.DEFAULT);
  }

  private StoreServer listen(int size, int port, Limits limits) {
    return closing(
        StoreServer.listen(
            new InetSocketAddress(InetAddress.getLoopbackAddress(), port),
            ranks(0, size, 1),
            SECRET,
            limits,
            Deadline.in(LONG)));
  }

  private Future<byte[]> serve(StoreServer server, Duration timeout) {
    return threads.start(
        () -> {
          try (server) {
            server.serve(ID, Deadline.in(timeout));
            return ID;
          }
        });
  }

  private static StoreClient client(int rank, int size, int port) {
    return new StoreClient(ranks(rank, size, port), SECRET, Limits.DEFAULT);
  }

  private Future<byte[]> fetch(int rank, int size, int port) {
    return fetch(client(rank, size, port), LONG);
  }

  private Future<byte[]> fetch(StoreClient client, Duration timeout) {
    return threads.start(() -> client.fetch(Deadline.in(timeout)));
  }

  private RawPeer peer(int port) throws IOException {
    return closing(new RawPeer(port));
  }

  private RawPeer seated(int rank, int size, int port) throws IOException {
    RawPeer peer = peer(port);
    Frame answer = peer.claim(ranks(1, size, port), SECRET, rank);
    assertEquals(Frame.Type.ACCEPTED, answer.type());
    return peer;
  }

  private static int freePort() throws IOException {
    try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      return socket.getLocalPort();
    }
  }

  private static void assertContains(Exception e, String... parts) {
    for (String part : parts) {
      assertTrue(e.getMessage().contains(part), part + " is not in: " + e.getMessage());
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 8, 64})
  void everyRankGetsTheIdOfRankZero(int size) throws Exception {
    StoreServer server = listen(size);
    List<Future<byte[]>> ids = new ArrayList<>();
    for (int rank = size - 1; rank > 0; rank--) {
      ids.add(fetch(rank, size, server.port()));
    }
    ids.add(serve(server, LONG));
    for (byte[] id : TestRanks.results(ids)) {
      assertArrayEquals(ID, id);
    }
  }

  @Test
  void canBeUsedTwiceInARowOnOnePort() throws Exception {
    int size = 4;
    int port = freePort();
    List<Future<byte[]>> seconds = new ArrayList<>();
    for (int r = 0; r < size; r++) {
      int rank = r;
      seconds.add(
          threads.start(
              () -> {
                TcpExchange exchange = new TcpExchange(ranks(rank, size, port), SECRET, LONG);
                byte[] first = exchange.exchange(rank == 0 ? TestRanks.id(1) : new byte[0]);
                assertArrayEquals(TestRanks.id(1), first);
                return exchange.exchange(rank == 0 ? TestRanks.id(2) : new byte[0]);
              }));
    }
    for (byte[] id : TestRanks.results(seconds)) {
      assertArrayEquals(TestRanks.id(2), id);
    }
  }

  /** Else a rank's next exchange could reach the one that the others are still in. */
  @Test
  void nobodyCanConnectAnyMoreOnceARankHasTheId() throws Exception {
    StoreServer server = listen(3);
    Future<byte[]> served = serve(server, LONG);
    RawPeer one = seated(1, 3, server.port());
    RawPeer two = seated(2, 3, server.port());
    assertEquals(Frame.Type.ID, one.read().type());
    assertThrows(ConnectException.class, () -> peer(server.port()));
    one.received();
    two.received();
    TestRanks.result(served);
  }

  @Test
  void rankThatIsThereBeforeRankZeroWaitsForIt() throws Exception {
    StoreClient early;
    Future<byte[]> id;
    int port;
    try (ServerSocket notYet = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      port = notYet.getLocalPort();
      early = client(1, 2, port);
      id = fetch(early, LONG);
      notYet.accept().close();
    }
    Future<byte[]> served = serve(listen(2, port, Limits.DEFAULT), LONG);
    assertArrayEquals(ID, TestRanks.result(id));
    TestRanks.result(served);
  }

  @Test
  void nobodyGetsTheIdBeforeTheLastRankHasCome() throws Exception {
    StoreServer server = listen(3);
    Future<byte[]> served = serve(server, LONG);
    RawPeer early = seated(1, 3, server.port());
    early.socket.setSoTimeout(1);
    assertThrows(SocketTimeoutException.class, () -> early.socket.getInputStream().read());
    Future<byte[]> late = fetch(2, 3, server.port());
    assertArrayEquals(ID, early.id(early.read()));
    early.received();
    assertArrayEquals(ID, TestRanks.result(late));
    TestRanks.result(served);
  }

  /**
   * Row 29 of the table of known faults: a peer that never comes ends in a message, not in a hang.
   */
  @Test
  void missingRanksAreNamedOnRankZeroAndOnThoseThatCame() throws Exception {
    StoreServer server = listen(6);
    StoreClient one = client(1, 6, server.port());
    StoreClient four = client(4, 6, server.port());
    Future<byte[]> atOne = fetch(one, LONG);
    Future<byte[]> atFour = fetch(four, LONG);
    TestRanks.until("both are in", () -> one.isAccepted() && four.isAccepted());
    DeadlineException e = TestRanks.failure(DeadlineException.class, serve(server, SHORT));
    assertContains(e, "ranks 2, 3, 5 of 6 did not come within 200 ms", "port " + server.port());
    for (Future<byte[]> waiting : List.of(atOne, atFour)) {
      e = TestRanks.failure(DeadlineException.class, waiting);
      assertContains(e, "gave up", "ranks 2, 3, 5 of 6 did not come within 200 ms");
    }
  }

  @Test
  void theEarliestDeadlineEndsItForAllWithTheMissingRanksNamed() throws Exception {
    StoreServer server = listen(4);
    RawPeer patient = seated(1, 4, server.port());
    Future<byte[]> served = serve(server, LONG);
    Future<byte[]> hasty = fetch(client(3, 4, server.port()), Duration.ofSeconds(10));
    String message = "rank 2 of 4 did not come before the deadline of rank 3";
    assertContains(TestRanks.failure(DeadlineException.class, served), message);
    assertContains(TestRanks.failure(DeadlineException.class, hasty), "gave up", message);
    Frame last = patient.read();
    assertEquals(Frame.Type.LATE, last.type());
    assertTrue(last.text().contains(message), last.text());
  }

  @Test
  void rankThatWentAwayIsNamedAndMayComeAgain() throws Exception {
    StoreServer server = listen(3);
    RawPeer first = seated(1, 3, server.port());
    String from = first.socket.getLocalSocketAddress().toString();
    first.close();
    TestRanks.until("it is missed", () -> server.hasLeft(1));
    DeadlineException e = TestRanks.failure(DeadlineException.class, serve(server, SHORT));
    assertContains(e, "ranks 1, 2 of 3 did not come", "came and went away: {1=" + from);

    StoreServer again = listen(2);
    seated(1, 2, again.port()).close();
    TestRanks.until("it is missed", () -> again.hasLeft(1));
    Future<byte[]> id = fetch(1, 2, again.port());
    TestRanks.result(serve(again, LONG));
    assertArrayEquals(ID, TestRanks.result(id));
  }

  @Test
  void rankThatDiesWithoutTheIdFailsRankZero() throws Exception {
    StoreServer server = listen(2);
    Future<byte[]> served = serve(server, LONG);
    RawPeer peer = seated(1, 2, server.port());
    assertEquals(Frame.Type.ID, peer.read().type());
    peer.close();
    assertContains(TestRanks.failure(BootstrapException.class, served), "went away: {1=");
  }

  @Test
  void rankThatNeverTakesTheIdIsNamed() throws Exception {
    StoreServer server = listen(2);
    RawPeer peer = seated(1, 2, server.port());
    DeadlineException e = TestRanks.failure(DeadlineException.class, serve(server, SHORT));
    assertContains(e, "rank 1 of 2 did not take the id within 200 ms");
    assertEquals(Frame.Type.ID, peer.read().type());
  }

  @Test
  void deathOfRankZeroEndsTheWaitOfTheOthers() throws Exception {
    StoreServer server = listen(3);
    StoreClient client = client(1, 3, server.port());
    Future<byte[]> waiting = fetch(client, LONG);
    TestRanks.until("it is in", client::isAccepted);
    server.close();
    BootstrapException e = TestRanks.failure(BootstrapException.class, waiting);
    assertContains(e, "127.0.0.1:" + server.port(), "went away before all ranks had come");
  }

  @Test
  void unreachableRankZeroIsNamedWithItsAddress() throws Exception {
    int port = freePort();
    DeadlineException e =
        TestRanks.failure(
            DeadlineException.class, fetch(client(1, 2, port), Duration.ofSeconds(1)));
    assertContains(e, "rank 1: rank 0 at 127.0.0.1:" + port, "within 1 s", "refused");
    TestRanks.until(
        "its thread is gone",
        () ->
            Thread.getAllStackTraces().keySet().stream()
                .noneMatch(thread -> thread.getName().equals("ncclffm-bootstrap")));
  }

  @Test
  void unknownHostIsNamed() {
    RankInfo ranks =
        new RankInfo(
            "test", 1, 2, 0, 1, InetSocketAddress.createUnresolved("nowhere.invalid", 9), null);
    DeadlineException e =
        assertThrows(
            DeadlineException.class,
            () -> new TcpExchange(ranks, SECRET, SHORT).exchange(new byte[0]));
    assertContains(e, "nowhere.invalid:9");
  }

  @Test
  void wrongSecretIsToldAndDoesNotDisturb() throws Exception {
    StoreServer server = listen(2);
    StoreClient wrong = new StoreClient(ranks(1, 2, server.port()), OTHER_SECRET, Limits.DEFAULT);
    BootstrapException e = TestRanks.failure(BootstrapException.class, fetch(wrong, LONG));
    assertContains(e, "another secret", "NCCLFFM_SECRET");
    assertContains(
        TestRanks.failure(DeadlineException.class, serve(server, SHORT)),
        "rank 1 of 2 did not come",
        "did not prove that they know the secret: 1, the last from /127.0.0.1");

    StoreServer again = listen(2);
    fetch(new StoreClient(ranks(1, 2, again.port()), OTHER_SECRET, Limits.DEFAULT), LONG);
    Future<byte[]> right = fetch(1, 2, again.port());
    TestRanks.result(serve(again, LONG));
    assertArrayEquals(ID, TestRanks.result(right));
  }

  @Test
  void strangersDoNotDisturb() throws Exception {
    int size = 8;
    StoreServer server = listen(size);
    for (int i = 0; i < 10; i++) {
      peer(server.port());
      peer(server.port()).close();
      RawPeer partial = peer(server.port());
      partial.socket.getOutputStream().write("NCCLFFM".getBytes(StandardCharsets.US_ASCII));
      RawPeer stuck = peer(server.port());
      new Frame(Frame.Type.HELLO).write(stuck.socket);
      RawPeer wrongType = peer(server.port());
      new Frame(Frame.Type.RECEIVED).write(wrongType.socket);
      assertTrue(wrongType.isCut());
      RawPeer http = peer(server.port());
      http.socket.getOutputStream().write("GET / HTTP/1.1\r\n\r\n".getBytes());
      assertTrue(http.isCut());
    }
    RawPeer flood = peer(server.port());
    OutputStream out = flood.socket.getOutputStream();
    assertThrows(
        IOException.class,
        () -> {
          byte[] garbage = TestRanks.id(3);
          // Ends with the reset that follows the server's close; 1 GiB would be no end.
          for (int i = 0; i < 1 << 23; i++) {
            out.write(garbage);
          }
        });
    List<Future<byte[]>> ids = new ArrayList<>();
    for (int rank = 1; rank < size; rank++) {
      ids.add(fetch(rank, size, server.port()));
    }
    ids.add(serve(server, LONG));
    for (byte[] id : TestRanks.results(ids)) {
      assertArrayEquals(ID, id);
    }
  }

  @Test
  void tooManyStrangersPushOutTheOldestAndNotTheRanks() throws Exception {
    int size = 4;
    StoreServer server = listen(size, 0, new Limits(LONG, 3));
    List<RawPeer> strangers = new ArrayList<>();
    for (int i = 0; i < 40; i++) {
      strangers.add(peer(server.port()));
    }
    for (int i = 0; i < 40 - (size + 3); i++) {
      assertTrue(strangers.get(i).isCut(), "stranger " + i + " is still served");
    }
    List<Future<byte[]>> ids = new ArrayList<>();
    for (int rank = 1; rank < size; rank++) {
      ids.add(fetch(rank, size, server.port()));
    }
    ids.add(serve(server, LONG));
    for (byte[] id : TestRanks.results(ids)) {
      assertArrayEquals(ID, id);
    }
  }

  @Test
  void strangerThatDripsIsCutAtTheDeadlineOfTheWholeGreeting() throws Exception {
    StoreServer server = listen(2, 0, new Limits(Duration.ofMillis(150), 64));
    RawPeer peer = peer(server.port());
    peer.socket.setSoTimeout(20);
    byte[] magic = "NCCLFFM".getBytes(StandardCharsets.US_ASCII);
    int sent = 0;
    boolean cut = false;
    while (!cut && sent < 400) {
      try {
        peer.socket.getOutputStream().write(sent < magic.length ? magic[sent] : 1);
        sent++;
        cut = peer.socket.getInputStream().read() < 0;
      } catch (SocketTimeoutException e) {
        // Not yet: on with the next byte.
      } catch (IOException e) {
        cut = true;
      }
    }
    assertTrue(cut && sent > 1, "served for " + sent + " bytes");
  }

  @Test
  void secondClaimOfARankIsToldAndTheFirstKeepsIt() throws Exception {
    StoreServer server = listen(2);
    RawPeer first = seated(1, 2, server.port());
    BootstrapException e = TestRanks.failure(BootstrapException.class, fetch(1, 2, server.port()));
    assertContains(e, "rank 1 came twice", first.socket.getLocalSocketAddress() + " has it");
    Future<byte[]> served = serve(server, LONG);
    assertArrayEquals(ID, first.id(first.read()));
    first.received();
    TestRanks.result(served);
  }

  @Test
  void wrongNumberOfRanksIsToldToBoth() throws Exception {
    StoreServer server = listen(2);
    BootstrapException e = TestRanks.failure(BootstrapException.class, fetch(1, 3, server.port()));
    assertContains(e, "refused rank 1 of 3 ranks: this run has 2");
    assertContains(
        TestRanks.failure(DeadlineException.class, serve(server, SHORT)),
        "rank 1 of 2 did not come",
        "refused: /127.0.0.1",
        "rank 1 of 3 ranks");
  }

  @ParameterizedTest
  @ValueSource(ints = {-1, 0, 2, Integer.MAX_VALUE, Integer.MIN_VALUE})
  void rankOutOfRangeIsTold(int rank) throws Exception {
    StoreServer server = listen(2);
    RawPeer peer = peer(server.port());
    Frame answer = peer.claim(ranks(1, 2, server.port()), SECRET, rank);
    assertEquals(Frame.Type.REFUSED, answer.type());
    assertTrue(answer.text().contains("rank " + rank + ": ranks 1..1 come here"), answer.text());
    assertTrue(peer.isCut());
  }

  @Test
  void rankOfAnotherRunIsTold() throws Exception {
    StoreServer server = listen(2);
    RankInfo other =
        new RankInfo(
            "test",
            1,
            2,
            1,
            2,
            InetSocketAddress.createUnresolved("127.0.0.1", server.port()),
            "run 2");
    BootstrapException e =
        TestRanks.failure(
            BootstrapException.class, fetch(new StoreClient(other, SECRET, Limits.DEFAULT), LONG));
    assertContains(e, "rank 1 of another run: this one is test run 1");
  }

  @Test
  void recordedConversationIsUselessAndDoesNotShowTheId() throws Exception {
    StoreServer server = listen(2);
    RecordingProxy proxy = closing(new RecordingProxy(server.port(), -1));
    Future<byte[]> served = serve(server, LONG);
    assertArrayEquals(ID, TestRanks.result(fetch(1, 2, proxy.port())));
    TestRanks.result(served);
    byte[] fromClient = proxy.fromClient();
    byte[] fromServer = proxy.fromServer();
    assertEquals(3 * Frame.BYTES, fromClient.length);
    assertEquals(3 * Frame.BYTES, fromServer.length);
    for (byte[] recorded : List.of(fromClient, fromServer)) {
      String wire = HexFormat.of().formatHex(recorded);
      for (int i = 0; i + 6 <= ID.length; i++) {
        String part = HexFormat.of().formatHex(ID, i, i + 6);
        assertFalse(wire.contains(part), "bytes " + i + " of the id are on the wire");
      }
    }

    StoreServer next = listen(2);
    RawPeer replayed = peer(next.port());
    replayed.socket.getOutputStream().write(fromClient, 0, Frame.BYTES);
    assertEquals(Frame.Type.CHALLENGE, replayed.read().type());
    replayed.socket.getOutputStream().write(fromClient, Frame.BYTES, Frame.BYTES);
    assertEquals(Frame.Type.UNPROVEN, replayed.read().type());
    assertTrue(replayed.isCut());

    try (ServerSocket impostor = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      Future<byte[]> fooled = fetch(1, 2, impostor.getLocalPort());
      try (Socket victim = impostor.accept()) {
        victim.getOutputStream().write(fromServer);
        BootstrapException e = TestRanks.failure(BootstrapException.class, fooled);
        assertContains(e, "does not know the secret");
      }
    }
  }

  /** In the challenge, the acceptance and the encrypted id. */
  @ParameterizedTest
  @ValueSource(ints = {20, Frame.BYTES + 8, Frame.BYTES + 300, 2 * Frame.BYTES + 30})
  void changedByteIsFound(int index) throws Exception {
    StoreServer server = listen(2);
    serve(server, LONG);
    RecordingProxy proxy = closing(new RecordingProxy(server.port(), index));
    TestRanks.failure(BootstrapException.class, fetch(1, 2, proxy.port()));
  }

  @ParameterizedTest
  @EnumSource(Foreign.class)
  void somethingElseOnThePortIsTold(Foreign foreign) throws Exception {
    try (ServerSocket other = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      Future<byte[]> client = fetch(1, 2, other.getLocalPort());
      try (Socket socket = other.accept()) {
        socket.getOutputStream().write(foreign.bytes());
        BootstrapException e = TestRanks.failure(BootstrapException.class, client);
        assertContains(e, "127.0.0.1:" + other.getLocalPort(), foreign.message);
      }
    }
  }

  enum Foreign {
    HTTP("NCCLFFM_PORT"),
    ECHO("answered a greeting with HELLO"),
    NEWER_VERSION("version 2 of the protocol, this rank 1"),
    UNKNOWN_TYPE("unknown type 77");

    final String message;

    Foreign(String message) {
      this.message = message;
    }

    byte[] bytes() {
      byte[] frame = new byte[Frame.BYTES];
      byte[] start =
          switch (this) {
            case HTTP -> "HTTP/1.1 400 Bad Request\r\n".getBytes();
            case ECHO -> new byte[] {'N', 'C', 'C', 'L', 'F', 'F', 'M', 1, 0};
            case NEWER_VERSION -> new byte[] {'N', 'C', 'C', 'L', 'F', 'F', 'M', 2, 0};
            case UNKNOWN_TYPE -> new byte[] {'N', 'C', 'C', 'L', 'F', 'F', 'M', 1, 77};
          };
      System.arraycopy(start, 0, frame, 0, start.length);
      return frame;
    }
  }

  @Test
  void clientOfAnotherVersionIsToldTheServersVersion() throws Exception {
    StoreServer server = listen(2);
    RawPeer peer = peer(server.port());
    peer.socket.getOutputStream().write(Foreign.NEWER_VERSION.bytes());
    assertEquals(Frame.Type.OTHER_VERSION, peer.read().type());
    assertTrue(peer.isCut());
  }

  @Test
  void takenPortIsNamed() throws Exception {
    try (ServerSocket other = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      int port = other.getLocalPort();
      BootstrapException e =
          assertThrows(BootstrapException.class, () -> listen(2, port, new Limits(SHORT, 1)));
      assertContains(e, "port " + port, "NCCLFFM_PORT");
    }
  }

  @Test
  void ranksOfOneHostAreServedOnTheLoopbackInterfaceAlone() throws Exception {
    RankInfo oneHost = ranks(0, 2, freePort());
    try (StoreServer server =
        StoreServer.listen(oneHost, SECRET, Limits.DEFAULT, Deadline.in(LONG))) {
      assertTrue(server.address().isLoopbackAddress(), "" + server.address());
    }
    RankInfo twoHosts =
        new RankInfo(
            "test",
            0,
            2,
            0,
            1,
            InetSocketAddress.createUnresolved("127.0.0.1", freePort()),
            "run 1");
    try (StoreServer server =
        StoreServer.listen(twoHosts, SECRET, Limits.DEFAULT, Deadline.in(LONG))) {
      assertTrue(server.address().isAnyLocalAddress(), "" + server.address());
    }
  }

  @Test
  void interruptionEndsTheWaitOfRankZeroAndTellsTheOthers() throws Exception {
    StoreServer server = listen(3);
    RawPeer peer = seated(1, 3, server.port());
    AtomicBoolean stillInterrupted = new AtomicBoolean();
    Future<byte[]> served =
        threads.start(
            () -> {
              Thread.currentThread().interrupt();
              try (server) {
                server.serve(ID, Deadline.in(LONG));
              } finally {
                stillInterrupted.set(Thread.currentThread().isInterrupted());
              }
              return ID;
            });
    assertContains(TestRanks.failure(DeadlineException.class, served), "interrupted");
    assertTrue(stillInterrupted.get());
    Frame last = peer.read();
    assertEquals(Frame.Type.FAILED, last.type());
    assertTrue(last.text().contains("interrupted"), last.text());
  }

  @Test
  void interruptionEndsTheWaitOfAnotherRank() throws Exception {
    StoreServer server = listen(3);
    StoreClient client = client(1, 3, server.port());
    AtomicBoolean stillInterrupted = new AtomicBoolean();
    List<Thread> thread = new ArrayList<>();
    Future<byte[]> waiting =
        threads.start(
            () -> {
              synchronized (thread) {
                thread.add(Thread.currentThread());
              }
              try {
                return client.fetch(Deadline.in(LONG));
              } finally {
                stillInterrupted.set(Thread.currentThread().isInterrupted());
              }
            });
    TestRanks.until("it is in", client::isAccepted);
    synchronized (thread) {
      thread.get(0).interrupt();
    }
    DeadlineException e = TestRanks.failure(DeadlineException.class, waiting);
    assertContains(e, "127.0.0.1:" + server.port(), "interrupted");
    assertTrue(stillInterrupted.get());
    TestRanks.until("rank 0 knows", () -> server.hasLeft(1));
  }

  @Test
  void argumentsAreChecked() {
    RankInfo zero = ranks(0, 2, 7);
    assertThrows(
        IllegalArgumentException.class, () -> new TcpExchange(zero, SECRET, Duration.ZERO));
    TcpExchange exchange = new TcpExchange(zero, SECRET, LONG);
    Exception e =
        assertThrows(IllegalArgumentException.class, () -> exchange.exchange(new byte[127]));
    assertContains(e, "127 bytes", "exactly 128");
  }

  @Test
  void textLongerThanAFrameIsCut() {
    String text = "x".repeat(2 * Frame.BYTES);
    String got = new Frame(Frame.Type.LATE).withText(text).text();
    assertTrue(got.length() > 400 && text.startsWith(got), got.length() + " characters");
    Frame negative = new Frame(Frame.Type.LATE);
    negative.body().putShort((short) -1);
    assertEquals("", negative.text());
    assertEquals(0, Arrays.compare(new byte[0], negative.text().getBytes()));
  }
}

package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.DeadlineException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The exchange through a directory, and what earlier runs leave in it. */
class FileExchangeTest {
  private static final byte[] ID = TestRanks.id(43);
  private static final Duration LONG = Duration.ofSeconds(25);
  private static final Duration SHORT = Duration.ofMillis(200);

  @TempDir Path directory;

  private final TestRanks threads = new TestRanks();

  @AfterEach
  void close() {
    threads.close();
  }

  private Path path() {
    return directory.resolve("id");
  }

  private Path rankFile(int rank) {
    return directory.resolve("id.rank" + rank);
  }

  private FileExchange exchange(int rank, int size, Duration timeout) {
    return new FileExchange(path(), rank, size, timeout);
  }

  private Future<byte[]> start(int rank, int size, Duration timeout) {
    return threads.start(
        () -> exchange(rank, size, timeout).exchange(rank == 0 ? ID : new byte[0]));
  }

  private void assertEveryRankGetsTheId(int size) throws Exception {
    List<Future<byte[]>> ids = new ArrayList<>();
    for (int rank = 0; rank < size; rank++) {
      ids.add(start(rank, size, LONG));
    }
    for (byte[] id : TestRanks.results(ids)) {
      assertArrayEquals(ID, id);
    }
  }

  private void assertNothingIsLeft() throws IOException {
    try (Stream<Path> files = Files.list(directory)) {
      assertEquals(List.of(), files.toList());
    }
  }

  private static void assertContains(Exception e, String... parts) {
    for (String part : parts) {
      assertTrue(e.getMessage().contains(part), part + " is not in: " + e.getMessage());
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {1, 2, 8, 64})
  void everyRankGetsTheIdOfRankZeroAndNothingIsLeft(int size) throws Exception {
    assertEveryRankGetsTheId(size);
    assertNothingIsLeft();
  }

  @Test
  void canBeUsedManyTimesInARow() throws Exception {
    int size = 3;
    int rounds = 10;
    List<Future<Integer>> done = new ArrayList<>();
    for (int r = 0; r < size; r++) {
      int rank = r;
      done.add(
          threads.start(
              () -> {
                FileExchange exchange = exchange(rank, size, LONG);
                for (int round = 0; round < rounds; round++) {
                  byte[] id = exchange.exchange(rank == 0 ? TestRanks.id(round) : new byte[0]);
                  assertArrayEquals(TestRanks.id(round), id, "rank " + rank + " round " + round);
                }
                return rounds;
              }));
    }
    TestRanks.results(done);
    assertNothingIsLeft();
  }

  /** What a run leaves behind that was killed between the writing and the taking of the id. */
  private void leaveFilesOfADeadRun(int size) throws Exception {
    Path copies = Files.createDirectory(directory.resolve("copies"));
    Future<byte[]> zero = start(0, size, LONG);
    List<Future<byte[]>> others = new ArrayList<>();
    for (int rank = 2; rank < size; rank++) {
      others.add(start(rank, size, LONG));
    }
    // In rank 1's place: with its file the id is published, and stays until rank 1 takes it.
    TestRanks.until("rank 2 is there", () -> Files.exists(rankFile(2)));
    Files.copy(rankFile(2), rankFile(1));
    TestRanks.until("the id is there", () -> Files.exists(path()));
    for (String name : List.of("id", "id.rank1")) {
      Files.copy(directory.resolve(name), copies.resolve(name));
    }
    zero.cancel(true);
    others.forEach(other -> other.cancel(true));
    TestRanks.until("they have ended", () -> !Files.exists(path()) && !Files.exists(rankFile(2)));
    for (String name : List.of("id", "id.rank1")) {
      Files.move(
          copies.resolve(name), directory.resolve(name), StandardCopyOption.REPLACE_EXISTING);
    }
    Files.delete(copies);
  }

  @Test
  void filesOfADeadRunAreNotTakenForThisOnes() throws Exception {
    leaveFilesOfADeadRun(3);
    assertTrue(Files.exists(path()) && Files.exists(rankFile(1)));

    // Rank 2 first, alone with the dead run's file, and not fooled by it.
    DeadlineException e = TestRanks.failure(DeadlineException.class, start(2, 3, SHORT));
    assertContains(e, path().toString(), "the file there is of another exchange");

    assertEveryRankGetsTheId(3);
    assertNothingIsLeft();
  }

  @Test
  void rankThatComesAfterItsDeadPredecessorsFileGetsTheId() throws Exception {
    leaveFilesOfADeadRun(3);
    Files.delete(path());
    Future<byte[]> zero = start(0, 3, LONG);
    Future<byte[]> two = start(2, 3, LONG);
    assertArrayEquals(
        ID,
        TestRanks.result(
            threads.start(
                () -> {
                  TestRanks.until(
                      "the id is there for the dead rank 1", () -> Files.exists(path()));
                  return exchange(1, 3, LONG).exchange(new byte[0]);
                })));
    assertArrayEquals(ID, TestRanks.result(zero));
    assertArrayEquals(ID, TestRanks.result(two));
    assertNothingIsLeft();
  }

  /** Row 29 of the table of known faults, as for TCP. */
  @Test
  void missingRanksAreNamedOnRankZeroAndOnTheOthers() throws Exception {
    Future<byte[]> one = start(1, 4, LONG);
    TestRanks.until("rank 1 is there", () -> Files.exists(rankFile(1)));
    DeadlineException e = TestRanks.failure(DeadlineException.class, start(0, 4, SHORT));
    assertContains(e, path().toString(), "ranks 2, 3 of 4 did not come within 200 ms");
    one.cancel(true);
    TestRanks.until("rank 1 is gone", () -> !Files.exists(rankFile(1)));

    e = TestRanks.failure(DeadlineException.class, start(1, 4, SHORT));
    assertContains(
        e, path().toString(), "rank 0 did not put the id there", "no file of ranks 2, 3");
    assertNothingIsLeft();
  }

  @Test
  void rankThatNeverTakesTheIdIsNamed() throws Exception {
    Future<byte[]> two = start(2, 3, LONG);
    TestRanks.until("rank 2 is there", () -> Files.exists(rankFile(2)));
    Files.copy(rankFile(2), rankFile(1));
    DeadlineException e =
        TestRanks.failure(DeadlineException.class, start(0, 3, Duration.ofSeconds(2)));
    assertContains(e, "rank 1 of 3 did not take the id");
    // It has the id, and only waited for the others.
    assertArrayEquals(ID, TestRanks.result(two));
  }

  @Test
  void otherNumberOfRanksIsNamed() throws Exception {
    Future<byte[]> one = start(1, 3, LONG);
    TestRanks.until("rank 1 is there", () -> Files.exists(rankFile(1)));
    DeadlineException e = TestRanks.failure(DeadlineException.class, start(0, 2, SHORT));
    assertContains(e, "rank 1 of 2 did not come", "another number of ranks from rank 1");
    one.cancel(true);
  }

  @Test
  void anotherRunOnTheSamePathIsFound() throws Exception {
    Future<byte[]> two = start(2, 3, LONG);
    TestRanks.until("rank 2 is there", () -> Files.exists(rankFile(2)));
    Files.copy(rankFile(2), rankFile(1));
    Future<byte[]> zero = start(0, 3, LONG);
    TestRanks.until("the id is there", () -> Files.exists(path()));
    Path others = Files.write(directory.resolve("other"), TestRanks.id(9));
    Files.move(others, path(), StandardCopyOption.ATOMIC_MOVE);
    BootstrapException e = TestRanks.failure(BootstrapException.class, zero);
    assertContains(e, path().toString(), "changed by another", "path of its own");
    assertArrayEquals(TestRanks.id(9), Files.readAllBytes(path()));
    two.cancel(true);
  }

  @Test
  void filesAreForTheirOwnerOnly() throws Exception {
    Future<byte[]> two = start(2, 3, LONG);
    TestRanks.until("rank 2 is there", () -> Files.exists(rankFile(2)));
    Files.copy(rankFile(2), rankFile(1));
    Future<byte[]> zero = start(0, 3, LONG);
    TestRanks.until("the id is there", () -> Files.exists(path()));
    for (Path file : List.of(path(), rankFile(2))) {
      assertEquals("rw-------", PosixFilePermissions.toString(Files.getPosixFilePermissions(file)));
    }
    zero.cancel(true);
    two.cancel(true);
  }

  @Test
  void missingDirectoryIsNamed() {
    Path nowhere = directory.resolve("none").resolve("id");
    Exception e =
        assertThrows(
            BootstrapException.class,
            () -> new FileExchange(nowhere, 1, 2, LONG).exchange(new byte[0]));
    assertContains(e, "cannot write " + nowhere, "directory must exist");
  }

  @ParameterizedTest
  @ValueSource(ints = {0, 1})
  void interruptionEndsTheWait(int rank) throws Exception {
    AtomicBoolean stillInterrupted = new AtomicBoolean();
    Future<byte[]> waiting =
        threads.start(
            () -> {
              Thread.currentThread().interrupt();
              try {
                return exchange(rank, 2, LONG).exchange(rank == 0 ? ID : new byte[0]);
              } finally {
                stillInterrupted.set(Thread.currentThread().isInterrupted());
              }
            });
    DeadlineException e = TestRanks.failure(DeadlineException.class, waiting);
    assertContains(e, path().toString(), "interrupted");
    assertTrue(stillInterrupted.get());
    assertNothingIsLeft();
  }

  @Test
  void argumentsAreChecked() {
    assertThrows(IllegalArgumentException.class, () -> exchange(2, 2, LONG));
    assertThrows(IllegalArgumentException.class, () -> exchange(-1, 2, LONG));
    assertThrows(IllegalArgumentException.class, () -> exchange(0, 2, Duration.ZERO));
    Exception e =
        assertThrows(
            IllegalArgumentException.class, () -> exchange(0, 2, LONG).exchange(new byte[1]));
    assertContains(e, "1 bytes", "exactly 128");
  }
}

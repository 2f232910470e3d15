package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/**
 * One of four processes is killed in the midst of collectives, again and again. The three others
 * stay and meet a new one in every round, so that a round costs the start of one JVM. {@code
 * -Dncclffm.test.kills=50} for more rounds than the few of a usual run.
 */
class KillsTest {
  private static final int SIZE = 4;
  private static final int ROUNDS = Integer.getInteger("ncclffm.test.kills", 5);
  private static final Duration START = Duration.ofSeconds(60);
  private static final Duration NOTICE = RepeatedRank.WATCHDOG.plusSeconds(5);
  private static final Path SHARED_MEMORY = Path.of("/dev/shm");

  private final List<ChildJvm> started = new ArrayList<>();

  @AfterEach
  void endChildren() {
    started.forEach(ChildJvm::close);
  }

  private ChildJvm start() {
    ChildJvm child = ChildJvm.of(RepeatedRank.class, "" + SIZE).start();
    started.add(child);
    return child;
  }

  @Test
  @Timeout(value = 600, unit = TimeUnit.SECONDS)
  void othersOfAKilledRankFailInTimeCloseAndGoOn() throws Exception {
    TestRanks.assumeCpu("NCCL's own time-outs are longer than a test's patience");
    Set<String> before = sharedMemory();
    long begin = System.nanoTime();
    List<ChildJvm> survivors = List.of(start(), start(), start());
    ChildJvm next = start();
    long[] most = new long[3]; // milliseconds, threads, descriptors of all rounds
    long[] first = new long[3];
    for (int round = 0; round < ROUNDS; round++) {
      ChildJvm victim = next;
      int victimRank = round % SIZE;
      NcclUniqueId id = NcclUniqueId.create();
      List<ChildJvm> ranks = new ArrayList<>(survivors);
      ranks.add(victimRank, victim);
      for (int r = 0; r < SIZE; r++) {
        ranks.get(r).tell(round + " " + r + " " + SIZE + " " + id.toHex());
      }
      next = round + 1 < ROUNDS ? start() : victim; // starts while the others run
      for (ChildJvm rank : ranks) {
        rank.awaitLine("RUNNING " + round, START);
      }
      victim.kill(); // SIGKILL
      for (ChildJvm survivor : survivors) {
        String[] over = survivor.awaitLine("OVER " + round + " ", NOTICE).split(" ", 5);
        assertEquals("ncclRemoteError", over[3], survivor.output());
        assertTrue(over[4].contains("rank " + victimRank), survivor.output());
        for (int i = 0; i < most.length; i++) {
          most[i] = Math.max(most[i], Long.parseLong(over[i]));
          first[i] = round == 0 ? most[i] : first[i];
        }
      }
      assertEquals(128 + 9, victim.exitStatus(NOTICE), victim.output());
      victim.close();
    }
    for (ChildJvm survivor : survivors) {
      survivor.endInput();
      assertEquals(0, survivor.exitStatus(NOTICE), survivor.output());
      survivor.awaitLine("ENDED", NOTICE);
    }
    Set<String> left = sharedMemory();
    left.removeAll(before);
    assertEquals(Set.of(), left, "left in /dev/shm");
    System.out.printf(
        "%d kills in %d s: noticed and closed within %d ms; threads %d after the first round, %d at"
            + " most, descriptors %d and %d%n",
        ROUNDS,
        (System.nanoTime() - begin) / 1_000_000_000,
        most[0],
        first[1],
        most[1],
        first[2],
        most[2]);
    assertTrue(most[0] < NOTICE.toMillis(), "noticed after " + most[0] + " ms");
    assertTrue(most[1] <= first[1] + 5, "threads: " + first[1] + ", later " + most[1]);
    assertTrue(most[2] <= first[2] + 5, "descriptors: " + first[2] + ", later " + most[2]);
  }

  /** Names in /dev/shm that may come from this library or from NCCL. */
  private static Set<String> sharedMemory() throws IOException {
    try (Stream<Path> files = Files.list(SHARED_MEMORY)) {
      return files
          .map(file -> file.getFileName().toString())
          .filter(name -> name.startsWith("nccl"))
          .collect(Collectors.toCollection(TreeSet::new));
    }
  }
}

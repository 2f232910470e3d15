package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Ranks that are processes: they find one another, and they survive one another's death. */
class ProcessesTest {
  private static final Duration START = Duration.ofSeconds(60);
  private static final Duration NOTICE = Duration.ofSeconds(10);
  private static final Path SHARED_MEMORY = Path.of("/dev/shm");

  private final List<ChildJvm> children = new ArrayList<>();

  @AfterEach
  void endChildren() {
    children.forEach(ChildJvm::close);
  }

  private ChildJvm start(ChildJvm.Setup setup) {
    ChildJvm child = setup.start();
    children.add(child);
    return child;
  }

  private static ChildJvm.Setup rank(int rank, int size, int steps) {
    return ChildJvm.of(RankProcess.class, "" + rank, "" + size, "" + steps);
  }

  /** Starts all ranks; rank 0's id goes to the others. */
  private void startRanks(int size, int steps) throws InterruptedException {
    for (int r = 0; r < size; r++) {
      start(rank(r, size, steps));
    }
    String id = children.get(0).awaitLine("ID ", START);
    for (int r = 1; r < size; r++) {
      children.get(r).send(id);
    }
  }

  @ParameterizedTest
  @ValueSource(ints = {2, 4})
  void processesAllReduceRight(int size) throws Exception {
    startRanks(size, 50);
    for (ChildJvm child : children) {
      assertEquals(0, child.exitStatus(START), child.output());
      child.awaitLine("DONE", NOTICE);
      child.awaitLine("ENDED", NOTICE);
    }
  }

  // The first is the rank that created the id, around which the others gathered.
  @ParameterizedTest
  @ValueSource(ints = {0, 2})
  void killedRankFailsTheOthersAndLeavesNothingBehind(int victim) throws Exception {
    TestRanks.assumeCpu("NCCL's own time-outs are longer than a test's patience");
    Set<String> before = sharedMemory();
    int size = 4;
    startRanks(size, 0);
    for (ChildJvm child : children) {
      child.awaitLine("RUNNING", START);
      String maps = Files.readString(Path.of("/proc/" + child.pid() + "/maps"));
      assertTrue(!maps.contains(" /dev/shm/"), maps);
    }
    children.get(victim).kill();

    for (int r = 0; r < size; r++) {
      if (r != victim) {
        ChildJvm survivor = children.get(r);
        String[] failed = survivor.awaitLine("FAILED ", NOTICE).split(" ", 3);
        assertEquals("ncclRemoteError", failed[0], survivor.output());
        assertTrue(failed[2].contains("rank " + victim), survivor.output());
        assertEquals(0, survivor.exitStatus(NOTICE), survivor.output());
        survivor.awaitLine("ENDED", NOTICE);
      }
    }
    children.get(victim).exitStatus(NOTICE);
    Set<String> left = sharedMemory();
    left.removeAll(before);
    assertEquals(Set.of(), left, "left in /dev/shm");
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

  @Test
  void rankThatNeverJoinsIsNamed() throws Exception {
    TestRanks.assumeCpu("NCCL's own time-outs are longer than a test's patience");
    int size = 3;
    for (int r = 0; r < size - 1; r++) {
      start(rank(r, size, 1).environment("NCCLFFM_CPU_TIMEOUT_MS", 2000));
    }
    children.get(1).send(children.get(0).awaitLine("ID ", START));

    for (ChildJvm child : children) {
      String[] failed = child.awaitLine("FAILED ", NOTICE).split(" ", 3);
      assertEquals("ncclSystemError", failed[0], child.output());
      assertTrue(failed[2].matches(".*rank.* 2\\b.*"), child.output());
      assertEquals(0, child.exitStatus(NOTICE), child.output());
    }
  }

  @Test
  void idThatHasServedIsRefused() throws Exception {
    TestRanks.assumeCpu("NCCL waits for ranks that never come");
    NcclUniqueId id = NcclUniqueId.create();
    try (Communicator served = Communicator.create(id, 1, 0, new CudaDevice(0))) {
      assertEquals(1, served.size());
      // As another process, which cannot know that the id was used here.
      ChildJvm late = start(rank(1, 2, 1));
      late.send(id.toHex());
      String[] failed = late.awaitLine("FAILED ", START).split(" ", 3);
      assertEquals("ncclInvalidUsage", failed[0], late.output());
      assertEquals(0, late.exitStatus(NOTICE), late.output());
    }
  }
}

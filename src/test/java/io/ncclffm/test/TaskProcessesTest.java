package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Task queues of ranks that are processes. On a GPU they need MPS to run at the same time. */
class TaskProcessesTest {
  private static final Duration START = Duration.ofSeconds(60);
  private static final Duration PATIENCE = Duration.ofSeconds(50);

  private final List<ChildJvm> children = new ArrayList<>();

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @AfterEach
  void endChildren() {
    children.forEach(ChildJvm::close);
  }

  private void start(int size, String what) throws InterruptedException {
    for (int r = 0; r < size; r++) {
      children.add(ChildJvm.of(TaskProcess.class, "" + r, "" + size, what).start());
    }
    String id = children.get(0).awaitLine("ID ", START);
    for (int r = 1; r < size; r++) {
      children.get(r).send(id);
    }
  }

  @Test
  void tasksAreRunAndADisagreementIsNamedInBothProcesses() throws Exception {
    start(2, "tasks");
    for (int r = 0; r < 2; r++) {
      String told = children.get(r).awaitLine("DISAGREED ", PATIENCE);
      assertTrue(told.contains("\"of rank " + r + "\""), told);
      // The name is the other process's: here only its hash is known.
      assertTrue(told.matches(".*rank " + (1 - r) + " came to task 0x[0-9a-f]{8} .*"), told);
      assertEquals("850", children.get(r).awaitLine("RIGHT ", PATIENCE));
      assertEquals(0, children.get(r).exitStatus(PATIENCE), children.get(r).output());
    }
  }

  @Test
  void othersOfAKilledProcessEndWithinTheDeadline() throws Exception {
    start(3, "loop");
    for (ChildJvm child : children) {
      child.awaitLine("RUNNING", START);
    }
    children.get(1).kill();
    boolean named = false;
    for (int r = 0; r < 3; r += 2) {
      String[] over = children.get(r).awaitLine("FAILED ", PATIENCE).split(" ", 3);
      named |= over[0].equals("1");
      assertTrue(Long.parseLong(over[1]) < PATIENCE.toMillis(), children.get(r).output());
      assertTrue(over[2].contains("\"gradients\""), children.get(r).output());
      assertEquals(0, children.get(r).exitStatus(PATIENCE), children.get(r).output());
    }
    assertTrue(named, children.get(0).output());
  }
}

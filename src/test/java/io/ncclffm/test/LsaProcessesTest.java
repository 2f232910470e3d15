package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeFalse;

import io.ncclffm.lsa.LsaProvider;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** Windows between ranks that are processes. On a GPU they need MPS to run at the same time. */
class LsaProcessesTest {
  private static final Duration START = Duration.ofSeconds(90);

  private final List<ChildJvm> children = new ArrayList<>();

  @BeforeEach
  void needsTheShim() {
    TestRanks.assumeShim();
  }

  @AfterEach
  void endChildren() {
    children.forEach(ChildJvm::close);
  }

  private void startRanks(int size, String provider, int rounds, String then, String... environment)
      throws InterruptedException {
    for (int r = 0; r < size; r++) {
      ChildJvm.Setup setup =
          ChildJvm.of(LsaProcess.class, "" + r, "" + size, provider, "" + rounds, then);
      for (int i = 0; i < environment.length; i += 2) {
        setup.environment(environment[i], environment[i + 1]);
      }
      children.add(setup.start());
    }
    String id = children.get(0).awaitLine("ID ", START);
    for (int r = 1; r < size; r++) {
      children.get(r).send(id);
    }
  }

  private void awaitEnds() throws InterruptedException {
    for (ChildJvm child : children) {
      assertEquals(0, child.exitStatus(START), child.output());
      child.awaitLine("ENDED", START);
    }
  }

  @ParameterizedTest
  @CsvSource({
    "2,NCCL_WINDOW", "2,CPU", "2,CUDA_IPC", "2,HOST_STAGED",
    "4,NCCL_WINDOW", "4,CPU", "4,CUDA_IPC", "4,HOST_STAGED",
    "8,NCCL_WINDOW", "8,CUDA_IPC", "8,HOST_STAGED"
  })
  void everyProcessReachesEveryOther(int size, LsaProvider provider) throws Exception {
    ProvidersHere.assume(provider);
    assumeFalse(TestRanks.onCpu() && size == 8, "eight JVMs are too much for a small machine");
    startRanks(size, provider.name(), TestRanks.onCpu() ? 50 : 20, "");
    awaitEnds();
    for (int r = 0; r < size; r++) {
      String[] made = children.get(r).awaitLine("PROVIDER ", START).split(" ");
      assertEquals(provider.name(), made[0]);
      for (int p = 0; p < size; p++) {
        assertEquals(p == r, made[1 + p].equals("SELF"), String.join(" ", made));
      }
      String left = children.get(r).awaitLine("LEFT ", START);
      String[] figures = left.split(" ");
      assertTrue(Long.parseLong(figures[1]) <= Long.parseLong(figures[0]) + 1, left);
      assertTrue(Long.parseLong(figures[3]) <= Long.parseLong(figures[2]) + 20, left);
      // A shared GPU's memory is everybody's, and others may have their next window by now: 4 MiB
      // for each of them; if they kept all it would be 2 MiB for each in every round.
      long others = TestRanks.onCpu() ? 0 : (long) size * (4 << 20);
      assertTrue(Long.parseLong(figures[5]) >= Long.parseLong(figures[4]) - others, left);
    }
  }

  @ParameterizedTest
  @EnumSource
  void windowsThatAreOpenAtAnAbortAreClosed(LsaProvider provider) throws Exception {
    ProvidersHere.assume(provider);
    startRanks(2, provider.name(), 1, "abort");
    awaitEnds();
  }

  @Test
  void withoutPeerAccessTheHostIsTheWay() throws Exception {
    TestRanks.assumeCpu("peer access cannot be taken away");
    startRanks(
        2,
        "any",
        1,
        "",
        "NCCLFFM_CPU_PEER_ACCESS",
        "0",
        "NCCLFFM_CPU_FAULTS",
        "ncclCommWindowRegister:result=0");
    awaitEnds();
    for (ChildJvm child : children) {
      child.awaitLine("PROVIDER HOST_STAGED", START);
    }
  }

  /** One rank cannot open the others' memory: all of them get the same exception. */
  @Test
  void allRanksAreRefusedForTheSameReason() throws Exception {
    TestRanks.assumeCpu("the fault is injected");
    for (int r = 0; r < 3; r++) {
      ChildJvm.Setup setup = ChildJvm.of(LsaProcess.class, "" + r, "3", "CUDA_IPC", "1", "");
      if (r == 1) {
        setup.environment("NCCLFFM_CPU_FAULTS", "cudaIpcOpenMemHandle:result=400");
      }
      children.add(setup.start());
    }
    String id = children.get(0).awaitLine("ID ", START);
    children.get(1).send(id);
    children.get(2).send(id);
    awaitEnds();
    String first = children.get(0).awaitLine("REFUSED ", START);
    assertTrue(first.contains("CUDA_IPC: rank 1: cudaIpcOpenMemHandle"), first);
    for (ChildJvm child : children) {
      assertEquals(first, child.awaitLine("REFUSED ", START));
    }
  }

  /**
   * A rank that waited in vain for another closes what it has: nothing may wait for the kernel in
   * which NCCL still waits, and in the end nothing is taken.
   */
  @ParameterizedTest
  @CsvSource({
    "CPU,window",
    "CPU,device",
    "CPU,close",
    "CUDA_IPC,window",
    "CUDA_IPC,device",
    "CUDA_IPC,close",
    "HOST_STAGED,window",
    "HOST_STAGED,close",
    "NCCL_WINDOW,window",
    "NCCL_WINDOW,close"
  })
  void closingAfterADeadlineDoesNotWait(LsaProvider provider, String what) throws Exception {
    ProvidersHere.assume(provider);
    for (int r = 0; r < 2; r++) {
      children.add(ChildJvm.of(LsaWaitsInVain.class, "" + r, provider.name(), what).start());
    }
    children.get(1).tell(children.get(0).awaitLine("ID ", START));
    String vain = children.get(0).awaitLine("VAIN ", START);
    assertTrue(vain.endsWith("FAILED"), vain);
    assertEquals(0, children.get(0).exitStatus(START), children.get(0).output());
    String left = children.get(0).awaitLine("LEFT ", START);
    String[] figures = left.split(" ");
    // On a shared GPU rank 1 still has its communicator, some 550 MiB.
    long others = TestRanks.onCpu() ? 0 : 1L << 30;
    assertTrue(Long.parseLong(figures[1]) >= Long.parseLong(figures[0]) - others, left);
    children.get(1).send("end");
    awaitEnds();
  }

  /** What is on stays on, what is off is off again, and a window holds it in between. */
  @Test
  void peerAccessIsCountedForOtherProcessesMemoryToo() throws Exception {
    TestRanks.prepare();
    TestRanks.assumeDevices(2);
    startRanks(2, "CUDA_IPC", 1, "access");
    awaitEnds();
    for (ChildJvm child : children) {
      assertEquals(
          "found off: one window on, none off; found on: one window on, none on",
          child.awaitLine("ACCESS ", START));
    }
  }
}

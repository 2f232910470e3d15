package io.ncclffm.core.bootstrap;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The environments of the launchers. */
class RankInfoTest {
  private static Map<String, String> env(String... namesAndValues) {
    Map<String, String> env = new HashMap<>();
    for (int i = 0; i < namesAndValues.length; i += 2) {
      env.put(namesAndValues[i], namesAndValues[i + 1]);
    }
    return env;
  }

  private static Map<String, String> torchrun() {
    return env(
        "RANK", "5",
        "WORLD_SIZE", "8",
        "LOCAL_RANK", "1",
        "LOCAL_WORLD_SIZE", "4",
        "MASTER_ADDR", "host0",
        "MASTER_PORT", "29500",
        "TORCHELASTIC_RUN_ID", "my-run");
  }

  private static Map<String, String> slurm() {
    return env(
        "SLURM_JOB_ID", "200505",
        "SLURM_STEP_ID", "2",
        "SLURM_PROCID", "6",
        "SLURM_NTASKS", "7",
        "SLURM_STEP_NUM_TASKS", "7",
        "SLURM_LOCALID", "2",
        "SLURM_NODEID", "1",
        "SLURM_STEP_TASKS_PER_NODE", "4,3",
        "SLURM_STEP_NODELIST", "gnode[10,20,25,37]",
        "SLURM_JOB_NODELIST", "gnode[01-99]");
  }

  private static Map<String, String> openMpi() {
    return env(
        "OMPI_COMM_WORLD_RANK", "3",
        "OMPI_COMM_WORLD_SIZE", "4",
        "OMPI_COMM_WORLD_LOCAL_RANK", "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "2",
        "PMIX_RANK", "3",
        "PMIX_NAMESPACE", "prterun-host0-77@1");
  }

  private static Map<String, String> with(Map<String, String> env, String name, String value) {
    env.put(name, value);
    return env;
  }

  private static Map<String, String> without(Map<String, String> env, String name) {
    env.remove(name);
    return env;
  }

  private static InetSocketAddress at(String host, int port) {
    return InetSocketAddress.createUnresolved(host, port);
  }

  private static String refusal(Map<String, String> env) {
    return assertThrows(BootstrapException.class, () -> RankInfo.fromEnvironment(env)).getMessage();
  }

  private static void assertNames(Map<String, String> env, String... parts) {
    String message = refusal(env);
    for (String part : parts) {
      assertTrue(message.contains(part), part + " is not in: " + message);
    }
  }

  @Test
  void torchrunIsRead() {
    assertEquals(
        new RankInfo("torchrun", 5, 8, 1, 4, at("host0", 29500), "my-run"),
        RankInfo.fromEnvironment(torchrun()));
  }

  @Test
  void portThatTorchrunItselfListensOnIsLeftToIt() {
    Map<String, String> env = with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", "True");
    assertEquals(at("host0", 29501), RankInfo.fromEnvironment(env).master());
    env.put("TORCHELASTIC_USE_AGENT_STORE", "False");
    assertEquals(at("host0", 29500), RankInfo.fromEnvironment(env).master());
    env.put("TORCHELASTIC_USE_AGENT_STORE", "True");
    env.put("MASTER_PORT", "65535");
    assertNames(env, "MASTER_PORT=65535", "NCCLFFM_PORT");
  }

  @Test
  void slurmIsRead() {
    int port = 20_000 + (31 * 200_505 + 2) % 12_000;
    assertEquals(
        new RankInfo("Slurm", 6, 7, 2, 3, at("gnode10", port), "200505.2"),
        RankInfo.fromEnvironment(slurm()));
  }

  @Test
  void slurmWithoutStepVariablesUsesThoseOfTheJob() {
    Map<String, String> env =
        env(
            "SLURM_PROCID", "3",
            "SLURM_NTASKS", "4",
            "SLURM_LOCALID", "1",
            "SLURM_NTASKS_PER_NODE", "2",
            "SLURM_JOB_NODELIST", "a1,b2");
    assertEquals(new RankInfo("Slurm", 3, 4, 1, 2, null, null), RankInfo.fromEnvironment(env));
    env.put("MASTER_PORT", "7000");
    assertEquals(at("a1", 7000), RankInfo.fromEnvironment(env).master());
    env.put("MASTER_ADDR", "b2");
    assertEquals(at("b2", 7000), RankInfo.fromEnvironment(env).master());
  }

  @ParameterizedTest
  @CsvSource(
      delimiter = '|',
      value = {
        "gnode[10,20,25,37] | gnode10",
        "node[001-004,007],gpu1 | node001",
        "a1,b[2-3] | a1",
        "solo | solo",
        "r[0-1]n[3,5] | r0n3",
        "n[1-2].example.org | n1.example.org",
        "gpu-a-[7-9] | gpu-a-7",
      })
  void firstHostOfANodeList(String list, String host) {
    Map<String, String> env = with(slurm(), "SLURM_STEP_NODELIST", list);
    assertEquals(host, RankInfo.fromEnvironment(env).master().getHostString());
  }

  @ParameterizedTest
  @ValueSource(strings = {"", ",a", "a[1-2", "a]1", "a[]", "a[-3]", "a b"})
  void malformedNodeListIsNamed(String list) {
    assertNames(
        with(slurm(), "SLURM_STEP_NODELIST", list), "SLURM_STEP_NODELIST=" + list, "gpu[07-09");
  }

  @ParameterizedTest
  @CsvSource(
      delimiter = '|',
      value = {"0|4(x2),3|4", "1|4(x2),3|4", "2|4(x2),3|3", "0|5,4(x3)|5", "3|5,4(x3)|4", "0|7|7"})
  void tasksOfANode(String node, String list, int tasks) {
    Map<String, String> env = with(slurm(), "SLURM_NODEID", node);
    env.put("SLURM_STEP_TASKS_PER_NODE", list);
    assertEquals(tasks, RankInfo.fromEnvironment(env).localSize());
  }

  @ParameterizedTest
  @ValueSource(strings = {"", "x", "4(x", "4(2)", "4,,3", "-4", "4(x2)3", "99999999999"})
  void malformedTasksOfNodesAreNamed(String list) {
    assertNames(
        with(slurm(), "SLURM_STEP_TASKS_PER_NODE", list), "SLURM_STEP_TASKS_PER_NODE=" + list);
  }

  @Test
  void nodeBeyondTheListIsNamed() {
    assertNames(
        with(slurm(), "SLURM_NODEID", "2"), "SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=4,3");
  }

  @Test
  void openMpiIsRead() {
    assertEquals(
        new RankInfo("Open MPI", 3, 4, 1, 2, null, "prterun-host0-77@1"),
        RankInfo.fromEnvironment(openMpi()));
    Map<String, String> env = with(openMpi(), "MASTER_ADDR", "host0");
    env.put("MASTER_PORT", "7000");
    assertEquals(at("host0", 7000), RankInfo.fromEnvironment(env).master());
  }

  @Test
  void onOneHostRankZeroIsAtTheLoopbackAddress() {
    Map<String, String> env = with(openMpi(), "OMPI_COMM_WORLD_LOCAL_SIZE", "4");
    env.put("NCCLFFM_PORT", "7001");
    assertEquals(at("127.0.0.1", 7001), RankInfo.fromEnvironment(env).master());
  }

  @Test
  void ownPortGoesBeforeEveryOther() {
    for (Map<String, String> env : List.of(torchrun(), slurm())) {
      env.put("NCCLFFM_PORT", "7001");
      assertEquals(7001, RankInfo.fromEnvironment(env).master().getPort());
    }
  }

  @Test
  void theInnermostLauncherCounts() {
    Map<String, String> mpirunInSlurm = slurm();
    mpirunInSlurm.putAll(openMpi());
    assertEquals(3, RankInfo.fromEnvironment(mpirunInSlurm).rank());
    Map<String, String> torchrunBelowBoth = new HashMap<>(mpirunInSlurm);
    torchrunBelowBoth.putAll(torchrun());
    assertEquals(5, RankInfo.fromEnvironment(torchrunBelowBoth).rank());
  }

  @Test
  void contradictingPmixRankIsNamed() {
    assertNames(
        with(openMpi(), "PMIX_RANK", "2"), "OMPI_COMM_WORLD_RANK=3", "PMIX_RANK=2", "set RANK");
    assertNames(with(slurm(), "PMIX_RANK", "2"), "SLURM_PROCID=6", "PMIX_RANK=2", "set RANK");
    assertEquals(6, RankInfo.fromEnvironment(with(slurm(), "PMIX_RANK", "6")).rank());
  }

  @Test
  void pmixAloneIsNotEnough() {
    assertNames(env("PMIX_RANK", "3"), "PMIX_RANK=3", "number of ranks", "WORLD_SIZE");
  }

  @Test
  void noLauncherIsSaid() {
    assertNames(env("PATH", "/bin"), "no launcher", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID");
  }

  @ParameterizedTest
  @ValueSource(strings = {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
  void missingTorchrunVariableIsNamed(String name) {
    assertNames(without(torchrun(), name), "torchrun: " + name + " is not set", "unset RANK");
  }

  @ParameterizedTest
  @ValueSource(strings = {"SLURM_LOCALID", "SLURM_NODEID"})
  void missingSlurmVariableIsNamed(String name) {
    assertNames(without(slurm(), name), "Slurm: " + name + " is not set", "srun");
  }

  @Test
  void batchScriptWithoutSrunIsTold() {
    assertNames(
        env("SLURM_PROCID", "0", "SLURM_LOCALID", "0", "SLURM_JOB_ID", "1"), "is not set", "srun");
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"
      })
  void missingOpenMpiVariableIsNamed(String name) {
    assertNames(without(openMpi(), name), "Open MPI: " + name + " is not set", "mpirun");
  }

  @ParameterizedTest
  @CsvSource({
    "RANK, x",
    "RANK, ''",
    "RANK, -1",
    "RANK, 8",
    "RANK, 99999999999",
    "WORLD_SIZE, 0",
    "WORLD_SIZE, 8.0",
    "LOCAL_RANK, 4",
    "LOCAL_RANK, ' 1'",
    "LOCAL_WORLD_SIZE, 9",
    "LOCAL_WORLD_SIZE, 0",
    "MASTER_PORT, 0",
    "MASTER_PORT, 65536",
    "MASTER_PORT, http",
    "MASTER_ADDR, ' '",
    "NCCLFFM_PORT, 70000"
  })
  void badValueIsNamed(String name, String value) {
    assertNames(with(torchrun(), name, value), name + "=" + value + ":", "torchrun");
  }

  @Test
  void numbersOutOfRangeAreRefused() {
    Exception e =
        assertThrows(
            IllegalArgumentException.class, () -> new RankInfo("test", 4, 4, 0, 1, null, null));
    assertTrue(e.getMessage().contains("rank 4: must be in 0..3"), e.getMessage());
    assertThrows(
        IllegalArgumentException.class, () -> new RankInfo("test", 0, 4, 1, 1, null, null));
    assertThrows(
        IllegalArgumentException.class, () -> new RankInfo("test", 0, 4, 1, 5, null, null));
    assertThrows(
        IllegalArgumentException.class, () -> new RankInfo("test", 0, 1, 0, 1, at("h", 0), null));
    assertNull(new RankInfo("test", 0, 1, 0, 1, null, null).master());
  }
}

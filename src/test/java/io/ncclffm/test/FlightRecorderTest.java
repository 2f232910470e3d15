package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.TaskBuckets;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskQueueException;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Comparator;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import jdk.jfr.Configuration;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordingFile;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** What a recording with the library's settings file holds. */
class FlightRecorderTest {
  private static final String SETTINGS = "/META-INF/ncclffm/ncclffm.jfc";
  private static final int RANKS = 2;
  private static final int COUNT = 100;

  @TempDir Path temp;

  private interface Work {
    void run() throws Exception;
  }

  private List<RecordedEvent> record(Work work) throws Exception {
    try (InputStream in = settings();
        Recording recording =
            new Recording(
                Configuration.create(new InputStreamReader(in, StandardCharsets.UTF_8)))) {
      recording.start();
      work.run();
      recording.stop();
      Path file = temp.resolve("recording.jfr");
      recording.dump(file);
      return RecordingFile.readAllEvents(file).stream()
          .filter(e -> e.getEventType().getName().startsWith("io.ncclffm."))
          .sorted(Comparator.comparing(RecordedEvent::getStartTime))
          .toList();
    }
  }

  private static InputStream settings() {
    @Nullable InputStream in = Communicator.class.getResourceAsStream(SETTINGS);
    assertNotNull(in, SETTINGS);
    return in;
  }

  private static List<RecordedEvent> of(List<RecordedEvent> events, String type, int rank) {
    return events.stream()
        .filter(e -> e.getEventType().getName().equals("io.ncclffm." + type))
        .filter(e -> rank < 0 || e.getInt("rank") == rank)
        .toList();
  }

  @Test
  void everyOperationIsRecordedWithWhatItIs() throws Exception {
    long[] streams = new long[RANKS];
    List<RecordedEvent> events =
        record(
            () -> {
              try (LocalWorld world = TestRanks.open(RANKS);
                  RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT64, COUNT)) {
                world.run(
                    rank -> {
                      streams[rank.rank()] = rank.stream().handle().address();
                      DeviceBuffer mine = x.of(rank);
                      Communicator comm = rank.communicator();
                      comm.allReduce(mine, 0, mine, 0, 7, ReduceOp.MAX, rank.stream());
                      comm.broadcast(mine, mine, 1, rank.stream());
                      NcclGroup.run(
                          () -> {
                            comm.send(mine, 0, 3, 1 - rank.rank(), rank.stream());
                            comm.recv(mine, 50, 3, 1 - rank.rank(), rank.stream());
                          });
                      rank.stream().synchronize();
                    });
              }
            });
    for (int r = 0; r < RANKS; r++) {
      List<RecordedEvent> operations = of(events, "Collective", r);
      List<String> told =
          operations.stream()
              .map(
                  e ->
                      e.getString("operation")
                          + " "
                          + e.getLong("bytes")
                          + " "
                          + e.getString("type")
                          + " "
                          + e.getString("reduction")
                          + " "
                          + e.getInt("peer"))
              .toList();
      assertEquals(
          List.of(
              "ncclAllReduce 4000 FLOAT32 sum -1", // of TestRanks.open
              "ncclAllReduce 56 FLOAT64 max -1",
              "ncclBroadcast 800 FLOAT64  1",
              "ncclSend 24 FLOAT64  " + (1 - r),
              "ncclRecv 24 FLOAT64  " + (1 - r)),
          told);
      for (RecordedEvent e : operations) {
        assertEquals(streams[r], e.getLong("stream"));
        assertEquals(RANKS, e.getInt("size"));
      }
      List<RecordedEvent> life = of(events, "Communicator", r);
      assertEquals(
          List.of("create", "ncclCommDestroy"),
          life.stream().map(e -> e.getString("step")).toList());
      assertTrue(life.get(0).getDuration().compareTo(Duration.ZERO) > 0);
      assertEquals(RANKS, life.get(0).getInt("size"));
    }
    List<RecordedEvent> groups = of(events, "Group", -1);
    assertEquals(RANKS, groups.size());
    for (RecordedEvent group : groups) {
      assertEquals(1, group.getInt("communicators"));
      assertEquals(false, group.getBoolean("failed"));
    }
    assertEquals(List.of(), of(events, "Failure", -1));
  }

  @Test
  void failuresAndAbortsAreRecorded() throws Exception {
    List<RecordedEvent> events =
        record(
            () -> {
              try (LocalWorld world = TestRanks.open(1)) {
                world.run(
                    rank -> {
                      assertThrows(
                          NcclException.class, () -> rank.communicator().call("ncclDemo", c -> 5));
                      assertThrows(
                          IllegalStateException.class,
                          () ->
                              NcclGroup.run(
                                  () -> {
                                    throw new IllegalStateException("from the body");
                                  }));
                      rank.communicator().abort();
                    });
              }
            });
    List<RecordedEvent> failures = of(events, "Failure", -1);
    assertEquals(1, failures.size());
    assertEquals("ncclDemo", failures.get(0).getString("operation"));
    assertEquals(5, failures.get(0).getInt("resultCode"));
    assertTrue(failures.get(0).getString("message").contains("ncclInvalidUsage"));
    assertNotNull(failures.get(0).getStackTrace());
    assertEquals(true, of(events, "Group", -1).get(0).getBoolean("failed"));
    assertEquals("ncclCommAbort", of(events, "Communicator", 0).get(1).getString("step"));
  }

  @Test
  void tasksAndTheirFailuresAreRecorded() throws Exception {
    TestRanks.assumeShim();
    String[] messages = new String[RANKS];
    List<RecordedEvent> events =
        record(
            () -> {
              try (LocalWorld world = TestRanks.open(RANKS);
                  TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
                world.run(
                    rank -> {
                      TaskQueue queue = tasks.of(rank);
                      DeviceBuffer x = tasks.x(rank);
                      Ticket[] all = {queue.ticket(), queue.ticket()};
                      TaskSymbol name = TaskRanks.GRADIENTS;
                      queue.allReduce(name, 1, x, 0, x, 0, 7, ReduceOp.MAX, all[0]);
                      // The ranks disagree.
                      queue.broadcast(name, 2, x, 0, x, 0, 3 + rank.rank(), 0, all[1]);
                      queue.launch(rank.stream());
                      TaskBuckets work = new TaskBuckets(x, 0, 10, 5, 1, 1, 1);
                      all[0].await(TaskRanks.LONG);
                      messages[rank.rank()] =
                          assertThrows(TaskQueueException.class, () -> all[1].await(TaskRanks.LONG))
                              .getMessage();
                      assertThrows(
                          TaskQueueException.class, () -> queue.buckets(name, work, rank.stream()));
                    });
              }
              try (LocalWorld world = TestRanks.open(1);
                  TaskRanks tasks = TaskRanks.open(world, TaskQueueConfig.DEFAULT)) {
                world.run(
                    rank -> {
                      TaskBuckets work = new TaskBuckets(tasks.x(rank), 0, 10, 5, 1, 1, 1);
                      tasks
                          .of(rank)
                          .buckets(TaskRanks.OTHER, work, rank.stream())
                          .await(TaskRanks.LONG);
                    });
              }
            });
    for (int r = 0; r < RANKS; r++) {
      List<String> told =
          of(events, "Task", r).stream()
              .filter(e -> e.getInt("size") == RANKS)
              .map(
                  e ->
                      e.getString("symbol")
                          + " "
                          + e.getString("operation")
                          + " "
                          + e.getLong("bytes")
                          + " "
                          + e.getString("type")
                          + " "
                          + e.getString("reduction")
                          + " "
                          + e.getInt("lane"))
              .toList();
      assertEquals(
          List.of(
              "\"gradients\" ncclFfmAllReduce 28 FLOAT32 max 1",
              "\"gradients\" ncclFfmBroadcast " + (12 + 4 * r) + " FLOAT32  2"),
          told);
      List<RecordedEvent> failures = of(events, "TaskFailure", r);
      assertEquals(1, failures.size(), "one for each lane");
      assertEquals("ncclFfmBroadcast", failures.get(0).getString("operation"));
      assertEquals(5, failures.get(0).getInt("resultCode"));
      assertEquals(2, failures.get(0).getInt("lane"));
      assertEquals(messages[r], failures.get(0).getString("message"));
    }
    RecordedEvent producer =
        of(events, "Task", 0).stream().filter(e -> e.getInt("size") == 1).findFirst().get();
    assertEquals("ncclFfmTaskAppendBuckets", producer.getString("operation"));
    assertEquals("\"another task\"", producer.getString("symbol"));
    assertEquals(40, producer.getLong("bytes"));
    assertEquals(-1, producer.getInt("lane"));
  }

  @Test
  void splitsAreSteps() throws Exception {
    List<RecordedEvent> events =
        record(
            () -> {
              try (LocalWorld world = TestRanks.open(RANKS)) {
                world.run(
                    rank ->
                        rank.communicator()
                            .split(rank.rank(), 0, CommunicatorConfig.DEFAULT)
                            .close());
              }
            });
    Set<String> steps = new TreeSet<>();
    of(events, "Communicator", -1).forEach(e -> steps.add(e.getString("step")));
    assertEquals(Set.of("create", "ncclCommSplit", "ncclCommDestroy"), steps);
  }

  /** As the comment in the settings file says. */
  @Test
  void settingsFileServesOnTheCommandLine() throws Exception {
    Path settings = temp.resolve("ncclffm.jfc");
    try (InputStream in = settings()) {
      Files.copy(in, settings);
    }
    Path file = temp.resolve("child.jfr");
    try (ChildJvm child =
        ChildJvm.of(LeavesEverythingOpen.class)
            .environment(
                "JDK_JAVA_OPTIONS",
                "-XX:StartFlightRecording:settings=" + settings + ",filename=" + file)
            .start()) {
      assertEquals(0, child.exitStatus(Duration.ofSeconds(90)), child::output);
    }
    Set<String> types = new TreeSet<>();
    for (RecordedEvent event : RecordingFile.readAllEvents(file)) {
      types.add(event.getEventType().getName());
    }
    assertTrue(
        types.containsAll(List.of("io.ncclffm.Communicator", "io.ncclffm.Collective")),
        types::toString);
  }
}

package io.ncclffm.device.doctor;

import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/**
 * Reads what {@code TaskQueueSnapshot.toString()} has written, wherever it stands in a text, and
 * tells what each lane waits for. Several snapshots, as of all ranks, are compared.
 */
final class QueueReader {
  private static final Pattern SNAPSHOT =
      Pattern.compile("TaskQueueSnapshot\\[scheduler=(\\w+), .*?producers=(\\d+), lanes=\\[");
  private static final Pattern LANE =
      Pattern.compile(
          "lane (\\d+): head (\\d+), launched (\\d+), done (\\d+)"
              + "(?:, oldest (task .+? of lane \\d+))?(?:, failed: (.+?)(?=, lane \\d+: head|]]|$))?",
          Pattern.MULTILINE);

  private QueueReader() {}

  private record Lane(
      int snapshot,
      String scheduler,
      int producers,
      int number,
      int head,
      int launched,
      int done,
      @Nullable String oldest,
      @Nullable String failure) {
    String name() {
      return "snapshot " + snapshot + ", lane " + number;
    }

    /** Numbers of tasks wrap: how far another lane has come beyond this one. */
    int behind(Lane other) {
      return other.done - done;
    }

    boolean isIdle() {
      return done == head;
    }

    String state() {
      return name()
          + ": "
          + Integer.toUnsignedLong(done)
          + " of "
          + Integer.toUnsignedLong(head)
          + " done, may run up to "
          + Integer.toUnsignedLong(launched)
          + ", scheduler "
          + scheduler;
    }
  }

  static List<Finding> read(String text) {
    List<Lane> lanes = parse(text);
    if (lanes.isEmpty()) {
      return List.of(
          Finding.error(
              "queue.format",
              "no snapshot of a task queue is in it",
              "give it what TaskQueue.snapshot().toString() says, on any number of ranks"));
    }
    List<Finding> findings = new ArrayList<>();
    lanes.forEach(lane -> findings.add(judge(lane)));
    for (Lane lane : lanes) {
      for (Lane other : lanes) {
        if (other.snapshot > lane.snapshot && other.number == lane.number) {
          compare(lane, other, findings);
        }
      }
    }
    return findings;
  }

  private static List<Lane> parse(String text) {
    List<Lane> lanes = new ArrayList<>();
    Matcher snapshot = SNAPSHOT.matcher(text);
    for (int i = 1; snapshot.find(); i++) {
      Matcher next = SNAPSHOT.matcher(text);
      int end = next.find(snapshot.end()) ? next.start() : text.length();
      Matcher lane = LANE.matcher(text).region(snapshot.end(), end);
      while (lane.find()) {
        lanes.add(
            new Lane(
                i,
                snapshot.group(1),
                Integer.parseInt(snapshot.group(2)),
                Integer.parseInt(lane.group(1)),
                Integer.parseUnsignedInt(lane.group(2)),
                Integer.parseUnsignedInt(lane.group(3)),
                Integer.parseUnsignedInt(lane.group(4)),
                lane.group(5),
                lane.group(6)));
      }
    }
    return lanes;
  }

  private static Finding judge(Lane lane) {
    String seen = lane.state() + (lane.oldest == null ? "" : "; oldest: " + lane.oldest);
    if (lane.failure != null) {
      return Finding.error(
          "queue.failed",
          seen + "; " + lane.failure,
          "mend what the message names, then make a new queue: a lane fails for good");
    }
    if (lane.isIdle()) {
      return Finding.ok("queue.idle", seen);
    }
    if (lane.launched - lane.done <= 0) {
      return Finding.warning(
          "queue.not-launched",
          seen + "; it waits for a launch",
          "ncclTaskLaunch in the producer, or TaskQueue.launch on the host");
    }
    if (lane.oldest == null) {
      return Finding.warning(
          "queue.not-handed-in",
          seen + "; it waits for a producer that took the number and has not handed in its task",
          "look for a producer kernel that ended early or stands still; "
              + lane.producers
              + " were running");
    }
    if (lane.scheduler.equals("RUNNING")) {
      return Finding.warning(
          "queue.waits-for-peers",
          seen + "; it waits for the other ranks to come to this task, or is running it",
          "take a snapshot of every rank at one time and read them together");
    }
    return Finding.warning(
        "queue.no-scheduler",
        seen + "; it waits for a scheduler",
        "TaskQueue.launch starts it; a kernel of your own must be told of by producerLaunched");
  }

  private static void compare(Lane lane, Lane other, List<Finding> findings) {
    int behind = lane.behind(other);
    if (behind != 0) {
      Lane late = behind > 0 ? lane : other;
      Lane early = behind > 0 ? other : lane;
      findings.add(
          Finding.warning(
              "queue.behind",
              late.name()
                  + " is "
                  + Math.abs(behind)
                  + " tasks behind "
                  + early.name()
                  + (late.oldest == null ? "" : ", at " + late.oldest),
              "the rank of " + late.name() + " keeps the others waiting: look at that one"));
    } else if (lane.isIdle() != other.isIdle()) {
      Lane idle = lane.isIdle() ? lane : other;
      Lane waiting = lane.isIdle() ? other : lane;
      findings.add(
          Finding.warning(
              "queue.missing",
              idle.name()
                  + " has no task where "
                  + waiting.name()
                  + " has "
                  + (waiting.oldest == null ? "one" : waiting.oldest),
              "the rank of "
                  + idle.name()
                  + " has not appended it: look at where that rank stands"));
    } else if (lane.oldest != null && other.oldest != null && !lane.oldest.equals(other.oldest)) {
      findings.add(
          Finding.error(
              "queue.disagree",
              lane.name() + ": " + lane.oldest + "\n" + other.name() + ": " + other.oldest,
              "every rank must append the same tasks to a lane, in the same order"));
    }
  }
}

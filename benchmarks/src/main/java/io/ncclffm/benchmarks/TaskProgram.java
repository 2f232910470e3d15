package io.ncclffm.benchmarks;

import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** The lines that task_cuda_test prints for people, as lines of samples; each is a median. */
final class TaskProgram {
  static final String ROUTE = "task in kernel";
  static final String BY_PRODUCER = "task in kernel, LaneProducer";
  static final String HOST = "host, task_cuda_test";

  private static final String FIGURE = "([0-9.]+)";
  private static final Pattern APPEND =
      Pattern.compile(
          "(\\d+) ranks: append by a block F us; by a warp, 32 tasks, F us each; append to done of an"
                  .replace("F", FIGURE)
              + " all-reduce of 512 B F us, 4 KiB F us, 64 KiB F us.*".replace("F", FIGURE));
  private static final Pattern PRODUCER =
      Pattern.compile(
          ("(\\d+) ranks, LaneProducer: append F us; append to done 512 B F us, 4 KiB F us, 64 KiB F us")
              .replace("F", FIGURE));
  private static final Pattern ALL_REDUCE =
      Pattern.compile("(\\d+) ranks: ncclAllReduce of 4 KiB, back to back, " + FIGURE + " us.*");
  private static final Pattern OVERLAP =
      Pattern.compile(
          ("(\\d+) ranks, overlap, (\\d+) KiB, us an iteration: computes F, communicates F, both F:.*")
              .replace("F", FIGURE));

  private TaskProgram() {}

  static List<String> samples(List<String> printed) {
    List<String> samples = new ArrayList<>();
    for (String line : printed) {
      Matcher append = APPEND.matcher(line);
      Matcher producer = PRODUCER.matcher(line);
      Matcher allReduce = ALL_REDUCE.matcher(line);
      Matcher overlap = OVERLAP.matcher(line);
      if (append.matches()) {
        int ranks = Integer.parseInt(append.group(1));
        samples.add(sample(ROUTE, "append by a block", ranks, 0, append.group(2)));
        samples.add(sample(ROUTE, "append by a warp", ranks, 0, append.group(3)));
        samples.add(sample(ROUTE, "append to done", ranks, 512, append.group(4)));
        samples.add(sample(ROUTE, "append to done", ranks, 4 << 10, append.group(5)));
        samples.add(sample(ROUTE, "append to done", ranks, 64 << 10, append.group(6)));
      } else if (producer.matches()) {
        int ranks = Integer.parseInt(producer.group(1));
        samples.add(sample(BY_PRODUCER, "append", ranks, 0, producer.group(2)));
        samples.add(sample(BY_PRODUCER, "append to done", ranks, 512, producer.group(3)));
        samples.add(sample(BY_PRODUCER, "append to done", ranks, 4 << 10, producer.group(4)));
        samples.add(sample(BY_PRODUCER, "append to done", ranks, 64 << 10, producer.group(5)));
      } else if (allReduce.matches()) {
        int ranks = Integer.parseInt(allReduce.group(1));
        samples.add(sample(HOST, "allReduce", ranks, 4 << 10, allReduce.group(2)));
      } else if (overlap.matches()) {
        int ranks = Integer.parseInt(overlap.group(1));
        long bytes = Long.parseLong(overlap.group(2)) << 10;
        samples.add(sample(ROUTE, "overlap: compute", ranks, bytes, overlap.group(3)));
        samples.add(sample(ROUTE, "overlap: communicate", ranks, bytes, overlap.group(4)));
        samples.add(sample(ROUTE, "overlap: both", ranks, bytes, overlap.group(5)));
      }
    }
    return samples;
  }

  private static String sample(String route, String operation, int ranks, long bytes, String us) {
    return String.join(
        "\t",
        Row.MARK,
        "cuda",
        "c",
        route,
        operation,
        Integer.toString(ranks),
        Long.toString(bytes),
        "us",
        us);
  }
}

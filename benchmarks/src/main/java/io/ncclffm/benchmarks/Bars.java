package io.ncclffm.benchmarks;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Stream;

/**
 * What the library promises of its speed on H200s, against the rows of a run: of ranks that share
 * one, or of one rank on each of several.
 */
final class Bars {
  private static final int KI = 1 << 10;
  private static final int MI = 1 << 20;
  private static final int[] RANKS = {2, 4, 8};
  private static final String STEP = "2x+1, allReduce, sqrt";

  /**
   * @param least whether the bound is the least that the figure may be, not the most
   * @param figure NaN if the run has not measured it
   */
  record Bar(String what, int ranks, boolean least, double bound, double figure) {
    String verdict() {
      if (Double.isNaN(figure)) {
        return "not measured";
      }
      return (least ? figure >= bound : figure <= bound) ? "met" : "MISSED";
    }
  }

  private final List<Row> rows;
  private final List<Bar> bars = new ArrayList<>();

  private Bars(List<Row> rows, int devices) {
    this.rows = rows;
    if (devices == 1) {
      synchronousRoute();
      taskRoute();
      fusedRoute();
    } else {
      severalGpus(devices);
    }
    java();
  }

  static List<Bar> of(List<Row> rows, int devices) {
    return new Bars(rows, devices).bars;
  }

  /** A table, and another of what the device library's own choices cost against the best ones. */
  static String toMarkdown(List<Row> rows, int devices) {
    StringBuilder text = new StringBuilder("| bar | ranks | bound | measured | |\n");
    text.append("|---|---|---|---|---|\n");
    for (Bar bar : of(rows, devices)) {
      String measured =
          Double.isNaN(bar.figure) ? "" : String.format(Locale.ROOT, "%.2f", bar.figure);
      text.append(
          String.format(
              Locale.ROOT,
              "| %s | %d | %s %.2f | %s | %s |%n",
              bar.what,
              bar.ranks,
              bar.least ? "at least" : "at most",
              bar.bound,
              measured,
              bar.verdict()));
    }
    return text + "\n" + choices(rows, "java", "device") + choices(rows, "c", "in kernel");
  }

  private static String choices(List<Row> rows, String language, String route) {
    Map<String, Row> best = new TreeMap<>();
    List<Row> all =
        rows.stream()
            .filter(row -> row.language().equals(language) && row.unit().equals("us"))
            .filter(row -> row.operation().equals("allReduce"))
            .toList();
    all.stream()
        .filter(row -> row.route().matches(route + " (LL|LL128|SIMPLE) .*"))
        .forEach(row -> best.merge(row.subject(), row, (a, b) -> a.p50() <= b.p50() ? a : b));
    StringBuilder text = new StringBuilder();
    for (Row auto : all) {
      Row other = best.get(auto.subject());
      if (auto.route().equals(route) && other != null) {
        text.append(
            String.format(
                Locale.ROOT,
                "| %d | %d | %.2f | %s | %.2f | %.2f |%n",
                auto.ranks(),
                auto.bytes(),
                auto.p50(),
                other.route().substring(route.length() + 1),
                other.p50(),
                auto.p50() / other.p50()));
      }
    }
    return text.isEmpty()
        ? ""
        : "What the tuning table takes, and the best, "
            + language
            + " "
            + route
            + ":\n\n| ranks | bytes | us | best | us | ratio |\n|---|---|---|---|---|---|\n"
            + text
            + "\n";
  }

  private double median(
      String language, String route, String operation, int ranks, long bytes, String unit) {
    return rows.stream()
        .filter(row -> row.language().equals(language) && row.route().equals(route))
        .filter(row -> row.operation().equals(operation) && row.ranks() == ranks)
        .filter(row -> row.bytes() == bytes && row.unit().equals(unit))
        .mapToDouble(Row::p50)
        .findFirst()
        .orElse(Double.NaN);
  }

  private double c(String route, String operation, int ranks, long bytes) {
    return median("c", route, operation, ranks, bytes, "us");
  }

  private void atMost(String what, int ranks, double bound, double figure) {
    bars.add(new Bar(what, ranks, false, bound, figure));
  }

  private void atLeast(String what, int ranks, double bound, double figure) {
    bars.add(new Bar(what, ranks, true, bound, figure));
  }

  /** The bound for 2, 4 and 8 ranks. */
  private static double at(int ranks, double two, double four, double eight) {
    return ranks == 2 ? two : ranks == 4 ? four : eight;
  }

  private void synchronousRoute() {
    String all = "allReduce";
    for (int n : RANKS) {
      double us = c("in kernel", all, n, 4 * KI);
      double host = c("host, device_route", all, n, 4 * KI);
      atMost("in a kernel, all-reduce of 4 KiB, us", n, at(n, 0.8, 1.8, 3.8), us);
      atLeast("... times faster than ncclAllReduce", n, at(n, 15, 8, 6), host / us);
      double of64 = c("host, device_route", all, n, 64 * KI) / c("in kernel", all, n, 64 * KI);
      atLeast("in a kernel, 64 KiB, times faster than ncclAllReduce", n, 4, of64);
      double zeroCopy = c("device zero-copy", all, n, 64 * MI);
      double symmetric = c("host-symmetric, device_route", all, n, 64 * MI);
      atMost("64 MiB zero-copy / symmetric windows", n, 0.75, zeroCopy / symmetric);
      for (String route : List.of("device", "device zero-copy")) {
        double ratio = c(route, "misaligned " + all, n, MI) / c(route, all, n, MI);
        atMost("1 MiB misaligned / aligned, " + route, n, 1.3, ratio);
      }
    }
  }

  /** One rank a GPU: 2 and 8 ranks have bars, on machines with so many. */
  private void severalGpus(int devices) {
    String all = "allReduce";
    if (devices >= 2) {
      double us = c("in kernel", all, 2, 4 * KI);
      atMost("in a kernel, all-reduce of 4 KiB, us", 2, 1.3, us);
      double host = c("host, device_route", all, 2, 4 * KI);
      atLeast("... times faster than ncclAllReduce", 2, 6, host / us);
      atMost("in a kernel, 64 KiB, us", 2, 1.6, c("in kernel", all, 2, 64 * KI));
      fusedSteps(2, 3.3, 2);
      double best = best(2, 64 * MI, "device", "device zero-copy");
      atMost("64 MiB / NCCL's best host route", 2, 0.85, best / bestOfNccl(2, 64 * MI));
    }
    if (devices >= 8) {
      atMost("in a kernel, all-reduce of 4 KiB, us", 8, 4, c("in kernel", all, 8, 4 * KI));
      fusedSteps(8, 1.5, 0);
      double best = best(8, 256 * MI, "device", "device zero-copy");
      atLeast("256 MiB, bandwidth / NCCL's best", 8, 0.9, bestOfNccl(8, 256 * MI) / best);
    }
  }

  /** Up to 64 KiB; a bound of 0 is none. */
  private void fusedSteps(int n, double backToBack, double single) {
    for (int bytes : new int[] {4 * KI, 16 * KI, 64 * KI}) {
      double ratio = c("host", STEP, n, bytes) / c("fused", STEP, n, bytes);
      atLeast("fused, " + bytes / KI + " KiB, times faster", n, backToBack, ratio);
      if (single != 0) {
        String step = "single " + STEP;
        ratio = c("host", step, n, bytes) / c("fused", step, n, bytes);
        atLeast("... a single step, times faster", n, single, ratio);
      }
    }
  }

  private double bestOfNccl(int n, long bytes) {
    return best(n, bytes, "host, device_route", "host-symmetric, device_route");
  }

  private double best(int n, long bytes, String... routes) {
    return Stream.of(routes)
        .mapToDouble(route -> c(route, "allReduce", n, bytes))
        .filter(us -> !Double.isNaN(us))
        .min()
        .orElse(Double.NaN);
  }

  private void taskRoute() {
    String route = TaskProgram.ROUTE;
    for (int n : RANKS) {
      atMost("append by a block, us", n, 1, c(route, "append by a block", n, 0));
      atMost("append by a warp, us a task", n, 0.3, c(route, "append by a warp", n, 0));
      double us = c(route, "append to done", n, 4 * KI);
      double byProducer = c(TaskProgram.BY_PRODUCER, "append to done", n, 4 * KI);
      double host = c(TaskProgram.HOST, "allReduce", n, 4 * KI);
      atMost("append to done, 4 KiB, us", n, at(n, 3.5, 4.5, 6), us);
      atLeast("... times faster than ncclAllReduce", n, 3.5, host / us);
      atMost("... by a LaneProducer, us", n, at(n, 3.5, 4.5, 6), byProducer);
      atLeast("... times faster than ncclAllReduce", n, 3.5, host / byProducer);
      double communicate = c(route, "overlap: communicate", n, 512 * KI);
      double shown =
          c(route, "overlap: both", n, 512 * KI) - c(route, "overlap: compute", n, 512 * KI);
      atLeast("overlap, % of communication hidden", n, 80, 100 * (1 - shown / communicate));
    }
  }

  private void fusedRoute() {
    for (int n : RANKS) {
      for (int bytes : new int[] {4 * KI, 16 * KI, 64 * KI, MI, 64 * MI}) {
        double ratio = c("host", STEP, n, bytes) / c("fused", STEP, n, bytes);
        double bound = bytes == MI ? at(n, 2, 1.7, 1.5) : bytes == 64 * MI ? 1 : at(n, 3, 2.5, 2.5);
        atLeast("fused, " + bytes / KI + " KiB, times faster", n, bound, ratio);
        if (bytes <= 64 * KI) {
          String single = "single " + STEP;
          ratio = c("host", single, n, bytes) / c("fused", single, n, bytes);
          bound = at(n, 2, 1.5, 1.8);
          atLeast("... a single step, times faster", n, bound, ratio);
          ratio =
              c("host", single, n, bytes) / c("fused", single + ", told by the kernel", n, bytes);
          atLeast("... told by the kernel, times faster than NCCL's synchronized", n, bound, ratio);
        }
      }
    }
  }

  private void java() {
    for (String what : List.of("compile for one protocol", "compile for every protocol")) {
      String cached = what + ", from the cache";
      atMost("NVRTC, " + what + ", ms", 1, 3000, median("java", "nvrtc", what, 1, 0, "ms"));
      atMost("NVRTC, " + cached + ", ms", 1, 50, median("java", "nvrtc", cached, 1, 0, "ms"));
    }
    for (String call : Measure.CALLS) {
      double c = median("c", "host", call, 1, 0, "ns");
      double ns = median("java", "host", call, 1, 0, "ns");
      double javacpp = median("javacpp", "host", call, 1, 0, "ns");
      atMost(call + ", ns more than C", 1, 10, ns - c);
      atMost(call + ", Java / JavaCPP", 1, 1, ns / javacpp);
    }
    for (int n : new int[] {1, 2, 4, 8}) {
      double c = c("host", "launch allReduce", n, 64);
      double us = median("java", "host", "launch allReduce", n, 64, "us");
      atMost("launch of ncclAllReduce, Java / C", n, 1.05, us / c);
      for (String route : n == 1 ? List.of("host") : List.of("host", "device", "fused", "task")) {
        double bytes = median("java", route, "allocated by allReduce", n, 64, "B");
        atMost("bytes allocated by an all-reduce, " + route, n, 0.5, bytes);
      }
    }
  }
}

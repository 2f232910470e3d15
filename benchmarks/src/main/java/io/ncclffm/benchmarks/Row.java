package io.ncclffm.benchmarks;

import java.util.Arrays;

/**
 * One figure: what was measured, and the spread of its samples. Rows of a run that differ only in
 * language and route can be compared.
 *
 * @param backend cuda or cpu
 * @param language java, c or javacpp
 * @param route host, device, fused, task, ...; "host" is what the others are compared with
 * @param operation such as allReduce
 * @param bytes of the larger buffer of a rank, as nccl-tests counts them; 0 where there is none
 * @param unit us, ns, or B (allocated for an operation)
 */
record Row(
    String backend,
    String language,
    String route,
    String operation,
    int ranks,
    long bytes,
    String unit,
    int samples,
    double p10,
    double p50,
    double p90) {

  static final String MARK = "sample";

  /**
   * Of what a measuring process prints: {@value #MARK}, backend, language, route, operation, ranks,
   * bytes, unit and the samples, with tabs between them. Lines of several processes may be given.
   */
  static Row of(String[] fields, double[] samples) {
    double[] sorted = samples.clone();
    Arrays.sort(sorted);
    return new Row(
        fields[1],
        fields[2],
        fields[3],
        fields[4],
        Integer.parseInt(fields[5]),
        Long.parseLong(fields[6]),
        fields[7],
        sorted.length,
        percentile(sorted, 0.1),
        percentile(sorted, 0.5),
        percentile(sorted, 0.9));
  }

  private static double percentile(double[] sorted, double part) {
    double at = part * (sorted.length - 1);
    int below = (int) at;
    int above = Math.min(below + 1, sorted.length - 1);
    return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
  }

  /** What is measured, whoever does it. */
  String subject() {
    return operation + ", " + ranks + " ranks, " + bytes + " B, in " + unit;
  }

  String name() {
    return language + " " + route + " " + subject();
  }

  /** How far the samples lie from their median, as a part of it. */
  double spread() {
    return p50 == 0 ? 0 : Math.max(p90 - p50, p50 - p10) / p50;
  }

  /** GB/s by the convention of nccl-tests; 0 for what moves no data between ranks. */
  double busBandwidth() {
    return unit.equals("us") && p50 > 0 ? bytes / p50 / 1e3 * factor() : 0;
  }

  private double factor() {
    double others = (ranks - 1.0) / ranks;
    return switch (operation) {
      case "allReduce" -> 2 * others;
      case "reduceScatter", "allGather", "allToAll" -> others;
      case "broadcast", "reduce", "sendRecv" -> 1;
      default -> 0;
    };
  }
}

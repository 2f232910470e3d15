package io.ncclffm.benchmarks;

import java.io.IOException;
import java.io.PrintStream;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import org.jspecify.annotations.Nullable;

/**
 * Compares two result files: {@code Compare OLD.json NEW.json}. Not times, which another clock or
 * another day changes, but each route's ratio to the host route of its own run (C's, if it is
 * there), with the noise that the samples of all four rows show. Allocated bytes are compared as
 * they are.
 *
 * <p>Exit status: 0, nothing is slower; 1, something is slower, missing, or allocates more; 2, the
 * files cannot be compared.
 */
public final class Compare {
  /** Smaller changes of a ratio are never flagged. */
  private static final double LEAST = 0.05;

  /** With more noise than this a ratio says nothing. */
  private static final double MOST_NOISE = 0.5;

  private Compare() {}

  public static void main(String[] arguments) throws IOException {
    if (arguments.length != 2) {
      System.err.println("usage: Compare OLD.json NEW.json");
      System.exit(2);
    }
    try {
      Results before = Results.read(Path.of(arguments[0]));
      Results after = Results.read(Path.of(arguments[1]));
      System.exit(compare(before, after, System.out));
    } catch (IllegalArgumentException | IOException e) {
      System.err.println(e.getMessage());
      System.exit(2);
    }
  }

  /**
   * @throws IllegalArgumentException if the files are not of one backend, or nothing is in both
   */
  static int compare(Results before, Results after, PrintStream out) {
    checkBackends(before, after);
    Map<String, Row> old = byName(before);
    Map<String, Row> now = byName(after);
    int flagged = 0;
    int compared = 0;
    for (Map.Entry<String, Row> entry : old.entrySet()) {
      String name = entry.getKey();
      Row was = entry.getValue();
      Row is = now.get(name);
      if (is == null) {
        out.println("MISSING  " + name);
        flagged++;
        continue;
      }
      if (was.unit().equals("B")) {
        compared++;
        if (is.p50() > was.p50() + 0.5) {
          out.printf("MORE     %s: %.1f, was %.1f%n", name, is.p50(), was.p50());
          flagged++;
        }
        continue;
      }
      Row wasBeside = reference(was, old, now);
      if (wasBeside == null) {
        continue;
      }
      Row isBeside = now.get(wasBeside.name());
      double wasRatio = was.p50() / wasBeside.p50();
      double isRatio = is.p50() / isBeside.p50();
      double noise = 0;
      for (Row row : List.of(was, wasBeside, is, isBeside)) {
        noise = Math.hypot(noise, row.spread());
      }
      compared++;
      String verdict = verdict(isRatio / wasRatio, noise);
      if (!verdict.isEmpty()) {
        out.printf(
            "%-8s %s: %.3f of %s, was %.3f, noise %.0f %%%n",
            verdict,
            name,
            isRatio,
            isBeside.language() + " " + isBeside.route(),
            wasRatio,
            100 * noise);
        flagged += verdict.equals("SLOWER") ? 1 : 0;
      }
    }
    if (compared == 0 && flagged == 0) {
      throw new IllegalArgumentException("the files have no rows that could be compared");
    }
    out.printf("%d compared, %d flagged%n", compared, flagged);
    return flagged == 0 ? 0 : 1;
  }

  private static String verdict(double change, double noise) {
    double bound = 1 + Math.max(noise, LEAST);
    if (change > bound) {
      return "SLOWER";
    }
    if (change < 1 / bound) {
      return "faster";
    }
    return noise > MOST_NOISE ? "noisy" : "";
  }

  private static void checkBackends(Results before, Results after) {
    List<String> backends =
        List.of(before, after).stream()
            .flatMap(results -> results.rows().stream())
            .map(Row::backend)
            .distinct()
            .toList();
    if (backends.size() > 1) {
      throw new IllegalArgumentException(
          "figures of the backends " + backends + " cannot be compared; run both on one backend");
    }
  }

  private static Map<String, Row> byName(Results results) {
    return results.rows().stream()
        .collect(
            Collectors.toMap(
                Row::name,
                row -> row,
                (a, b) -> {
                  throw new IllegalArgumentException("a result file has two rows " + a.name());
                },
                LinkedHashMap::new));
  }

  /**
   * The host's row of the same subject that both files have and that is not the row itself, of
   * tasks the host's all-reduce of 4 KiB; null if there is none, as for C's host rows, which the
   * others are compared with.
   */
  private static @Nullable Row reference(Row row, Map<String, Row> old, Map<String, Row> now) {
    if (row.language().equals("c") && row.route().equals("host")) {
      return null;
    }
    List<String> names = new ArrayList<>();
    names.add("c host " + row.subject());
    names.add("java host " + row.subject());
    if (row.route().startsWith("task")) {
      String subject = "allReduce, " + row.ranks() + " ranks, 4096 B, in us";
      names.add("c " + TaskProgram.HOST + " " + subject);
      names.add("c host " + subject);
    }
    for (String name : names) {
      Row candidate = old.get(name);
      Row other = now.get(name);
      if (candidate != null
          && other != null
          && candidate.p50() > 0
          && other.p50() > 0
          && row.p50() > 0
          && !name.equals(row.name())) {
        return candidate;
      }
    }
    return null;
  }
}

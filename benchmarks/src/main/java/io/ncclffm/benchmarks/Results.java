package io.ncclffm.benchmarks;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;

/**
 * A run: how it was started, on what, and its rows.
 *
 * @param facts versions, clocks and the like, one a line
 */
record Results(String command, List<String> facts, List<Row> rows) {
  private static final int FORMAT = 1;

  /** Of the lines that measuring processes printed; those of one subject are put together. */
  static List<Row> rows(List<String> lines) {
    Map<String, List<String>> bySubject = new LinkedHashMap<>();
    for (String line : lines) {
      int samples = line.lastIndexOf('\t');
      if (line.startsWith(Row.MARK + "\t")) {
        bySubject
            .computeIfAbsent(line.substring(0, samples), key -> new ArrayList<>())
            .add(line.substring(samples + 1));
      }
    }
    List<Row> rows = new ArrayList<>();
    bySubject.forEach(
        (subject, samples) ->
            rows.add(
                Row.of(
                    subject.split("\t"),
                    samples.stream()
                        .flatMap(some -> List.of(some.split(" ")).stream())
                        .mapToDouble(Double::parseDouble)
                        .toArray())));
    return rows;
  }

  String toJson() {
    StringBuilder json = new StringBuilder("{\"format\": " + FORMAT);
    json.append(",\n \"command\": ").append(Json.quote(command)).append(",\n \"facts\": [");
    json.append(String.join(",\n  ", facts.stream().map(Json::quote).toList()));
    json.append("],\n \"rows\": [\n  ");
    json.append(String.join(",\n  ", rows.stream().map(Results::toJson).toList()));
    return json.append("]}\n").toString();
  }

  private static String toJson(Row row) {
    return String.format(
        Locale.ROOT,
        "{\"backend\": %s, \"language\": %s, \"route\": %s, \"operation\": %s, \"ranks\": %d,"
            + " \"bytes\": %d, \"unit\": %s, \"samples\": %d, \"p10\": %.4f, \"p50\": %.4f,"
            + " \"p90\": %.4f, \"busbw\": %.3f}",
        Json.quote(row.backend()),
        Json.quote(row.language()),
        Json.quote(row.route()),
        Json.quote(row.operation()),
        row.ranks(),
        row.bytes(),
        Json.quote(row.unit()),
        row.samples(),
        row.p10(),
        row.p50(),
        row.p90(),
        row.busBandwidth());
  }

  static Results read(Path file) throws IOException {
    return parse(Files.readString(file));
  }

  static Results parse(String json) {
    if (!(Json.parse(json) instanceof Map<?, ?> file)
        || !(file.get("facts") instanceof List<?> facts)
        || !(file.get("rows") instanceof List<?> all)
        || !Double.valueOf(FORMAT).equals(file.get("format"))) {
      throw new IllegalArgumentException("no result file of format " + FORMAT);
    }
    List<Row> rows = new ArrayList<>();
    for (Object one : all) {
      Map<?, ?> row = (Map<?, ?>) one;
      rows.add(
          new Row(
              string(row, "backend"),
              string(row, "language"),
              string(row, "route"),
              string(row, "operation"),
              (int) number(row, "ranks"),
              (long) number(row, "bytes"),
              string(row, "unit"),
              (int) number(row, "samples"),
              number(row, "p10"),
              number(row, "p50"),
              number(row, "p90")));
    }
    return new Results(
        string(file, "command"), facts.stream().map(Object::toString).toList(), rows);
  }

  private static String string(Map<?, ?> members, String name) {
    return member(members, name, String.class);
  }

  private static double number(Map<?, ?> members, String name) {
    return member(members, name, Double.class);
  }

  private static <T> T member(Map<?, ?> members, String name, Class<T> type) {
    Object value = members.get(name);
    if (!type.isInstance(value)) {
      throw new IllegalArgumentException(
          "a result file needs " + name + " (" + type.getSimpleName() + "), not " + value);
    }
    return type.cast(value);
  }

  /** GPUs of the machine, as {@link Bench} has written down; 1 if it has not. */
  private int devices() {
    return facts.stream()
        .filter(fact -> fact.startsWith("devices: "))
        .mapToInt(fact -> Integer.parseInt(fact.substring("devices: ".length())))
        .findFirst()
        .orElse(1);
  }

  String toMarkdown() {
    StringBuilder text = new StringBuilder("# Benchmarks\n\n```\n" + command + "\n```\n\n");
    facts.forEach(fact -> text.append("- ").append(fact).append('\n'));
    if (rows.stream().anyMatch(row -> row.backend().equals("cpu"))) {
      text.append("\nRows of the backend cpu say nothing about a GPU.\n");
    }
    if (rows.stream().anyMatch(row -> row.backend().equals("cuda"))) {
      text.append("\n## Bars\n\n").append(Bars.toMarkdown(rows, devices()));
    }
    text.append("\n## Rows\n");
    text.append(
        "\n| backend | operation | ranks | bytes | language | route | unit | p10 | median | p90 |"
            + " bus GB/s | samples |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (Row row : rows) {
      text.append(
          String.format(
              Locale.ROOT,
              "| %s | %s | %d | %d | %s | %s | %s | %.2f | %.2f | %.2f | %s | %d |%n",
              row.backend(),
              row.operation(),
              row.ranks(),
              row.bytes(),
              row.language(),
              row.route(),
              row.unit(),
              row.p10(),
              row.p50(),
              row.p90(),
              row.busBandwidth() == 0 ? "" : String.format(Locale.ROOT, "%.2f", row.busBandwidth()),
              row.samples()));
    }
    return text.toString();
  }

  /** results.json, README.md, and plots of what was measured at several sizes. */
  void write(Path folder) throws IOException {
    Files.createDirectories(folder);
    Files.writeString(folder.resolve("results.json"), toJson());
    Files.writeString(folder.resolve("README.md"), toMarkdown());
    Map<String, List<Row>> plots = new TreeMap<>();
    rows.stream()
        .filter(row -> row.unit().equals("us") && row.bytes() > 0)
        .forEach(row -> plots.computeIfAbsent(plotOf(row), title -> new ArrayList<>()).add(row));
    for (Map.Entry<String, List<Row>> plot : plots.entrySet()) {
      List<Row> of = plot.getValue();
      if (of.stream().mapToLong(Row::bytes).distinct().count() == 1) {
        continue;
      }
      Path file = folder.resolve(fileName(plot.getKey()));
      String svg = Plot.svg(plot.getKey() + ": latency", "us", of, Row::p50);
      Files.writeString(file.resolveSibling(file.getFileName() + "-latency.svg"), svg);
      if (of.stream().anyMatch(row -> row.busBandwidth() > 0)) {
        svg = Plot.svg(plot.getKey() + ": bus bandwidth", "GB/s", of, Row::busBandwidth);
        Files.writeString(file.resolveSibling(file.getFileName() + "-bandwidth.svg"), svg);
      }
    }
  }

  /** Its title; forced protocols and algorithms have plots of their own. */
  private static String plotOf(Row row) {
    String title = row.backend() + " " + row.operation() + ", " + row.ranks() + " ranks";
    String route = row.route().replaceFirst(" (LL|LL128|SIMPLE)\\b.*", "");
    return route.equals(row.route()) ? title : title + ", ways of " + row.language() + " " + route;
  }

  static String fileName(String text) {
    return text.replaceAll("[^A-Za-z0-9]+", "-");
  }
}

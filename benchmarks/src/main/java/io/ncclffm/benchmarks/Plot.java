package io.ncclffm.benchmarks;

import java.math.BigDecimal;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.ToDoubleFunction;

/** A figure against the size, both logarithmic, as SVG; one line for each language and route. */
final class Plot {
  private static final int WIDTH = 800;
  private static final int HEIGHT = 480;
  private static final int LEFT = 70;
  private static final int TOP = 40;
  private static final int RIGHT = 240; // the legend
  private static final int BOTTOM = 50;
  private static final int LEGEND = 16; // a line of it
  private static final String[] DASHES = {"none", "6 3", "2 3"};
  private static final String[] COLOURS = {
    "#1b6ca8", "#d1495b", "#2a9d4a", "#8e44ad", "#e08e0b", "#555555", "#17a2a2", "#a0522d"
  };

  private Plot() {}

  static String svg(String title, String unit, List<Row> rows, ToDoubleFunction<Row> figure) {
    Map<String, List<Row>> lines = new TreeMap<>();
    List<Row> shown =
        rows.stream().filter(row -> row.bytes() > 0 && figure.applyAsDouble(row) > 0).toList();
    shown.forEach(
        row ->
            lines
                .computeIfAbsent(row.language() + " " + row.route(), name -> new ArrayList<>())
                .add(row));
    double fromX = Math.floor(shown.stream().mapToDouble(row -> log2(row.bytes())).min().orElse(0));
    double toX = Math.ceil(shown.stream().mapToDouble(row -> log2(row.bytes())).max().orElse(1));
    double fromY =
        Math.floor(
            shown.stream().mapToDouble(r -> Math.log10(figure.applyAsDouble(r))).min().orElse(0));
    double toY =
        Math.ceil(
            shown.stream().mapToDouble(r -> Math.log10(figure.applyAsDouble(r))).max().orElse(1));
    Scale x = new Scale(fromX, Math.max(toX, fromX + 1), LEFT, WIDTH - RIGHT);
    Scale y = new Scale(fromY, Math.max(toY, fromY + 1), HEIGHT - BOTTOM, TOP);

    StringBuilder svg = new StringBuilder();
    add(
        svg,
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' font-family='sans-serif'"
            + " font-size='12'><rect width='100%%' height='100%%' fill='white'/>",
        WIDTH,
        Math.max(HEIGHT, TOP + LEGEND * lines.size()));
    text(svg, LEFT, 20, "start", title);
    text(svg, LEFT, TOP - 6, "end", unit);
    text(svg, WIDTH - RIGHT, HEIGHT - 12, "end", "bytes");
    for (double at = x.from; at <= x.to; at += Math.max(2, Math.ceil((x.to - x.from) / 8))) {
      grid(svg, x.of(at), TOP, x.of(at), HEIGHT - BOTTOM);
      text(svg, x.of(at), HEIGHT - BOTTOM + 18, "middle", bytes(at));
    }
    for (double at = y.from; at <= y.to; at++) {
      grid(svg, LEFT, y.of(at), WIDTH - RIGHT, y.of(at));
      text(svg, LEFT - 6, y.of(at) + 4, "end", power((int) at));
    }
    int number = 0;
    for (Map.Entry<String, List<Row>> line : lines.entrySet()) {
      String colour = COLOURS[number % COLOURS.length];
      String dash = DASHES[number / COLOURS.length % DASHES.length];
      StringBuilder points = new StringBuilder();
      line.getValue().stream()
          .sorted((a, b) -> Long.compare(a.bytes(), b.bytes()))
          .forEach(
              row ->
                  add(
                      points,
                      "%.1f,%.1f ",
                      x.of(log2(row.bytes())),
                      y.of(Math.log10(figure.applyAsDouble(row)))));
      add(
          svg,
          "<polyline fill='none' stroke='%s' stroke-dasharray='%s' stroke-width='1.8'"
              + " points='%s'/>",
          colour,
          dash,
          points.toString().strip());
      int at = TOP + LEGEND * number++;
      add(
          svg,
          "<line x1='%d' y1='%d' x2='%d' y2='%d' stroke='%s' stroke-dasharray='%s'"
              + " stroke-width='3'/>",
          WIDTH - RIGHT + 12,
          at,
          WIDTH - RIGHT + 36,
          at,
          colour,
          dash);
      text(svg, WIDTH - RIGHT + 42, at + 4, "start", line.getKey());
    }
    return svg.append("</svg>\n").toString();
  }

  private record Scale(double from, double to, double start, double end) {
    double of(double value) {
      return start + (value - from) / (to - from) * (end - start);
    }
  }

  private static double log2(double value) {
    return Math.log(value) / Math.log(2);
  }

  private static String power(int exponent) {
    return BigDecimal.ONE.scaleByPowerOfTen(exponent).toPlainString();
  }

  private static String bytes(double exponent) {
    int unit = (int) exponent / 10;
    return (1L << (int) exponent % 10) + List.of("", "Ki", "Mi", "Gi").get(unit);
  }

  private static void grid(StringBuilder svg, double x1, double y1, double x2, double y2) {
    add(svg, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#dddddd'/>", x1, y1, x2, y2);
  }

  private static void text(StringBuilder svg, double x, double y, String anchor, String text) {
    String escaped = text.replace("&", "&amp;").replace("<", "&lt;");
    add(svg, "<text x='%.1f' y='%.1f' text-anchor='%s'>%s</text>", x, y, anchor, escaped);
  }

  private static void add(StringBuilder svg, String format, Object... arguments) {
    svg.append(String.format(Locale.ROOT, format, arguments)).append('\n');
  }
}

package io.ncclffm.training;

import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;

/** Trains by every route, prints what came of it, and draws the losses: {@code FILE.svg}. */
public final class LossPlot {
  private static final int WIDTH = 640;
  private static final int HEIGHT = 360;
  private static final int LEFT = 50;
  private static final int BOTTOM = 40;
  private static final int TOP = 20;
  private static final double MOST = 2.5; // of a loss
  private static final String[] COLORS = {"#000000", "#1f77b4", "#d62728", "#2ca02c"};
  private static final double[] WIDTHS = {6, 4, 2.5, 1}; // all are seen where they agree

  private LossPlot() {}

  public static void main(String[] arguments) throws IOException {
    Map<String, double[]> curves = new LinkedHashMap<>();
    curves.put("1 rank, host", train(1, Training.Route.HOST));
    for (Training.Route route : Training.Route.values()) {
      String name = "4 ranks, " + route.name().toLowerCase(Locale.ROOT);
      curves.put(name, train(4, route));
    }
    Files.writeString(Path.of(arguments[0]), draw(curves));
  }

  private static double[] train(int ranks, Training.Route route) {
    Training.Result[] results = new Training.Result[ranks];
    try (LocalWorld world = LocalWorld.open(ranks)) {
      world.run(
          rank -> results[rank.rank()] = Training.run(rank.communicator(), rank.stream(), route));
    }
    double[] losses = results[0].losses();
    System.out.printf(
        Locale.ROOT,
        "%s: %d rank(s), %s: loss %.4f, then %.4f; accuracy %.3f%n",
        Nccl.versions().backend(),
        ranks,
        route,
        losses[0],
        losses[losses.length - 1],
        results[0].accuracy());
    return losses;
  }

  /** Losses by step, each curve with its name. */
  public static String draw(Map<String, double[]> curves) {
    StringBuilder svg = new StringBuilder();
    svg.append(
        String.format(
            Locale.ROOT,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\""
                + " font-size=\"12\">%n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>%n",
            WIDTH,
            HEIGHT));
    for (double loss = 0; loss <= MOST; loss += 0.5) {
      svg.append(
          String.format(
              Locale.ROOT,
              "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                  + "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.1f</text>%n",
              LEFT,
              WIDTH - 10,
              y(loss),
              y(loss),
              LEFT - 6,
              y(loss) + 4,
              loss));
    }
    int i = 0;
    for (Map.Entry<String, double[]> curve : curves.entrySet()) {
      double[] losses = curve.getValue();
      svg.append("<polyline fill=\"none\" stroke=\"").append(COLORS[i % COLORS.length]);
      svg.append("\" stroke-width=\"").append(WIDTHS[i % WIDTHS.length]).append("\" points=\"");
      for (int step = 0; step < losses.length; step++) {
        double x = LEFT + (double) step / (losses.length - 1) * (WIDTH - 10 - LEFT);
        svg.append(String.format(Locale.ROOT, "%.1f,%.1f ", x, y(losses[step])));
      }
      svg.append(
          String.format(
              Locale.ROOT,
              "\"/>%n<text x=\"%d\" y=\"%d\" fill=\"%s\">%s</text>%n",
              WIDTH - 170,
              TOP + 16 + 18 * i,
              COLORS[i % COLORS.length],
              curve.getKey()));
      i++;
    }
    svg.append(
        String.format(
            Locale.ROOT,
            "<text x=\"%d\" y=\"%d\">step, of %d</text><text x=\"8\" y=\"14\">loss</text>%n</svg>%n",
            WIDTH / 2,
            HEIGHT - 10,
            curves.values().iterator().next().length));
    return svg.toString();
  }

  private static double y(double loss) {
    return HEIGHT - BOTTOM - Math.min(loss, MOST) / MOST * (HEIGHT - BOTTOM - TOP);
  }
}

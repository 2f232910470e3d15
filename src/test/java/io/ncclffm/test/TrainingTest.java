package io.ncclffm.test;

import static java.lang.Double.parseDouble;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.LocalWorld;
import io.ncclffm.training.LossPlot;
import io.ncclffm.training.Training;
import io.ncclffm.training.TrainingProcess;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;
import java.util.stream.DoubleStream;
import java.util.stream.IntStream;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** The training example: n ranks learn as one does with n times the batch, by every route. */
class TrainingTest {
  private static final Duration START = Duration.ofSeconds(60);
  private static final Duration PATIENCE = Duration.ofSeconds(60);

  /** Sums of floats in another order, over all steps. */
  private static final double NEAR = 1e-3;

  private static Training.Result alone;

  @BeforeAll
  static void trainAlone() {
    TestRanks.assumeShim();
    alone = run(1, Training.Route.HOST)[0];
  }

  private static Training.Result[] run(int ranks, Training.Route route) {
    Training.Result[] results = new Training.Result[ranks];
    try (LocalWorld world = TestRanks.open(ranks)) {
      world.run(
          rank -> results[rank.rank()] = Training.run(rank.communicator(), rank.stream(), route));
    }
    return results;
  }

  @Test
  void oneRankLearns() {
    double[] losses = alone.losses();
    assertEquals(Math.log(10), losses[0], 0.5, "before it has learned anything");
    double last = Arrays.stream(losses, losses.length - 10, losses.length).average().orElseThrow();
    assertTrue(last < losses[0] / 5, "loss " + last);
    assertTrue(alone.accuracy() > 0.9, "accuracy " + alone.accuracy());
  }

  /** Where the curves of a drawing are, from left to right. */
  private static List<double[]> heights(String svg) {
    return Pattern.compile("<polyline[^>]*points=\"([^\"]*)\"")
        .matcher(svg)
        .results()
        .map(curve -> curve.group(1).split("[ ,]"))
        .map(xy -> IntStream.range(0, xy.length / 2).mapToDouble(i -> parseDouble(xy[2 * i + 1])))
        .map(DoubleStream::toArray)
        .toList();
  }

  @Test
  void plotInTheGuideIsOfThisCode() throws IOException {
    String tree = System.getProperty("ncclffm.test.tree");
    assumeTrue(tree != null, "no -Dncclffm.test.tree=FOLDER");
    List<double[]> drawn = heights(Files.readString(Path.of(tree, "docs/training.svg")));
    assertEquals(1 + Training.Route.values().length, drawn.size());
    double[] now = heights(LossPlot.draw(Map.of("now", alone.losses()))).get(0);
    for (double[] curve : drawn) {
      assertArrayEquals(
          now, curve, 1); // of a drawing 360 high; Math.exp may differ in its last bit
    }
  }

  @ParameterizedTest
  @EnumSource
  void fourRanksLearnAsOneDoes(Training.Route route) {
    for (Training.Result result : run(4, route)) {
      assertArrayEquals(alone.losses(), result.losses(), NEAR, route.toString());
      assertEquals(alone.accuracy(), result.accuracy(), 0.005);
    }
  }

  @ParameterizedTest
  @EnumSource
  void ranksHaveTheSameWeights(Training.Route route) {
    Training.Result[] results = run(2, route);
    assertArrayEquals(results[0].weights(), results[1].weights());
  }

  @ParameterizedTest
  @EnumSource
  void processesLearnAsOneDoes(Training.Route route) throws Exception {
    List<ChildJvm> children = new ArrayList<>();
    try {
      for (int r = 0; r < 2; r++) {
        children.add(ChildJvm.of(TrainingProcess.class, "" + r, "2", route.name()).start());
      }
      children.get(1).send(children.get(0).awaitLine("ID ", START));
      for (ChildJvm child : children) {
        String[] losses = child.awaitLine("LOSSES ", PATIENCE).split(" ");
        double[] curve = Arrays.stream(losses).mapToDouble(Double::parseDouble).toArray();
        assertArrayEquals(alone.losses(), curve, NEAR, route.toString());
        assertEquals(0, child.exitStatus(PATIENCE), child.output());
      }
    } finally {
      children.forEach(ChildJvm::close);
    }
  }
}

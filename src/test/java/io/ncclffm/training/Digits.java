package io.ncclffm.training;

import java.util.Random;

/**
 * Handwriting in miniature: the ten digits on 8 x 8 pixels, shifted and with noise. The same seed
 * gives the same pictures.
 */
record Digits(float[][] pixels, int[] labels) {
  static final int SIDE = 8;
  static final int PIXELS = SIDE * SIDE;
  static final int CLASSES = 10;
  private static final float NOISE = 0.2f;

  private static final String[] GLYPHS = {
    ".###. #...# #...# #...# #...# #...# .###.",
    "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ..##. .#... #.... #####",
    "####. ....# ....# .###. ....# ....# ####.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "##### #.... ####. ....# ....# #...# .###.",
    "..##. .#... #.... ####. #...# #...# .###.",
    "##### ....# ...#. ..#.. ..#.. .#... .#...",
    ".###. #...# #...# .###. #...# #...# .###.",
    ".###. #...# #...# .#### ....# ...#. .##..",
  };

  static Digits generate(int n, long seed) {
    Random random = new Random(seed);
    float[][] pixels = new float[n][PIXELS];
    int[] labels = new int[n];
    for (int i = 0; i < n; i++) {
      labels[i] = random.nextInt(CLASSES);
      draw(GLYPHS[labels[i]].split(" "), random, pixels[i]);
    }
    return new Digits(pixels, labels);
  }

  private static void draw(String[] glyph, Random random, float[] into) {
    int down = random.nextInt(SIDE - glyph.length + 1);
    int right = random.nextInt(SIDE - glyph[0].length() + 1);
    for (int y = 0; y < glyph.length; y++) {
      for (int x = 0; x < glyph[y].length(); x++) {
        into[(y + down) * SIDE + x + right] = glyph[y].charAt(x) == '#' ? 1 : 0;
      }
    }
    for (int p = 0; p < PIXELS; p++) {
      into[p] += NOISE * (float) random.nextGaussian();
    }
  }

  int size() {
    return labels.length;
  }
}

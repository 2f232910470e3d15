package io.ncclffm.lsa;

import java.util.List;
import org.jspecify.annotations.Nullable;

/** Runs every step of an undoing, also after one that failed. */
final class Cleanup {
  private Cleanup() {}

  /** The last first; empties the list, and throws the first failure at the end. */
  static void runAll(List<Runnable> steps) {
    @Nullable RuntimeException first = null;
    for (int i = steps.size() - 1; i >= 0; i--) {
      try {
        steps.get(i).run();
      } catch (RuntimeException e) {
        if (first == null) {
          first = e;
        } else {
          first.addSuppressed(e);
        }
      }
    }
    steps.clear();
    if (first != null) {
      throw first;
    }
  }
}

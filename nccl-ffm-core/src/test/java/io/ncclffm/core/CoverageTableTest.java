package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.bindings.nccl.NcclH;
import java.io.IOException;
import java.lang.reflect.Method;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;

/** docs/coverage.md names every bound function, and only methods that there are. */
class CoverageTableTest {
  private static final Path TABLE = Path.of("../docs/coverage.md");
  private static final Pattern ROW =
      Pattern.compile("\\| `(\\w+)` \\| (.*) \\| [^|]+ \\| [^|]+ \\|");
  private static final Pattern METHOD = Pattern.compile("`(\\w+)\\.(\\w+)(?:\\(\\))?`");

  private static List<Matcher> rows() throws IOException {
    return Files.readAllLines(TABLE).stream().map(ROW::matcher).filter(Matcher::matches).toList();
  }

  @Test
  void everyBoundFunctionHasOneRow() throws IOException {
    TreeSet<String> bound = new TreeSet<>();
    for (Method method : NcclH.class.getDeclaredMethods()) {
      if (method.getName().endsWith("$handle")) {
        bound.add(method.getName().substring(0, method.getName().indexOf('$')));
      }
    }
    List<String> named = rows().stream().map(row -> row.group(1)).sorted().toList();
    assertEquals(List.copyOf(bound), named);
  }

  @Test
  void everyMethodInTheTableExists() throws Exception {
    for (Matcher row : rows()) {
      Matcher method = METHOD.matcher(row.group(2));
      boolean any = false;
      while (method.find()) {
        any = true;
        Class<?> owner = Class.forName("io.ncclffm.core." + method.group(1));
        String name = method.group(2);
        assertTrue(
            Arrays.stream(owner.getMethods()).anyMatch(m -> m.getName().equals(name)),
            () -> owner.getSimpleName() + "." + name + " of " + row.group(1));
      }
      assertTrue(
          any || row.group(2).startsWith("raw: "), () -> row.group(1) + " has no method or reason");
    }
  }
}

package io.ncclffm.core.bindings;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** What is bound is what the argument files list, and that is all that the headers declare. */
class BindingsCoverageTest {
  private static final Path SHIM_HEADER = Path.of("..", "native", "include", "ncclffm.h");

  @ParameterizedTest
  @ValueSource(strings = {"nccl", "cudart", "nvrtc", "shim"})
  void everyListedFunctionIsBoundAndNoOther(String library) throws Exception {
    assertEquals(Generated.included(library, "function"), Generated.functions(library));
  }

  @ParameterizedTest
  @ValueSource(strings = {"nccl", "cudart", "nvrtc", "shim"})
  void everyListedConstantAndTypeIsGenerated(String library) throws Exception {
    Set<String> generated = new TreeSet<>(Generated.classes(library).keySet());
    Stream.of(Generated.header(library).getMethods()).forEach(m -> generated.add(m.getName()));
    Stream.of(Generated.header(library).getFields()).forEach(f -> generated.add(f.getName()));

    Set<String> missing = new TreeSet<>();
    for (String kind : new String[] {"constant", "struct", "union", "typedef"}) {
      missing.addAll(Generated.included(library, kind));
    }
    missing.removeAll(generated);
    assertEquals(Set.of(), missing);
  }

  @Test
  void ncclHas64HostAnd16DeviceSetupFunctionsAndNoProfilingTwins() {
    Set<String> bound = Generated.functions("nccl");
    assertEquals(64 + 16, bound.size());
    assertTrue(bound.stream().noneMatch(name -> name.startsWith("pnccl")), bound::toString);
  }

  @Test
  void ncclFunctionsAreThoseOfTheRealHeaders() throws Exception {
    Path include = Generated.ncclInclude();
    Set<String> host =
        Generated.matches(
            "\\b(nccl\\w+)\\s*\\(", Generated.declarations(include.resolve("nccl.h")));
    Set<String> device = new TreeSet<>();
    try (Stream<Path> headers = Files.list(include.resolve("nccl_device"))) {
      for (Path header : (Iterable<Path>) headers::iterator) {
        // The Windows stub declares NCCL's internals.
        if (header.toString().endsWith(".h") && !header.endsWith("gin_win_stub.h")) {
          device.addAll(
              Generated.matches(
                  "NCCL_EXTERN_C __host__ \\w+ (nccl\\w+)\\(", Generated.declarations(header)));
        }
      }
    }

    assertEquals(64, host.size(), host::toString);
    assertEquals(16, device.size(), device::toString);
    host.addAll(device);
    assertEquals(host, Generated.functions("nccl"));
  }

  @Test
  void shimBindingsHoldEverythingInItsHeader() throws Exception {
    String text = Generated.declarations(SHIM_HEADER);
    assertEquals(Generated.matches("\\b(ncclFfm\\w+)\\(", text), Generated.functions("shim"));
    assertEquals(
        Generated.matches("typedef struct (\\w+)", text), Generated.included("shim", "struct"));

    Set<String> constants = Generated.matches("\\b(ncclFfm\\w+) = ", text);
    constants.addAll(
        Generated.matches("(?m)^#define (NCCLFFM_\\w+) [0-9]", Files.readString(SHIM_HEADER)));
    assertEquals(constants, Generated.included("shim", "constant"));
  }
}

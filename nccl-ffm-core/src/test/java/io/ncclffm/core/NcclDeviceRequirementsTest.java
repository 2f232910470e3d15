package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.bindings.nccl.ncclDevCommRequirements;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Which headers' kernels which library can serve, and the structs between them. */
class NcclDeviceRequirementsTest {
  private static NcclDeviceRequirements of(int header, boolean network) {
    return NcclDeviceRequirements.builder()
        .headerVersion(header)
        .ginSignalCount(network ? 1 : 0)
        .build();
  }

  @ParameterizedTest
  @CsvSource({
    "22809, 22809, false, compatible from 2.29.2",
    "22902, 22809, false, a later one",
    "22902, 22902, false, ",
    "22902, 23007, false, ",
    "22902, 23007, true, network",
    "22907, 22907, true, ",
    "23007, 22907, false, a later one",
    "23007, 23004, false, a later one",
    "23003, 23007, true, ",
    "23007, 23206, true, ",
    "23102, 23206, false, known here up to NCCL 2.30.7",
  })
  void headersAndLibrary(int header, int loaded, boolean network, String problem) {
    String found = of(header, network).problemWith(loaded);
    if (problem == null) {
      assertEquals(null, found);
    } else {
      assertNotNull(found);
      assertTrue(found.contains(problem), found);
      assertTrue(found.contains("2." + header / 100 % 100 + "." + header % 100), found);
    }
  }

  @ParameterizedTest
  @CsvSource({"22902, 72, 200", "22907, 88, 224", "23003, 96, 240", "23007, 96, 240"})
  void sizesAreThoseOfTheHeaders(int header, long requirements, int deviceCommunicator) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment struct = of(header, false).toNative(arena);
      assertEquals(requirements, ncclDevCommRequirements.size(struct));
      assertEquals(header, ncclDevCommRequirements.version(struct));
    }
    assertEquals(deviceCommunicator, of(header, false).deviceCommunicatorBytes());
  }
}

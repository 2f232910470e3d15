package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.abort;
import static org.junit.jupiter.api.Assumptions.assumeFalse;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.Nccl;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclParameters;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.Versions;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclUniqueId;
import java.io.IOException;
import java.io.Reader;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Properties;
import java.util.Set;
import java.util.SortedMap;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * The official NCCL and libcudart on a machine without a GPU: they load, everything bound is there,
 * and calls that need a GPU fail as CUDA says, without harm.
 */
@Tag("real-library")
class RealLibraryTest {
  private static String nccl;
  private static String cudart;

  @BeforeAll
  static void findLibraries() throws IOException {
    String file = System.getProperty("ncclffm.realLibraries");
    if (file == null || !Files.exists(Path.of(file))) {
      abort("no -Dncclffm.realLibraries=FILE that says where the real libraries are");
    }
    Properties found = new Properties();
    try (Reader reader = Files.newBufferedReader(Path.of(file))) {
      found.load(reader);
    }
    nccl = found.getProperty("nccl.library");
    cudart = found.getProperty("cudart.library");
    assumeTrue(nccl != null && cudart != null, found.getProperty("reason", file));
    System.setProperty("ncclffm.backend", "cuda");
    System.setProperty("ncclffm.nccl", nccl);
    System.setProperty("ncclffm.cudart", cudart);
  }

  @Test
  void versionsTellWhatIsMapped() throws IOException {
    Versions versions = Nccl.versions();
    assertEquals(Backend.CUDA, versions.backend());
    assertEquals("2.30.7", versions.nccl().version());
    assertEquals("2.30.7", versions.nccl().headerVersion());
    assertEquals(Path.of(nccl).toRealPath().toString(), versions.nccl().file());
    assertEquals("13.0", versions.cudart().headerVersion());
    assertTrue(versions.cudart().version().matches("1[0-9]\\.[0-9]"), versions.toString());
    assertEquals(Path.of(cudart).toRealPath().toString(), versions.cudart().file());
    assertEquals(Set.of(), versions.nccl().otherCopies());
    String maps = Files.readString(Path.of("/proc/self/maps"));
    assertTrue(maps.contains(versions.nccl().file()), maps);
    assertFalse(maps.contains("libncclffm_cpu.so"), maps);
  }

  @ParameterizedTest
  @ValueSource(classes = {NcclH.class, CudartH.class})
  void everyBoundFunctionResolves(Class<?> header) throws Exception {
    List<String> missing = new ArrayList<>();
    int resolved = 0;
    for (Method method : header.getMethods()) {
      if (method.getName().endsWith("$address")) {
        try {
          MemorySegment address = (MemorySegment) method.invoke(null);
          assertNotEquals(0, address.address(), method.getName());
          resolved++;
        } catch (InvocationTargetException e) {
          missing.add(method.getName() + ": " + e.getCause());
        }
      }
    }
    assertEquals(List.of(), missing);
    assertTrue(resolved > 50, resolved + " functions of " + header);
  }

  @Test
  void functionsThatAreMissingAreNotClaimed() {
    assertTrue(Nccl.supports("ncclCommWindowRegister"));
    assertFalse(Nccl.supports("ncclNoSuchFunction"));
  }

  @Test
  void uniqueIdsDifferAndSurviveTheWayThroughText() {
    NcclUniqueId id = NcclUniqueId.create();
    assertEquals(id, NcclUniqueId.fromHex(id.toHex()));
    assertEquals(id, NcclUniqueId.fromBytes(id.toBytes()));
    assertNotEquals(id, NcclUniqueId.create());
  }

  @Test
  void parametersAreReadable() {
    SortedMap<String, String> all = NcclParameters.all();
    assertTrue(all.containsKey("NCCL_DEBUG_FILE"), all.toString());
    all.forEach((name, value) -> assertEquals(value, NcclParameters.get(name), name));
    assertThrows(NcclException.class, () -> NcclParameters.get("NCCL_NO_SUCH_THING"));
  }

  /** Row 7 of the table of known faults: NCCL and cudart leave the JVM's SIGSEGV handler alone. */
  @Test
  void compiledNullChecksStillMakeExceptions() {
    NcclUniqueId.create(); // starts NCCL's bootstrap thread
    int[][] arrays = {new int[1], null};
    int caught = 0;
    for (int i = 0; i < 200_000; i++) {
      try {
        arrays[i % 1000 == 999 ? 1 : 0][0]++;
      } catch (NullPointerException e) {
        caught++;
      }
    }
    assertEquals(200, caught);
  }

  @Test
  void emptyGroupEnds() {
    NcclGroup.run(() -> {});
    NcclGroup.run(() -> NcclGroup.run(() -> {}));
  }

  @Test
  void everyResultHasItsOwnText() {
    Set<String> texts = new HashSet<>();
    for (int code = 0; code <= 8; code++) {
      String text = text(NcclH.ncclGetErrorString(code));
      assertFalse(text.isEmpty(), "result " + code);
      assertTrue(texts.add(text), code + ": " + text);
      assertTrue(NcclException.resultName(code).startsWith("nccl"));
    }
    assertEquals("unknown result", NcclException.resultName(99));
  }

  @SuppressWarnings("restricted") // a C string
  private static String text(MemorySegment cString) {
    return cString.reinterpret(Long.MAX_VALUE).getString(0);
  }

  @Test
  void withoutAGpuCudaSaysSo() {
    assumeNoGpu();
    CudaException e = noGpu(assertThrows(CudaException.class, CudaDevice::count));
    Messages.assertNames(e, "cudaGetDeviceCount");
    noGpu(assertThrows(CudaException.class, () -> new CudaDevice(0)));
    noGpu(assertThrows(CudaException.class, () -> LocalWorld.open(1)));
    // Asked again, the answer is the same.
    noGpu(assertThrows(CudaException.class, CudaDevice::count));
  }

  private static void assumeNoGpu() {
    assumeFalse(Files.exists(Path.of("/proc/driver/nvidia/gpus")), "this machine has a GPU");
  }

  private static CudaException noGpu(CudaException e) {
    boolean named =
        e.getMessage().contains("cudaErrorNoDevice")
            || e.getMessage().contains("cudaErrorInsufficientDriver");
    assertTrue(named, e.getMessage());
    return e;
  }

  @Test
  void withoutAGpuNcclFailsWithItsOwnText() {
    assumeNoGpu();
    NcclUniqueId id = NcclUniqueId.create();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ValueLayout.ADDRESS);
      MemorySegment raw = ncclUniqueId.allocate(arena);
      raw.copyFrom(MemorySegment.ofArray(id.toBytes()));
      int rc = NcclH.ncclCommInitRank(out, 1, raw, 0);
      NcclException e = NcclException.of("ncclCommInitRank", rc, " on rank 0 of 1");
      assertEquals("ncclUnhandledCudaError", NcclException.resultName(rc), e.getMessage());
      Messages.assertNames(e, "ncclCommInitRank on rank 0 of 1", "NCCL_DEBUG=INFO");
      assertEquals(0, out.get(ValueLayout.ADDRESS, 0).address(), "no communicator");
    }
  }

  @Test
  void badArgumentsAreRefusedByNccl() {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment out = arena.allocate(ValueLayout.JAVA_INT);
      int rc = NcclH.ncclCommCount(MemorySegment.NULL, out);
      assertEquals("ncclInvalidArgument", NcclException.resultName(rc));
      assertFalse(NcclException.of("ncclCommCount", rc, "").isCommunicatorFatal());
    }
  }
}

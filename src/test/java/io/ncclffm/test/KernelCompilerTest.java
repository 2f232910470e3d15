package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.device.KernelCompileException;
import io.ncclffm.device.KernelCompiler;
import io.ncclffm.device.KernelImage;
import io.ncclffm.device.KernelModule;
import io.ncclffm.device.KernelSource;
import java.io.IOException;
import java.nio.charset.Charset;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.attribute.PosixFilePermissions;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.Stream;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** NVRTC from Java: what comes of sources good and bad, and the cache of results. Needs no GPU. */
class KernelCompilerTest {
  private static final Duration CHILD = Duration.ofSeconds(50);

  static final String SCALE =
      """
      extern "C" __global__ void scale(float *x, long n, float a) {
        long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
        if (i < n) x[i] *= a;
      }
      """;

  /** sqrt(|sum of 2x + 1|), by the one protocol and algorithm that are best for small messages. */
  static final String FUSED =
      """
      #include "ncclffm/device.h"
      using namespace ncclffm;

      extern "C" __global__ void fused(DevComm comm, const float *in, float *out, uint64_t n) {
        const BlockShare share = shareOf(n, sizeof(float), blockIdx.x, gridDim.x);
        if (share.count == 0) return;
        ChannelSession<CoopBlock> session(CoopBlock(), comm, blockIdx.x, ncclFfmFunctionAllReduce);
        Call call = makeCall(ncclFfmFunctionAllReduce, in + share.first, out + share.first,
                             share.count, ncclFloat32, ncclSum, 0, 0);
        call.protocol = ncclFfmProtocolLL;
        call.algorithm = ncclFfmAlgorithmOneShot;
        fusedAllReduceLsa<float>(session, call, ScaleAdd{2, 1}, SqrtAbs());
      }
      """;

  private static final String OF_EVERY_PROTOCOL =
      """
      #include "ncclffm/device.h"
      using namespace ncclffm;

      extern "C" __global__ void step(DevComm comm, const float *in, float *out, uint64_t n, int *results) {
        results[blockIdx.x] = fusedAllReduceKernel<float>(CoopBlock(), comm, blockIdx.x, gridDim.x, in, out, n,
                                                          ncclSum, ScaleAdd{2, 1}, SqrtAbs());
      }
      """;

  private enum Sized {
    SMALL(SCALE),
    FUSED_IN_ONE_WAY(FUSED),
    FUSED_IN_EVERY_WAY(OF_EVERY_PROTOCOL);

    final String text;

    Sized(String text) {
      this.text = text;
    }
  }

  @TempDir Path folder;

  private Path cache;

  @BeforeAll
  static void findCompiler() throws IOException {
    NvrtcHere.assumePresent();
  }

  /** Without the letters that this locale's file names cannot have. */
  static String fileName(String name) {
    Charset ofFileNames = Charset.forName(System.getProperty("sun.jnu.encoding"));
    return ofFileNames.newEncoder().canEncode(name) ? name : name.replaceAll("[^ -~]", "");
  }

  @BeforeEach
  void useOwnCache() {
    cache = folder.resolve(fileName("cache of Zoë")); // as users are called
    System.setProperty("ncclffm.kernelCache", cache.toString());
  }

  @AfterEach
  void useTheUsersCache() {
    System.clearProperty("ncclffm.kernelCache");
  }

  private static KernelImage compile(String text) {
    return KernelCompiler.compile(KernelSource.of(text), "sm_90");
  }

  private Path onlyEntry() throws IOException {
    try (Stream<Path> entries = Files.list(cache)) {
      List<Path> all = entries.toList();
      assertEquals(1, all.size(), all::toString);
      return all.get(0);
    }
  }

  @Test
  void aCubinForADeviceAndPtxForAllFromOneOn() {
    KernelImage cubin = compile(SCALE);
    assertEquals(KernelImage.Form.CUBIN, cubin.form());
    assertEquals(90, cubin.architecture());
    KernelImage ptx = KernelCompiler.compile(KernelSource.of(SCALE), "compute_80");
    assertEquals(KernelImage.Form.PTX, ptx.form());
    assertEquals(80, ptx.architecture());
    String text = new String(ptx.toBytes(), StandardCharsets.US_ASCII);
    assertTrue(text.contains(".entry scale("), text);
    KernelSource named =
        KernelSource.builder(SCALE).options("--gpu-architecture=compute_90").build();
    assertEquals("PTX", KernelCompiler.compile(named, "sm_80").toString().substring(0, 3));
    KernelSource linked = KernelSource.builder(SCALE).options("-dlto").build();
    Messages.assertNames(
        assertThrows(
            IllegalArgumentException.class, () -> KernelCompiler.compile(linked, "compute_90")),
        "neither a cubin nor PTX",
        "-dlto");
  }

  @Test
  void aCubinThatWasCutOffIsRefused() {
    byte[] whole = compile(SCALE).toBytes();
    assertEquals(90, KernelImage.of(whole).architecture());
    for (int length : new int[] {whole.length - 1, whole.length / 2, 64}) {
      byte[] cut = Arrays.copyOf(whole, length);
      Messages.assertNames(
          assertThrows(IllegalArgumentException.class, () -> KernelImage.of(cut)),
          "cubin of " + length + " bytes",
          "cut off");
    }
  }

  @ParameterizedTest
  @EnumSource
  void fastColdAndFasterFromTheCache(Sized kernel) {
    String text = kernel.text;
    long start = System.nanoTime();
    KernelImage cold = compile(text);
    long coldMillis = (System.nanoTime() - start) / 1_000_000;
    long least = Long.MAX_VALUE;
    for (int i = 0; i < 5; i++) {
      start = System.nanoTime();
      KernelImage again = compile(text);
      least = Math.min(least, (System.nanoTime() - start) / 1_000_000);
      assertTrue(again.isCached());
      assertArrayEquals(cold.toBytes(), again.toBytes());
    }
    assertFalse(cold.isCached());
    System.out.printf(
        "NVRTC, %s: %d ms cold, %d ms from the cache, %d bytes%n",
        kernel, coldMillis, least, cold.toBytes().length);
    assertTrue(least < 50, least + " ms from the cache; 50 are the bar");
  }

  @Test
  void aSyntaxErrorTellsWhereAndWhat() {
    KernelSource source =
        KernelSource.builder(
                """
                extern "C" __global__ void broken(float *x) {
                  x[0] = 1
                }
                """)
            .name("my kernels ü.cu")
            .build();
    KernelCompileException e =
        assertThrows(KernelCompileException.class, () -> KernelCompiler.compile(source, "sm_90"));
    Messages.assertNames(
        e, "my kernels ü.cu, line 3", "expected a \";\"", "  3 | }", "NVRTC_ERROR_COMPILATION");
    assertEquals("my kernels ü.cu", e.file());
    assertEquals(3, e.line());
    assertTrue(e.log().contains("1 error detected"), e.log());
  }

  @Test
  void anErrorInAHeaderNamesTheHeader() {
    KernelSource source =
        KernelSource.builder("#include \"shapes.h\"\n" + SCALE)
            .header("shapes.h", "\nint area(;\n")
            .build();
    KernelCompileException e =
        assertThrows(KernelCompileException.class, () -> KernelCompiler.compile(source, "sm_90"));
    assertEquals("shapes.h", e.file());
    assertEquals(2, e.line());
  }

  @Test
  void aMissingHeaderTellsWhatThereIs() {
    KernelSource source =
        KernelSource.builder("#include \"nowhere.h\"\n" + SCALE).header("shapes.h", "").build();
    KernelCompileException e =
        assertThrows(KernelCompileException.class, () -> KernelCompiler.compile(source, "sm_90"));
    Messages.assertNames(
        e, "kernels.cu, line 1", "nowhere.h", "ncclffm/device.h", "[shapes.h]", "CUDA's own");
    assertEquals(1, e.line());
  }

  @Test
  void anUnknownArchitectureOrOptionIsNamed() {
    Messages.assertNames(
        assertThrows(
            KernelCompileException.class,
            () -> KernelCompiler.compile(KernelSource.of(SCALE), "sm_17")),
        "sm_17");
    KernelSource source = KernelSource.builder(SCALE).options("--no-such-option").build();
    Messages.assertNames(
        assertThrows(KernelCompileException.class, () -> KernelCompiler.compile(source, "sm_90")),
        "--no-such-option");
  }

  @Test
  void aFailureIsNotKept() throws IOException {
    assertThrows(KernelCompileException.class, () -> compile("nonsense"));
    try (Stream<Path> entries = Files.list(cache)) {
      assertEquals(0, entries.count());
    }
  }

  @Test
  void whateverTheResultDependsOnIsPartOfTheKey() throws IOException {
    Path include = Files.createDirectory(folder.resolve("my headers"));
    Files.writeString(include.resolve("factor.h"), "#define FACTOR 2\n");
    String text =
        """
        #include "factor.h"
        #include "more.h"
        extern "C" __global__ void f(float *x) { *x *= FACTOR + MORE; }
        """;
    KernelSource.Builder builder =
        KernelSource.builder(text).includeFolder(include).header("more.h", "#define MORE 1");
    assertFalse(KernelCompiler.compile(builder.build(), "sm_90").isCached());
    assertTrue(KernelCompiler.compile(builder.build(), "sm_90").isCached());
    Files.writeString(include.resolve("factor.h"), "#define FACTOR 300\n");
    assertFalse(KernelCompiler.compile(builder.build(), "sm_90").isCached(), "the folder");
    builder.header("more.h", "#define MORE 7");
    assertFalse(KernelCompiler.compile(builder.build(), "sm_90").isCached(), "the header");
    builder.options("--define-macro=X");
    assertFalse(KernelCompiler.compile(builder.build(), "sm_90").isCached(), "the options");
    assertFalse(KernelCompiler.compile(builder.build(), "sm_80").isCached(), "the architecture");
    KernelSource other =
        KernelSource.builder(text + "\n")
            .includeFolder(include)
            .header("more.h", "#define MORE 7")
            .options("--define-macro=X")
            .build();
    assertFalse(KernelCompiler.compile(other, "sm_90").isCached(), "the text");
  }

  /** Files that the key does not know of are not looked at. */
  @Test
  void headersAreNotFoundBesideTheSource() throws IOException {
    Files.writeString(folder.resolve("beside.h"), "#define FACTOR 2\n");
    KernelSource.Builder builder =
        KernelSource.builder("#include \"beside.h\"\n")
            .name(folder.resolve("source.cu").toString());
    assertThrows(
        KernelCompileException.class, () -> KernelCompiler.compile(builder.build(), "sm_90"));
    builder.options("-I" + folder);
    Messages.assertNames(
        assertThrows(
            IllegalArgumentException.class, () -> KernelCompiler.compile(builder.build(), "sm_90")),
        "option -I",
        "includeFolder");
  }

  @ParameterizedTest
  @ValueSource(strings = {"a byte", "cut", "empty", "other"})
  void aDamagedEntryIsMadeAnew(String damage) throws IOException {
    byte[] image = compile(SCALE).toBytes();
    Path entry = onlyEntry();
    byte[] content = Files.readAllBytes(entry);
    switch (damage) {
      case "a byte":
        content[content.length / 2] ^= 1;
        break;
      case "cut":
        content = java.util.Arrays.copyOf(content, content.length - 1);
        break;
      case "empty":
        content = new byte[0];
        break;
      default:
        content = "something else altogether, long enough to be one".repeat(9).getBytes();
    }
    Files.write(entry, content);
    KernelImage anew = compile(SCALE);
    assertFalse(anew.isCached(), damage);
    assertArrayEquals(image, anew.toBytes());
    KernelImage again = compile(SCALE);
    assertTrue(again.isCached(), damage);
    assertArrayEquals(image, again.toBytes());
  }

  @Test
  void theCacheIsPrivate() throws IOException {
    compile(SCALE);
    assertEquals("rwx------", PosixFilePermissions.toString(Files.getPosixFilePermissions(cache)));
    Files.setPosixFilePermissions(cache, PosixFilePermissions.fromString("rwxrwxrwx"));
    assertFalse(compile(SCALE).isCached(), "others can write there");
    System.setProperty("ncclffm.kernelCache", "off");
    assertFalse(compile(SCALE).isCached());
    System.setProperty("ncclffm.kernelCache", "/proc/no/such/folder");
    assertFalse(compile(SCALE).isCached());
  }

  @Test
  void threadsThatCompileTheSameCompileItOnce() throws Exception {
    int threads = 4;
    CyclicBarrier start = new CyclicBarrier(threads);
    List<Future<KernelImage>> all = new ArrayList<>();
    try (ExecutorService pool = Executors.newFixedThreadPool(threads)) {
      for (int i = 0; i < threads; i++) {
        all.add(
            pool.submit(
                () -> {
                  start.await();
                  return compile(SCALE);
                }));
      }
      int made = 0;
      for (Future<KernelImage> one : all) {
        made += one.get().isCached() ? 0 : 1;
      }
      assertEquals(1, made);
    }
  }

  @Test
  void processesThatCompileTheSameDoNotDisturbEachOther() throws Exception {
    try (ChildJvm one = ChildJvm.of(CompilesKernel.class).start();
        ChildJvm two = ChildJvm.of(CompilesKernel.class).start()) {
      one.awaitLine("READY", CHILD);
      two.awaitLine("READY", CHILD);
      one.send("go");
      two.send("go");
      for (ChildJvm child : List.of(one, two)) {
        assertEquals(
            "cubin for sm_90", child.awaitLine("DONE ", CHILD).substring(0, 15), child.output());
      }
    }
    onlyEntry();
    assertTrue(compile(FUSED).isCached());
    try (ChildJvm third = ChildJvm.of(CompilesKernel.class).start()) {
      third.awaitLine("READY", CHILD);
      third.send("go");
      String[] done = third.awaitLine("DONE cubin for sm_90 true ", CHILD).split(" ");
      System.out.println("NVRTC, a process's first look into the cache: " + done[0] + " ms");
    }
  }

  @Test
  void withoutTheLibraryTheSearchIsTold() throws Exception {
    try (ChildJvm child =
        ChildJvm.of(CompilesKernel.class).property("ncclffm.nvrtc", "/no/libnvrtc.so").start()) {
      child.awaitLine("READY", CHILD);
      child.send("go");
      child.awaitLine("FAILED cannot load libnvrtc", CHILD);
      assertEquals(0, child.exitStatus(CHILD));
      assertTrue(child.output().contains("/no/libnvrtc.so: no such file"), child.output());
      assertTrue(child.output().contains("-Dncclffm.nvrtc=FILE"), child.output());
    }
  }

  @Test
  void theCpuBackendSaysThatItRunsNoKernels() {
    TestRanks.assumeCpu("a GPU runs them");
    Messages.assertNames(
        assertThrows(
            UnsupportedByLibraryException.class,
            () -> KernelModule.compile(new CudaDevice(0), SCALE)),
        "CPU backend",
        "no CUDA code",
        "KernelCompiler");
  }
}

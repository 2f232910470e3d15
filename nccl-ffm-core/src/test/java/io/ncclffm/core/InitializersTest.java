package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.bindings.nccl.NcclH;
import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * The structs that NCCL is handed, against its own initializer macros and the places of its fields
 * as the C++ compiler sees them in the real header (native/bindings/layouts.txt).
 */
class InitializersTest {
  private static final Path TABLE = Path.of("..", "native", "bindings", "layouts.txt");

  /** A field of {@code ncclConfig_t}: what the builder is told, and what must stand there then. */
  record Setting(String field, CommunicatorConfig config, Object value) {
    @Override
    public String toString() {
      return field;
    }
  }

  private static CommunicatorConfig.Builder config() {
    return CommunicatorConfig.builder();
  }

  static Stream<Setting> settings() {
    return Stream.of(
        new Setting("blocking", config().blocking(false).build(), 0),
        new Setting("cgaClusterSize", config().cgaClusterSize(3).build(), 3),
        new Setting("minCTAs", config().minCtas(5).build(), 5),
        new Setting("maxCTAs", config().maxCtas(7).build(), 7),
        new Setting("netName", config().netName("Socket").build(), "Socket"),
        new Setting("splitShare", config().splitShare(true).build(), 1),
        new Setting("trafficClass", config().trafficClass(9).build(), 9),
        new Setting("commName", config().name("nccl-ffm \u00e4").build(), "nccl-ffm \u00e4"),
        new Setting("collnetEnable", config().collnetEnable(true).build(), 1),
        new Setting(
            "CTAPolicy",
            config()
                .ctaPolicy(
                    CommunicatorConfig.CtaPolicy.EFFICIENCY, CommunicatorConfig.CtaPolicy.ZERO)
                .build(),
            3),
        new Setting("shrinkShare", config().shrinkShare(true).build(), 1),
        new Setting("nvlsCTAs", config().nvlsCtas(11).build(), 11),
        new Setting("nChannelsPerNetPeer", config().channelsPerNetPeer(4).build(), 4),
        new Setting("nvlinkCentricSched", config().nvlinkCentricSched(true).build(), 1),
        new Setting("graphUsageMode", config().graphUsageMode(2).build(), 2),
        new Setting("numRmaCtx", config().numRmaCtx(13).build(), 13),
        new Setting("maxP2pPeers", config().maxP2pPeers(17).build(), 17),
        new Setting("graphStreamOrdering", config().graphStreamOrdering(true).build(), 1));
  }

  private static Map<String, String> initializers() throws IOException {
    Map<String, String> initializers = new TreeMap<>();
    for (String line : Files.readAllLines(TABLE)) {
      String[] words = line.split(" ");
      if (words.length == 2) {
        initializers.put(words[0], words[1]);
      }
    }
    return initializers;
  }

  /** Offset and size in bytes of every field of a struct. */
  private static Map<String, int[]> fields(String struct) throws IOException {
    Map<String, int[]> fields = new TreeMap<>();
    for (String line : Files.readAllLines(TABLE)) {
      String[] words = line.split(" ");
      if (words[0].equals(struct) && !words[1].equals("-")) {
        fields.put(words[1], new int[] {Integer.parseInt(words[2]), Integer.parseInt(words[3])});
      }
    }
    return fields;
  }

  private static byte[] bytes(MemorySegment struct) {
    return struct.toArray(ValueLayout.JAVA_BYTE);
  }

  @Test
  void defaultConfigurationIsNcclsInitializerBitForBit() throws IOException {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment config = CommunicatorConfig.DEFAULT.toNative(arena);
      String expected = initializers().get("NCCL_CONFIG_INITIALIZER");
      assertEquals(expected, HexFormat.of().formatHex(bytes(config)));
    }
  }

  @Test
  void simulationStartsFromNcclsInitializer() throws IOException {
    try (Arena arena = Arena.ofConfined()) {
      String expected = initializers().get("NCCL_SIM_INFO_INITIALIZER");
      String actual = HexFormat.of().formatHex(bytes(NcclGroup.simulationInfo(arena)));
      assertEquals(expected, actual);
    }
  }

  @Test
  void defaultDeviceRequirementsAreNcclsInitializerBitForBit() throws IOException {
    try (Arena arena = Arena.ofConfined()) {
      String expected = initializers().get("NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER");
      String actual = HexFormat.of().formatHex(bytes(NcclDeviceRequirements.NONE.toNative(arena)));
      assertEquals(expected, actual);
    }
  }

  /** Every setter of the builder once; the last two fields are true unless set. */
  @Test
  void everyDeviceRequirementReachesItsField() throws IOException {
    NcclDeviceRequirements all =
        NcclDeviceRequirements.builder()
            .resources(MemorySegment.ofAddress(4096))
            .teams(MemorySegment.ofAddress(8192))
            .lsaMultimem(true)
            .barrierCount(1)
            .lsaBarrierCount(2)
            .railGinBarrierCount(3)
            .lsaLla2a(4, 5)
            .ginContextCount(6)
            .ginSignalCount(7)
            .ginCounterCount(8)
            .ginConnection(NcclDeviceRequirements.GinConnection.RAIL)
            .ginExclusiveContexts(true)
            .ginQueueDepth(9)
            .ginTrafficClass(10)
            .worldGinBarrierCount(11)
            .ginStrongSignalsRequired(false)
            .ginVaSignalsRequired(false)
            .build();
    Map<String, Long> expected = new TreeMap<>();
    expected.put("resourceRequirementsList", 4096L);
    expected.put("teamRequirementsList", 8192L);
    expected.put("lsaMultimem", 1L);
    expected.put("barrierCount", 1L);
    expected.put("lsaBarrierCount", 2L);
    expected.put("railGinBarrierCount", 3L);
    expected.put("lsaLLA2ABlockCount", 4L);
    expected.put("lsaLLA2ASlotCount", 5L);
    expected.put("ginForceEnable", 0L); // deprecated, has no setter
    expected.put("ginContextCount", 6L);
    expected.put("ginSignalCount", 7L);
    expected.put("ginCounterCount", 8L);
    expected.put("ginConnectionType", 2L);
    expected.put("ginExclusiveContexts", 1L);
    expected.put("ginQueueDepth", 9L);
    expected.put("ginTrafficClass", 10L);
    expected.put("worldGinBarrierCount", 11L);
    expected.put("ginStrongSignalsRequired", 0L);
    expected.put("ginVaSignalsRequired", 0L);
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment struct = all.toNative(arena);
      Map<String, Long> actual = new TreeMap<>();
      for (Map.Entry<String, int[]> field : fields("ncclDevCommRequirements").entrySet()) {
        int[] place = field.getValue();
        actual.put(field.getKey(), number(struct, place[0], place[1]));
      }
      actual.keySet().removeAll(List.of("size", "magic", "version"));
      assertEquals(expected, actual);
    }
  }

  private static long number(MemorySegment struct, int offset, int size) {
    return switch (size) {
      case 1 -> struct.get(ValueLayout.JAVA_BYTE, offset);
      case 4 -> struct.get(ValueLayout.JAVA_INT, offset);
      default -> struct.get(ValueLayout.JAVA_LONG, offset);
    };
  }

  // Row 34 of the table of known faults: a field of the builder that reaches no field of the
  // struct.
  @ParameterizedTest
  @MethodSource("settings")
  @SuppressWarnings("restricted") // the length of a text that a pointer leads to
  void everySettingReachesItsFieldAndNoOther(Setting setting) throws IOException {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment unset = CommunicatorConfig.DEFAULT.toNative(arena);
      MemorySegment set = setting.config().toNative(arena);
      int[] place = fields("ncclConfig_t").get(setting.field());
      int offset = place[0];
      if (setting.value() instanceof String text) {
        MemorySegment pointer = set.get(ValueLayout.ADDRESS, offset);
        assertEquals(text, pointer.reinterpret(100).getString(0));
      } else {
        assertEquals(4, place[1]);
        assertEquals(setting.value(), set.get(ValueLayout.JAVA_INT, offset));
      }
      byte[] before = bytes(unset);
      byte[] after = bytes(set);
      for (int b = 0; b < before.length; b++) {
        if (b < offset || b >= offset + place[1]) {
          assertEquals(before[b], after[b], "byte " + b);
        }
      }
      assertTrue(setting.config().toString().contains(setting.field()));
    }
  }

  @Test
  void everyFieldOfTheStructHasASetting() throws IOException {
    List<String> set = settings().map(Setting::field).sorted().toList();
    List<String> fields =
        fields("ncclConfig_t").keySet().stream()
            .filter(f -> !List.of("size", "magic", "version").contains(f))
            .sorted()
            .toList();
    assertEquals(fields, set);
  }

  @Test
  void aValueSetTwiceIsTheLast() {
    assertEquals(
        "CommunicatorConfig{minCTAs=2}", config().minCtas(1).minCtas(2).build().toString());
    assertTrue(CommunicatorConfig.DEFAULT.isBlocking());
    assertEquals(NcclH.NCCL_CONFIG_UNDEF_INT(), Integer.MIN_VALUE);
  }
}

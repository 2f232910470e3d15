package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclConfig_t;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.ArrayList;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * How a communicator is made ({@code ncclConfig_t}). What is not set is NCCL's to decide. A field
 * that the loaded library does not know is refused by name, where NCCL itself would ignore it.
 *
 * <p>Immutable; {@link #toString} shows what is set.
 */
public final class CommunicatorConfig {
  /** Nothing set. */
  public static final CommunicatorConfig DEFAULT = builder().build();

  /** How NCCL uses SMs ({@code NCCL_CTA_POLICY_*}, NCCL 2.27); may be combined. */
  public enum CtaPolicy {
    /** As fast as can be. */
    DEFAULT(0),
    /** Fewer SMs where that costs little. */
    EFFICIENCY(1),
    /** No SMs where copy engines can do the work (NCCL 2.28). */
    ZERO(2);

    private final int bit;

    CtaPolicy(int bit) {
      this.bit = bit;
    }
  }

  /** The fields and the first release whose header has them. */
  private enum Field {
    BLOCKING("blocking", 21403),
    CGA_CLUSTER_SIZE("cgaClusterSize", 21701),
    MIN_CTAS("minCTAs", 21701),
    MAX_CTAS("maxCTAs", 21701),
    NET_NAME("netName", 21701),
    SPLIT_SHARE("splitShare", 21801),
    TRAFFIC_CLASS("trafficClass", 22602),
    COMM_NAME("commName", 22703),
    COLLNET_ENABLE("collnetEnable", 22703),
    CTA_POLICY("CTAPolicy", 22703),
    SHRINK_SHARE("shrinkShare", 22703),
    NVLS_CTAS("nvlsCTAs", 22703),
    CHANNELS_PER_NET_PEER("nChannelsPerNetPeer", 22803),
    NVLINK_CENTRIC_SCHED("nvlinkCentricSched", 22803),
    GRAPH_USAGE_MODE("graphUsageMode", 22902),
    NUM_RMA_CTX("numRmaCtx", 22902),
    MAX_P2P_PEERS("maxP2pPeers", 23003),
    GRAPH_STREAM_ORDERING("graphStreamOrdering", 23007);

    final String cName;
    final int since;

    Field(String cName, int since) {
      this.cName = cName;
      this.since = since;
    }
  }

  private final Map<Field, Object> values;

  private CommunicatorConfig(Map<Field, Object> values) {
    this.values = values;
  }

  public static Builder builder() {
    return new Builder();
  }

  /** Whether calls return before their work is set up, see {@link Builder#blocking}. */
  public boolean isBlocking() {
    return !Integer.valueOf(0).equals(values.get(Field.BLOCKING));
  }

  /** The name given, or null. */
  public @Nullable String name() {
    return (String) values.get(Field.COMM_NAME);
  }

  CommunicatorConfig nonBlockingUnlessSet() {
    if (values.containsKey(Field.BLOCKING)) {
      return this;
    }
    EnumMap<Field, Object> more = new EnumMap<>(Field.class);
    more.putAll(values);
    more.put(Field.BLOCKING, 0);
    return new CommunicatorConfig(more);
  }

  /** What a child without a configuration of its own gets: NCCL copies the parent's. */
  CommunicatorConfig orElse(CommunicatorConfig parent) {
    return values.isEmpty() ? parent : this;
  }

  /**
   * Writes the struct, every field explicitly.
   *
   * @param lifetime must outlive the communicator and all that is split from it: NCCL keeps the
   *     pointer to {@code commName}
   * @throws UnsupportedByLibraryException if the loaded library does not know a field that is set
   */
  MemorySegment toNative(Arena lifetime) {
    checkSupported(values.keySet(), NativeLibraries.load().ncclVersion());
    MemorySegment config = lifetime.allocate(ncclConfig_t.layout());
    ncclConfig_t.size(config, ncclConfig_t.sizeof());
    ncclConfig_t.magic(config, NcclH.NCCL_API_MAGIC());
    ncclConfig_t.version(config, NcclH.NCCL_VERSION_CODE());
    ncclConfig_t.blocking(config, integer(Field.BLOCKING));
    ncclConfig_t.cgaClusterSize(config, integer(Field.CGA_CLUSTER_SIZE));
    ncclConfig_t.minCTAs(config, integer(Field.MIN_CTAS));
    ncclConfig_t.maxCTAs(config, integer(Field.MAX_CTAS));
    ncclConfig_t.netName(config, text(Field.NET_NAME, lifetime));
    ncclConfig_t.splitShare(config, integer(Field.SPLIT_SHARE));
    ncclConfig_t.trafficClass(config, integer(Field.TRAFFIC_CLASS));
    ncclConfig_t.commName(config, text(Field.COMM_NAME, lifetime));
    ncclConfig_t.collnetEnable(config, integer(Field.COLLNET_ENABLE));
    ncclConfig_t.CTAPolicy(config, integer(Field.CTA_POLICY));
    ncclConfig_t.shrinkShare(config, integer(Field.SHRINK_SHARE));
    ncclConfig_t.nvlsCTAs(config, integer(Field.NVLS_CTAS));
    ncclConfig_t.nChannelsPerNetPeer(config, integer(Field.CHANNELS_PER_NET_PEER));
    ncclConfig_t.nvlinkCentricSched(config, integer(Field.NVLINK_CENTRIC_SCHED));
    ncclConfig_t.graphUsageMode(config, integer(Field.GRAPH_USAGE_MODE));
    ncclConfig_t.numRmaCtx(config, integer(Field.NUM_RMA_CTX));
    ncclConfig_t.maxP2pPeers(config, integer(Field.MAX_P2P_PEERS));
    ncclConfig_t.graphStreamOrdering(config, integer(Field.GRAPH_STREAM_ORDERING));
    return config;
  }

  private static void checkSupported(Set<Field> set, int loaded) {
    List<String> unknown = new ArrayList<>();
    for (Field field : set) {
      if (loaded < field.since) {
        unknown.add(field.cName + " (NCCL >= " + NativeLibraries.versionText(field.since) + ")");
      }
    }
    if (!unknown.isEmpty()) {
      throw new UnsupportedByLibraryException(
          "ncclConfig_t: "
              + String.join(", ", unknown)
              + ": loaded "
              + NativeLibraries.versionText(loaded)
              + " from "
              + NativeLibraries.load().nccl().file()
              + " would ignore it");
    }
  }

  private int integer(Field field) {
    @Nullable Object value = values.get(field);
    return value == null ? NcclH.NCCL_CONFIG_UNDEF_INT() : (Integer) value;
  }

  private MemorySegment text(Field field, Arena lifetime) {
    @Nullable Object value = values.get(field);
    return value == null ? MemorySegment.NULL : lifetime.allocateFrom((String) value);
  }

  @Override
  public String toString() {
    StringBuilder text = new StringBuilder("CommunicatorConfig{");
    values.forEach(
        (field, value) -> text.append(field.cName).append('=').append(value).append(' '));
    return text.toString().stripTrailing() + "}";
  }

  /** Collects what is set. Values are checked by NCCL, which names the field in its last error. */
  public static final class Builder {
    private final EnumMap<Field, Object> values = new EnumMap<>(Field.class);

    private Builder() {}

    private Builder set(Field field, Object value) {
      values.put(field, value);
      return this;
    }

    private Builder set(Field field, boolean value) {
      return set(field, value ? 1 : 0);
    }

    /**
     * False: calls return while NCCL still sets up, so that a wait can have a deadline and {@link
     * Communicator#abort} can end it. Costs a helper thread of NCCL's a call. NCCL 2.14.3.
     */
    public Builder blocking(boolean value) {
      return set(Field.BLOCKING, value);
    }

    /** Thread block cluster size of NCCL's kernels, 0 to 8. NCCL 2.17.1. */
    public Builder cgaClusterSize(int value) {
      return set(Field.CGA_CLUSTER_SIZE, value);
    }

    /** Least number of blocks (SMs) a collective takes. NCCL 2.17.1. */
    public Builder minCtas(int value) {
      return set(Field.MIN_CTAS, value);
    }

    /** Most blocks (SMs) a collective takes. NCCL 2.17.1. */
    public Builder maxCtas(int value) {
      return set(Field.MAX_CTAS, value);
    }

    /** Name of the network module, as "IB" or "Socket". NCCL 2.17.1. */
    public Builder netName(String value) {
      return set(Field.NET_NAME, value);
    }

    /** Whether children made by split share this communicator's resources. NCCL 2.18.1. */
    public Builder splitShare(boolean value) {
      return set(Field.SPLIT_SHARE, value);
    }

    /** Traffic class of the network. NCCL 2.26.2. */
    public Builder trafficClass(int value) {
      return set(Field.TRAFFIC_CLASS, value);
    }

    /** Name in NCCL's log and profiler. NCCL 2.27.3. */
    public Builder name(String value) {
      return set(Field.COMM_NAME, value);
    }

    /** Whether to use in-network reduction (CollNet). NCCL 2.27.3. */
    public Builder collnetEnable(boolean value) {
      return set(Field.COLLNET_ENABLE, value);
    }

    /** How to use SMs. NCCL 2.27.3. */
    public Builder ctaPolicy(CtaPolicy first, CtaPolicy... more) {
      int bits = first.bit;
      for (CtaPolicy policy : more) {
        bits |= policy.bit;
      }
      return set(Field.CTA_POLICY, bits);
    }

    /** Whether children made by shrink share this communicator's resources. NCCL 2.27.3. */
    public Builder shrinkShare(boolean value) {
      return set(Field.SHRINK_SHARE, value);
    }

    /** Blocks (SMs) of NVLS kernels. NCCL 2.27.3. */
    public Builder nvlsCtas(int value) {
      return set(Field.NVLS_CTAS, value);
    }

    /** Channels to each peer over the network, a power of two. NCCL 2.28.3. */
    public Builder channelsPerNetPeer(int value) {
      return set(Field.CHANNELS_PER_NET_PEER, value);
    }

    /** Whether scheduling favours NVLink. NCCL 2.28.3. */
    public Builder nvlinkCentricSched(boolean value) {
      return set(Field.NVLINK_CENTRIC_SCHED, value);
    }

    /**
     * How CUDA graphs are used with this communicator: 0 never, 1 one graph at a time, 2 several
     * graphs or graphs mixed with other launches. NCCL 2.29.2.
     */
    public Builder graphUsageMode(int value) {
      return set(Field.GRAPH_USAGE_MODE, value);
    }

    /** Contexts of one-sided operations. NCCL 2.29.2. */
    public Builder numRmaCtx(int value) {
      return set(Field.NUM_RMA_CTX, value);
    }

    /** Peers that send and receive are set up for at most. NCCL 2.30.3. */
    public Builder maxP2pPeers(int value) {
      return set(Field.MAX_P2P_PEERS, value);
    }

    /** Whether launches captured into a graph keep the order of streams. NCCL 2.30.7. */
    public Builder graphStreamOrdering(boolean value) {
      return set(Field.GRAPH_STREAM_ORDERING, value);
    }

    public CommunicatorConfig build() {
      return new CommunicatorConfig(new EnumMap<>(values));
    }
  }
}

package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclDevCommRequirements;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;
import org.jspecify.annotations.Nullable;

/**
 * What kernels will need of an {@link NcclDeviceCommunicator} ({@code ncclDevCommRequirements_t},
 * 2.29.2). What is not set has the value of {@code NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER}: nothing
 * but the peers' addresses. GIN is NCCL's network access from kernels.
 *
 * <p>Immutable. All ranks must ask for the same.
 */
public final class NcclDeviceRequirements {
  /** Only the peers' addresses. */
  public static final NcclDeviceRequirements NONE = builder().build();

  /** Which peers kernels reach over the network ({@code ncclGinConnectionType_t}). */
  public enum GinConnection {
    NONE(0),
    /** Every rank. */
    FULL(1),
    /** The ranks of {@link Communicator#teamRail}. */
    RAIL(2);

    private final int ncclValue;

    GinConnection(int ncclValue) {
      this.ncclValue = ncclValue;
    }
  }

  private static final int OLDEST_HEADERS = 22902;

  private final Builder values;

  private NcclDeviceRequirements(Builder values) {
    this.values = values;
  }

  public static Builder builder() {
    return new Builder();
  }

  /** NCCL's version code of the headers that the kernels were compiled with. */
  int headerVersion() {
    return values.headerVersion;
  }

  /** Bytes of the {@code ncclDevComm} that kernels compiled with these headers take by value. */
  int deviceCommunicatorBytes() {
    return values.headerVersion < 22905 ? 200 : values.headerVersion < 23000 ? 224 : 240;
  }

  private boolean wantsNetwork() {
    return values.ginConnection != GinConnection.NONE
        || values.ginSignalCount > 0
        || values.ginCounterCount > 0
        || values.railGinBarrierCount > 0
        || values.worldGinBarrierCount > 0;
  }

  /**
   * Why a library cannot make what kernels of these headers take, or null: the layout of NCCL's
   * struct is that of the headers, which the library must know.
   *
   * @param loaded its version code
   */
  @Nullable String problemWith(int loaded) {
    int header = values.headerVersion;
    String kernels = "kernels compiled with NCCL " + NativeLibraries.versionText(header);
    if (header > loaded) {
      return kernels + " need a library of that version or a later one";
    }
    if (header < OLDEST_HEADERS) {
      return kernels
          + ": NCCL keeps its device structs compatible from "
          + NativeLibraries.versionText(OLDEST_HEADERS)
          + " on; compile them with later headers";
    }
    if (header / 100 > NcclH.NCCL_VERSION_CODE() / 100) {
      return kernels
          + ": what they require is known here up to NCCL "
          + NativeLibraries.versionText(NcclH.NCCL_VERSION_CODE());
    }
    if (wantsNetwork() && header < 23000 && header / 100 != loaded / 100) {
      return kernels + " cannot use the network (GIN) with another library than 2.29";
    }
    return null;
  }

  /** Writes the struct, every field explicitly, as the headers' version has it. */
  MemorySegment toNative(SegmentAllocator allocator) {
    MemorySegment r = ncclDevCommRequirements.allocate(allocator);
    int header = values.headerVersion;
    // NCCL copies as many bytes: what is behind them was not there yet.
    ncclDevCommRequirements.size(
        r, header < 22905 ? 72 : header < 23000 ? 88 : ncclDevCommRequirements.sizeof());
    ncclDevCommRequirements.magic(r, NcclH.NCCL_API_MAGIC());
    ncclDevCommRequirements.version(r, header);
    ncclDevCommRequirements.resourceRequirementsList(r, values.resources);
    ncclDevCommRequirements.teamRequirementsList(r, values.teams);
    ncclDevCommRequirements.lsaMultimem(r, values.lsaMultimem);
    ncclDevCommRequirements.barrierCount(r, values.barrierCount);
    ncclDevCommRequirements.lsaBarrierCount(r, values.lsaBarrierCount);
    ncclDevCommRequirements.railGinBarrierCount(r, values.railGinBarrierCount);
    ncclDevCommRequirements.lsaLLA2ABlockCount(r, values.lsaLla2aBlockCount);
    ncclDevCommRequirements.lsaLLA2ASlotCount(r, values.lsaLla2aSlotCount);
    // NCCL's own log calls it deprecated; ginConnection says the same.
    ncclDevCommRequirements.ginForceEnable(r, false);
    ncclDevCommRequirements.ginContextCount(r, values.ginContextCount);
    ncclDevCommRequirements.ginSignalCount(r, values.ginSignalCount);
    ncclDevCommRequirements.ginCounterCount(r, values.ginCounterCount);
    ncclDevCommRequirements.ginConnectionType(r, values.ginConnection.ncclValue);
    ncclDevCommRequirements.ginExclusiveContexts(r, values.ginExclusiveContexts);
    ncclDevCommRequirements.ginQueueDepth(r, values.ginQueueDepth);
    ncclDevCommRequirements.ginTrafficClass(r, values.ginTrafficClass);
    ncclDevCommRequirements.worldGinBarrierCount(r, values.worldGinBarrierCount);
    ncclDevCommRequirements.ginStrongSignalsRequired(r, values.ginStrongSignalsRequired);
    ncclDevCommRequirements.ginVaSignalsRequired(r, values.ginVaSignalsRequired);
    return r;
  }

  /** Collects what is set. Values are checked by NCCL. */
  public static final class Builder {
    private int headerVersion = NcclH.NCCL_VERSION_CODE();
    private MemorySegment resources = MemorySegment.NULL;
    private MemorySegment teams = MemorySegment.NULL;
    private boolean lsaMultimem;
    private int barrierCount;
    private int lsaBarrierCount;
    private int railGinBarrierCount;
    private int lsaLla2aBlockCount;
    private int lsaLla2aSlotCount;
    private int ginContextCount = 4;
    private int ginSignalCount;
    private int ginCounterCount;
    private GinConnection ginConnection = GinConnection.NONE;
    private boolean ginExclusiveContexts;
    private int ginQueueDepth;
    private int ginTrafficClass = NcclH.NCCL_CONFIG_UNDEF_INT();
    private int worldGinBarrierCount;
    private boolean ginStrongSignalsRequired = true;
    private boolean ginVaSignalsRequired = true;

    private Builder() {}

    private Builder(Builder other) {
      headerVersion = other.headerVersion;
      resources = other.resources;
      teams = other.teams;
      lsaMultimem = other.lsaMultimem;
      barrierCount = other.barrierCount;
      lsaBarrierCount = other.lsaBarrierCount;
      railGinBarrierCount = other.railGinBarrierCount;
      lsaLla2aBlockCount = other.lsaLla2aBlockCount;
      lsaLla2aSlotCount = other.lsaLla2aSlotCount;
      ginContextCount = other.ginContextCount;
      ginSignalCount = other.ginSignalCount;
      ginCounterCount = other.ginCounterCount;
      ginConnection = other.ginConnection;
      ginExclusiveContexts = other.ginExclusiveContexts;
      ginQueueDepth = other.ginQueueDepth;
      ginTrafficClass = other.ginTrafficClass;
      worldGinBarrierCount = other.worldGinBarrierCount;
      ginStrongSignalsRequired = other.ginStrongSignalsRequired;
      ginVaSignalsRequired = other.ginVaSignalsRequired;
    }

    /**
     * The {@code NCCL_VERSION_CODE} of the headers that the kernels were compiled with, by which
     * NCCL lays out its struct (the requirements' {@code version}); that of the bindings by
     * default. NCCL takes headers from 2.29.2 on, up to its own version; those of 2.29 without the
     * network if it is later itself.
     */
    public Builder headerVersion(int code) {
      headerVersion = code;
      return this;
    }

    /**
     * First of a chain of {@code ncclDevResourceRequirements_t}, as the raw {@code
     * nccl...CreateRequirement} functions fill them. NCCL writes the handles they point to during
     * the creation; all of them must stay until it is done.
     */
    public Builder resources(MemorySegment first) {
      resources = first;
      return this;
    }

    /** First of a chain of {@code ncclTeamRequirements_t}; as {@link #resources}. */
    public Builder teams(MemorySegment first) {
      teams = first;
      return this;
    }

    /** Whether the LSA team needs multicast addresses. */
    public Builder lsaMultimem(boolean value) {
      lsaMultimem = value;
      return this;
    }

    /** Barriers of all ranks. */
    public Builder barrierCount(int value) {
      barrierCount = value;
      return this;
    }

    /** Barriers of the LSA team, usually one a block. */
    public Builder lsaBarrierCount(int value) {
      lsaBarrierCount = value;
      return this;
    }

    /** Barriers of the rail team over the network. */
    public Builder railGinBarrierCount(int value) {
      railGinBarrierCount = value;
      return this;
    }

    /**
     * Room for LL all-to-alls in the LSA team.
     *
     * @param blocks that run one at a time
     * @param slots each, from the raw {@code ncclLLA2ACalcSlots}
     */
    public Builder lsaLla2a(int blocks, int slots) {
      lsaLla2aBlockCount = blocks;
      lsaLla2aSlotCount = slots;
      return this;
    }

    /** GIN contexts; NCCL may give another number. 4 by default. */
    public Builder ginContextCount(int value) {
      ginContextCount = value;
      return this;
    }

    /** GIN signals, numbered from 0. */
    public Builder ginSignalCount(int value) {
      ginSignalCount = value;
      return this;
    }

    /** GIN counters, numbered from 0. */
    public Builder ginCounterCount(int value) {
      ginCounterCount = value;
      return this;
    }

    /** Which peers are reached over the network; none by default. */
    public Builder ginConnection(GinConnection value) {
      ginConnection = value;
      return this;
    }

    /** Whether the contexts are this device communicator's alone. */
    public Builder ginExclusiveContexts(boolean value) {
      ginExclusiveContexts = value;
      return this;
    }

    /** Depth of a GIN queue; 0 leaves it to NCCL. */
    public Builder ginQueueDepth(int value) {
      ginQueueDepth = value;
      return this;
    }

    /** Traffic class of the network; NCCL's by default. */
    public Builder ginTrafficClass(int value) {
      ginTrafficClass = value;
      return this;
    }

    /** Barriers of all ranks over the network alone. */
    public Builder worldGinBarrierCount(int value) {
      worldGinBarrierCount = value;
      return this;
    }

    /** False if no kernel uses strong GIN signals; true by default. */
    public Builder ginStrongSignalsRequired(boolean value) {
      ginStrongSignalsRequired = value;
      return this;
    }

    /** False if no kernel uses GIN signals by address; true by default. */
    public Builder ginVaSignalsRequired(boolean value) {
      ginVaSignalsRequired = value;
      return this;
    }

    public NcclDeviceRequirements build() {
      return new NcclDeviceRequirements(new Builder(this));
    }
  }
}

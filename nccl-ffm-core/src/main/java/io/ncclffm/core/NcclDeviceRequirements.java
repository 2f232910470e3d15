package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclDevCommRequirements;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;

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

  private final Builder values;

  private NcclDeviceRequirements(Builder values) {
    this.values = values;
  }

  public static Builder builder() {
    return new Builder();
  }

  /** Writes the struct, every field explicitly. */
  MemorySegment toNative(SegmentAllocator allocator) {
    MemorySegment r = ncclDevCommRequirements.allocate(allocator);
    ncclDevCommRequirements.size(r, ncclDevCommRequirements.sizeof());
    ncclDevCommRequirements.magic(r, NcclH.NCCL_API_MAGIC());
    ncclDevCommRequirements.version(r, NcclH.NCCL_VERSION_CODE());
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

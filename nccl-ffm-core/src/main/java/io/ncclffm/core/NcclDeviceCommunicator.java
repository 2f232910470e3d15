package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.JAVA_LONG;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import org.jspecify.annotations.Nullable;

/**
 * NCCL's own device communicator ({@code ncclDevComm_t}), for kernels that were compiled from the
 * {@code nccl_device} headers; from {@link Communicator#createDeviceCommunicator}. The kernels of
 * this project do not need it.
 */
public final class NcclDeviceCommunicator implements AutoCloseable {
  /** More than any version's struct takes. */
  private static final MemoryLayout ROOM = MemoryLayout.sequenceLayout(128, JAVA_LONG);

  private final Communicator communicator;
  private final MemorySegment struct;
  private boolean closed;

  private NcclDeviceCommunicator(Communicator communicator, MemorySegment struct) {
    this.communicator = communicator;
    this.struct = struct;
  }

  static NcclDeviceCommunicator create(
      Communicator communicator, NcclDeviceRequirements requirements) {
    if (Nccl.versions().backend() == Backend.CPU) {
      throw new UnsupportedByLibraryException(
          "ncclDevCommCreate: the CPU backend runs no kernel compiled from NCCL's device headers");
    }
    NativeLibraries.requireNccl("ncclDevCommCreate", "2.28.3");
    NativeLibraries.Loaded loaded = NativeLibraries.load();
    @Nullable String problem = requirements.problemWith(loaded.ncclVersion());
    if (problem != null) {
      throw new UnsupportedByLibraryException(
          "ncclDevCommCreate: "
              + problem
              + "; loaded "
              + NativeLibraries.versionText(loaded.ncclVersion())
              + " from "
              + loaded.nccl().file());
    }
    if (NcclGroup.isActive()) {
      throw new IllegalStateException(
          "ncclDevCommCreate inside a group: it would exist only after its end; create outside");
    }
    MemorySegment room = communicator.allocateLateWritten(ROOM);
    MemorySegment struct = room.asSlice(0, requirements.deviceCommunicatorBytes());
    try (Arena scratch = Arena.ofConfined()) {
      // NCCL copies the requirements during the call.
      MemorySegment wanted = requirements.toNative(scratch);
      communicator.call("ncclDevCommCreate", comm -> NcclH.ncclDevCommCreate(comm, wanted, struct));
    }
    NcclDeviceCommunicator created = new NcclDeviceCommunicator(communicator, struct);
    communicator.adopt(created);
    return created;
  }

  /** The communicator that this one lives on. */
  public Communicator communicator() {
    return communicator;
  }

  /**
   * The {@code ncclDevComm_t}, as the headers of {@link NcclDeviceRequirements} have it, to be
   * handed to a kernel by value. Lives as long as the communicator.
   *
   * @throws IllegalStateException if closed
   */
  public MemorySegment struct() {
    if (closed) {
      throw new IllegalStateException("device communicator of " + communicator + " is closed");
    }
    return struct;
  }

  /** Gives it back ({@code ncclDevCommDestroy}); no kernel may use it any more. Collective. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    communicator.disown(this);
    if (communicator.endsResources()) {
      communicator.call("ncclDevCommDestroy", comm -> NcclH.ncclDevCommDestroy(comm, struct));
    }
  }
}

package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclDevComm;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * NCCL's own device communicator ({@code ncclDevComm_t}), for kernels that were compiled from the
 * {@code nccl_device} headers; from {@link Communicator#createDeviceCommunicator}. The kernels of
 * this project do not need it.
 */
public final class NcclDeviceCommunicator implements AutoCloseable {
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
    int header = NcclH.NCCL_VERSION_CODE();
    int loaded = NativeLibraries.load().ncclVersion();
    if (loaded < header) {
      throw new UnsupportedByLibraryException(
          "ncclDevCommCreate needs NCCL >= "
              + NativeLibraries.versionText(header)
              + ", whose struct a kernel would be compiled for; loaded "
              + NativeLibraries.versionText(loaded)
              + " from "
              + NativeLibraries.load().nccl().file());
    }
    if (NcclGroup.isActive()) {
      throw new IllegalStateException(
          "ncclDevCommCreate inside a group: it would exist only after its end; create outside");
    }
    MemorySegment struct = communicator.allocateLateWritten(ncclDevComm.layout());
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
   * The {@code ncclDevComm_t}, to be handed to a kernel by value. Lives as long as the
   * communicator.
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

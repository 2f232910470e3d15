package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import java.lang.foreign.MemorySegment;

/** A buffer that a communicator knows, from {@link Communicator#register}. */
public final class RegisteredBuffer implements AutoCloseable {
  private final Communicator communicator;
  private final DeviceBuffer buffer;
  private final MemorySegment handle;
  private boolean closed;

  RegisteredBuffer(Communicator communicator, DeviceBuffer buffer, MemorySegment handle) {
    this.communicator = communicator;
    this.buffer = buffer;
    this.handle = handle;
  }

  public DeviceBuffer buffer() {
    return buffer;
  }

  /** Deregisters ({@code ncclCommDeregister}); the buffer stays. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    communicator.disown(this);
    if (communicator.endsResources()) {
      communicator.call("ncclCommDeregister", comm -> NcclH.ncclCommDeregister(comm, handle));
    }
  }
}

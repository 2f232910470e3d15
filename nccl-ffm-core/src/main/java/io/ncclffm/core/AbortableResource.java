package io.ncclffm.core;

/**
 * A resource of a communicator whose kernels may be waiting for other ranks. When the communicator
 * is aborted it is told so first, then there is a bounded wait for its kernels, and only then are
 * windows unmapped and memory freed.
 */
public interface AbortableResource extends AutoCloseable {
  /** Makes kernels of this resource end soon, those enqueued as well; from any thread. */
  void abort();

  @Override
  void close();
}

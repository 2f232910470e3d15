package io.ncclffm.core;

/**
 * Something that enqueues work on a stream and may learn of a failure that the stream itself does
 * not show, as a communicator whose peer died. {@link CudaStream#synchronize} asks it while it
 * waits, so that a failure is an exception and not a hang.
 */
public interface FailureSource {
  /** Throws if a failure is known; returns quickly, never blocks. */
  void throwIfFailed();
}

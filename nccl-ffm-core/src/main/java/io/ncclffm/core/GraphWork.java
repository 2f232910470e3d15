package io.ncclffm.core;

/**
 * Work in a {@link CudaGraph} whose owner has to know of each launch, as the task queue that counts
 * its producers. {@link CudaStream#addToGraph} puts it there.
 */
public interface GraphWork {
  /**
   * Before a launch of the graph, on its thread. If it throws, nothing is launched.
   *
   * @param stream that it is launched on
   */
  void begin(CudaStream stream);

  /**
   * After {@link #begin} did not throw, on the same thread.
   *
   * @param launched whether the graph was launched
   */
  void end(CudaStream stream, boolean launched);

  /**
   * The graph launches it no more: it was closed or updated, or could not be made. What was
   * launched goes on.
   */
  void release();
}

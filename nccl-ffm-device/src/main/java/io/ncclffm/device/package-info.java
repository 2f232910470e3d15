/**
 * Communication inside kernels: collectives as kernels of their own ({@link DeviceCommunicator}),
 * kernels that compute, all-reduce and go on computing ({@link FusedKernels}), tasks that kernels
 * and the host hand to a scheduler kernel ({@link TaskQueue}), kernels of one's own, compiled or
 * loaded ({@link KernelModule}), and {@link GradientBuckets} for training.
 *
 * <p>All is enqueued on streams, and a failure of a kernel is thrown when the stream is waited for.
 * Every wait in a kernel has a deadline. Threads: one at a time for each object, {@code abort} from
 * any. Collectives, launches and tasks allocate nothing on the Java heap.
 */
package io.ncclffm.device;

/**
 * NCCL's host API and what of CUDA belongs to it: devices, streams, events, buffers and graphs;
 * communicators, collectives and groups; {@link LocalWorld} for all ranks in one process.
 *
 * <p>Calls that a device carries out are enqueued on a {@link CudaStream} and return at once;
 * {@link CudaStream#synchronize} waits, with a deadline, and throws what failed. Counts and offsets
 * are in elements. Handles are closed by whoever made them; nothing is freed behind a program's
 * back. A communicator takes one thread at a time. All ranks call the same collectives in the same
 * order.
 *
 * <p>The native libraries are loaded at the first use: CUDA's and NCCL's where there is a GPU, else
 * the CPU backend; {@link Nccl#versions} tells.
 */
package io.ncclffm.core;

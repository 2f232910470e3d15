/**
 * Load/store-accessible windows: memory that every rank of a communicator provides and that kernels
 * of every rank reach ({@link LsaWindow}), whoever maps it ({@link LsaProvider}), along which path
 * ({@link LsaPath}); many buffers in one window ({@link SymmetricPool}).
 *
 * <p>Making and closing is collective; windows are closed with their communicator. Threads: as the
 * communicator.
 */
package io.ncclffm.lsa;

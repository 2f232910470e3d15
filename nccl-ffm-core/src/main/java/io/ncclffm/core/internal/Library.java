package io.ncclffm.core.internal;

import java.lang.foreign.MemorySegment;
import java.util.Optional;
import org.jspecify.annotations.Nullable;

/**
 * One opened library.
 *
 * @param name what it is to us: libcudart, libnccl, libnvrtc or libncclffm (the shim or the CPU
 *     backend)
 * @param filePrefix how the names of all copies of it begin, for finding a second one
 * @param origin which rule of the search order found it
 * @param handle from {@code dlopen}; never closed
 * @param file what is really mapped, or what was asked for where the system does not tell
 */
public record Library(
    String name, String filePrefix, String origin, MemorySegment handle, String file) {

  /** A symbol's address, or empty. */
  public Optional<MemorySegment> find(String symbol) {
    @Nullable MemorySegment address = Libc.symbol(handle, symbol);
    return Optional.ofNullable(address);
  }
}

package io.ncclffm.core;

import org.jspecify.annotations.Nullable;

/**
 * What runs under the API in this process.
 *
 * @param reason why this backend was chosen
 * @param shim null if the CUDA shim was not built; then there is no device side
 */
public record Versions(
    Backend backend,
    String reason,
    LibraryVersion cudart,
    LibraryVersion nccl,
    @Nullable LibraryVersion shim) {

  /** Four lines for people. */
  @Override
  public String toString() {
    return "backend    "
        + backend.name().toLowerCase(java.util.Locale.ROOT)
        + ", "
        + reason
        + "\nlibcudart  "
        + cudart
        + "\nlibnccl    "
        + nccl
        + "\nshim       "
        + (shim == null ? "not built" : shim);
  }
}

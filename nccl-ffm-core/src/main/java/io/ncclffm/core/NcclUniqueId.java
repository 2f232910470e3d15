package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclUniqueId;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;
import java.lang.foreign.ValueLayout;
import java.util.Arrays;
import java.util.HexFormat;

/**
 * The 128 bytes that lead the ranks of one communicator together ({@code ncclUniqueId}). One
 * process creates it and hands it to the others; it serves for one communicator only, and its
 * creator must live until all ranks have joined. Whoever has it can join: treat it as a secret.
 */
public final class NcclUniqueId {
  /** Its size. */
  public static final int BYTES = 128;

  private final byte[] bytes;

  private NcclUniqueId(byte[] bytes) {
    this.bytes = bytes;
  }

  /** Creates one ({@code ncclGetUniqueId}). */
  public static NcclUniqueId create() {
    NativeLibraries.load();
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment id = ncclUniqueId.allocate(arena);
      int rc = NcclH.ncclGetUniqueId(id);
      if (rc != 0) {
        throw NcclException.of("ncclGetUniqueId", rc, "");
      }
      return new NcclUniqueId(id.toArray(ValueLayout.JAVA_BYTE));
    }
  }

  /**
   * @throws IllegalArgumentException unless there are exactly 128 bytes
   */
  public static NcclUniqueId fromBytes(byte[] bytes) {
    if (bytes.length != BYTES) {
      throw new IllegalArgumentException(
          "unique id of " + bytes.length + " bytes: it has exactly " + BYTES);
    }
    return new NcclUniqueId(bytes.clone());
  }

  /**
   * @throws IllegalArgumentException unless these are 256 hexadecimal digits
   */
  public static NcclUniqueId fromHex(String hex) {
    if (hex.length() != 2 * BYTES) {
      throw new IllegalArgumentException(
          "unique id of " + hex.length() + " digits: it has exactly " + 2 * BYTES);
    }
    return new NcclUniqueId(HexFormat.of().parseHex(hex));
  }

  public byte[] toBytes() {
    return bytes.clone();
  }

  public String toHex() {
    return HexFormat.of().formatHex(bytes);
  }

  MemorySegment toNative(SegmentAllocator allocator) {
    return allocator.allocateFrom(ValueLayout.JAVA_BYTE, bytes);
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof NcclUniqueId id && Arrays.equals(bytes, id.bytes);
  }

  @Override
  public int hashCode() {
    return Arrays.hashCode(bytes);
  }

  /** The first and last bytes only: the whole is a secret. */
  @Override
  public String toString() {
    String hex = toHex();
    return "NcclUniqueId[" + hex.substring(0, 8) + ".." + hex.substring(hex.length() - 8) + "]";
  }
}

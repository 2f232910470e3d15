package io.ncclffm.device;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/**
 * Kernels in one of the forms that CUDA loads: a cubin, PTX, or a fatbin of several. Immutable.
 *
 * <p>A cubin runs on the architecture that it is made for, and those of the same major number above
 * it. PTX is translated when it is loaded, which takes seconds for large kernels, for any
 * architecture from its own on.
 */
public final class KernelImage {
  /** Which of the forms. */
  public enum Form {
    CUBIN,
    PTX,
    FATBIN
  }

  private static final int ELF_MACHINE_CUDA = 190;
  private static final int FATBIN_MAGIC = 0xBA55ED50;
  private static final Pattern TARGET =
      Pattern.compile("^\\s*\\.target\\s+sm_(\\d+)([af]?)", Pattern.MULTILINE);
  private static final Pattern VERSION =
      Pattern.compile("^\\s*\\.version\\s+(\\d+\\.\\d+)", Pattern.MULTILINE);

  private final byte[] bytes;
  private final String log;
  private final boolean cached;
  private final Form form;
  private final int architecture;
  private final String ptxVersion;

  KernelImage(byte[] bytes, String log, boolean cached) {
    this.bytes = bytes;
    this.log = log;
    this.cached = cached;
    ByteBuffer words = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN);
    if (bytes.length >= 64 && words.getInt(0) == 0x464c457f) {
      if (words.getShort(18) != ELF_MACHINE_CUDA) {
        throw notAnImage("an ELF file of machine " + words.getShort(18) + ", not of a GPU");
      }
      form = Form.CUBIN;
      // Either of its two tables comes last.
      requireWhole(Math.max(endOfTable(words, 32, 54), endOfTable(words, 40, 58)));
      // From version 8 of the ABI on, the architecture is in the second byte of the flags.
      int flags = words.getInt(48);
      architecture = bytes[8] >= 8 ? flags >> 8 & 0xff : flags & 0xff;
      ptxVersion = "";
    } else if (bytes.length >= 16 && words.getInt(0) == FATBIN_MAGIC) {
      form = Form.FATBIN;
      requireWhole(Short.toUnsignedLong(words.getShort(6)) + words.getLong(8));
      architecture = 0;
      ptxVersion = "";
    } else {
      String text = new String(bytes, StandardCharsets.ISO_8859_1);
      Matcher target = TARGET.matcher(text);
      Matcher version = VERSION.matcher(text);
      if (!target.find() || !version.find()) {
        throw notAnImage(bytes.length + " bytes");
      }
      form = Form.PTX;
      architecture = Integer.parseInt(target.group(1));
      ptxVersion = version.group(1);
    }
  }

  /** Of an ELF file: at which byte it begins, and the size and number of its entries. */
  private static long endOfTable(ByteBuffer elf, int beginAt, int entriesAt) {
    int size = Short.toUnsignedInt(elf.getShort(entriesAt));
    int number = Short.toUnsignedInt(elf.getShort(entriesAt + Short.BYTES));
    return elf.getLong(beginAt) + (long) size * number;
  }

  private void requireWhole(long needed) {
    if (needed < 0 || needed > bytes.length) {
      throw new IllegalArgumentException(
          "kernel image: a "
              + form.name().toLowerCase(Locale.ROOT)
              + " of "
              + bytes.length
              + " bytes, of which its header says that it has "
              + Long.toUnsignedString(needed)
              + ": it was cut off");
    }
  }

  private static IllegalArgumentException notAnImage(String what) {
    return new IllegalArgumentException(
        "kernel image: " + what + ": neither a cubin, nor a fatbin, nor PTX");
  }

  /**
   * What was compiled elsewhere, as nvcc's {@code -cubin}, {@code -ptx} or {@code -fatbin}.
   *
   * @throws IllegalArgumentException if it is none of them
   */
  public static KernelImage of(byte[] image) {
    return new KernelImage(image.clone(), "", false);
  }

  public Form form() {
    return form;
  }

  /** As 90 for {@code sm_90}; 0 of a fatbin, which may hold several. */
  public int architecture() {
    return architecture;
  }

  /** A copy. */
  public byte[] toBytes() {
    return bytes.clone();
  }

  byte[] bytes() {
    return bytes;
  }

  /** What the compiler had to say, warnings for example; empty of what was compiled elsewhere. */
  public String log() {
    return log;
  }

  /** Whether it was taken from the cache. */
  public boolean isCached() {
    return cached;
  }

  /**
   * Why a device cannot run it, as far as the image itself tells.
   *
   * @param device as 90
   */
  @Nullable String problemOn(int device) {
    if (form == Form.PTX && architecture > device) {
      return this
          + " cannot be translated for an older one; compile for compute_"
          + device
          + " or lower";
    }
    if (form == Form.CUBIN && (architecture / 10 != device / 10 || architecture > device)) {
      return this + " runs on that and its minor successors only; compile for sm_" + device;
    }
    return null;
  }

  @Override
  public String toString() {
    switch (form) {
      case PTX:
        return "PTX " + ptxVersion + " for sm_" + architecture;
      case CUBIN:
        return "cubin for sm_" + architecture;
      default:
        return "fatbin";
    }
  }
}

package io.ncclffm.device.doctor;

import io.ncclffm.core.DataType;
import io.ncclffm.lsa.AlignmentReport;
import java.util.Locale;

/** What the alignment of a buffer allows, of a description TYPE,COUNT,OFFSET[,window]. */
final class BufferCheck {
  private BufferCheck() {}

  /**
   * @throws IllegalArgumentException if that is no description
   */
  static Finding of(String description) {
    String[] parts = description.split(",");
    boolean inWindow = parts.length == 4 && parts[3].equals("window");
    if (parts.length != 3 && !inWindow) {
      throw new IllegalArgumentException(
          description + ": take TYPE,COUNT,OFFSET or TYPE,COUNT,OFFSET,window, OFFSET in bytes");
    }
    DataType type = DataType.valueOf(parts[0].toUpperCase(Locale.ROOT));
    AlignmentReport report =
        AlignmentReport.of(type, Long.parseLong(parts[1]), Long.parseLong(parts[2]), inWindow);
    String seen =
        description
            + ": loads and stores of "
            + report.vectorBytes()
            + " bytes; at full speed: "
            + (report.fast().isEmpty() ? "no protocol" : report.fast())
            + (report.zeroCopy() ? "; Simple needs no copy" : "");
    if (report.obstacles().isEmpty()) {
      return Finding.ok("buffer.alignment", seen);
    }
    return Finding.warning(
        "buffer.alignment",
        seen + "\n" + String.join("\n", report.obstacles()),
        "in a window (LsaWindow, SymmetricPool), at an offset that is a multiple of 128 bytes, a"
            + " count whose bytes are a multiple of 16");
  }
}

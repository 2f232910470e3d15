package io.ncclffm.core.internal;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/** The files mapped into this process, as {@code /proc/self/maps} tells. */
record ProcessMaps(List<Mapping> mappings) {

  record Mapping(long start, long end, String file) {}

  static ProcessMaps read() {
    List<Mapping> mappings = new ArrayList<>();
    try {
      for (String line : Files.readAllLines(Path.of("/proc/self/maps"))) {
        // address perms offset dev inode path; the path may hold blanks
        String[] fields = line.split("\\s+", 6);
        if (fields.length == 6 && fields[5].startsWith("/")) {
          int dash = fields[0].indexOf('-');
          mappings.add(
              new Mapping(
                  Long.parseUnsignedLong(fields[0].substring(0, dash), 16),
                  Long.parseUnsignedLong(fields[0].substring(dash + 1), 16),
                  fields[5]));
        }
      }
    } catch (IOException e) {
      return new ProcessMaps(List.of()); // diagnosis only: unknown is shown as unknown
    }
    return new ProcessMaps(List.copyOf(mappings));
  }

  /** The file that holds an address, or null. */
  @Nullable String fileAt(long address) {
    for (Mapping m : mappings) {
      if (Long.compareUnsigned(address, m.start) >= 0 && Long.compareUnsigned(address, m.end) < 0) {
        return m.file;
      }
    }
    return null;
  }

  /** The mapped files whose name (without folder) begins with a prefix, each once. */
  Set<String> filesNamed(String prefix) {
    Set<String> files = new LinkedHashSet<>();
    for (Mapping m : mappings) {
      if (m.file.substring(m.file.lastIndexOf('/') + 1).startsWith(prefix)) {
        files.add(m.file);
      }
    }
    return files;
  }
}

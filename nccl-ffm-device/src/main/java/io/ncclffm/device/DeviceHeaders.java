package io.ncclffm.device;

import io.ncclffm.core.NativeLibraryException;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.SortedMap;
import java.util.TreeMap;
import org.jspecify.annotations.Nullable;

/**
 * The device library's headers, which travel in the nccl-ffm-native jar. NVRTC looks headers in
 * memory up by what stands between the quotes: so each {@code #include} here names its header from
 * the root.
 */
final class DeviceHeaders {
  private static final String FOLDER = "META-INF/ncclffm/include/";
  private static final String INCLUDE = "\n#include \"";

  private DeviceHeaders() {}

  /** By name, as {@code ncclffm/device.h}: everything that it includes, however far. */
  static SortedMap<String, String> all() {
    return Holder.ALL;
  }

  private static final class Holder {
    static final SortedMap<String, String> ALL = new TreeMap<>();

    static {
      add("ncclffm/device.h", ALL);
    }
  }

  private static void add(String name, SortedMap<String, String> all) {
    if (all.containsKey(name)) {
      return;
    }
    String text = read(name);
    all.put(name, text); // before what it includes, which may include it in turn
    StringBuilder rewritten = new StringBuilder();
    int from = 0;
    // No regular expression: this is part of what a program's first kernel costs.
    for (int at = text.indexOf(INCLUDE); at >= 0; at = text.indexOf(INCLUDE, from)) {
      int start = at + INCLUDE.length();
      int end = text.indexOf('"', start);
      String other =
          Path.of(name).resolveSibling(text.substring(start, end)).normalize().toString();
      add(other, all);
      rewritten.append(text, from, start).append(other);
      from = end;
    }
    all.put(name, rewritten.append(text, from, text.length()).toString());
  }

  private static String read(String name) {
    String resource = FOLDER + name;
    @Nullable ClassLoader loader = DeviceHeaders.class.getClassLoader();
    try (@Nullable InputStream in =
        loader == null
            ? ClassLoader.getSystemResourceAsStream(resource)
            : loader.getResourceAsStream(resource)) {
      if (in == null) {
        throw new NativeLibraryException(
            resource
                + " is not on the class path or module path. Remedy: add the nccl-ffm-native jar of"
                + " the same build.");
      }
      return new String(in.readAllBytes(), StandardCharsets.UTF_8);
    } catch (IOException e) {
      throw new UncheckedIOException(resource, e);
    }
  }
}

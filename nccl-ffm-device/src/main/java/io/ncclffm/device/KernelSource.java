package io.ncclffm.device;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.SortedMap;
import java.util.TreeMap;

/**
 * CUDA C++ to be compiled by NVRTC: the text, and what it is compiled with. It may include the
 * device library ({@code #include "ncclffm/device.h"}) and, where they are found, CUDA's own
 * headers. Kernels that Java looks up by name are {@code extern "C"}. Immutable.
 */
public final class KernelSource {
  private static final String LIBRARY = "ncclffm";

  private final Builder values;

  private KernelSource(Builder values) {
    this.values = values;
  }

  /** Text without options, which is called {@code kernels.cu} in messages. */
  public static KernelSource of(String text) {
    return builder(text).build();
  }

  public static Builder builder(String text) {
    return new Builder(text);
  }

  /** What the text is called in messages. */
  public String name() {
    return values.name;
  }

  public String text() {
    return values.text;
  }

  List<String> options() {
    return values.options;
  }

  SortedMap<String, String> headers() {
    return values.headers;
  }

  List<Path> includeFolders() {
    return values.includeFolders;
  }

  /** All headers in memory: the source's own, and the device library's where it may want them. */
  Map<String, String> allHeaders() {
    TreeMap<String, String> all = new TreeMap<>(values.headers);
    if (!values.includeFolders.isEmpty()
        || values.text.contains(LIBRARY)
        || values.headers.values().stream().anyMatch(h -> h.contains(LIBRARY))) {
      DeviceHeaders.all().forEach(all::putIfAbsent);
    }
    return all;
  }

  @Override
  public String toString() {
    return "source " + values.name;
  }

  /** Collects what is set. */
  public static final class Builder {
    private final String text;
    private String name = "kernels.cu";
    private final List<String> options = new ArrayList<>();
    private final TreeMap<String, String> headers = new TreeMap<>();
    private final List<Path> includeFolders = new ArrayList<>();

    private Builder(String text) {
      if (text == null) {
        throw new IllegalArgumentException("kernel source: the text is null");
      }
      this.text = text;
    }

    private Builder(Builder other) {
      text = other.text;
      name = other.name;
      options.addAll(other.options);
      headers.putAll(other.headers);
      includeFolders.addAll(other.includeFolders);
    }

    /** What the text is called in messages. */
    public Builder name(String value) {
      name = value;
      return this;
    }

    /**
     * Options of NVRTC, as {@code --define-macro=N=8}. Without others of their kind, {@code
     * --std=c++17} and the device's {@code --gpu-architecture} are added.
     */
    public Builder options(String... values) {
      options.addAll(List.of(values));
      return this;
    }

    /** A header in memory: what {@code #include "name"} stands for. */
    public Builder header(String headerName, String headerText) {
      headers.put(headerName, headerText);
      return this;
    }

    /** A folder in which headers are looked for, before CUDA's own. */
    public Builder includeFolder(Path folder) {
      includeFolders.add(folder);
      return this;
    }

    public KernelSource build() {
      return new KernelSource(new Builder(this));
    }
  }
}

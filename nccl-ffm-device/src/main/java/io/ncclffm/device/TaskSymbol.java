package io.ncclffm.device;

import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * The name of a task. What travels is a hash of it (FNV-1a, 32 bits, of its UTF-8 bytes, as {@code
 * TaskSymbol} in {@code task_queue.h} computes); messages show the name where this process has
 * called {@link #of} for it, else the hash. Ranks that give a task different names are told so.
 *
 * <p>Make each once and keep it: {@code static final TaskSymbol GRADIENTS =
 * TaskSymbol.of("gradients")}. Names are kept for the life of the process. Threads: any.
 */
public final class TaskSymbol {
  private static final int FNV_BASIS = 0x811c9dc5;
  private static final int FNV_PRIME = 0x01000193;
  private static final Map<Integer, TaskSymbol> KNOWN = new ConcurrentHashMap<>();

  private final int hash;
  private final @Nullable String name;

  private TaskSymbol(int hash, @Nullable String name) {
    this.hash = hash;
    this.name = name;
  }

  /**
   * The symbol of a name, which it makes known to messages.
   *
   * @throws IllegalArgumentException if the name is empty, or has the hash of another known one
   */
  public static TaskSymbol of(String name) {
    if (name.isEmpty()) {
      throw new IllegalArgumentException("the name of a task is empty");
    }
    int hash = FNV_BASIS;
    for (byte b : name.getBytes(StandardCharsets.UTF_8)) {
      hash = (hash ^ b & 0xff) * FNV_PRIME;
    }
    TaskSymbol symbol = KNOWN.computeIfAbsent(hash, h -> new TaskSymbol(h, name));
    if (!name.equals(symbol.name)) {
      throw new IllegalArgumentException(
          "the names \""
              + name
              + "\" and "
              + symbol
              + " of tasks have the same hash; take another name");
    }
    return symbol;
  }

  /** The symbol with a hash, as kernels hand it over; its name is shown if it is known. */
  public static TaskSymbol ofHash(int hash) {
    TaskSymbol known = KNOWN.get(hash);
    return known != null ? known : new TaskSymbol(hash, null);
  }

  /** What travels in place of the name. */
  public int hash() {
    return hash;
  }

  @Override
  public boolean equals(@Nullable Object other) {
    return other instanceof TaskSymbol symbol && symbol.hash == hash;
  }

  @Override
  public int hashCode() {
    return hash;
  }

  /** The name in quotation marks, or the hash in hexadecimal. */
  @Override
  public String toString() {
    return name != null ? '"' + name + '"' : String.format("0x%08x", hash);
  }
}

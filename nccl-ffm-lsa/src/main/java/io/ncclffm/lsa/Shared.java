package io.ncclffm.lsa;

import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * Memory that ranks of this process use by its plain address. The last of them that lets go frees
 * it: after an abort there is no barrier, and a kernel of another rank may still be storing.
 */
final class Shared {
  private static final Map<Long, Shared> BY_ADDRESS = new ConcurrentHashMap<>();

  private final long address;
  private final Runnable free;
  private int users = 1;

  private Shared(long address, Runnable free) {
    this.address = address;
    this.free = free;
  }

  /** The owner's. */
  static Shared create(long address, Runnable free) {
    Shared made = new Shared(address, free);
    BY_ADDRESS.put(address, made);
    return made;
  }

  /** Another rank's, by the owner's address. */
  static Shared join(long address) {
    @Nullable Shared known = BY_ADDRESS.get(address);
    if (known == null || !known.enter()) {
      throw new IllegalStateException("another rank of this process has closed its memory");
    }
    return known;
  }

  private synchronized boolean enter() {
    if (users == 0) {
      return false;
    }
    users++;
    return true;
  }

  /** Once for {@link #create} and for each {@link #join}. */
  void leave() {
    synchronized (this) {
      if (--users > 0) {
        return;
      }
    }
    BY_ADDRESS.remove(address, this);
    free.run();
  }
}

package io.ncclffm.core.internal;

import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.nio.channels.FileChannel;
import java.nio.channels.FileChannel.MapMode;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;

/**
 * Memory that processes of one user share: a file without a name (mode 0600), so that nothing is
 * left behind however the processes end.
 */
public final class SharedMemory implements AutoCloseable {
  private static final int MFD_CLOEXEC = 1;
  private static final int NO_FILE = -1;

  private final Arena arena = Arena.ofShared();
  private final MemorySegment segment;
  private int fd;

  private SharedMemory(String file, int fd, long bytes) throws IOException {
    this.fd = fd;
    try (FileChannel channel =
        FileChannel.open(Path.of(file), StandardOpenOption.READ, StandardOpenOption.WRITE)) {
      // Grows a file that is shorter.
      segment = channel.map(MapMode.READ_WRITE, 0, bytes, arena);
    } catch (IOException | RuntimeException e) {
      close();
      throw e;
    }
  }

  /** Makes some, zeroed. */
  public static SharedMemory create(long bytes) throws IOException {
    int fd = Libc.memfdCreate("ncclffm-window", MFD_CLOEXEC);
    if (fd < 0) {
      throw new IOException("memfd_create failed");
    }
    String file = "/proc/self/fd/" + fd;
    try {
      Files.setPosixFilePermissions(Path.of(file), PosixFilePermissions.fromString("rw-------"));
    } catch (IOException e) {
      Libc.close(fd);
      throw e;
    }
    return new SharedMemory(file, fd, bytes);
  }

  /** Maps what another process made and has not closed the file of yet. */
  public static SharedMemory open(long pid, int fd, long bytes) throws IOException {
    return new SharedMemory("/proc/" + pid + "/fd/" + fd, NO_FILE, bytes);
  }

  /** The descriptor by which others {@link #open} it, until {@link #closeFile}. */
  public int fd() {
    return fd;
  }

  public MemorySegment segment() {
    return segment;
  }

  /** Nobody else can open it any more; the mapping stays. */
  public void closeFile() {
    if (fd != NO_FILE) {
      Libc.close(fd);
      fd = NO_FILE;
    }
  }

  /** Unmaps. */
  @Override
  public void close() {
    closeFile();
    if (arena.scope().isAlive()) {
      arena.close();
    }
  }
}

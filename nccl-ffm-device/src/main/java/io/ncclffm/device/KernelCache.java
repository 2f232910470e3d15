package io.ncclffm.device;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.attribute.FileAttribute;
import java.nio.file.attribute.PosixFilePermission;
import java.nio.file.attribute.PosixFilePermissions;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Set;
import org.jspecify.annotations.Nullable;

/**
 * Compiled kernels on disk, by a hash of all that they were made of. The folder is the user's own:
 * what is in it runs on the GPU. Entries appear whole, by a rename, and carry a hash of their
 * content; one that does not match is as good as none. Trouble with the cache is logged and costs
 * no more than a compilation.
 */
final class KernelCache {
  private static final System.Logger LOG = System.getLogger("io.ncclffm");
  private static final long MAGIC = 0x4e43434c46464d31L; // "NCCLFFM1"
  private static final int HASH_BYTES = 32;
  private static final FileAttribute<Set<PosixFilePermission>> PRIVATE =
      PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------"));

  private final @Nullable Path folder;

  private KernelCache(@Nullable Path folder) {
    this.folder = folder;
  }

  /** The one that property, environment or the user's cache folder say. */
  static KernelCache open() {
    String value = System.getProperty("ncclffm.kernelCache");
    if (value == null) {
      value = System.getenv("NCCLFFM_KERNEL_CACHE");
    }
    if ("off".equals(value)) {
      return new KernelCache(null);
    }
    Path folder = value != null ? Path.of(value) : userCache().resolve("ncclffm/kernels");
    try {
      Files.createDirectories(folder.toAbsolutePath().getParent());
      if (!Files.isDirectory(folder)) {
        Files.createDirectories(folder, PRIVATE);
      }
      requirePrivate(folder);
      return new KernelCache(folder);
    } catch (IOException | UnsupportedOperationException e) {
      LOG.log(System.Logger.Level.WARNING, "nccl-ffm: no cache of kernels in {0}: {1}", folder, e);
      return new KernelCache(null);
    }
  }

  private static Path userCache() {
    String xdg = System.getenv("XDG_CACHE_HOME");
    return xdg != null && Path.of(xdg).isAbsolute()
        ? Path.of(xdg)
        : Path.of(System.getProperty("user.home"), ".cache");
  }

  private static void requirePrivate(Path folder) throws IOException {
    Set<PosixFilePermission> allowed = Files.getPosixFilePermissions(folder);
    if (allowed.contains(PosixFilePermission.GROUP_WRITE)
        || allowed.contains(PosixFilePermission.OTHERS_WRITE)
        || !Files.getAttribute(folder, "unix:uid")
            .equals(Files.getAttribute(Path.of("/proc/self"), "unix:uid"))) {
      throw new IOException("others can write there, or own it: make it private (chmod 700)");
    }
  }

  /** An entry, or null if there is none that is whole. */
  @Nullable KernelImage get(String key) {
    if (folder == null) {
      return null;
    }
    Path file = folder.resolve(key);
    try {
      ByteBuffer entry = ByteBuffer.wrap(Files.readAllBytes(file));
      byte[] hash = new byte[HASH_BYTES];
      if (entry.remaining() < Long.BYTES + HASH_BYTES + Integer.BYTES || entry.getLong() != MAGIC) {
        throw new IOException("is not one");
      }
      entry.get(hash);
      MessageDigest digest = sha256();
      digest.update(entry.duplicate());
      if (!MessageDigest.isEqual(hash, digest.digest())) {
        throw new IOException("its content is not what was written");
      }
      byte[] log = new byte[entry.getInt()];
      entry.get(log);
      byte[] image = new byte[entry.remaining()];
      entry.get(image);
      return new KernelImage(image, new String(log, StandardCharsets.UTF_8), true);
    } catch (NoSuchFileException e) {
      return null;
    } catch (IOException | RuntimeException e) {
      LOG.log(
          System.Logger.Level.WARNING,
          "nccl-ffm: entry {0} of the cache of kernels is made anew: {1}",
          file,
          e.getMessage());
      return null;
    }
  }

  void put(String key, KernelImage image) {
    if (folder == null) {
      return;
    }
    byte[] log = image.log().getBytes(StandardCharsets.UTF_8);
    ByteBuffer content = ByteBuffer.allocate(Integer.BYTES + log.length + image.bytes().length);
    content.putInt(log.length).put(log).put(image.bytes()).flip();
    MessageDigest digest = sha256();
    digest.update(content.duplicate());
    ByteBuffer entry = ByteBuffer.allocate(Long.BYTES + HASH_BYTES + content.remaining());
    entry.putLong(MAGIC).put(digest.digest()).put(content);
    @Nullable Path partial = null;
    try {
      partial = Files.createTempFile(folder, "partial", "");
      Files.write(partial, entry.array());
      Files.move(partial, folder.resolve(key), StandardCopyOption.ATOMIC_MOVE);
    } catch (IOException e) {
      LOG.log(
          System.Logger.Level.WARNING, "nccl-ffm: cannot write to the cache of kernels: {0}", e);
      delete(partial);
    }
  }

  private static void delete(@Nullable Path partial) {
    try {
      if (partial != null) {
        Files.deleteIfExists(partial);
      }
    } catch (IOException e) {
      LOG.log(System.Logger.Level.WARNING, "nccl-ffm: {0} stays behind: {1}", partial, e);
    }
  }

  static MessageDigest sha256() {
    try {
      return MessageDigest.getInstance("SHA-256");
    } catch (NoSuchAlgorithmException e) {
      throw new IllegalStateException(e); // every JDK has it
    }
  }
}

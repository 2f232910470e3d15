package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.NcclUniqueId;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.AccessDeniedException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.time.Duration;
import java.util.Arrays;
import java.util.BitSet;
import org.jspecify.annotations.Nullable;

/**
 * The id through a directory that all ranks share, for where no port can be had. Every other rank
 * writes a fresh random number to PATH.rankN; rank 0 waits for all of them and writes the id
 * together with these numbers to PATH; a rank takes the id only from a file with its own number,
 * and says so in PATH.rankN; then rank 0 removes PATH, and each rank its own file. So a file that
 * an earlier run left behind is never taken for this run's, and need not be removed by hand.
 *
 * <p>Files are written under another name and renamed, with access for their owner only: who may
 * read the user's files is the protection. Each path serves one run at a time. A network file
 * system may take seconds to show a file to other hosts.
 *
 * <p>Can be used any number of times, one after the other, if all ranks do. Threads: one exchange
 * at a time.
 */
public final class FileExchange implements UniqueIdExchange {
  private static final byte[] HELLO = "NCCLFFMH".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] ID = "NCCLFFMI".getBytes(StandardCharsets.US_ASCII);
  private static final byte[] TAKEN = "NCCLFFMT".getBytes(StandardCharsets.US_ASCII);
  private static final int KIND_BYTES = 8;
  private static final int NONCE_BYTES = Frame.NONCE_BYTES;
  private static final int RANK_FILE_BYTES = KIND_BYTES + Integer.BYTES + NONCE_BYTES;
  private static final int ID_AT = KIND_BYTES + Integer.BYTES;
  private static final int NONCES_AT = ID_AT + NcclUniqueId.BYTES;
  private static final int FIRST_PAUSE_MILLIS = 5;
  private static final int LAST_PAUSE_MILLIS = 100;

  private final Path path;
  private final int rank;
  private final int size;
  private final Duration timeout;
  private String lastProblem = "";

  /**
   * @param path a file to be made, in a directory that exists and that all ranks see
   * @param rank 0 to size - 1
   * @param size number of ranks
   * @param timeout for all ranks to come and to get the id
   */
  public FileExchange(Path path, int rank, int size, Duration timeout) {
    if (rank < 0 || rank >= size) {
      throw new IllegalArgumentException(
          "rank " + rank + ": must be in 0.." + (size - 1) + ", size is " + size);
    }
    Deadline.in(timeout);
    this.path = path.toAbsolutePath();
    this.rank = rank;
    this.size = size;
    this.timeout = timeout;
  }

  /**
   * @param id 128 bytes on rank 0; ignored on the others
   * @return rank 0's 128 bytes
   * @throws BootstrapException if a file cannot be read or written, or another run uses the path
   * @throws DeadlineException if ranks are missing at the deadline, with their numbers and the
   *     file; or on interruption
   */
  @Override
  public byte[] exchange(byte[] id) {
    Deadline deadline = Deadline.in(timeout);
    if (rank != 0) {
      return new Reader(deadline).run();
    }
    if (id.length != NcclUniqueId.BYTES) {
      throw new IllegalArgumentException(
          "id of " + id.length + " bytes on rank 0: it has exactly " + NcclUniqueId.BYTES);
    }
    new Writer(id, deadline).run();
    return id.clone();
  }

  /** Rank 0. */
  private final class Writer {
    private final Deadline deadline;

    /** What is in the file, or will be: the numbers of the ranks that came, zeros for others. */
    private final ByteBuffer content = ByteBuffer.allocate(contentBytes());

    private final BitSet missing = new BitSet();
    private final BitSet waiting = new BitSet();
    private final BitSet otherSize = new BitSet();

    Writer(byte[] id, Deadline deadline) {
      this.deadline = deadline;
      content.put(ID).putInt(size).put(id);
      missing.set(1, size);
      waiting.set(1, size);
    }

    void run() {
      byte @Nullable [] published = null;
      try {
        Pause pause = new Pause(deadline);
        while (!waiting.isEmpty()) {
          look();
          if (missing.isEmpty() && !Arrays.equals(published, content.array())) {
            published = content.array().clone();
            write(path, published);
          }
          if (published != null && !Arrays.equals(published, read(path, published.length))) {
            published = null;
            throw new BootstrapException(
                path + " was changed by another: each run needs a path of its own");
          }
          if (!waiting.isEmpty() && !pause.next()) {
            throw late();
          }
        }
      } finally {
        if (published != null) {
          delete(path);
        }
      }
    }

    private void look() {
      for (int r = waiting.nextSetBit(0); r >= 0; r = waiting.nextSetBit(r + 1)) {
        byte @Nullable [] file = read(rankFile(r), RANK_FILE_BYTES);
        missing.set(r);
        if (file == null || file.length != RANK_FILE_BYTES) {
          continue;
        }
        int at = NONCES_AT + r * NONCE_BYTES;
        otherSize.set(r, ByteBuffer.wrap(file).getInt(KIND_BYTES) != size);
        if (startsWith(file, HELLO) && !otherSize.get(r)) {
          // Anew after each look: what was there first may be an earlier run's.
          content.put(at, file, ID_AT, NONCE_BYTES);
          missing.clear(r);
        } else if (startsWith(file, TAKEN)
            && Arrays.equals(file, ID_AT, RANK_FILE_BYTES, content.array(), at, at + NONCE_BYTES)) {
          missing.clear(r);
          waiting.clear(r);
        }
      }
    }

    private DeadlineException late() {
      String what =
          missing.isEmpty()
              ? RankText.of(waiting) + " of " + size + " did not take the id"
              : RankText.of(missing) + " of " + size + " did not come";
      String hint =
          otherSize.isEmpty()
              ? ""
              : "; there is a file for another number of ranks from " + RankText.of(otherSize);
      return new DeadlineException(
          "exchange of the unique id through "
              + path
              + ": "
              + what
              + " within "
              + deadline
              + hint
              + lastProblem);
    }
  }

  /** Every other rank. */
  private final class Reader {
    private final Deadline deadline;
    private final byte[] nonce = SessionKeys.nonce();

    Reader(Deadline deadline) {
      this.deadline = deadline;
    }

    byte[] run() {
      try {
        write(rankFile(rank), rankFileContent(HELLO));
        Pause pause = new Pause(deadline);
        byte @Nullable [] id;
        while ((id = look()) == null) {
          if (!pause.next()) {
            throw late("rank 0 did not put the id there");
          }
        }
        write(rankFile(rank), rankFileContent(TAKEN));
        // Else this rank's next exchange could mix with this one, which others are still in.
        while (look() != null) {
          if (!pause.next()) {
            throw late("rank 0 did not see all ranks take the id");
          }
        }
        return id;
      } finally {
        delete(rankFile(rank));
      }
    }

    private byte[] rankFileContent(byte[] kind) {
      return ByteBuffer.allocate(RANK_FILE_BYTES).put(kind).putInt(size).put(nonce).array();
    }

    /** The id, if the file is there and has this rank's number. */
    private byte @Nullable [] look() {
      int length = contentBytes();
      byte @Nullable [] file = read(path, length);
      int at = NONCES_AT + rank * NONCE_BYTES;
      boolean mine =
          file != null
              && file.length == length
              && startsWith(file, ID)
              && Arrays.equals(file, at, at + NONCE_BYTES, nonce, 0, NONCE_BYTES);
      return mine ? Arrays.copyOfRange(file, ID_AT, NONCES_AT) : null;
    }

    private DeadlineException late(String what) {
      BitSet absent = new BitSet();
      for (int r = 1; r < size; r++) {
        absent.set(r, !Files.exists(rankFile(r)));
      }
      return new DeadlineException(
          "exchange of the unique id through "
              + path
              + " on rank "
              + rank
              + " of "
              + size
              + ": "
              + what
              + " within "
              + deadline
              + (absent.isEmpty() ? "" : "; no file of " + RankText.of(absent))
              + (Files.exists(path) ? "; the file there is of another exchange" : "")
              + lastProblem);
    }
  }

  /** The pauses between looks. */
  private final class Pause {
    private final Deadline deadline;
    private long millis = FIRST_PAUSE_MILLIS;

    Pause(Deadline deadline) {
      this.deadline = deadline;
    }

    /** False at the deadline. */
    boolean next() {
      deadline.pause(millis);
      millis = Math.min(LAST_PAUSE_MILLIS, 2 * millis);
      if (Thread.interrupted()) {
        throw Deadline.interrupted("exchange of the unique id through " + path);
      }
      return !deadline.passed();
    }
  }

  private int contentBytes() {
    return Math.addExact(NONCES_AT, Math.multiplyExact(size, NONCE_BYTES));
  }

  private Path rankFile(int r) {
    return path.resolveSibling(path.getFileName() + ".rank" + r);
  }

  private static boolean startsWith(byte[] file, byte[] kind) {
    return Arrays.equals(file, 0, KIND_BYTES, kind, 0, KIND_BYTES);
  }

  /** At most one byte more than expected, which shows that there is more; null if no such file. */
  private byte @Nullable [] read(Path file, int expected) {
    try (InputStream in = Files.newInputStream(file)) {
      return in.readNBytes(expected + 1);
    } catch (NoSuchFileException e) {
      return null;
    } catch (AccessDeniedException e) {
      throw new BootstrapException("cannot read " + file + ": it belongs to another user", e);
    } catch (IOException e) {
      // As NFS does for a file that is replaced while it is read: the next look finds the new one.
      lastProblem = "; last problem: " + e;
      return null;
    }
  }

  private void write(Path file, byte[] content) {
    Path parent = path.getParent();
    try {
      // On POSIX systems it can be read and written by its owner only.
      Path temporary = Files.createTempFile(parent, path.getFileName() + ".", ".tmp");
      try {
        Files.write(temporary, content);
        Files.move(temporary, file, StandardCopyOption.ATOMIC_MOVE);
      } catch (IOException e) {
        Files.deleteIfExists(temporary);
        throw e;
      }
    } catch (IOException e) {
      throw new BootstrapException(
          "cannot write " + file + ": " + e + "; the directory must exist, shared by all ranks", e);
    }
  }

  private static void delete(Path file) {
    try {
      Files.deleteIfExists(file);
    } catch (IOException e) {
      System.getLogger("io.ncclffm")
          .log(System.Logger.Level.WARNING, "cannot remove " + file + ": " + e);
    }
  }
}

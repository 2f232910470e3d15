package io.ncclffm.test;

import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static org.junit.jupiter.api.Assertions.assertEquals;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.HostBuffer;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.core.bindings.shim.ncclLsa;
import io.ncclffm.core.bindings.shim.ncclLsaWindow;
import io.ncclffm.lsa.Lsa;
import io.ncclffm.lsa.LsaPath;
import io.ncclffm.lsa.LsaWindow;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * Kernels that store to and load from every rank's window. The bytes are a function of writer,
 * reader and offset, so that one that went to the wrong place does not pass for another.
 */
final class WindowPatterns implements AutoCloseable {
  /** Bytes a writer has in each window; no multiple of any vector. */
  static final int REGION = 3 * 4096 + 40;

  private final Communicator communicator;
  private final CudaStream stream;
  private final HostBuffer firstBad;
  private final DeviceBuffer meeting;

  WindowPatterns(Communicator communicator, CudaStream stream) {
    this.communicator = communicator;
    this.stream = stream;
    this.firstBad = HostBuffer.allocate(communicator.device(), Long.BYTES);
    this.meeting = DeviceBuffer.allocate(communicator.device(), DataType.INT32, 1);
  }

  /** Of a window that {@link #exchange} can use. */
  static long bytes(int ranks) {
    return (long) ranks * REGION;
  }

  /** All ranks write to all, then all read all. Collective. */
  void exchange(LsaWindow window, int round) {
    int ranks = communicator.size();
    int self = communicator.rank();
    for (int reader = 0; reader < ranks; reader++) {
      write(whole(window, reader), begin(self), length(self), seed(round, self, reader));
    }
    meet();
    for (int reader = 0; reader < ranks; reader++) {
      for (int writer = 0; writer < ranks; writer++) {
        check(
            whole(window, reader),
            begin(writer),
            length(writer),
            seed(round, writer, reader),
            "rank " + self + " reads what rank " + writer + " wrote to rank " + reader);
      }
    }
    meet(); // nobody writes again while another reads
  }

  /** Each rank writes to its two neighbours on the ring. Collective. */
  void exchangeWithNeighbours(Lsa lsa, int round) {
    int ranks = communicator.size();
    int self = communicator.rank();
    int previous = Math.floorMod(self - 1, ranks);
    int next = (self + 1) % ranks;
    MemorySegment struct = lsa.struct();
    MemorySegment fromPrevious = ncclLsa.x(struct, 0);
    MemorySegment toPrevious = ncclLsa.x(struct, 1);
    MemorySegment fromNext = ncclLsa.y(struct, 0);
    MemorySegment toNext = ncclLsa.y(struct, 1);
    long length = ncclLsaWindow.bytes(toNext);
    int up = 100 + round;
    int down = 200 + round;
    write(toNext, 0, length, seed(up, self, next));
    write(toPrevious, 0, length, seed(down, self, previous));
    meet();
    check(fromPrevious, 0, length, seed(up, previous, self), "from the previous rank");
    check(fromNext, 0, length, seed(down, next, self), "from the next rank");
    meet();
  }

  private static long begin(int writer) {
    return (long) writer * REGION + writer % 3;
  }

  private static long length(int writer) {
    return REGION - 16 - writer;
  }

  private static long seed(int round, int writer, int reader) {
    return ((long) round << 32) + writer * 1000L + reader;
  }

  private static MemorySegment whole(LsaWindow window, int rank) {
    MemorySegment struct = ncclLsaWindow.allocate(Arena.ofAuto());
    ncclLsaWindow.base(struct, MemorySegment.ofAddress(window.address(rank, 0, window.bytes())));
    ncclLsaWindow.bytes(struct, window.bytes());
    return struct;
  }

  private void write(MemorySegment struct, long offset, long length, long seed) {
    communicator.device().makeCurrent();
    int rc = ShimH.ncclFfmLsaWritePattern(struct, offset, length, seed, stream.handle());
    assertEquals(0, rc, "ncclFfmLsaWritePattern");
  }

  private void check(MemorySegment struct, long offset, long length, long seed, String what) {
    communicator.device().makeCurrent();
    firstBad.segment().set(JAVA_LONG, 0, -1);
    int rc =
        ShimH.ncclFfmLsaCheckPattern(
            struct, offset, length, seed, firstBad.deviceAddress(), stream.handle());
    assertEquals(0, rc, "ncclFfmLsaCheckPattern");
    stream.synchronize();
    assertEquals(-1, firstBad.segment().get(JAVA_LONG, 0), "first wrong offset: " + what);
  }

  private void meet() {
    communicator.allReduce(meeting, meeting, ReduceOp.MAX, stream);
    stream.synchronize();
  }

  /** The paths are those that the machine can have. */
  static void assertPaths(LsaWindow window) {
    int self = window.communicator().rank();
    for (int r = 0; r < window.communicator().size(); r++) {
      assertEquals(r == self, window.path(r) == LsaPath.SELF, "path to " + r);
      assertEquals(r, window.team().worldRank(window.team().lsaRank(r)));
    }
  }

  @Override
  public void close() {
    firstBad.close();
    meeting.close();
  }
}

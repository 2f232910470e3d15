package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclGroup;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/**
 * How the ranks of a communicator agree: they exchange small records, on the host where they are
 * threads of one process, and by an all-gather on the communicator itself between processes. One a
 * communicator, closed with it.
 */
final class Exchange implements AutoCloseable {
  /** Bytes of a record. */
  static final int RECORD = 512;

  /** Bytes in front of it: what the rank is doing, so that ranks in different steps are noticed. */
  private static final int HEADER = 64;

  private static final int PACKET = HEADER + RECORD;

  private static final Duration TIMEOUT = Duration.ofMinutes(1);
  private static final UUID PROCESS = UUID.randomUUID();
  private static final Map<UUID, Meeting> MEETINGS = new ConcurrentHashMap<>();
  private static final Map<Communicator, Thread> INSIDE = new ConcurrentHashMap<>();

  private final Communicator communicator;
  private final CudaStream stream;
  private final DeviceBuffer mine;
  private final DeviceBuffer all;
  private final List<Integer> local = new ArrayList<>(); // ranks in this process
  private UUID meetingId = PROCESS;
  private @Nullable Meeting meeting;
  private boolean chosenBefore;

  private Exchange(
      Communicator communicator, CudaStream stream, DeviceBuffer mine, DeviceBuffer all) {
    this.communicator = communicator;
    this.stream = stream;
    this.mine = mine;
    this.all = all;
  }

  /**
   * Takes steps that the ranks of a communicator agree on, one thread at a time. The communicator
   * itself is entered only for its own calls in between: it can be aborted while a rank waits here.
   *
   * @throws IllegalStateException if another thread is inside
   */
  static <T extends @Nullable Object> T alone(
      Communicator communicator, String operation, Supplier<T> steps) {
    Thread me = Thread.currentThread();
    @Nullable Thread other = INSIDE.putIfAbsent(communicator, me);
    if (other == me) { // a step of steps
      return steps.get();
    }
    if (other != null) {
      throw new IllegalStateException(
          operation
              + " on "
              + communicator
              + ": thread "
              + other.getName()
              + " is inside a call; a communicator takes one thread at a time");
    }
    try {
      return steps.get();
    } finally {
      INSIDE.remove(communicator);
    }
  }

  /** The communicator's; made on first use, which is collective. */
  static Exchange of(Communicator communicator) {
    @Nullable Exchange known = communicator.child(Exchange.class);
    if (known != null) {
      if (known.meeting == null) {
        throw new LsaException("the ranks of " + communicator + " did not meet; abort it");
      }
      return known;
    }
    communicator.throwIfFailed();
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("the ranks cannot agree inside a group: end it first");
    }
    CudaStream stream = CudaStream.create(communicator.device());
    @Nullable DeviceBuffer mine = null;
    Exchange made;
    try {
      mine = DeviceBuffer.allocate(communicator.device(), DataType.UINT8, PACKET);
      long bytes = (long) PACKET * communicator.size();
      DeviceBuffer all = DeviceBuffer.allocate(communicator.device(), DataType.UINT8, bytes);
      made = new Exchange(communicator, stream, mine, all);
    } catch (RuntimeException e) {
      if (mine != null) {
        mine.close();
      }
      stream.close();
      throw e;
    }
    // If the others do not come, a kernel waits on the stream, and freeing would wait for it: what
    // is made so far stays until the communicator ends.
    communicator.adopt(made);
    made.findNeighbours();
    return made;
  }

  /** The ranks in one process meet where the lowest of them says. */
  private void findNeighbours() {
    UUID proposal = UUID.randomUUID();
    ByteBuffer record = ByteBuffer.allocate(PACKET);
    put(record, PROCESS);
    put(record, proposal);
    byte[][] known = allGatherByNccl(record.array());
    for (int r = 0; r < known.length; r++) {
      ByteBuffer in = ByteBuffer.wrap(known[r]);
      if (new UUID(in.getLong(), in.getLong()).equals(PROCESS)) {
        if (local.isEmpty()) {
          meetingId = new UUID(in.getLong(), in.getLong());
        }
        local.add(r);
      }
    }
    meeting = MEETINGS.computeIfAbsent(meetingId, id -> new Meeting(local.size()));
  }

  private static void put(ByteBuffer out, UUID value) {
    out.putLong(value.getMostSignificantBits()).putLong(value.getLeastSignificantBits());
  }

  /**
   * Every rank's record. Collective; returns when all ranks have come.
   *
   * @param step what the rank is doing, the same on all
   * @param record at most {@link #RECORD} bytes
   * @throws LsaException on every rank, if they are not in the same step
   */
  byte[][] allGather(String step, byte[] record) {
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("the ranks cannot agree inside a group: end it first");
    }
    ByteBuffer packet = ByteBuffer.allocate(PACKET);
    Card.put(packet.limit(HEADER), step);
    packet.limit(PACKET).position(HEADER).put(record);
    int place = local.indexOf(communicator.rank());
    byte[][] met =
        Objects.requireNonNull(meeting).exchange(place, packet.array(), communicator, TIMEOUT);
    byte[][] all = met;
    if (met.length < communicator.size()) {
      try {
        all = allGatherByNccl(packet.array());
      } catch (RuntimeException e) {
        giveUp("a rank could not agree with other processes: " + e.getMessage());
        throw e;
      }
    }
    byte[][] records = new byte[all.length][];
    String first = Card.text(ByteBuffer.wrap(all[0]));
    for (int r = 0; r < all.length; r++) {
      String other = Card.text(ByteBuffer.wrap(all[r]));
      if (!other.equals(first)) {
        throw new LsaException("rank 0 " + first + ", but rank " + r + " " + other);
      }
      records[r] = Arrays.copyOfRange(all[r], HEADER, PACKET);
    }
    return records;
  }

  /** How many places to meet there are in this process. */
  static int meetings() {
    return MEETINGS.size();
  }

  /** Lets the other ranks of this process know that this one cannot go on. */
  void giveUp(String reason) {
    Objects.requireNonNull(meeting).end(reason);
  }

  /** Whether no window was made on the communicator before. */
  boolean isFirstChoice() {
    boolean first = !chosenBefore;
    chosenBefore = true;
    return first;
  }

  private byte[][] allGatherByNccl(byte[] packet) {
    byte[] received = new byte[PACKET * communicator.size()];
    try {
      mine.copyFrom(MemorySegment.ofArray(packet), stream);
      communicator.allGather(mine, all, stream);
      stream.synchronize(TIMEOUT);
      all.copyTo(MemorySegment.ofArray(received), stream);
    } catch (DeadlineException e) {
      // NCCL's kernel waits on for a rank that may never come, and only an abort ends it.
      communicator.fail(e);
      throw e;
    }
    byte[][] packets = new byte[communicator.size()][];
    for (int r = 0; r < packets.length; r++) {
      packets[r] = Arrays.copyOfRange(received, r * PACKET, (r + 1) * PACKET);
    }
    return packets;
  }

  /**
   * Returns when every rank has come.
   *
   * @param step as of {@link #allGather}
   */
  void barrier(String step) {
    allGather(step, new byte[0]);
  }

  /** For small copies of the agreeing parties. */
  CudaStream stream() {
    return stream;
  }

  @Override
  public void close() {
    communicator.disown(this);
    if (meeting != null) {
      // A rank that comes to the place later than this makes another, and removes that one.
      meeting.end("a rank has ended " + communicator);
      MEETINGS.remove(meetingId, meeting);
    }
    try (mine;
        all) {
      stream.close();
    }
  }
}

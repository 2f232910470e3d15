package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclGroup;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import org.jspecify.annotations.Nullable;

/**
 * How the ranks of a communicator agree: they exchange small records, on the host where they are
 * threads of one process, and by an all-gather on the communicator itself between processes. One a
 * communicator, closed with it.
 */
final class Exchange implements AutoCloseable {
  /** Bytes of a record. */
  static final int RECORD = 512;

  private static final Duration TIMEOUT = Duration.ofMinutes(1);
  private static final UUID PROCESS = UUID.randomUUID();
  private static final Map<UUID, Meeting> MEETINGS = new ConcurrentHashMap<>();

  private final Communicator communicator;
  private final CudaStream stream;
  private final DeviceBuffer mine;
  private final DeviceBuffer all;
  private final List<Integer> local = new ArrayList<>(); // ranks in this process
  private UUID meetingId = PROCESS;
  private Meeting meeting = new Meeting(1);

  private Exchange(
      Communicator communicator, CudaStream stream, DeviceBuffer mine, DeviceBuffer all) {
    this.communicator = communicator;
    this.stream = stream;
    this.mine = mine;
    this.all = all;
  }

  /** The communicator's; made on first use, which is collective. */
  static Exchange of(Communicator communicator) {
    @Nullable Exchange known = communicator.child(Exchange.class);
    if (known != null) {
      return known;
    }
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("the ranks cannot agree inside a group: end it first");
    }
    CudaStream stream = CudaStream.create(communicator.device());
    @Nullable DeviceBuffer mine = null;
    try {
      mine = DeviceBuffer.allocate(communicator.device(), DataType.UINT8, RECORD);
      long bytes = (long) RECORD * communicator.size();
      DeviceBuffer all = DeviceBuffer.allocate(communicator.device(), DataType.UINT8, bytes);
      Exchange made = new Exchange(communicator, stream, mine, all);
      communicator.adopt(made);
      made.findNeighbours();
      return made;
    } catch (RuntimeException e) {
      if (mine != null) {
        mine.close();
      }
      stream.close();
      throw e;
    }
  }

  /** The ranks in one process meet where the lowest of them says. */
  private void findNeighbours() {
    UUID proposal = UUID.randomUUID();
    ByteBuffer record = ByteBuffer.allocate(RECORD);
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
   * @param record at most {@link #RECORD} bytes
   */
  byte[][] allGather(byte[] record) {
    if (NcclGroup.isActive()) {
      throw new IllegalStateException("the ranks cannot agree inside a group: end it first");
    }
    byte[] padded = Arrays.copyOf(record, RECORD);
    int place = local.indexOf(communicator.rank());
    byte[][] met = meeting.exchange(place, padded, communicator, TIMEOUT);
    return met.length == communicator.size() ? clone(met) : allGatherByNccl(padded);
  }

  private static byte[][] clone(byte[][] records) {
    byte[][] copy = new byte[records.length][];
    for (int r = 0; r < copy.length; r++) {
      copy[r] = records[r].clone();
    }
    return copy;
  }

  private byte[][] allGatherByNccl(byte[] record) {
    byte[] received = new byte[RECORD * communicator.size()];
    mine.copyFrom(MemorySegment.ofArray(record), stream);
    communicator.allGather(mine, all, stream);
    stream.synchronize(TIMEOUT);
    all.copyTo(MemorySegment.ofArray(received), stream);
    byte[][] records = new byte[communicator.size()][];
    for (int r = 0; r < records.length; r++) {
      records[r] = Arrays.copyOfRange(received, r * RECORD, (r + 1) * RECORD);
    }
    return records;
  }

  /** Returns when every rank has come. */
  void barrier() {
    allGather(new byte[0]);
  }

  /** For small copies of the agreeing parties. */
  CudaStream stream() {
    return stream;
  }

  @Override
  public void close() {
    communicator.disown(this);
    meeting.end();
    MEETINGS.remove(meetingId, meeting);
    try (mine;
        all) {
      stream.close();
    }
  }
}

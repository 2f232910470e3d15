package io.ncclffm.device;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.Team;
import io.ncclffm.core.bindings.cudart.CudartH;
import io.ncclffm.core.bindings.nccl.NcclH;
import java.lang.foreign.MemorySegment;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import org.jspecify.annotations.Nullable;

/**
 * All-reduce over several LSA teams, as over several hosts: a kernel reduces and scatters within
 * the team, NCCL's own engine reduces across the teams (each rank its part, with the ranks of the
 * same place in the other teams), and a kernel gathers within the team. So each link between hosts
 * carries 1 / (ranks of a team) of the data, and no kernel of this library reaches further than its
 * windows do.
 *
 * <p>Makes two communicators by {@link Communicator#split}, and a {@link DeviceCommunicator} on the
 * team's. They are closed with this, and this with the communicator it was made on. Creating and
 * closing are collective over it. Threads: one at a time.
 */
public final class HierarchicalAllReduce implements AutoCloseable {
  private static final Duration SETUP_TIMEOUT = Duration.ofMinutes(1);

  /** Bytes of the all-reduces by which NCCL connects the teams: it takes other ways for more. */
  private static final long[] CONNECTING_BYTES = {8, 1 << 16, 4 << 20};

  private static final String OPERATION = "hierarchical all-reduce";

  private final Communicator communicator;
  private final Deque<AutoCloseable> resources;
  private final Communicator team;
  private final Communicator across;
  private final DeviceCommunicator inTeam;
  private boolean closed;

  private HierarchicalAllReduce(
      Communicator communicator,
      Deque<AutoCloseable> resources,
      Communicator team,
      Communicator across,
      DeviceCommunicator inTeam) {
    this.communicator = communicator;
    this.resources = resources;
    this.team = team;
    this.across = across;
    this.inTeam = inTeam;
  }

  /**
   * Over the LSA teams that NCCL finds ({@code ncclTeamLsa}, 2.28.3). Collective.
   *
   * @throws io.ncclffm.core.UnsupportedByLibraryException by an older NCCL: name the ranks of a
   *     team
   */
  public static HierarchicalAllReduce create(Communicator communicator) {
    return create(communicator, communicator.teamLsa(), DeviceCommunicatorConfig.DEFAULT);
  }

  /** Over the LSA teams that NCCL finds; see the short form. */
  public static HierarchicalAllReduce create(
      Communicator communicator, DeviceCommunicatorConfig config) {
    return create(communicator, communicator.teamLsa(), config);
  }

  /**
   * Over teams of neighbouring ranks. Collective.
   *
   * @param ranksPerTeam the same on every rank; divides their number. Windows must join the ranks
   *     of a team
   * @throws IllegalArgumentException if it does not
   */
  public static HierarchicalAllReduce create(
      Communicator communicator, int ranksPerTeam, DeviceCommunicatorConfig config) {
    if (ranksPerTeam < 1 || communicator.size() % ranksPerTeam != 0) {
      throw new IllegalArgumentException(
          OPERATION
              + " on "
              + communicator
              + ": teams of "
              + ranksPerTeam
              + ": must divide the number of ranks");
    }
    Team neighbours = new Team(ranksPerTeam, communicator.rank() % ranksPerTeam, 1);
    return create(communicator, neighbours, config);
  }

  private static HierarchicalAllReduce create(
      Communicator communicator, Team lsa, DeviceCommunicatorConfig config) {
    Deque<AutoCloseable> resources = new ArrayDeque<>();
    try {
      CudaStream stream = CudaStream.create(communicator.device());
      resources.push(stream);
      DeviceBuffer word = DeviceBuffer.allocate(communicator.device(), DataType.INT32, 1);
      resources.push(word);
      // Freed with all else: to free it waits for the device, on which other ranks of a team, or
      // other teams, may still wait for each other.
      long most = CONNECTING_BYTES[CONNECTING_BYTES.length - 1];
      DeviceBuffer x = DeviceBuffer.allocate(communicator.device(), DataType.INT8, most);
      resources.push(x);
      int first = communicator.rank() - lsa.rank() * lsa.stride();
      Communicator team = split(communicator, first, resources);
      Communicator across = split(communicator, lsa.rank(), resources);
      if (team.size() != lsa.size() || (long) team.size() * across.size() != communicator.size()) {
        throw new NcclException(
            OPERATION,
            NcclH.ncclInvalidUsage(),
            " on " + communicator,
            "its teams are not alike: this one has "
                + team.size()
                + " ranks, and "
                + across.size()
                + " ranks are at the same place of theirs");
      }
      connect(across, x, stream);
      DeviceCommunicator inTeam = DeviceCommunicator.create(team, config);
      resources.push(inTeam);
      // From here on nothing is allocated, freed or loaded, which would have to wait for kernels
      // of other teams that share the device. So nobody goes on before all have come here.
      communicator.allReduce(word, word, ReduceOp.MAX, stream);
      stream.synchronize(SETUP_TIMEOUT);
      HierarchicalAllReduce made =
          new HierarchicalAllReduce(communicator, resources, team, across, inTeam);
      communicator.adopt(made);
      return made;
    } catch (RuntimeException e) {
      DeviceCommunicator.closeAll(resources, e);
      throw e;
    }
  }

  private static Communicator split(
      Communicator communicator, int color, Deque<AutoCloseable> resources) {
    Communicator child = communicator.split(color, communicator.rank(), CommunicatorConfig.DEFAULT);
    resources.push(child);
    child.awaitReady(SETUP_TIMEOUT);
    return child;
  }

  /** NCCL connects ranks inside their first collective, which may wait for the device. */
  private static void connect(Communicator across, DeviceBuffer x, CudaStream stream) {
    for (long bytes : CONNECTING_BYTES) {
      across.allReduce(x, 0, x, 0, bytes, ReduceOp.MAX, stream);
      stream.synchronize(SETUP_TIMEOUT);
    }
  }

  /** Number of ranks in each team. */
  public int teamSize() {
    return team.size();
  }

  /** Number of teams. */
  public int teams() {
    return across.size();
  }

  /** What kernels of the team use. Closed with this. */
  public DeviceCommunicator deviceCommunicator() {
    return inTeam;
  }

  /** Reduces whole buffers of equal type and count; every rank of every team gets the result. */
  public void allReduce(DeviceBuffer send, DeviceBuffer recv, ReduceOp op, CudaStream stream) {
    if (send.count() != recv.count()) {
      throw new IllegalArgumentException(
          OPERATION + ": the lengths of send " + send + " and recv " + recv + " do not match");
    }
    allReduce(send, 0, recv, 0, send.count(), op, stream);
  }

  /**
   * Reduces {@code count} elements; every rank of every team gets the result, and all the same
   * bits. The types and operations of {@link DeviceCommunicator}. Averages of integers are the
   * truncated quotient of the whole sum; those of floats are rounded in the team and across teams.
   * What is left of a count that the ranks of a team do not divide is reduced by the team's first
   * rank, in kernels of its own.
   */
  public void allReduce(
      DeviceBuffer send,
      long sendOffset,
      DeviceBuffer recv,
      long recvOffset,
      long count,
      ReduceOp op,
      CudaStream stream) {
    checkBuffers(send, sendOffset, recv, recvOffset, count);
    if (closed) {
      throw new IllegalStateException(OPERATION + " on " + communicator + " is closed");
    }
    if (across.size() == 1) {
      inTeam.allReduce(send, sendOffset, recv, recvOffset, count, op, stream);
      return;
    }
    // The sum of all, divided by the number of teams and then by the ranks of one, is truncated as
    // if divided once; an average of averages would not be.
    boolean divides = op == ReduceOp.AVG;
    boolean dividesIntegers = divides && send.type().ncclValue() < DataType.FLOAT16.ncclValue();
    ReduceOp teamOp = dividesIntegers ? ReduceOp.SUM : op;
    long part = count / team.size();
    long body = part * team.size();
    long own = recvOffset + team.rank() * part;
    long tail = count - body;
    if (part > 0) {
      inTeam.reduceScatter(send, sendOffset, recv, own, part, teamOp, stream);
    }
    if (tail > 0) {
      inTeam.reduce(send, sendOffset + body, recv, recvOffset + body, tail, teamOp, 0, stream);
    }
    if (part > 0) {
      across.allReduce(recv, own, recv, own, part, op, stream);
    }
    if (tail > 0 && team.rank() == 0) {
      across.allReduce(recv, recvOffset + body, recv, recvOffset + body, tail, op, stream);
    }
    if (dividesIntegers) {
      // Divided as a sum in which each rank has only its own part.
      clear(recv, recvOffset, team.rank() * part, stream);
      long end = team.rank() == 0 ? body : count;
      clear(recv, own + part, recvOffset + end - own - part, stream);
      inTeam.allReduce(recv, recvOffset, recv, recvOffset, count, ReduceOp.AVG, stream);
      return;
    }
    if (part > 0) {
      inTeam.allGather(recv, own, recv, recvOffset, part, stream);
    }
    if (tail > 0) {
      inTeam.broadcast(recv, recvOffset + body, recv, recvOffset + body, tail, 0, stream);
    }
  }

  private void checkBuffers(
      DeviceBuffer send, long sendOffset, DeviceBuffer recv, long recvOffset, long count) {
    if (send.type() != recv.type()) {
      throw new IllegalArgumentException(
          OPERATION + ": send " + send + " and recv " + recv + " differ in type; take one type");
    }
    long from = send.pointer(OPERATION, sendOffset, count);
    long to = recv.pointer(OPERATION, recvOffset, count);
    if (from != to && Math.abs(from - to) < count * send.type().bytes()) {
      throw new IllegalArgumentException(
          OPERATION
              + ": "
              + count
              + " elements from offset "
              + sendOffset
              + " of send "
              + send
              + " and from "
              + recvOffset
              + " of recv "
              + recv
              + " overlap: take the same or ranges that lie apart");
    }
  }

  private void clear(DeviceBuffer buffer, long offset, long count, CudaStream stream) {
    if (count > 0) {
      communicator.device().makeCurrent();
      MemorySegment from = buffer.address(OPERATION, offset, count);
      long bytes = count * buffer.type().bytes();
      int rc = CudartH.cudaMemsetAsync(from, 0, bytes, stream.handle());
      CudaException.check(rc, "cudaMemsetAsync", communicator.device());
    }
  }

  /** Ends it, with its communicators. Collective. What was enqueued must have ended. */
  @Override
  public void close() {
    if (closed) {
      return;
    }
    closed = true;
    communicator.disown(this);
    @Nullable RuntimeException trouble = DeviceCommunicator.closeAll(resources, null);
    if (trouble != null) {
      throw trouble;
    }
  }

  @Override
  public String toString() {
    return OPERATION + " of " + across.size() + " teams on " + communicator;
  }
}

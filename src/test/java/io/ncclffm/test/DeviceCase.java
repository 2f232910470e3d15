package io.ncclffm.test;

import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclException;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceAlgorithm;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceFunction;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * One device collective of a test: what is called, with how many elements, and where its data is.
 *
 * @param root of broadcast and reduce; ranks in a group of the hierarchical all-reduce; how far
 *     along the ring a send-receive goes
 * @param sendAt the first element in the inputs, the same on all ranks
 * @param recvAt the first element of the result, or of the region of a call in place
 */
record DeviceCase(
    DeviceFunction function,
    LaunchChoice choice,
    ReduceOp op,
    int root,
    boolean inPlace,
    boolean onWindows,
    int count,
    int sendAt,
    long recvAt) {

  private static final List<LsaProtocol> PROTOCOLS = List.of(LsaProtocol.values());

  /** What {@code hasAlgorithm} in impl/choose.h allows. */
  static List<DeviceAlgorithm> algorithms(DeviceFunction function, boolean onWindows) {
    switch (function) {
      case ALL_REDUCE:
        return onWindows
            ? List.of(DeviceAlgorithm.TWO_SHOT)
            : List.of(DeviceAlgorithm.ONE_SHOT, DeviceAlgorithm.TWO_SHOT, DeviceAlgorithm.RING);
      case ALL_GATHER:
        return onWindows
            ? List.of(DeviceAlgorithm.ONE_SHOT)
            : List.of(DeviceAlgorithm.ONE_SHOT, DeviceAlgorithm.RING);
      case BROADCAST:
        return onWindows
            ? List.of(DeviceAlgorithm.ONE_SHOT)
            : List.of(DeviceAlgorithm.ONE_SHOT, DeviceAlgorithm.TWO_SHOT);
      case HIERARCHICAL_ALL_REDUCE:
        return onWindows ? List.of() : List.of(DeviceAlgorithm.TWO_SHOT);
      case REDUCE_SCATTER:
      case REDUCE:
      case ALL_TO_ALL:
        return List.of(DeviceAlgorithm.ONE_SHOT);
      default:
        return onWindows ? List.of() : List.of(DeviceAlgorithm.ONE_SHOT);
    }
  }

  /** Every way to run a function; LL128 only where the path carries it. */
  static List<LaunchChoice> choices(DeviceFunction function, boolean onWindows, boolean withLl128) {
    List<LaunchChoice> all = new ArrayList<>(List.of(LaunchChoice.AUTO));
    for (DeviceAlgorithm algorithm : algorithms(function, onWindows)) {
      for (LsaProtocol protocol : PROTOCOLS) {
        if (!(onWindows && protocol != LsaProtocol.SIMPLE)
            && !(protocol == LsaProtocol.LL128 && !withLl128)) {
          all.add(LaunchChoice.AUTO.with(algorithm).with(protocol));
        }
      }
    }
    return all;
  }

  /** Several GPUs without NVLink do not. */
  static boolean carriesLl128(DeviceCommunicator comm) {
    LaunchChoice ll128 = LaunchChoice.AUTO.with(LsaProtocol.LL128);
    try {
      comm.choose(DeviceFunction.ALL_REDUCE, DataType.INT8, 1, ll128);
      return true;
    } catch (NcclException e) {
      return false;
    }
  }

  static boolean reduces(DeviceFunction function) {
    return function == DeviceFunction.ALL_REDUCE
        || function == DeviceFunction.REDUCE_SCATTER
        || function == DeviceFunction.REDUCE
        || function == DeviceFunction.HIERARCHICAL_ALL_REDUCE;
  }

  static boolean hasInPlaceForm(DeviceFunction function) {
    return function != DeviceFunction.ALL_TO_ALL && function != DeviceFunction.SEND_RECV;
  }

  /** Counts of elements that a rank sends. */
  static int sendParts(DeviceFunction function, int ranks) {
    return function == DeviceFunction.REDUCE_SCATTER || function == DeviceFunction.ALL_TO_ALL
        ? ranks
        : 1;
  }

  /** Counts of elements that a rank receives. */
  static int recvParts(DeviceFunction function, int ranks) {
    return function == DeviceFunction.ALL_GATHER || function == DeviceFunction.ALL_TO_ALL
        ? ranks
        : 1;
  }

  /** Elements that the result, or a buffer in place, takes. */
  long regionCount(int ranks) {
    int parts = recvParts(function, ranks);
    return (long) count * (inPlace ? Math.max(parts, sendParts(function, ranks)) : parts);
  }

  /** Where a call in place has its input. */
  long inPlaceInputAt(int rank) {
    return function == DeviceFunction.ALL_GATHER ? recvAt + (long) rank * count : recvAt;
  }

  long resultAt(int rank) {
    return inPlace && function == DeviceFunction.REDUCE_SCATTER
        ? recvAt + (long) rank * count
        : recvAt;
  }

  boolean receives(int rank) {
    return function != DeviceFunction.REDUCE || rank == root;
  }

  /** In buffers; the inputs begin at an element of the send buffer. */
  void enqueue(
      DeviceCommunicator comm, DeviceBuffer send, int inputsAt, DeviceBuffer recv, CudaStream s) {
    int rank = comm.communicator().rank();
    int size = comm.communicator().size();
    DeviceBuffer from = inPlace ? recv : send;
    long so = inPlace ? inPlaceInputAt(rank) : inputsAt + sendAt;
    long ro = resultAt(rank);
    switch (function) {
      case ALL_REDUCE -> comm.allReduce(from, so, recv, ro, count, op, s, choice);
      case REDUCE_SCATTER -> comm.reduceScatter(from, so, recv, ro, count, op, s, choice);
      case ALL_GATHER -> comm.allGather(from, so, recv, ro, count, s, choice);
      case BROADCAST -> comm.broadcast(from, so, recv, ro, count, root, s, choice);
      case REDUCE -> comm.reduce(from, so, recv, ro, count, op, root, s, choice);
      case ALL_TO_ALL -> comm.allToAll(from, so, recv, ro, count, s, choice);
      case HIERARCHICAL_ALL_REDUCE ->
          comm.hierarchicalAllReduce(from, so, recv, ro, count, op, root, s, choice);
      default -> {
        int to = (rank + root) % size;
        int of = Math.floorMod(rank - root, size);
        comm.sendRecv(from, so, to, recv, ro, of, count, s, choice);
      }
    }
  }

  /** The same as a task. */
  void append(
      TaskQueue queue,
      TaskSymbol name,
      int lane,
      DeviceBuffer send,
      int inputsAt,
      DeviceBuffer recv,
      Ticket t) {
    int rank = queue.deviceCommunicator().communicator().rank();
    int size = queue.deviceCommunicator().communicator().size();
    DeviceBuffer from = inPlace ? recv : send;
    long so = inPlace ? inPlaceInputAt(rank) : inputsAt + sendAt;
    long ro = resultAt(rank);
    switch (function) {
      case ALL_REDUCE -> queue.allReduce(name, lane, from, so, recv, ro, count, op, t);
      case REDUCE_SCATTER -> queue.reduceScatter(name, lane, from, so, recv, ro, count, op, t);
      case ALL_GATHER -> queue.allGather(name, lane, from, so, recv, ro, count, t);
      case BROADCAST -> queue.broadcast(name, lane, from, so, recv, ro, count, root, t);
      case REDUCE -> queue.reduce(name, lane, from, so, recv, ro, count, op, root, t);
      case ALL_TO_ALL -> queue.allToAll(name, lane, from, so, recv, ro, count, t);
      case HIERARCHICAL_ALL_REDUCE ->
          queue.hierarchicalAllReduce(name, lane, from, so, recv, ro, count, op, root, t);
      default -> {
        int to = (rank + root) % size;
        int of = Math.floorMod(rank - root, size);
        queue.sendRecv(name, lane, from, so, to, recv, ro, of, count, t);
      }
    }
  }

  /** In windows, at the same offsets on every rank but for the own part of a call in place. */
  void enqueue(
      DeviceCommunicator comm, DataType type, LsaWindow send, LsaWindow recv, CudaStream s) {
    int rank = comm.communicator().rank();
    LsaWindow from = inPlace ? recv : send;
    long so = (inPlace ? recvAt : sendAt) * type.bytes();
    long ro = recvAt * type.bytes();
    // In place, this rank's part is in another place than the others'.
    if (inPlace && function == DeviceFunction.ALL_GATHER) {
      so = inPlaceInputAt(rank) * type.bytes();
    } else if (inPlace && function == DeviceFunction.REDUCE_SCATTER) {
      ro = resultAt(rank) * type.bytes();
    }
    switch (function) {
      case ALL_REDUCE -> comm.allReduce(from, so, recv, ro, type, count, op, s, choice);
      case REDUCE_SCATTER -> comm.reduceScatter(from, so, recv, ro, type, count, op, s, choice);
      case ALL_GATHER -> comm.allGather(from, so, recv, ro, type, count, s, choice);
      case BROADCAST -> comm.broadcast(from, so, recv, ro, type, count, root, s, choice);
      case REDUCE -> comm.reduce(from, so, recv, ro, type, count, op, root, s, choice);
      default -> comm.allToAll(from, so, recv, ro, type, count, s, choice);
    }
  }

  /** Null if a rank's result is right, or what is wrong first. */
  @Nullable String mismatch(Inputs inputs, int rank, int ranks, ByteBuffer result, int at) {
    switch (function) {
      case REDUCE_SCATTER:
        return inputs.mismatchWithReduction(sendAt + rank * count, count, result, at);
      case ALL_GATHER:
        return mismatchOfParts(inputs, ranks, sendAt, result, at);
      case ALL_TO_ALL:
        return mismatchOfParts(inputs, ranks, sendAt + rank * count, result, at);
      case BROADCAST:
        return inputs.mismatchWithInput(root, sendAt, count, result, at);
      case SEND_RECV:
        return inputs.mismatchWithInput(
            Math.floorMod(rank - root, ranks), sendAt, count, result, at);
      default:
        return inputs.mismatchWithReduction(sendAt, count, result, at);
    }
  }

  private @Nullable String mismatchOfParts(
      Inputs inputs, int ranks, int from, ByteBuffer result, int at) {
    for (int r = 0; r < ranks; r++) {
      @Nullable String wrong = inputs.mismatchWithInput(r, from, count, result, at + r * count);
      if (wrong != null) {
        return "part " + r + ", " + wrong;
      }
    }
    return null;
  }
}

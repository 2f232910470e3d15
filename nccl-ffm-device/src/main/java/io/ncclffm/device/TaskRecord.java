package io.ncclffm.device;

import io.ncclffm.core.DataType;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.bindings.shim.ncclFfmTask;
import io.ncclffm.core.bindings.shim.ncclFfmTaskRecord;
import io.ncclffm.core.bindings.shim.ncclFfmTaskSlot;
import java.lang.foreign.MemorySegment;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * What a task is ({@code ncclFfmTaskRecord}).
 *
 * @param function as exceptions name it, {@code ncclFfmAllReduce}
 * @param type null if it is none that Java knows
 * @param op null where nothing is reduced
 * @param root of a broadcast or reduction; to whom a send goes; ranks in a group of a hierarchical
 *     all-reduce
 * @param count elements as the function counts them
 * @param sequence its number in the lane, an unsigned 32-bit number
 */
public record TaskRecord(
    TaskSymbol symbol,
    String function,
    @Nullable DataType type,
    @Nullable ReduceOp op,
    int root,
    long count,
    int lane,
    long sequence) {
  private static final int SLOT_WORDS =
      (int) (ncclFfmTaskSlot.reserved$offset() / Long.BYTES); // that are filled
  private static final List<ReduceOp> OPS =
      List.of(ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG);

  /** Of a status record; null if there is none. */
  static @Nullable TaskRecord ofRecord(MemorySegment struct) {
    if (ncclFfmTaskRecord.present(struct) == 0) {
      return null;
    }
    return of(
        ncclFfmTaskRecord.symbol(struct),
        ncclFfmTaskRecord.function(struct),
        ncclFfmTaskRecord.datatype(struct),
        ncclFfmTaskRecord.op(struct),
        ncclFfmTaskRecord.root(struct),
        ncclFfmTaskRecord.count(struct),
        ncclFfmTaskRecord.lane(struct),
        ncclFfmTaskRecord.sequence(struct));
  }

  /** Of a place in the ring; null if the task of this number is not there, or only in part. */
  static @Nullable TaskRecord ofSlot(MemorySegment struct, int lane, int sequence) {
    int[] words = new int[SLOT_WORDS];
    for (int i = 0; i < words.length; i++) {
      long word = ncclFfmTaskSlot.word(struct, i);
      if ((int) (word >>> 32) != sequence + 1) {
        return null;
      }
      words[i] = (int) word;
    }
    long count = Integer.toUnsignedLong(words[6]) | (long) words[7] << 32;
    return of(words[0], words[1], words[2], words[3], words[4], count, lane, sequence);
  }

  /** Of a task that the host appends. */
  static TaskRecord ofTask(MemorySegment struct) {
    return of(
        ncclFfmTask.symbol(struct),
        ncclFfmTask.function(struct),
        ncclFfmTask.datatype(struct),
        ncclFfmTask.op(struct),
        ncclFfmTask.root(struct),
        ncclFfmTask.count(struct),
        ncclFfmTask.lane(struct),
        ncclFfmTask.sequence(struct));
  }

  private static TaskRecord of(
      int symbol, int function, int type, int op, int root, long count, int lane, int sequence) {
    DataType[] types = DataType.values();
    boolean reduces = DeviceFunction.reduces(function) && op >= 0 && op < OPS.size();
    return new TaskRecord(
        TaskSymbol.ofHash(symbol),
        DeviceFunction.nameOf(function),
        type >= 0 && type < types.length ? types[type] : null,
        reduces ? OPS.get(op) : null,
        root,
        count,
        lane,
        Integer.toUnsignedLong(sequence));
  }

  @Override
  public String toString() {
    return "task "
        + symbol
        + " ("
        + function
        + " of "
        + count
        + " x "
        + (type == null ? "unknown type" : type)
        + (op == null ? "" : ", " + op)
        + ", root or peer "
        + root
        + "), number "
        + sequence
        + " of lane "
        + lane;
  }
}

package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import org.jspecify.annotations.Nullable;

/**
 * A reduction. Not an enum: {@code ncclRedOp_t} is open, and {@link
 * Communicator#createPreMulSum(DataType, double)} makes more, which live on their communicator.
 */
public final class ReduceOp implements AutoCloseable {
  public static final ReduceOp SUM = new ReduceOp("sum", 0, null, null);
  public static final ReduceOp PROD = new ReduceOp("prod", 1, null, null);
  public static final ReduceOp MAX = new ReduceOp("max", 2, null, null);
  public static final ReduceOp MIN = new ReduceOp("min", 3, null, null);

  /** The sum divided by the number of ranks; integers truncate. */
  public static final ReduceOp AVG = new ReduceOp("avg", 4, null, null);

  private final String name;
  private final int ncclValue;
  private final @Nullable Communicator owner;
  private final @Nullable DataType type;
  private boolean closed;

  ReduceOp(String name, int ncclValue, @Nullable Communicator owner, @Nullable DataType type) {
    this.name = name;
    this.ncclValue = ncclValue;
    this.owner = owner;
    this.type = type;
  }

  /** The {@code ncclRedOp_t}. */
  public int ncclValue() {
    return ncclValue;
  }

  /** Refuses a communicator or data type that this operation was not made for. */
  void check(String operation, Communicator communicator, DataType data) {
    if (owner == null) {
      return;
    }
    if (closed) {
      throw new IllegalStateException(operation + ": the operator " + name + " is closed");
    }
    if (owner != communicator || type != data) {
      throw new IllegalArgumentException(
          operation
              + ": the operator "
              + name
              + " was made for "
              + type
              + " on "
              + owner
              + ", not for "
              + data
              + " on "
              + communicator);
    }
  }

  /**
   * Destroys an operator that a communicator made ({@code ncclRedOpDestroy}); else does nothing.
   */
  @Override
  public void close() {
    @Nullable Communicator on = owner;
    if (on == null || closed) {
      return;
    }
    closed = true;
    on.disown(this);
    if (on.endsResources()) {
      on.call("ncclRedOpDestroy", comm -> NcclH.ncclRedOpDestroy(ncclValue, comm));
    }
  }

  @Override
  public String toString() {
    return name;
  }
}

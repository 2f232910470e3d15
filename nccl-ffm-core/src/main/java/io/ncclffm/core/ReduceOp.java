package io.ncclffm.core;

/**
 * A reduction. Not an enum: {@code ncclRedOp_t} is open, user-made operations get values of their
 * own.
 */
public final class ReduceOp {
  public static final ReduceOp SUM = new ReduceOp("sum", 0);
  public static final ReduceOp PROD = new ReduceOp("prod", 1);
  public static final ReduceOp MAX = new ReduceOp("max", 2);
  public static final ReduceOp MIN = new ReduceOp("min", 3);

  /** The sum divided by the number of ranks; integers truncate. */
  public static final ReduceOp AVG = new ReduceOp("avg", 4);

  private final String name;
  private final int ncclValue;

  private ReduceOp(String name, int ncclValue) {
    this.name = name;
    this.ncclValue = ncclValue;
  }

  /** The {@code ncclRedOp_t}. */
  public int ncclValue() {
    return ncclValue;
  }

  @Override
  public String toString() {
    return name;
  }
}

package io.ncclffm.device;

import io.ncclffm.core.bindings.shim.ShimH;
import java.time.Duration;

/**
 * How a {@link TaskQueue} is made. Lanes, blocks, depth and mode are the same on every rank.
 * Immutable.
 */
public final class TaskQueueConfig {
  /** Four lanes of one block each, rings of 64 tasks, a persistent scheduler, 30 seconds. */
  public static final TaskQueueConfig DEFAULT = builder().build();

  private static final int MOST_BLOCKS = 1024;

  /** How a scheduler ends ({@code ncclFfmSchedulerMode}). */
  public enum Mode {
    /** When it has been idle for a while and no producer is queued or running. */
    PERSISTENT(ShimH.ncclFfmSchedulerPersistent()),
    /**
     * When all that has been launched is done. It is launched again by whoever appends, and by
     * those who wait for a task; a kernel that waits for its own tasks wants {@link #PERSISTENT}.
     */
    DRAIN(ShimH.ncclFfmSchedulerDrain()),
    /** As persistent; one lane, one block, one task at a time. */
    DEBUG(ShimH.ncclFfmSchedulerDebug());

    final int value;

    Mode(int value) {
      this.value = value;
    }
  }

  private final int lanes;
  private final int depth;
  private final int blocksPerLane;
  private final Duration idle;
  private final Duration timeout;
  private final Mode mode;

  private TaskQueueConfig(Builder builder) {
    boolean debug = builder.mode == Mode.DEBUG;
    this.mode = builder.mode;
    this.lanes = value(builder.lanes, debug ? 1 : 4);
    this.depth = value(builder.depth, debug ? 1 : 64);
    this.blocksPerLane = value(builder.blocksPerLane, 1);
    this.idle = builder.idle;
    this.timeout = builder.timeout;
    if (debug && (lanes != 1 || depth != 1 || blocksPerLane != 1)) {
      throw new IllegalArgumentException(
          "mode DEBUG with "
              + this
              + ": it has one lane of one block and depth 1; leave them open");
    }
  }

  private static int value(int given, int otherwise) {
    return given == 0 ? otherwise : given;
  }

  public static Builder builder() {
    return new Builder();
  }

  /** Lanes of the queue. */
  public int lanes() {
    return lanes;
  }

  /** Tasks in the ring of a lane. */
  public int depth() {
    return depth;
  }

  /** Blocks of the scheduler that work on one task. */
  public int blocksPerLane() {
    return blocksPerLane;
  }

  Duration idle() {
    return idle;
  }

  Duration timeout() {
    return timeout;
  }

  /** How the scheduler ends. */
  public Mode mode() {
    return mode;
  }

  @Override
  public String toString() {
    return lanes + " lanes of " + blocksPerLane + " blocks and depth " + depth + ", " + mode;
  }

  /** Collects what is set. */
  public static final class Builder {
    private int lanes;
    private int depth;
    private int blocksPerLane;
    private Duration idle = Duration.ofMillis(1);
    private Duration timeout = Duration.ofSeconds(30);
    private Mode mode = Mode.PERSISTENT;

    private Builder() {}

    /**
     * How many streams of tasks there are, each in an order of its own; 4 by default.
     *
     * @throws IllegalArgumentException if not from 1 to 64
     */
    public Builder lanes(int value) {
      lanes = inRange("lanes", value, ShimH.NCCLFFM_MAX_LANES());
      return this;
    }

    /**
     * How many tasks of a lane may be unfinished before a producer waits; 64 by default.
     *
     * @throws IllegalArgumentException if not a power of two up to 2^20
     */
    public Builder depth(int value) {
      inRange("depth", value, ShimH.NCCLFFM_MAX_DEPTH());
      if (Integer.bitCount(value) != 1) {
        throw new IllegalArgumentException("depth " + value + ": must be a power of two");
      }
      depth = value;
      return this;
    }

    /**
     * How many blocks of the scheduler work on a task of a lane; 1 by default, which has the best
     * latency, while large tasks want more. Lanes times blocks are what the scheduler takes from
     * the GPU while it runs, a processor each, and as many channels of the device communicator.
     *
     * @throws IllegalArgumentException if not positive
     */
    public Builder blocksPerLane(int value) {
      blocksPerLane = inRange("blocksPerLane", value, MOST_BLOCKS);
      return this;
    }

    /**
     * How long a scheduler with nothing to do stays before it ends; 1 ms by default. While it
     * stays, what waits for the whole device ({@code cudaFree}, {@code cudaDeviceSynchronize})
     * waits for it.
     *
     * @throws IllegalArgumentException if negative
     */
    public Builder idle(Duration value) {
      idle = notNegative("idle", value);
      return this;
    }

    /**
     * How long a producer waits for room in a ring and for its tasks, and the scheduler for a task
     * that was announced; 30 seconds by default. For peers it waits as long as {@link
     * DeviceCommunicatorConfig.Builder#timeout} says.
     *
     * @param value zero waits for ever
     * @throws IllegalArgumentException if negative
     */
    public Builder timeout(Duration value) {
      timeout = notNegative("timeout", value);
      return this;
    }

    /** How the scheduler ends; {@link Mode#PERSISTENT} by default. */
    public Builder mode(Mode value) {
      mode = value;
      return this;
    }

    /**
     * @throws IllegalArgumentException if more than one lane, block or task at a time is asked for
     *     in mode DEBUG
     */
    public TaskQueueConfig build() {
      return new TaskQueueConfig(this);
    }

    private static int inRange(String what, int value, int most) {
      if (value < 1 || value > most) {
        throw new IllegalArgumentException(what + " " + value + ": must be from 1 to " + most);
      }
      return value;
    }

    private static Duration notNegative(String what, Duration value) {
      if (value.isNegative()) {
        throw new IllegalArgumentException(what + " " + value + ": must not be negative");
      }
      return value;
    }
  }
}

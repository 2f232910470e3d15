package io.ncclffm.core.bootstrap;

import java.time.Duration;

/**
 * Carries rank 0's unique id to all ranks. {@link TcpExchange} and {@link FileExchange} are two;
 * any broadcast or all-gather that the program has already is another. In a barrier stage of Apache
 * Spark:
 *
 * <pre>{@code
 * BarrierTaskContext spark = BarrierTaskContext.get();
 * HexFormat hex = HexFormat.of();
 * NcclUniqueId id = Bootstrap.uniqueId(spark.partitionId(),
 *     mine -> hex.parseHex(spark.allGather(hex.formatHex(mine))[0]));
 * }</pre>
 *
 * <p>Whoever has the id can join: the way it takes must be as private as the data of the run.
 */
@FunctionalInterface
public interface UniqueIdExchange {
  /** How long {@link Bootstrap} lets all ranks take to come, where the caller does not say. */
  Duration DEFAULT_TIMEOUT = Duration.ofMinutes(5);

  /**
   * Called once by every rank for each id.
   *
   * @param id the 128 bytes of the id on rank 0, no bytes on the others
   * @return rank 0's bytes, on every rank
   * @throws Exception if they cannot be had; an implementation must not wait without an end
   */
  byte[] exchange(byte[] id) throws Exception;
}

package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.NcclUniqueId;
import java.time.Duration;
import java.util.Arrays;
import java.util.Map;
import java.util.function.Supplier;

/**
 * How ranks that a launcher started come to one unique id. The launcher (torchrun, Slurm's srun,
 * Open MPI's mpirun, Spark ...) starts the processes; nothing here does.
 *
 * <pre>{@code
 * RankInfo ranks = RankInfo.fromEnvironment();
 * CudaDevice device = new CudaDevice(ranks.localRank());
 * NcclUniqueId id = Bootstrap.uniqueId(ranks, Duration.ofMinutes(2));
 * try (Communicator all = Communicator.create(id, ranks.size(), ranks.rank(), device)) { ... }
 * }</pre>
 *
 * <p>Every rank must call it, once for each communicator, in the same order. All ranks come or none
 * gets an id. Thread rule: any thread; one exchange of a process at a time.
 */
public final class Bootstrap {
  private Bootstrap() {}

  /** An id for the ranks of this environment, within {@link UniqueIdExchange#DEFAULT_TIMEOUT}. */
  public static NcclUniqueId uniqueId() {
    return uniqueId(RankInfo.fromEnvironment(), UniqueIdExchange.DEFAULT_TIMEOUT);
  }

  /**
   * An id over {@link TcpExchange}, with the secret of {@link Secret#fromEnvironment}. A run of one
   * rank needs neither.
   *
   * @param ranks with the address of rank 0
   * @param timeout for all ranks to come
   * @throws BootstrapException if there is no secret, no address, or the ranks contradict each
   *     other
   * @throws DeadlineException if ranks are missing at the deadline, or on interruption
   */
  public static NcclUniqueId uniqueId(RankInfo ranks, Duration timeout) {
    return uniqueId(ranks, timeout, System.getenv(), NcclUniqueId::create);
  }

  static NcclUniqueId uniqueId(
      RankInfo ranks, Duration timeout, Map<String, String> env, Supplier<NcclUniqueId> creator) {
    UniqueIdExchange exchange =
        ranks.size() == 1 ? id -> id : new TcpExchange(ranks, Secret.fromEnvironment(env), timeout);
    return uniqueId(ranks.rank(), exchange, creator);
  }

  /**
   * An id over the caller's own exchange. Rank 0 creates it ({@code ncclGetUniqueId}).
   *
   * @throws BootstrapException if the exchange gives something else than rank 0's id, or throws a
   *     checked exception, which is the cause
   * @throws DeadlineException if it is interrupted
   */
  public static NcclUniqueId uniqueId(int rank, UniqueIdExchange exchange) {
    return uniqueId(rank, exchange, NcclUniqueId::create);
  }

  static NcclUniqueId uniqueId(
      int rank, UniqueIdExchange exchange, Supplier<NcclUniqueId> creator) {
    byte[] mine = rank == 0 ? creator.get().toBytes() : new byte[0];
    byte[] got;
    try {
      got = exchange.exchange(mine.clone());
    } catch (RuntimeException e) {
      throw e;
    } catch (InterruptedException e) {
      throw Deadline.interrupted("exchanging the unique id on rank " + rank);
    } catch (Exception e) {
      throw new BootstrapException("exchanging the unique id on rank " + rank + ": " + e, e);
    }
    if (got.length != NcclUniqueId.BYTES) {
      throw new BootstrapException(
          "the exchange gave rank "
              + rank
              + " "
              + got.length
              + " bytes: it must give every rank the 128 that rank 0 passed to it");
    }
    if (rank == 0 && !Arrays.equals(mine, got)) {
      throw new BootstrapException(
          "the exchange gave rank 0 another id than its own: it must give every rank rank 0's");
    }
    return NcclUniqueId.fromBytes(got);
  }
}

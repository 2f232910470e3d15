package io.ncclffm.core.bootstrap;

import io.ncclffm.core.DeadlineException;
import io.ncclffm.core.NcclUniqueId;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.time.Duration;

/**
 * Rank 0 listens on a TCP port, the others connect to it, and when all are there each gets the id.
 *
 * <p>Both sides prove to each other that they know the secret (HMAC-SHA256 over fresh random
 * numbers of both), and the id travels encrypted (AES-256-GCM), so that whoever listens, connects,
 * answers in rank 0's place or repeats what was recorded learns nothing and does not take part. A
 * stranger at the port has 5 seconds and 512 bytes at a time, and is served beside the ranks.
 *
 * <p>Rank 0 listens on the loopback interface alone if all ranks are on its host and the address of
 * rank 0 is a loopback address; else on all interfaces. The port is free again on return.
 *
 * <p>Can be used any number of times, one after the other, if all ranks do. Threads: one exchange
 * at a time; the work is done by daemon threads, which end with it.
 */
public final class TcpExchange implements UniqueIdExchange {
  static final int RUN_DIGEST_BYTES = 32;

  private final RankInfo ranks;
  private final Secret secret;
  private final Duration timeout;

  /**
   * @param ranks with the address of rank 0
   * @param secret the same on all ranks
   * @param timeout for all ranks to come and to get the id
   * @throws BootstrapException if the address of rank 0 is not known
   */
  public TcpExchange(RankInfo ranks, Secret secret, Duration timeout) {
    if (ranks.master() == null) {
      throw new BootstrapException(
          ranks.launcher()
              + " does not tell where rank 0 is: set MASTER_ADDR to its host and MASTER_PORT to a"
              + " free port of it, for all ranks");
    }
    Deadline.in(timeout);
    this.ranks = ranks;
    this.secret = secret;
    this.timeout = timeout;
  }

  /**
   * @param id 128 bytes on rank 0; ignored on the others
   * @return rank 0's 128 bytes
   * @throws BootstrapException if rank 0's port is taken, the secrets differ, another process has
   *     this rank, the ranks disagree about their number or run, or a rank goes away
   * @throws DeadlineException if ranks are missing at the deadline, which rank 0 names to all that
   *     are there; if rank 0 cannot be reached; or on interruption
   */
  @Override
  public byte[] exchange(byte[] id) {
    Deadline deadline = Deadline.in(timeout);
    if (ranks.rank() != 0) {
      return new StoreClient(ranks, secret, Limits.DEFAULT).fetch(deadline);
    }
    if (id.length != NcclUniqueId.BYTES) {
      throw new IllegalArgumentException(
          "id of " + id.length + " bytes on rank 0: it has exactly " + NcclUniqueId.BYTES);
    }
    try (StoreServer server = StoreServer.listen(ranks, secret, Limits.DEFAULT, deadline)) {
      server.serve(id, deadline);
    }
    return id.clone();
  }

  /** Of fixed size whatever the launcher calls the run. */
  static byte[] runDigest(RankInfo ranks) {
    String run = ranks.run() == null ? "" : "run " + ranks.run();
    try {
      return MessageDigest.getInstance("SHA-256").digest(run.getBytes(StandardCharsets.UTF_8));
    } catch (NoSuchAlgorithmException e) {
      throw new IllegalStateException("this Java runtime lacks SHA-256", e);
    }
  }
}

package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.Team;
import java.util.Objects;

/**
 * The ranks that a window joins, and their places in the communicator ("world"). On one host that
 * is every rank; over several hosts NCCL's LSA team of this rank.
 */
public final class LsaTeam {
  private final Team team;
  private final int worldRank;

  LsaTeam(Team team, int worldRank) {
    this.team = team;
    this.worldRank = worldRank;
  }

  /** Every rank of the communicator. */
  static LsaTeam ofAll(Communicator communicator) {
    int rank = communicator.rank();
    return new LsaTeam(new Team(communicator.size(), rank, 1), rank);
  }

  /** Number of ranks in the team. */
  public int size() {
    return team.size();
  }

  /** This rank's place in the team. */
  public int rank() {
    return team.rank();
  }

  /**
   * The communicator's rank of a member.
   *
   * @throws IndexOutOfBoundsException if there is no such member
   */
  public int worldRank(int lsaRank) {
    Objects.checkIndex(lsaRank, team.size());
    return worldRank + (lsaRank - team.rank()) * team.stride();
  }

  /** Whether a rank of the communicator is a member. */
  public boolean contains(int rank) {
    int distance = rank - worldRank;
    int lsaRank = team.rank() + distance / team.stride();
    return distance % team.stride() == 0 && 0 <= lsaRank && lsaRank < team.size();
  }

  /**
   * The place in the team of a rank of the communicator.
   *
   * @throws IllegalArgumentException if it is no member
   */
  public int lsaRank(int rank) {
    if (!contains(rank)) {
      throw new IllegalArgumentException("rank " + rank + " is not in the " + this);
    }
    return team.rank() + (rank - worldRank) / team.stride();
  }

  @Override
  public String toString() {
    return "LSA team of "
        + team.size()
        + " ranks from "
        + worldRank(0)
        + (team.stride() == 1 ? "" : " in steps of " + team.stride());
  }
}

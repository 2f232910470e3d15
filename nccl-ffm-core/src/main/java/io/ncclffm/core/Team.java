package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.ncclTeam;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SegmentAllocator;

/**
 * Some ranks of a communicator, evenly spaced ({@code ncclTeam_t}, 2.28.3). The arithmetic is that
 * of NCCL's inline functions, which a library does not export.
 *
 * @param size number of ranks in the team
 * @param rank the calling rank's place in it
 * @param stride distance of neighbours in the communicator
 */
public record Team(int size, int rank, int stride) {

  /**
   * @throws IllegalArgumentException if the rank does not lie in the team
   */
  public Team {
    if (size < 1 || rank < 0 || rank >= size) {
      throw new IllegalArgumentException("team of " + size + " ranks: rank " + rank);
    }
  }

  static Team of(MemorySegment team) {
    return new Team(ncclTeam.nRanks(team), ncclTeam.rank(team), ncclTeam.stride(team));
  }

  MemorySegment toNative(SegmentAllocator allocator) {
    MemorySegment team = ncclTeam.allocate(allocator);
    ncclTeam.nRanks(team, size);
    ncclTeam.rank(team, rank);
    ncclTeam.stride(team, stride);
    return team;
  }

  /**
   * Whether a rank of another team that holds this rank too is in this team ({@code
   * ncclTeamRankIsMember}).
   *
   * @param other the team that {@code otherRank} counts in
   */
  public boolean contains(Team other, int otherRank) {
    int delta = (otherRank - other.rank) * other.stride;
    if (delta % stride != 0) {
      return false;
    }
    int mine = rank + delta / stride;
    return 0 <= mine && mine < size;
  }

  /** The place in this team of another team's rank ({@code ncclTeamRankToTeam}). */
  public int rankOf(Team other, int otherRank) {
    return rank + (otherRank - other.rank) * other.stride / stride;
  }

  /**
   * This team cut into runs of neighbours, the run of the calling rank ({@code
   * ncclTeamInnerFactor}).
   *
   * @param innerSize divides the size
   */
  public Team inner(int innerSize) {
    checkFactor(innerSize);
    return new Team(innerSize, rank % innerSize, stride);
  }

  /** The ranks that have the calling rank's place in their runs ({@code ncclTeamOuterFactor}). */
  public Team outer(int innerSize) {
    checkFactor(innerSize);
    return new Team(size / innerSize, rank / innerSize, stride * innerSize);
  }

  private void checkFactor(int innerSize) {
    if (innerSize < 1 || size % innerSize != 0) {
      throw new IllegalArgumentException(
          "team of " + size + " ranks in runs of " + innerSize + ": does not divide");
    }
  }

  /**
   * The rank at an index among those of this team that are not in the subset ({@code
   * ncclTeamRankInDifference}).
   *
   * @param subset a part of this team that holds the calling rank
   * @param index 0 to size minus the subset's size, less 1
   */
  public int rankInDifference(Team subset, int index) {
    int strideOfSubset = subset.stride / stride;
    int below = rank - subset.rank * strideOfSubset;
    if (strideOfSubset < 0) {
      strideOfSubset = -strideOfSubset;
      below -= (subset.size - 1) * strideOfSubset;
    }
    if (index < below) {
      return index;
    }
    int inside = (subset.size - 1) * (strideOfSubset - 1);
    if (index - below < inside) {
      return below
          + 1
          + (index - below) / (strideOfSubset - 1) * strideOfSubset
          + (index - below) % (strideOfSubset - 1);
    }
    return below + 1 + (subset.size - 1) * strideOfSubset + (index - below - inside);
  }
}

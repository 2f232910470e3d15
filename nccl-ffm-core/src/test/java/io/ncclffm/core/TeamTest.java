package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** The arithmetic of {@link Team} against the lists of ranks that it stands for. */
class TeamTest {

  /** The communicator's ranks of a team that a rank of the communicator is in. */
  private static List<Integer> members(Team team, int worldRank) {
    return IntStream.range(0, team.size())
        .mapToObj(r -> worldRank + (r - team.rank()) * team.stride())
        .toList();
  }

  @ParameterizedTest
  @CsvSource({"8,2", "8,4", "12,3", "6,1", "6,6"})
  void innerAndOuterCutTheWorldIntoRunsAndRails(int size, int inner) {
    for (int r = 0; r < size; r++) {
      Team world = new Team(size, r, 1);
      int rank = r;
      List<Integer> run =
          IntStream.range(0, size).filter(w -> w / inner == rank / inner).boxed().toList();
      List<Integer> rail =
          IntStream.range(0, size).filter(w -> w % inner == rank % inner).boxed().toList();
      assertEquals(run, members(world.inner(inner), r));
      assertEquals(rail, members(world.outer(inner), r));
    }
  }

  @ParameterizedTest
  @CsvSource({"8,2", "12,3"})
  void membershipAndTranslationFollowTheMembers(int size, int inner) {
    for (int r = 0; r < size; r++) {
      Team world = new Team(size, r, 1);
      Team rail = world.outer(inner);
      List<Integer> members = members(rail, r);
      for (int other = 0; other < size; other++) {
        assertEquals(members.contains(other), rail.contains(world, other));
        if (members.contains(other)) {
          assertEquals(members.indexOf(other), rail.rankOf(world, other));
        }
      }
    }
  }

  @ParameterizedTest
  @CsvSource({"8,2", "8,4", "12,3"})
  void differenceCountsTheRanksOutsideTheSubset(int size, int inner) {
    for (int r = 0; r < size; r++) {
      Team world = new Team(size, r, 1);
      for (Team subset : List.of(world.inner(inner), world.outer(inner))) {
        List<Integer> inside = members(subset, r);
        List<Integer> outside =
            IntStream.range(0, size).filter(w -> !inside.contains(w)).boxed().toList();
        for (int i = 0; i < outside.size(); i++) {
          assertEquals(outside.get(i), world.rankInDifference(subset, i), subset + " at " + i);
        }
      }
    }
  }

  @Test
  void refusesRanksAndRunsThatDoNotFit() {
    assertThrows(IllegalArgumentException.class, () -> new Team(4, 4, 1));
    assertThrows(IllegalArgumentException.class, () -> new Team(0, 0, 1));
    assertThrows(IllegalArgumentException.class, () -> new Team(8, 0, 1).inner(3));
    assertTrue(new Team(1, 0, 1).contains(new Team(1, 0, 1), 0));
    assertFalse(new Team(2, 0, 2).contains(new Team(4, 0, 1), 1));
  }
}

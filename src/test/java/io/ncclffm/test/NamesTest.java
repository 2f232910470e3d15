package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclUniqueId;
import java.lang.foreign.Arena;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

/**
 * The name of a communicator: NCCL keeps the caller's pointer and reads it until the destroy, as
 * the CPU backend does, which refuses to destroy when the text has changed.
 */
class NamesTest {
  @BeforeAll
  static void prepareForSeveralRanks() {
    TestRanks.prepare();
  }

  /** Two ranks of this thread; the configuration is garbage when this returns. */
  private static List<Communicator> named() {
    NcclUniqueId id = NcclUniqueId.create();
    List<Communicator> made = new ArrayList<>();
    NcclGroup.run(
        () -> {
          for (int r = 0; r < 2; r++) {
            String name = "named " + System.nanoTime() + " for rank " + r;
            CudaDevice device = new CudaDevice(r % CudaDevice.count());
            made.add(
                Communicator.create(
                    id, 2, r, device, CommunicatorConfig.builder().name(name).build()));
          }
        });
    return made;
  }

  /** Frees what nobody refers to, and overwrites what was freed. */
  private static void pressure() {
    for (int round = 0; round < 5; round++) {
      System.gc();
      try (Arena arena = Arena.ofConfined()) {
        for (int bytes = 8; bytes <= 512; bytes += 8) {
          for (int i = 0; i < 100; i++) {
            arena.allocate(bytes).fill((byte) 'X');
          }
        }
      }
    }
  }

  @Test
  void nameLivesAsLongAsTheCommunicator() {
    List<Communicator> ranks = named();
    pressure();
    ranks.forEach(Communicator::close);
  }

  @Test
  void inheritedNameOutlivesTheParent() {
    List<Communicator> ranks = named();
    Communicator child = ranks.get(0).shrink(List.of(1), false, CommunicatorConfig.DEFAULT);
    ranks.forEach(Communicator::close);
    ranks.clear();
    pressure();
    assertEquals(1, child.size());
    child.close();
  }

  @Test
  void inheritedNameLivesAsLongAsASplit() {
    List<Communicator> ranks = named();
    List<Communicator> children = new ArrayList<>();
    NcclGroup.run(
        () ->
            ranks.forEach(
                rank -> children.add(rank.split(rank.rank(), 0, CommunicatorConfig.DEFAULT))));
    pressure();
    children.forEach(Communicator::close);
    pressure();
    ranks.forEach(Communicator::close);
  }
}

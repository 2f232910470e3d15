package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.EnumMap;
import java.util.EnumSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/**
 * Windows, a device communicator, a split communicator with a window, and the communicator below
 * all of them, closed in every order: what is closed says so, what is not works on, nothing stays.
 */
class LsaCloseOrderTest {
  private static final int RANKS = 2;

  private enum Part {
    WINDOW,
    DEVICE_COMMUNICATOR,
    CHILD_WINDOW,
    CHILD,
    PARENT;

    /** What ends with it. */
    Set<Part> ends() {
      return switch (this) {
        case PARENT -> EnumSet.allOf(Part.class);
        case CHILD -> EnumSet.of(CHILD, CHILD_WINDOW);
        default -> EnumSet.of(this);
      };
    }
  }

  private final CyclicBarrier everyRank = new CyclicBarrier(RANKS);

  private void meet() throws Exception {
    everyRank.await(30, TimeUnit.SECONDS);
  }

  /** One rank's. */
  private static final class Family {
    private final Communicator parent;
    private final LsaWindow window;
    private final DeviceCommunicator device;
    private final Communicator child;
    private final LsaWindow childWindow;
    private final Map<Part, AutoCloseable> parts = new EnumMap<>(Part.class);
    private final Set<Part> closed = EnumSet.noneOf(Part.class);

    Family(Communicator grandparent, LsaProvider provider) {
      parent = grandparent.split(0, grandparent.rank(), CommunicatorConfig.DEFAULT);
      window = LsaWindow.create(parent, 5000, provider);
      device =
          DeviceCommunicator.create(
              parent, DeviceCommunicatorConfig.builder().provider(provider).build());
      child = parent.split(0, -parent.rank(), CommunicatorConfig.DEFAULT);
      childWindow = LsaWindow.create(child, 3000, provider);
      parts.put(Part.WINDOW, window);
      parts.put(Part.DEVICE_COMMUNICATOR, device);
      parts.put(Part.CHILD_WINDOW, childWindow);
      parts.put(Part.CHILD, child);
      parts.put(Part.PARENT, parent);
    }

    void close(Part part) throws Exception {
      parts.get(part).close();
      parts.get(part).close();
      closed.addAll(part.ends());
    }

    void abort() {
      parent.abort();
      closed.addAll(Part.PARENT.ends());
    }

    /** Twice over: what was closed before, on its own or with another, can be closed again. */
    void closeAgain(List<Part> order) throws Exception {
      for (Part part : order) {
        parts.get(part).close();
      }
    }

    void check() {
      check(Part.WINDOW, window);
      check(Part.CHILD_WINDOW, childWindow);
      check(Part.DEVICE_COMMUNICATOR, device.window());
      if (closed.contains(Part.DEVICE_COMMUNICATOR)) {
        Messages.assertNames(assertThrows(IllegalStateException.class, device::struct), "closed");
      } else {
        device.verify("own kernel");
      }
      check(Part.CHILD, child);
      check(Part.PARENT, parent);
    }

    private void check(Part part, LsaWindow mine) {
      if (closed.contains(part)) {
        Messages.assertNames(
            assertThrows(IllegalStateException.class, () -> mine.address(0, 0, 1)), "closed");
      } else {
        mine.verify("still there");
      }
    }

    private void check(Part part, Communicator mine) {
      boolean ready = mine.state() == Communicator.State.READY;
      assertEquals(!closed.contains(part), ready, part + " is " + mine.state());
    }
  }

  private static List<List<Part>> orders() {
    List<List<Part>> orders = new ArrayList<>();
    extend(new ArrayList<>(), orders);
    return orders;
  }

  private static void extend(List<Part> begun, List<List<Part>> orders) {
    if (begun.size() == Part.values().length) {
      orders.add(List.copyOf(begun));
      return;
    }
    for (Part part : Part.values()) {
      if (!begun.contains(part)) {
        begun.add(part);
        extend(begun, orders);
        begun.remove(part);
      }
    }
  }

  @ParameterizedTest
  @EnumSource
  @Timeout(value = 15, unit = TimeUnit.MINUTES) // 120 worlds
  void everyOrderOfClosingEndsWell(LsaProvider provider) throws IOException {
    takeApart(provider, false);
  }

  @ParameterizedTest
  @EnumSource
  void everyOrderOfClosingAroundAnAbortEndsWell(LsaProvider provider) throws IOException {
    takeApart(provider, true);
  }

  private void takeApart(LsaProvider provider, boolean withAbort) throws IOException {
    TestRanks.assumeShim();
    ProvidersHere.assume(provider);
    List<List<Part>> all = orders();
    assertEquals(120, all.size());
    // On a GPU a pair of communicators takes a second to set up: ten orders, all parts first once.
    int step = TestRanks.onCpu() ? 1 : 12;
    try (LocalWorld world = TestRanks.open(RANKS)) {
      takeApart(world, provider, withAbort, List.of(all.get(0), all.get(all.size() - 1)), 1);
      Resources before = Resources.now();
      long mappings = mappings();
      takeApart(world, provider, withAbort, all, step);
      before.assertNoMoreThan(5, "after closing in every order");
      long more = mappings() - mappings;
      assertTrue(more <= 20, more + " mappings more than before");
      TestRanks.assertWorks(world);
    }
  }

  private void takeApart(
      LocalWorld world, LsaProvider provider, boolean withAbort, List<List<Part>> all, int step) {
    world.run(
        r -> {
          for (int i = 0; i < all.size(); i += step) {
            List<Part> order = all.get(i);
            try {
              takeApart(r, provider, order, withAbort ? i / step % (order.size() + 1) : -1);
            } catch (AssertionError | RuntimeException e) {
              throw new AssertionError("closing in the order " + order, e);
            }
          }
        });
  }

  /**
   * @param abortBefore place in the order at which the parent is aborted, or -1
   */
  private void takeApart(LocalWorld.Rank r, LsaProvider provider, List<Part> order, int abortBefore)
      throws Exception {
    Family family = new Family(r.communicator(), provider);
    family.check();
    for (int i = 0; i <= order.size(); i++) {
      if (i == abortBefore) {
        meet(); // the others are not inside a close that waits for this rank
        family.abort();
        family.check();
      }
      if (i < order.size()) {
        family.close(order.get(i));
        family.check();
      }
      meet(); // no kernel of the next step starts while another rank frees on the same GPU
    }
    family.closeAgain(order);
    meet();
  }

  private static long mappings() throws IOException {
    try (Stream<String> lines = Files.lines(Path.of("/proc/self/maps"))) {
      return lines.count();
    }
  }
}

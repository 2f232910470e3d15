package io.ncclffm.device.doctor;

import io.ncclffm.core.Backend;
import io.ncclffm.core.CommunicatorProperties;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.core.Versions;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import io.ncclffm.lsa.LsaException;
import io.ncclffm.lsa.LsaProvider;
import io.ncclffm.lsa.LsaWindow;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.atomic.AtomicReference;
import org.jspecify.annotations.Nullable;

/**
 * An all-reduce by every route and every provider of windows, on ranks that are threads of this
 * process. Each has a world of its own, so that one failure does not hide the next.
 */
final class SelfTest {
  private static final Duration TIMEOUT = Duration.ofSeconds(30);
  private static final Duration KERNEL_TIMEOUT = Duration.ofSeconds(10);
  private static final int COUNT = 1024;
  private static final int WARM_UP = 5;
  private static final int CALLS = 25;
  private static final long WINDOW_BYTES = 1 << 20;

  private final int ranks;
  private final List<Finding> findings = new ArrayList<>();

  private SelfTest(int ranks) {
    this.ranks = ranks;
  }

  static List<Finding> run(Versions versions, int ranks) {
    SelfTest test = new SelfTest(ranks);
    test.route("host", null, SelfTest::host);
    test.deviceApi();
    for (LsaProvider provider : LsaProvider.values()) {
      boolean cpu = versions.backend() == Backend.CPU;
      if (provider == (cpu ? LsaProvider.NCCL_WINDOW : LsaProvider.CPU)) {
        continue;
      }
      test.route("windows", provider, rank -> window(rank, provider));
      if (versions.shim() != null) {
        test.route("device", provider, rank -> device(rank, provider));
        test.route("fused", provider, rank -> fused(rank, provider));
        test.route("task", provider, rank -> task(rank, provider));
      }
    }
    return test.findings;
  }

  private interface Route {
    /** What rank 0 has to say of it. */
    String run(LocalWorld.Rank rank) throws Exception;
  }

  private void route(String name, @Nullable LsaProvider provider, Route route) {
    String id = "self-test." + name;
    String what = ranks + " ranks" + (provider == null ? "" : ", " + provider) + ": ";
    AtomicReference<String> said = new AtomicReference<>("");
    try (LocalWorld world = LocalWorld.open(ranks)) {
      world.run(
          rank -> {
            String text = route.run(rank);
            if (rank.rank() == 0) {
              said.set(text);
            }
          },
          TIMEOUT);
      findings.add(Finding.ok(id, what + said.get()));
    } catch (LsaException e) {
      findings.add(
          Finding.warning(
              id,
              what + e.getMessage(),
              "another provider serves, if one below works; the reasons are those of CUDA and NCCL:"
                  + " peer access, NCCL_CUMEM_ENABLE, the version of NCCL, /dev/shm"));
    } catch (RuntimeException | LinkageError e) {
      findings.add(
          Finding.error(
              id,
              what + e,
              "mend the errors and warnings above first; then NCCL_DEBUG=WARN tells NCCL's own"
                  + " reason"));
    }
  }

  private static String host(LocalWorld.Rank rank) {
    try (Data data = Data.of(rank)) {
      return data.timed(
          () -> rank.communicator().allReduce(data.send, data.recv, ReduceOp.SUM, rank.stream()));
    }
  }

  private static String window(LocalWorld.Rank rank, LsaProvider provider) {
    try (LsaWindow window = LsaWindow.create(rank.communicator(), WINDOW_BYTES, provider)) {
      return "a window, way to the others: " + window.poorestPath();
    }
  }

  private static DeviceCommunicator deviceCommunicator(LocalWorld.Rank rank, LsaProvider provider) {
    return DeviceCommunicator.create(
        rank.communicator(),
        DeviceCommunicatorConfig.builder().provider(provider).timeout(KERNEL_TIMEOUT).build());
  }

  private static String device(LocalWorld.Rank rank, LsaProvider provider) {
    try (Data data = Data.of(rank);
        DeviceCommunicator comm = deviceCommunicator(rank, provider)) {
      return data.timed(() -> comm.allReduce(data.send, data.recv, ReduceOp.SUM, rank.stream()));
    }
  }

  private static String fused(LocalWorld.Rank rank, LsaProvider provider) {
    try (Data data = Data.of(rank);
        DeviceCommunicator comm = deviceCommunicator(rank, provider)) {
      float factor = sum(rank); // the root of factor * sum is the sum that the others give
      return data.timed(
          () ->
              FusedKernels.scaleAllReduceSqrt(
                  comm,
                  data.send,
                  0,
                  data.recv,
                  0,
                  COUNT,
                  factor,
                  0,
                  rank.stream(),
                  LaunchChoice.AUTO));
    }
  }

  private static String task(LocalWorld.Rank rank, LsaProvider provider) {
    TaskQueueConfig config = TaskQueueConfig.builder().timeout(KERNEL_TIMEOUT).build();
    TaskSymbol symbol = TaskSymbol.of("doctor");
    try (Data data = Data.of(rank);
        DeviceCommunicator comm = deviceCommunicator(rank, provider);
        TaskQueue queue = TaskQueue.create(comm, config)) {
      Ticket ticket = queue.ticket();
      return data.timed(
          () -> {
            queue.allReduce(symbol, 0, data.send, 0, data.recv, 0, COUNT, ReduceOp.SUM, ticket);
            queue.launch(rank.stream());
            ticket.await(KERNEL_TIMEOUT);
          });
    }
  }

  /** Of what the ranks send: 1, 2 and so on. */
  private static float sum(LocalWorld.Rank rank) {
    return rank.size() * (rank.size() + 1) / 2f;
  }

  /**
   * What is sent and received. Made before a device communicator is: an allocation waits for the
   * kernels of other ranks on the same GPU, which may wait for this rank.
   */
  private record Data(LocalWorld.Rank rank, DeviceBuffer send, DeviceBuffer recv)
      implements AutoCloseable {
    static Data of(LocalWorld.Rank rank) {
      Data made =
          new Data(
              rank,
              DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, COUNT),
              DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, COUNT));
      float[] numbers = new float[COUNT];
      Arrays.fill(numbers, rank.rank() + 1);
      made.send.copyFrom(numbers, rank.stream());
      rank.stream().synchronize(KERNEL_TIMEOUT);
      return made;
    }

    /** Times an all-reduce with its wait, then looks at the sum. */
    String timed(Runnable allReduce) {
      long[] nanos = new long[CALLS];
      for (int i = -WARM_UP; i < CALLS; i++) {
        long start = System.nanoTime();
        allReduce.run();
        rank.stream().synchronize(KERNEL_TIMEOUT);
        if (i >= 0) {
          nanos[i] = System.nanoTime() - start;
        }
      }
      float[] sums = new float[COUNT];
      recv.copyTo(sums, rank.stream());
      float want = sum(rank);
      for (float got : sums) {
        if (got != want) {
          throw new IllegalStateException("wrong sum: " + got + " instead of " + want);
        }
      }
      Arrays.sort(nanos);
      return String.format(
          Locale.ROOT,
          "all-reduce of %d floats right, %.1f us a call with its wait (median of %d)",
          COUNT,
          nanos[CALLS / 2] / 1e3,
          CALLS);
    }

    @Override
    public void close() {
      send.close();
      recv.close();
    }
  }

  /** NCCL's device API, which the windows of NCCL come with. */
  private void deviceApi() {
    AtomicReference<CommunicatorProperties> answer = new AtomicReference<>();
    try (LocalWorld world = LocalWorld.open(ranks)) {
      world.run(
          rank -> {
            CommunicatorProperties properties = rank.communicator().properties();
            if (rank.rank() == 0) {
              answer.set(properties);
            }
          },
          TIMEOUT);
    } catch (UnsupportedByLibraryException e) {
      findings.add(
          Finding.warning(
              "device-api",
              String.valueOf(e.getMessage()),
              "NCCL 2.29.2 or later tells, and has it"));
      return;
    } catch (RuntimeException e) {
      findings.add(
          Finding.error("device-api", e.toString(), "mend what self-test.host says first"));
      return;
    }
    CommunicatorProperties properties = answer.get();
    findings.add(
        properties.deviceApiSupport()
            ? Finding.ok("device-api", properties.toString())
            : Finding.warning(
                "device-api",
                "NCCL's device API is not supported here: " + properties,
                "it takes peer access between all ranks of a host (gpu.p2p), cuMem"
                    + " (NCCL_CUMEM_ENABLE not 0), windows (NCCL_WIN_ENABLE not 0) and one /dev/shm"
                    + " for all ranks of a host; CUDA IPC and host-staged windows do without"));
  }
}

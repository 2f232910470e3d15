package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import com.sun.management.ThreadMXBean;
import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaGraph;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.AdamW;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.LaunchChoice;
import io.ncclffm.device.OptimizerState;
import io.ncclffm.device.Sgd;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import io.ncclffm.device.Ticket;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaWindow;
import java.lang.management.ManagementFactory;
import java.time.Duration;
import org.junit.jupiter.api.Test;

/** The hot path allocates nothing on the Java heap, once it is compiled. */
class AllocationTest {
  private static final int RANKS = 2;
  private static final int COUNT = 16;

  /** Operations before the stream is waited for, so that its queue stays short. */
  private static final int BATCH = 50;

  /** All but the last fifth give the compilers time, also on a busy machine. */
  private static final int BATCHES = 1000;

  /** Of operations that wait for each other's ranks. */
  private static final int TASK_BATCHES = 200;

  private static volatile boolean isDone = true;

  private static final Duration PATIENCE = Duration.ofSeconds(20);
  private static final ThreadMXBean THREADS = (ThreadMXBean) ManagementFactory.getThreadMXBean();

  private interface Setup {
    /** What a rank measures. Called on the rank's thread. */
    Runnable prepare(LocalWorld.Rank rank, RankBuffers x);
  }

  private static void assertAllocatesNothing(Setup setup) {
    assertAllocatesNothing(setup, BATCHES);
  }

  private static void assertAllocatesNothing(Setup setup, int batches) {
    long[][] bytes = new long[RANKS][batches];
    try (LocalWorld world = TestRanks.open(RANKS);
        RankBuffers x = RankBuffers.allocate(world, DataType.FLOAT32, 2 * COUNT)) {
      Runnable[] operations = new Runnable[RANKS];
      world.run(rank -> operations[rank.rank()] = setup.prepare(rank, x));
      world.run(
          rank -> {
            for (int batch = 0; batch < batches; batch++) {
              bytes[rank.rank()][batch] = batch(operations[rank.rank()]);
              rank.stream().synchronize();
            }
          });
    }
    for (int r = 0; r < RANKS; r++) {
      assertEndsQuietly(bytes[r], "rank " + r);
    }
  }

  /** Bytes that the calling thread allocates in one batch, without waiting for the stream. */
  private static long batch(Runnable operation) {
    long before = THREADS.getCurrentThreadAllocatedBytes();
    for (int i = 0; i < BATCH; i++) {
      operation.run();
    }
    return THREADS.getCurrentThreadAllocatedBytes() - before;
  }

  private static void assertEndsQuietly(long[] bytes, String who) {
    long last = 0;
    int measured = bytes.length / 5;
    for (int batch = bytes.length - measured; batch < bytes.length; batch++) {
      last += bytes[batch];
    }
    double perCall = (double) last / (BATCH * measured);
    assertTrue(perCall < 1, who + " still allocates " + perCall + " bytes an operation");
  }

  @Test
  void allReduce() {
    assertAllocatesNothing(
        (rank, x) ->
            () -> {
              DeviceBuffer mine = x.of(rank);
              Communicator comm = rank.communicator();
              comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream());
              comm.allReduce(mine, 1, mine, 1, COUNT, ReduceOp.SUM, rank.stream());
            });
  }

  @Test
  void waitForTheStream() {
    assertAllocatesNothing(
        (rank, x) ->
            () -> {
              DeviceBuffer mine = x.of(rank);
              rank.communicator().allReduce(mine, mine, ReduceOp.SUM, rank.stream());
              rank.stream().synchronize();
            });
  }

  @Test
  void sendAndRecvInAGroup() {
    assertAllocatesNothing(
        (rank, x) -> {
          int peer = 1 - rank.rank();
          Runnable body =
              () -> {
                rank.communicator().send(x.of(rank), 0, COUNT, peer, rank.stream());
                rank.communicator().recv(x.of(rank), COUNT, COUNT, peer, rank.stream());
              };
          return () -> NcclGroup.run(body);
        });
  }

  @Test
  void sendOrRecv() {
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceBuffer mine = x.of(rank);
          Communicator comm = rank.communicator();
          boolean sends = rank.rank() == 0;
          return () -> {
            if (sends) {
              comm.send(mine, 1, rank.stream());
            } else {
              comm.recv(mine, 0, rank.stream());
            }
          };
        });
  }

  @Test
  void everyOtherCollective() {
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceBuffer mine = x.of(rank);
          Communicator comm = rank.communicator();
          CudaStream stream = rank.stream();
          return () -> {
            comm.broadcast(mine, mine, 1, stream);
            comm.reduce(mine, mine, ReduceOp.MAX, 1, stream);
            comm.allGather(mine, rank.rank(), mine, 0, 1, stream);
            comm.reduceScatter(mine, 0, mine, rank.rank(), 1, ReduceOp.MIN, stream);
            comm.alltoAll(mine, 0, mine, COUNT, COUNT / 2, stream);
            comm.gather(mine, rank.rank(), mine, 0, 1, 1, stream);
            comm.scatter(mine, 0, mine, rank.rank(), 1, 1, stream);
          };
        });
  }

  @Test
  void preMultipliedSum() {
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceBuffer mine = x.of(rank);
          ReduceOp op = rank.communicator().createPreMulSum(DataType.FLOAT32, 0.5);
          return () -> rank.communicator().allReduce(mine, mine, op, rank.stream());
        });
  }

  @Test
  void putSignalAndWait() {
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          rank ->
              assumeTrue(
                  rank.communicator().properties().hostRmaSupport(),
                  "NCCL has no one-sided operations on this host"));
    }
    DeviceBuffer[] memory = new DeviceBuffer[RANKS];
    assertAllocatesNothing(
        (rank, x) -> {
          int r = rank.rank();
          DeviceBuffer mine =
              DeviceBuffer.allocateForWindow(rank.device(), DataType.FLOAT32, 2 * COUNT);
          memory[r] = mine;
          Communicator comm = rank.communicator();
          NcclWindow window = comm.registerWindow(mine, NcclWindow.Flag.COLLECTIVE_SYMMETRIC);
          return () -> {
            comm.putSignal(mine, 0, COUNT, 1 - r, window, COUNT * Float.BYTES, rank.stream());
            comm.waitSignal(1 - r, 1, rank.stream());
            comm.signal(1 - r, rank.stream());
            comm.waitSignal(1 - r, 1, rank.stream());
          };
        });
    for (DeviceBuffer buffer : memory) {
      buffer.close();
    }
  }

  @Test
  void deviceAllReduce() {
    TestRanks.assumeShim();
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
          DeviceBuffer mine = x.of(rank);
          return () -> {
            comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream());
            comm.allReduce(mine, 1, mine, 1, COUNT, ReduceOp.SUM, rank.stream());
          };
        });
  }

  @Test
  void waitForWhatTheKernelsTell() {
    TestRanks.assumeShim();
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceCommunicatorConfig config =
              DeviceCommunicatorConfig.builder().hostSignal(true).build();
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator(), config);
          DeviceBuffer mine = x.of(rank);
          CudaGraph graph =
              CudaGraph.capture(
                  rank.stream(), () -> comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream()));
          return () -> {
            comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream());
            comm.awaitKernels();
            graph.launch(rank.stream());
            comm.awaitKernels();
          };
        });
  }

  @Test
  void graphLaunch() {
    TestRanks.assumeShim();
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
          DeviceBuffer mine = x.of(rank);
          CudaGraph graph =
              CudaGraph.capture(
                  rank.stream(), () -> comm.allReduce(mine, mine, ReduceOp.SUM, rank.stream()));
          return () -> graph.launch(rank.stream());
        });
  }

  @Test
  void everyOtherDeviceCollective() {
    TestRanks.assumeShim();
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
          DeviceBuffer mine = x.of(rank);
          CudaStream stream = rank.stream();
          LaunchChoice choice = LaunchChoice.AUTO.with(LsaProtocol.LL).withBlocks(1);
          return () -> {
            comm.allGather(mine, rank.rank(), mine, 0, 1, stream);
            comm.allReduce(mine, 0, mine, 0, COUNT, ReduceOp.SUM, stream, choice);
            comm.reduceScatter(mine, 0, mine, rank.rank(), 1, ReduceOp.MIN, stream);
            comm.broadcast(mine, mine, 1, stream);
            comm.reduce(mine, mine, ReduceOp.MAX, 1, stream);
            comm.allToAll(mine, 0, mine, COUNT, COUNT / 2, stream);
            comm.hierarchicalAllReduce(mine, mine, ReduceOp.SUM, 1, stream);
            comm.sendRecv(mine, 0, 1 - rank.rank(), mine, COUNT, 1 - rank.rank(), COUNT, stream);
            comm.barrier(stream);
          };
        });
  }

  /** On streams in turn, as beside collectives. */
  @Test
  void deviceSendAndRecv() {
    TestRanks.assumeShim();
    CudaStream[] second = new CudaStream[RANKS];
    assertAllocatesNothing(
        (rank, x) -> {
          int r = rank.rank();
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
          DeviceBuffer mine = x.of(rank);
          second[r] = CudaStream.create(rank.device());
          return () -> {
            comm.send(mine, 0, COUNT, 1 - r, second[r]);
            comm.recv(mine, COUNT, COUNT, 1 - r, rank.stream());
          };
        });
    for (CudaStream stream : second) {
      stream.close();
    }
  }

  @Test
  void deviceCollectivesOnWindows() {
    TestRanks.assumeShim();
    assertAllocatesNothing(
        (rank, x) -> {
          DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
          LsaWindow window = LsaWindow.create(rank.communicator(), 1024);
          CudaStream stream = rank.stream();
          return () -> {
            comm.allReduce(window, 0, window, 0, DataType.FLOAT32, COUNT, ReduceOp.SUM, stream);
            comm.allGather(window, 0, window, 512, DataType.FLOAT32, COUNT, stream);
          };
        });
  }

  @Test
  void fusedKernels() {
    TestRanks.assumeShim();
    AdamW adamW = new AdamW(0.01f);
    Sgd sgd = new Sgd(0.01f, 0.9f);
    DeviceBuffer[][] buffers = new DeviceBuffer[RANKS][4];
    try {
      assertAllocatesNothing(
          (rank, x) -> {
            DeviceBuffer[] more = buffers[rank.rank()];
            for (int i = 0; i < more.length; i++) {
              more[i] = DeviceBuffer.allocate(rank.device(), DataType.FLOAT32, x.of(rank).count());
              more[i].fill((byte) 0, rank.stream());
            }
            rank.stream().synchronize();
            DeviceCommunicator comm = DeviceCommunicator.create(rank.communicator());
            LsaWindow window = LsaWindow.create(rank.communicator(), 2048);
            DeviceBuffer mine = x.of(rank);
            OptimizerState state = OptimizerState.ofAdamW(more[0], more[1], more[2]);
            CudaStream stream = rank.stream();
            LaunchChoice auto = LaunchChoice.AUTO;
            return () -> {
              FusedKernels.scaleAllReduceSqrt(comm, mine, 0, 1, stream);
              FusedKernels.scaleAllReduceSqrt(comm, mine, 1, COUNT, 0, 1, stream);
              FusedKernels.scaleAllReduceSqrt(
                  comm, window, 0, window, 0, DataType.FLOAT32, COUNT, 0, 1, stream, auto);
              FusedKernels.allReduceRmsNorm(comm, mine, more[2], more[3], mine, 1, 1, stream);
              FusedKernels.sgd(comm, mine, state, sgd, stream);
              FusedKernels.adamW(comm, mine, state, adamW, 1, stream);
            };
          });
    } finally {
      for (DeviceBuffer[] ofRank : buffers) {
        for (DeviceBuffer buffer : ofRank) {
          if (buffer != null) {
            buffer.close();
          }
        }
      }
    }
  }

  @Test
  void everyTaskOfTheHost() {
    TestRanks.assumeShim();
    TaskSymbol name = TaskSymbol.of("gradients");
    assertAllocatesNothing(
        (rank, x) -> {
          TaskQueue queue =
              TaskQueue.create(
                  DeviceCommunicator.create(rank.communicator()),
                  TaskQueueConfig.builder().lanes(2).build());
          DeviceBuffer mine = x.of(rank);
          int r = rank.rank();
          Ticket[] t = new Ticket[11];
          for (int i = 0; i < t.length; i++) {
            t[i] = queue.ticket();
          }
          return () -> {
            queue.allReduce(name, 0, mine, 0, mine, 0, COUNT, ReduceOp.SUM, t[0]);
            queue.reduceScatter(name, 0, mine, 0, mine, r, 1, ReduceOp.MIN, t[1]);
            queue.allGather(name, 0, mine, r, mine, 0, 1, t[2]);
            queue.broadcast(name, 0, mine, 0, mine, 0, COUNT, 1, t[3]);
            queue.reduce(name, 0, mine, 0, mine, 0, COUNT, ReduceOp.MAX, 1, t[4]);
            queue.allToAll(name, 0, mine, 0, mine, COUNT, COUNT / 2, t[5]);
            queue.hierarchicalAllReduce(name, 0, mine, 0, mine, 0, 1, ReduceOp.SUM, 1, t[6]);
            queue.sendRecv(name, 1, mine, 0, 1 - r, mine, COUNT, 1 - r, 4, t[7]);
            if (r == 0) {
              queue.send(name, 1, mine, 0, 4, 1, t[8]);
            } else {
              queue.recv(name, 1, mine, 0, 4, 0, t[8]);
            }
            queue.barrier(name, 1, t[9]);
            queue.placeholder(name, 1, t[10]);
            queue.launch(rank.stream());
            t[6].await(PATIENCE); // the last of each lane
            t[10].await(PATIENCE);
            for (Ticket ticket : t) {
              isDone &= ticket.isDone();
            }
          };
        },
        TASK_BATCHES);
  }

  @Test
  void waitForATask() {
    TestRanks.assumeShim();
    TaskSymbol name = TaskSymbol.of("gradients");
    assertAllocatesNothing(
        (rank, x) -> {
          TaskQueue queue = TaskQueue.create(DeviceCommunicator.create(rank.communicator()));
          DeviceBuffer mine = x.of(rank);
          Ticket ticket = queue.ticket();
          return () -> {
            queue.allReduce(name, 0, mine, 0, mine, 0, COUNT, ReduceOp.SUM, ticket);
            queue.launch(rank.stream());
            ticket.await(PATIENCE);
          };
        },
        TASK_BATCHES);
  }
}

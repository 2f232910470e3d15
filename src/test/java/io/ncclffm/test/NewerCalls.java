package io.ncclffm.test;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.Communicator.MemoryStatistic;
import io.ncclffm.core.CommunicatorConfig;
import io.ncclffm.core.CommunicatorConfig.CtaPolicy;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.core.NcclGroup;
import io.ncclffm.core.NcclParameters;
import io.ncclffm.core.NcclUniqueId;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.core.Team;
import io.ncclffm.core.UnsupportedByLibraryException;
import java.util.List;
import java.util.function.Consumer;

/**
 * Every call that needs a newer NCCL than the oldest one that loads. As a child JVM's main class it
 * makes each of them on a communicator of its own and prints what comes of it. Some have arguments
 * that are refused, here or by NCCL, once the library has been found new enough.
 */
final class NewerCalls {
  /** Begins the line that tells what came of a call: its name, a tab, the outcome. */
  static final String CALL = "CALL ";

  /** The outcome of a call that did what it should. */
  static final String OK = "ok";

  private static final CudaDevice DEVICE = new CudaDevice(0);
  private static final Team ALONE = new Team(1, 0, 1);
  private static final int ELEMENTS = 16;

  private NewerCalls() {}

  /** What a call may use: one rank alone, its stream, and memory that can be a window. */
  record Ground(Communicator comm, CudaStream stream, DeviceBuffer buffer) {}

  /** Makes a call. */
  interface Attempt {
    void make(Ground ground);
  }

  /**
   * One call.
   *
   * @param needs what NCCL must have for it, in the order in which it is looked for
   */
  record Call(String name, Attempt attempt, List<String> needs) {}

  private static Call call(String name, Attempt attempt, String... needs) {
    return new Call(name, attempt, List.of(needs));
  }

  private static Call onWindow(String name, Consumer<NcclWindow> attempt, String function) {
    return call(
        name,
        g -> {
          try (NcclWindow window = g.comm.registerWindow(g.buffer)) {
            attempt.accept(window);
          }
        },
        "ncclCommWindowRegister",
        function);
  }

  private static Call withConfig(String field, CommunicatorConfig.Builder config) {
    return call(
        "config with " + field,
        g -> Communicator.create(NcclUniqueId.create(), 1, 0, DEVICE, config.build()).close(),
        field);
  }

  private static CommunicatorConfig.Builder config() {
    return CommunicatorConfig.builder();
  }

  static final List<Call> CALLS =
      List.of(
          call("simulate", g -> NcclGroup.simulate(() -> {}), "ncclGroupSimulateEnd"),
          call(
              "create with two ids for one rank",
              g ->
                  Communicator.create(
                          List.of(NcclUniqueId.create(), NcclUniqueId.create()),
                          1,
                          0,
                          DEVICE,
                          CommunicatorConfig.DEFAULT)
                      .close(),
              "ncclCommInitRankScalable"),
          call(
              "shrink by itself",
              g -> g.comm.shrink(List.of(0), false, CommunicatorConfig.DEFAULT),
              "ncclCommShrink"),
          call("growthId", g -> g.comm.growthId(), "ncclCommGetUniqueId"),
          call(
              "grow by nothing",
              g -> g.comm.grow(1, null, CommunicatorConfig.DEFAULT),
              "ncclCommGrow"),
          call(
              "join as a rank that is out of range",
              g ->
                  Communicator.join(
                      NcclUniqueId.create(), 2, 2, DEVICE, CommunicatorConfig.DEFAULT),
              "ncclCommGrow"),
          call("revoke", g -> g.comm.revoke(), "ncclCommRevoke"),
          call("suspend", g -> g.comm.suspend(), "ncclCommSuspend"),
          call("resume of what is not suspended", g -> g.comm.resume(), "ncclCommResume"),
          call(
              "memoryStatistic",
              g -> g.comm.memoryStatistic(MemoryStatistic.TOTAL),
              "ncclCommMemStats"),
          call("properties", g -> g.comm.properties(), "ncclCommQueryProperties"),
          call(
              "alltoAll",
              g -> g.comm.alltoAll(g.buffer, 0, g.buffer, ELEMENTS / 2, ELEMENTS / 2, g.stream),
              "ncclAlltoAll"),
          call("gather", g -> g.comm.gather(g.buffer, g.buffer, 0, g.stream), "ncclGather"),
          call("scatter", g -> g.comm.scatter(g.buffer, g.buffer, 0, g.stream), "ncclScatter"),
          onWindow("registerWindow", window -> {}, "ncclCommWindowRegister"),
          call(
              "registerWindow with strict ordering",
              g -> g.comm.registerWindow(g.buffer, NcclWindow.Flag.STRICT_ORDERING).close(),
              "ncclCommWindowRegister",
              "NCCL_WIN_STRICT_ORDERING"),
          onWindow("userPointer", NcclWindow::userPointer, "ncclWinGetUserPtr"),
          onWindow("lsaPointer", w -> w.lsaPointer(0, 0), "ncclGetLsaDevicePointer"),
          onWindow("peerPointer", w -> w.peerPointer(0, 0), "ncclGetPeerDevicePointer"),
          onWindow(
              "lsaMultimemPointer at no offset",
              w -> w.lsaMultimemPointer(-1),
              "ncclGetLsaMultimemDevicePointer"),
          call(
              "putSignal",
              g -> {
                try (NcclWindow window =
                    g.comm.registerWindow(g.buffer, NcclWindow.Flag.COLLECTIVE_SYMMETRIC)) {
                  g.comm.putSignal(g.buffer, 0, 1, 0, window, 0, g.stream);
                  g.stream.synchronize();
                }
              },
              "ncclCommWindowRegister",
              "ncclPutSignal"),
          call("signal to nobody", g -> g.comm.signal(1, g.stream), "ncclSignal"),
          call("waitSignal for nothing", g -> g.comm.waitSignal(0, 0, g.stream), "ncclWaitSignal"),
          call("teamWorld", g -> g.comm.teamWorld(), "ncclTeamWorld"),
          call("teamLsa", g -> g.comm.teamLsa(), "ncclTeamLsa"),
          call("teamRail", g -> g.comm.teamRail(), "ncclTeamRail"),
          call("rankToWorld", g -> g.comm.rankToWorld(ALONE, 0), "ncclTeamRankToWorld"),
          call("rankToLsa", g -> g.comm.rankToLsa(ALONE, 0), "ncclTeamRankToLsa"),
          call(
              "lsaPointer of a window",
              g -> {
                try (DeviceBuffer x =
                        DeviceBuffer.allocateForWindow(g.comm.device(), DataType.UINT8, 4096);
                    NcclWindow window = g.comm.registerWindow(x)) {
                  window.lsaPointer(0, 0);
                }
              },
              "ncclCommWindowRegister",
              "ncclGetLsaDevicePointer"),
          call("all parameters", g -> NcclParameters.all(), "ncclParamGetAllParameterKeys"),
          call(
              "one parameter", g -> NcclParameters.get("NCCL_DEBUG_FILE"), "ncclParamGetParameter"),
          call("LocalWorld of 9 ranks", g -> LocalWorld.open(9).close(), "9 ranks on 8 GPUs"),
          call(
              "allReduce of FLOAT8_E4M3",
              g -> {
                try (DeviceBuffer x = DeviceBuffer.allocate(DEVICE, DataType.FLOAT8_E4M3, 1)) {
                  g.comm.allReduce(x, x, ReduceOp.MAX, g.stream);
                  g.stream.synchronize();
                }
              },
              "FLOAT8_E4M3"),
          call(
              "createPreMulSum of FLOAT8_E5M2",
              g -> g.comm.createPreMulSum(DataType.FLOAT8_E5M2, 2).close(),
              "FLOAT8_E5M2"),
          withConfig("trafficClass", config().trafficClass(1)),
          withConfig("commName", config().name("x")),
          withConfig("collnetEnable", config().collnetEnable(false)),
          withConfig("CTAPolicy", config().ctaPolicy(CtaPolicy.EFFICIENCY)),
          withConfig("shrinkShare", config().shrinkShare(true)),
          withConfig("nvlsCTAs", config().nvlsCtas(1)),
          withConfig("nChannelsPerNetPeer", config().channelsPerNetPeer(2)),
          withConfig("nvlinkCentricSched", config().nvlinkCentricSched(true)),
          withConfig("graphUsageMode", config().graphUsageMode(1)),
          withConfig("numRmaCtx", config().numRmaCtx(1)),
          withConfig("maxP2pPeers", config().maxP2pPeers(1)),
          withConfig("graphStreamOrdering", config().graphStreamOrdering(true)));

  public static void main(String[] arguments) {
    TestRanks.open(2).close(); // ranks that have reduced: that works with every library
    for (Call call : CALLS) {
      System.out.println(CALL + call.name() + "\t" + outcome(call));
    }
  }

  private static String outcome(Call call) {
    try (CudaStream stream = CudaStream.create(DEVICE);
        DeviceBuffer buffer = DeviceBuffer.allocateForWindow(DEVICE, DataType.FLOAT32, ELEMENTS);
        Communicator comm = Communicator.create(NcclUniqueId.create(), 1, 0, DEVICE)) {
      Ground ground = new Ground(comm, stream, buffer);
      String first = attempt(call, ground);
      if (first.startsWith(UnsupportedByLibraryException.class.getSimpleName())) {
        String second = attempt(call, ground);
        if (!second.equals(first)) {
          return first + ", but then " + second;
        }
        comm.allReduce(buffer, buffer, ReduceOp.SUM, stream); // the refusal did no harm
      }
      stream.synchronize();
      return first;
    }
  }

  private static String attempt(Call call, Ground ground) {
    try {
      call.attempt().make(ground);
      return OK;
    } catch (Throwable t) {
      return (t.getClass().getSimpleName() + ": " + t.getMessage()).replace("\n", " | ");
    }
  }
}

// One start of a program with several ranks on a GPU, as short as it can be: what may hang in one of many starts is the
// first launch of a kernel behind another rank's that spins. Primes, runs every protocol in launches and in replays of
// a graph that is made then, and looks at the sums.
//
//   device_start_cuda [GPUS [RANKS]]
#include "cuda_world.h"

namespace {

constexpr size_t kCount = 5003;

void enqueue(const Rank &rank, uint32_t protocol, size_t count) {
  ncclFfmCall call = {};
  call.function = ncclFfmFunctionAllReduce;
  call.datatype = ncclFloat32;
  call.op = ncclSum;
  call.protocol = protocol;
  call.count = count;
  call.sendbuff = rank.send;
  call.recvbuff = rank.recv;
  SHIM(ncclFfmLaunch(&rank.comm, &call, rank.stream));
}

}  // namespace

int main(int argc, char **argv) {
  begin(argc, argv);
  const int nRanks = argc > 2 ? atoi(argv[2]) : 8;
  World world(nRanks, 20000 * kMs, kCount, [](const Rank &) {});
  uint64_t call = 0;
  for (uint32_t protocol : {ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
    world.fill(++call, 0, kCount);
    world.onEach([&](Rank &rank, int) { enqueue(rank, protocol, kCount); });
    world.verify("launch", call, &Rank::recv, 0, kCount, false);
    std::vector<cudaGraphExec_t> graphs;
    world.onEach([&](Rank &rank, int) {
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
      enqueue(rank, protocol, kCount);
      CUDA(cudaStreamEndCapture(rank.stream, &graph));
      CUDA(cudaGraphInstantiate(&exec, graph, 0));
      CUDA(cudaGraphDestroy(graph));
      graphs.push_back(exec);
    });
    world.fill(++call, 0, kCount);
    world.onEach([&](Rank &rank, int r) { CUDA(cudaGraphLaunch(graphs[r], rank.stream)); });
    world.verify("replay", call, &Rank::recv, 0, kCount, false);
    world.onEach([&](Rank &, int r) { CUDA(cudaGraphExecDestroy(graphs[r])); });
  }
  printf("%d ranks: %s\n", nRanks, failures == 0 ? "right" : "WRONG");
  return failures == 0 ? 0 : 1;
}

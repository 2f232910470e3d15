// A rank in a process of its own: the other half of process_test.cpp.
#ifndef NCCLFFM_TEST_CPU_PROCESS_RANK_H_
#define NCCLFFM_TEST_CPU_PROCESS_RANK_H_

#include <string>

namespace test {

/// Arguments: scenario, rank, number of ranks. The unique id comes from standard input, followed by one byte for each
/// permission to go on; one byte goes to standard output for each thing achieved. Returns the exit status.
int runAsRank(int argc, char **argv);

/// Runs one of the scenarios of ipc_test.cpp; false when it has none of this name.
bool runIpcScenario(const std::string &scenario, int rank, int nRanks);

}  // namespace test

#endif  // NCCLFFM_TEST_CPU_PROCESS_RANK_H_

// Processes that play ranks, as the test that starts them sees them and as they see themselves.
#ifndef NCCLFFM_TEST_CPU_RANK_PROCESS_H_
#define NCCLFFM_TEST_CPU_RANK_PROCESS_H_

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "world.h"

extern char **environ;

namespace test {

using Clock = std::chrono::steady_clock;

constexpr int kLongMs = 60000;  // for what must happen; a failure, not a delay

inline void writeAll(int fd, const void *data, size_t bytes) {
  CHECK_EQ(write(fd, data, bytes), static_cast<ssize_t>(bytes));
}

inline void readAll(int fd, void *data, size_t bytes) {
  auto *to = static_cast<char *>(data);
  while (bytes > 0) {
    pollfd ready = {fd, POLLIN, 0};
    CHECK_EQ(poll(&ready, 1, kLongMs), 1);
    const ssize_t got = read(fd, to, bytes);
    CHECK(got > 0);
    to += got;
    bytes -= static_cast<size_t>(got);
  }
}

/// A rank's process as seen by the test.
class RankProcess {
 public:
  RankProcess(const char *scenario, int rank, int nRanks) {
    int in[2];
    int out[2];
    CHECK_EQ(pipe2(in, O_CLOEXEC), 0);
    CHECK_EQ(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    const std::string rankText = std::to_string(rank);
    const std::string countText = std::to_string(nRanks);
    const char *arguments[] = {"/proc/self/exe", "--rank", scenario, rankText.c_str(), countText.c_str(), nullptr};
    CHECK_EQ(posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, const_cast<char **>(arguments), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
  }

  ~RankProcess() {
    close(to_);
    close(from_);
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  RankProcess(const RankProcess &) = delete;
  RankProcess &operator=(const RankProcess &) = delete;

  void give(const ncclUniqueId &id) { writeAll(to_, &id, sizeof(id)); }
  ncclUniqueId takeId() {
    ncclUniqueId id;
    take(&id, sizeof(id));
    return id;
  }
  void take(void *data, size_t bytes) { readAll(from_, data, bytes); }
  void goOn() { writeAll(to_, "g", 1); }
  void awaitMark() {
    char mark;
    readAll(from_, &mark, 1);
  }

  void killNow() { CHECK_EQ(kill(pid_, SIGKILL), 0); }

  /// Waits for the end; the exit status, or minus the signal.
  int end() {
    int status = 0;
    const auto deadline = Clock::now() + std::chrono::milliseconds(kLongMs);
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      CHECK(Clock::now() < deadline);
      poll(nullptr, 0, 2);
    }
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
};

using RankProcesses = std::vector<std::unique_ptr<RankProcess>>;

inline RankProcesses start(const char *scenario, int n) {
  RankProcesses ranks;
  for (int rank = 0; rank < n; ++rank) {
    ranks.push_back(std::make_unique<RankProcess>(scenario, rank, n));
  }
  return ranks;
}

inline void giveIdTo(const RankProcesses &ranks) {
  ncclUniqueId id;
  NCCL_OK(ncclGetUniqueId(&id));
  for (const auto &rank : ranks) {
    rank->give(id);
  }
}

// ---- The rank's side ----

inline ncclUniqueId idFromParent() {
  ncclUniqueId id;
  readAll(0, &id, sizeof(id));
  return id;
}

inline void mark() {
  writeAll(1, "m", 1);
}

inline void awaitPermission() {
  char byte;
  readAll(0, &byte, 1);
}

inline Rank join(const ncclUniqueId &id, int number, int nRanks) {
  Rank rank;
  rank.rank = number;
  rank.nRanks = nRanks;
  CUDA_OK(cudaSetDevice(number));
  // Shifts this process's heap, so that equal offsets in two processes are no accident.
  (void)deviceArray<char>(4096u * static_cast<size_t>(1 + number));
  NCCL_OK(ncclCommInitRank(&rank.comm, nRanks, id, number));
  rank.stream = newStream();
  return rank;
}

inline void leave(const Rank &rank) {
  NCCL_OK(ncclCommDestroy(rank.comm));
  CUDA_OK(cudaStreamDestroy(rank.stream));
}

}  // namespace test

#endif  // NCCLFFM_TEST_CPU_RANK_PROCESS_H_

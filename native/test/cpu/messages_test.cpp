// A packet that is sent just before its socket is closed arrives.
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "messages.h"

using namespace ncclffm::cpu;

// The receiver asks while the sender sends and closes. Of a kernel that answers "the end" too early, one round in
// several thousand shows it.
TEST(lastPacketBeforeTheEndArrives) {
  constexpr int kRounds = 60000;
  constexpr std::chrono::seconds kAtMost{10};  // they spin, so a busy machine makes rounds slow
  std::atomic<int> begun{-1};                  // rounds
  std::atomic<int> ended{-1};
  std::atomic<int> senderSocket{-1};
  std::thread sender([&] {
    for (int round = 0; round < kRounds; ++round) {
      while (begun.load() < round) {
      }
      if (begun.load() == kRounds) {
        return;
      }
      for (int delay = 0; delay < round % 64; ++delay) {
        (void)senderSocket.load();  // the two meet at another place in every round
      }
      {
        const Fd socket(senderSocket.load());
        (void)sendPacket(socket.get(), &round, sizeof(round), {});
      }
      ended.store(round);
    }
  });
  int lost = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds && std::chrono::steady_clock::now() - start < kAtMost; ++round) {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    const Fd socket(ends[0]);
    senderSocket.store(ends[1]);
    begun.store(round);
    int packet = -1;
    std::vector<Fd> fds;
    long bytes;
    do {
      bytes = receivePacket(socket.get(), &packet, sizeof(packet), &fds);
    } while (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
    lost += bytes == static_cast<long>(sizeof(packet)) && packet == round ? 0 : 1;
    while (ended.load() != round) {
    }
  }
  begun.store(kRounds);
  sender.join();
  CHECK_EQ(lost, 0);
}

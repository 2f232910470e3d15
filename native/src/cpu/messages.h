// The two messages of the rendezvous, and sending packets with descriptors over a Unix socket.
#ifndef NCCLFFM_CPU_MESSAGES_H_
#define NCCLFFM_CPU_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "control.h"
#include "fd.h"

namespace ncclffm::cpu {

/// Rank to root, with the descriptors of the process's heap and lifeline.
struct Hello {
  uint32_t magic;
  int32_t nRanks;
  int32_t rank;
  int32_t device;
  int32_t pid;
};

constexpr uint32_t kHelloMagic = 0x4e464631;  // grows with the protocol: processes with other builds are refused

/// Root to rank. On success with the descriptors {control, heap of process 0, lifeline of process 0, heap of process 1
/// ...}.
struct Welcome {
  int32_t result;  // an ncclResult_t
  int32_t processes;
  char text[512];           // why not
  int32_t pids[kMaxRanks];  // by process
  struct {
    int32_t process;
    int32_t device;
  } ranks[kMaxRanks];
};

/// One packet. False with errno set when the peer is gone or the system refuses.
bool sendPacket(int socket, const void *data, size_t bytes, const std::vector<int> &fds);

/// One packet that has arrived: its length, 0 at the end of the connection, -1 with errno set. fds gets what came
/// along.
long receivePacket(int socket, void *data, size_t bytes, std::vector<Fd> *fds);

/// True when the process at the other end belongs to the same user: an abstract socket has no file permissions.
bool sameUser(int socket);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_MESSAGES_H_

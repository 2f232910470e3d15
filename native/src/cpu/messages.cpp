// Packets with descriptors (SCM_RIGHTS) over Unix sockets of type SOCK_SEQPACKET.
#include "messages.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ncclffm::cpu {

namespace {

constexpr size_t kMostFds = 1 + 2 * kMaxRanks;  // the kernel's limit for one packet is 253

long receiveOnce(int socket, msghdr *message) {
  long received;
  do {
    received = recvmsg(socket, message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  return received;
}

}  // namespace

bool sendPacket(int socket, const void *data, size_t bytes, const std::vector<int> &fds) {
  iovec part = {const_cast<void *>(data), bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char rights[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = rights;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  long sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<long>(bytes);
}

long receivePacket(int socket, void *data, size_t bytes, std::vector<Fd> *fds) {
  iovec part = {data, bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char rights[CMSG_SPACE(kMostFds * sizeof(int))];
  message.msg_control = rights;
  message.msg_controllen = sizeof(rights);
  const msghdr empty = message;
  long received = receiveOnce(socket, &message);
  if (received == 0) {
    // Linux looks for a packet first and for the end second: one that is sent between, just before the end, is still
    // there. After the end nothing more can come.
    message = empty;
    received = receiveOnce(socket, &message);
  }
  if (received < 0) {
    return received;
  }
  for (cmsghdr *header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
  return received;
}

bool sameUser(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

}  // namespace ncclffm::cpu

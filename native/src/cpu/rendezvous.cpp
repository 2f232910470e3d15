// The root's side (one service thread per process for all its ids) and the rank's side of the rendezvous.
#include "rendezvous.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "error.h"
#include "heap.h"
#include "messages.h"
#include "thread.h"

namespace ncclffm::cpu {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kIdMagic[8] = {'N', 'C', 'C', 'L', 'F', 'F', 'M', '1'};
constexpr size_t kTokenBytes = 16;

/// The abstract address that an id stands for.
struct Address {
  sockaddr_un name = {};
  socklen_t length = 0;
};

Address addressOf(const ncclUniqueId &id) {
  Address address;
  address.name.sun_family = AF_UNIX;
  char *path = address.name.sun_path + 1;  // a leading NUL: abstract
  size_t used = static_cast<size_t>(std::snprintf(path, sizeof(address.name.sun_path) - 1, "ncclffm-"));
  for (size_t i = 0; i < kTokenBytes; ++i) {
    const auto byte = static_cast<unsigned char>(id.internal[sizeof(kIdMagic) + i]);
    used += static_cast<size_t>(std::snprintf(path + used, 3, "%02x", byte));
  }
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + used);
  return address;
}

/// A rank's connection at the root.
struct Client {
  Fd socket;
  std::optional<Hello> hello;  // once it has introduced itself
  Fd heap;
  Fd lifeline;
};

Fd newControlSegment() {
  Fd fd(memfd_create("ncclffm-control", MFD_CLOEXEC));
  if (!fd.open() || ftruncate(fd.get(), sizeof(Control)) != 0) {
    throw NcclFailure(ncclSystemError, "creating the control segment" + systemReason());
  }
  return fd;
}

/// One id, until all its ranks have come or failed.
class Root {
 public:
  explicit Root(Fd listener) : listener_(std::move(listener)) {}

  /// Handles what has arrived and what is overdue. False when there is nothing more to do.
  bool advance() {
    accept();
    for (Client &client : clients_) {
      if (!finished_) {
        read(client);
      }
    }
    dropStrangers();
    if (!finished_ && nRanks_ > 0 && joined() == nRanks_) {
      welcomeAll();
    } else if (!finished_ && deadline_ && Clock::now() >= *deadline_) {
      refuseAll(ncclSystemError, format("ncclCommInitRank: rank %s of %d did not come within %lld ms",
                                        missing().c_str(), nRanks_, static_cast<long long>(limit_.count())));
    }
    if (finished_) {
      turnLateOnesAway();
    }
    return !finished_;
  }

  void pollFor(std::vector<pollfd> *fds) const {
    fds->push_back({listener_.get(), POLLIN, 0});
    for (const Client &client : clients_) {
      fds->push_back({client.socket.get(), POLLIN, 0});
    }
  }

  std::optional<Clock::time_point> deadline() const { return deadline_; }

 private:
  void accept() {
    while (true) {
      Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.open()) {
        return;
      }
      if (sameUser(socket.get())) {
        clients_.push_back(Client{std::move(socket), std::nullopt, Fd(), Fd()});
      }
    }
  }

  void read(Client &client) {
    Hello hello;
    std::vector<Fd> fds;
    const long bytes = receivePacket(client.socket.get(), &hello, sizeof(hello), &fds);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    }
    if (client.hello) {  // it has nothing more to say, so it has gone
      refuseAll(ncclRemoteError, format("ncclCommInitRank: rank %d (process %d) ended while it waited for the others",
                                        client.hello->rank, client.hello->pid));
      return;
    }
    if (bytes != sizeof(hello) || hello.magic != kHelloMagic || fds.size() != 2 || hello.nRanks < 1 ||
        hello.nRanks > kMaxRanks || hello.rank < 0 || hello.rank >= hello.nRanks) {
      client.socket = Fd();
      return;
    }
    admit(client, hello, std::move(fds));
  }

  void admit(Client &client, const Hello &hello, std::vector<Fd> fds) {
    if (nRanks_ == 0) {
      nRanks_ = hello.nRanks;
      limit_ = waitLimit();
      deadline_ = Clock::now() + limit_;
    }
    const bool taken = std::any_of(clients_.begin(), clients_.end(),
                                   [&](const Client &other) { return other.hello && other.hello->rank == hello.rank; });
    client.hello = hello;
    client.heap = std::move(fds[0]);
    client.lifeline = std::move(fds[1]);
    if (hello.nRanks != nRanks_) {
      refuseAll(ncclInvalidUsage, format("ncclCommInitRank: rank %d says nranks = %d, the first rank said %d",
                                         hello.rank, hello.nRanks, nRanks_));
    } else if (taken) {
      refuseAll(ncclInvalidUsage, format("ncclCommInitRank: rank %d came twice for the same unique id", hello.rank));
    }
  }

  void dropStrangers() {
    clients_.erase(
        std::remove_if(clients_.begin(), clients_.end(), [](const Client &client) { return !client.socket.open(); }),
        clients_.end());
  }

  int joined() const {
    return static_cast<int>(
        std::count_if(clients_.begin(), clients_.end(), [](const Client &client) { return client.hello.has_value(); }));
  }

  std::string missing() const {
    std::string text;
    for (int rank = 0; rank < nRanks_; ++rank) {
      const bool here = std::any_of(clients_.begin(), clients_.end(),
                                    [&](const Client &client) { return client.hello && client.hello->rank == rank; });
      if (!here) {
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    return text;
  }

  void welcomeAll() {
    Welcome welcome = {};
    const Fd control = newControlSegment();
    std::vector<int> fds = {control.get()};
    std::map<std::pair<dev_t, ino_t>, int> processOf;  // by the identity of the heap
    for (const Client &client : clients_) {
      if (!client.hello) {
        continue;
      }
      struct stat heap;
      if (fstat(client.heap.get(), &heap) != 0) {
        throw NcclFailure(ncclSystemError, "fstat of a peer's heap" + systemReason());
      }
      const auto [entry, isNew] = processOf.emplace(std::make_pair(heap.st_dev, heap.st_ino), welcome.processes);
      if (isNew) {
        welcome.pids[welcome.processes++] = client.hello->pid;
        fds.push_back(client.heap.get());
        fds.push_back(client.lifeline.get());
      }
      welcome.ranks[client.hello->rank].process = entry->second;
      welcome.ranks[client.hello->rank].device = client.hello->device;
    }
    for (const Client &client : clients_) {
      // A rank that cannot be told has gone; the others learn that from its lifeline.
      if (client.hello) {
        (void)sendPacket(client.socket.get(), &welcome, sizeof(welcome), fds);
      }
    }
    finished_ = true;
  }

  void refuseAll(ncclResult_t result, const std::string &text) {
    const Welcome refusal = refusalOf(result, text);
    for (const Client &client : clients_) {
      if (client.hello) {
        (void)sendPacket(client.socket.get(), &refusal, sizeof(refusal), {});
      }
    }
    finished_ = true;
  }

  // Those who connected just before the meeting point closes; anybody later is refused by the system.
  void turnLateOnesAway() {
    accept();
    const Welcome refusal = refusalOf(
        ncclInvalidUsage, "ncclCommInitRank: this unique id was already used; make a new one with ncclGetUniqueId");
    for (const Client &client : clients_) {
      if (!client.hello) {
        (void)sendPacket(client.socket.get(), &refusal, sizeof(refusal), {});
      }
    }
  }

  static Welcome refusalOf(ncclResult_t result, const std::string &text) {
    Welcome refusal = {};
    refusal.result = result;
    std::snprintf(refusal.text, sizeof(refusal.text), "%s", text.c_str());
    return refusal;
  }

  Fd listener_;
  std::vector<Client> clients_;
  int nRanks_ = 0;  // as the first rank said; 0 = nobody has come
  std::chrono::milliseconds limit_{0};
  std::optional<Clock::time_point> deadline_;
  bool finished_ = false;
};

/// Serves the roots of this process, on one thread that starts with the first.
class Service {
 public:
  static Service &instance() {
    static auto *service = new Service;  // leaked: its thread runs until the process is gone
    return *service;
  }

  void add(std::unique_ptr<Root> root) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      added_.push_back(std::move(root));
    }
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));  // full only when a wake-up is pending anyway
  }

 private:
  Service() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_.open()) {
      throw NcclFailure(ncclSystemError, "eventfd" + systemReason());
    }
    startThread("ncclffm-root", [this] { serve(); });
  }

  void serve() {
    while (true) {
      uint64_t count;
      (void)!read(wake_.get(), &count, sizeof(count));
      {
        std::lock_guard<std::mutex> lock(mutex_);
        std::move(added_.begin(), added_.end(), std::back_inserter(roots_));
        added_.clear();
      }
      roots_.erase(std::remove_if(roots_.begin(), roots_.end(), [](const auto &root) { return !advance(*root); }),
                   roots_.end());
      std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}};
      std::optional<Clock::time_point> next;
      for (const auto &root : roots_) {
        root->pollFor(&fds);
        if (root->deadline() && (!next || *root->deadline() < *next)) {
          next = root->deadline();
        }
      }
      poll(fds.data(), fds.size(), next ? millisecondsUntil(*next) : -1);
    }
  }

  // A root that the system refuses something closes its connections, which its ranks report.
  static bool advance(Root &root) {
    try {
      return root.advance();
    } catch (...) {
      return false;
    }
  }

  static int millisecondsUntil(Clock::time_point time) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(time - Clock::now()).count() + 1;
    return static_cast<int>(std::max<int64_t>(left, 0));
  }

  Fd wake_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Root>> added_;
  std::vector<std::unique_ptr<Root>> roots_;  // the thread's own
};

[[noreturn]] void throwNobodyAnswers() {
  throw NcclFailure(ncclInvalidUsage,
                    "ncclCommInitRank: nobody answers for this unique id: it was already used, or the process that "
                    "created it has ended; make a new one with ncclGetUniqueId");
}

Fd newSocket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.open()) {
    throw NcclFailure(ncclSystemError, "creating a socket" + systemReason());
  }
  return fd;
}

}  // namespace

std::chrono::milliseconds waitLimit() {
  const char *text = std::getenv("NCCLFFM_CPU_TIMEOUT_MS");
  const long value = text == nullptr ? 0 : std::strtol(text, nullptr, 10);
  return std::chrono::milliseconds(value > 0 ? value : 60000);
}

ncclUniqueId openRendezvous() {
  ncclUniqueId id = {};
  std::memcpy(id.internal, kIdMagic, sizeof(kIdMagic));
  if (getrandom(id.internal + sizeof(kIdMagic), kTokenBytes, 0) != static_cast<ssize_t>(kTokenBytes)) {
    throw NcclFailure(ncclSystemError, "ncclGetUniqueId: no random bytes" + systemReason());
  }
  Fd listener = newSocket();
  const Address address = addressOf(id);
  if (bind(listener.get(), reinterpret_cast<const sockaddr *>(&address.name), address.length) != 0 ||
      listen(listener.get(), 2 * kMaxRanks) != 0) {
    throw NcclFailure(ncclSystemError, "ncclGetUniqueId: opening the meeting point" + systemReason());
  }
  Service::instance().add(std::make_unique<Root>(std::move(listener)));
  return id;
}

static_assert(sizeof(IdToken) == kTokenBytes);

IdToken tokenOf(const ncclUniqueId &id) {
  IdToken token;
  std::memcpy(token.data(), id.internal + sizeof(kIdMagic), kTokenBytes);
  return token;
}

ncclUniqueId idOf(const IdToken &token) {
  ncclUniqueId id = {};
  std::memcpy(id.internal, kIdMagic, sizeof(kIdMagic));
  std::memcpy(id.internal + sizeof(kIdMagic), token.data(), kTokenBytes);
  return id;
}

Join::Join(const ncclUniqueId &id, int nRanks, int rank, int device)
    : nRanks_(nRanks), rank_(rank), socket_(newSocket()) {
  if (std::memcmp(id.internal, kIdMagic, sizeof(kIdMagic)) != 0) {
    throw NcclFailure(ncclInvalidArgument,
                      "ncclCommInitRank: the unique id was not made by ncclGetUniqueId of this library");
  }
  const Address address = addressOf(id);
  if (connect(socket_.get(), reinterpret_cast<const sockaddr *>(&address.name), address.length) != 0) {
    if (errno == ECONNREFUSED) {
      throwNobodyAnswers();
    }
    throw NcclFailure(ncclSystemError, "ncclCommInitRank: reaching the root" + systemReason());
  }
  if (!sameUser(socket_.get())) {
    throw NcclFailure(ncclSystemError, "ncclCommInitRank: the meeting point belongs to another user");
  }
  const Hello hello = {kHelloMagic, nRanks, rank, device, getpid()};
  if (!sendPacket(socket_.get(), &hello, sizeof(hello), {Heap::instance().fd(), lifelineFd()})) {
    if (errno == EPIPE || errno == ECONNRESET) {  // the meeting point closed after it let this rank connect
      throwNobodyAnswers();
    }
    throw NcclFailure(ncclSystemError, "ncclCommInitRank: introducing the rank" + systemReason());
  }
}

Membership Join::finish(const std::atomic<bool> &abandoned) {
  // Longer than the root's own limit, so that the root's answer, which names the missing ranks, comes first.
  const auto deadline = Clock::now() + waitLimit() + std::chrono::seconds(2);
  Welcome welcome;
  std::vector<Fd> fds;
  long bytes = -1;
  while (bytes < 0) {
    bytes = receivePacket(socket_.get(), &welcome, sizeof(welcome), &fds);
    if (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ECONNRESET) {
      throw NcclFailure(ncclSystemError, "ncclCommInitRank: hearing from the root" + systemReason());
    }
    if (bytes < 0 && errno == ECONNRESET) {  // the meeting point closed without reading the introduction
      throwNobodyAnswers();
    }
    if (bytes == 0) {
      throw NcclFailure(
          ncclRemoteError,
          format("ncclCommInitRank: the process that created the unique id ended before rank %d was admitted", rank_));
    }
    if (bytes < 0) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) {
        throw NcclFailure(ncclSystemError, format("ncclCommInitRank: no answer from the root for rank %d", rank_));
      }
      if (abandoned.load()) {
        throw NcclFailure(ncclInternalError, format("ncclCommInitRank: rank %d was aborted meanwhile", rank_));
      }
      constexpr int64_t kSliceMs = 20;
      pollfd socket = {socket_.get(), POLLIN, 0};
      poll(&socket, 1, static_cast<int>(std::min<int64_t>(left, kSliceMs)));
    }
  }
  if (bytes != sizeof(welcome)) {
    throw NcclFailure(ncclInternalError, "ncclCommInitRank: malformed answer from the root");
  }
  if (welcome.result != ncclSuccess) {
    throw NcclFailure(static_cast<ncclResult_t>(welcome.result), welcome.text);
  }
  if (fds.size() != 1 + 2 * static_cast<size_t>(welcome.processes)) {
    throw NcclFailure(ncclSystemError,
                      "ncclCommInitRank: descriptors were lost; is the open-file limit (ulimit -n) reached?");
  }
  Membership membership;
  membership.control = Mapping::of(std::move(fds[0]));
  for (int i = 0; i < welcome.processes; ++i) {
    membership.processes.push_back(
        PeerProcess::open(std::move(fds[1 + 2 * i]), std::move(fds[2 + 2 * i]), welcome.pids[i]));
  }
  for (int rank = 0; rank < nRanks_; ++rank) {
    membership.ranks.push_back({welcome.ranks[rank].process, welcome.ranks[rank].device});
  }
  socket_ = Fd();
  return membership;
}

}  // namespace ncclffm::cpu

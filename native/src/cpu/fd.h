// A file descriptor with an owner.
#ifndef NCCLFFM_CPU_FD_H_
#define NCCLFFM_CPU_FD_H_

#include <unistd.h>

#include <utility>

namespace ncclffm::cpu {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_FD_H_

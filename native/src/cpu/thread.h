// Threads of the backend: detached, named, and deaf to asynchronous signals.
#ifndef NCCLFFM_CPU_THREAD_H_
#define NCCLFFM_CPU_THREAD_H_

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace ncclffm::cpu {

/// Starts a detached thread, so that process exit never waits for it. Signals meant for the process (the host may be a
/// JVM) are blocked in it. The synchronous ones stay open: host functions may be Java upcalls, and the JVM needs
/// SIGSEGV for its safepoints and null checks. name has at most 15 characters.
template <class Body>
void startThread(const char *name, Body body) {
  sigset_t blocked;
  sigset_t previous;
  sigfillset(&blocked);
  for (int synchronous : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) {
    sigdelset(&blocked, synchronous);
  }
  pthread_sigmask(SIG_SETMASK, &blocked, &previous);
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name);
    thread.detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_THREAD_H_

// What a process holds: descriptors, threads, and files in /dev/shm.
#ifndef NCCLFFM_TEST_CPU_RESOURCES_H_
#define NCCLFFM_TEST_CPU_RESOURCES_H_

#include <dirent.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "check.h"

namespace test {

inline std::set<std::string> listing(const char *folder) {
  std::set<std::string> names;
  DIR *directory = opendir(folder);
  CHECK(directory != nullptr);
  while (const dirent *entry = readdir(directory)) {
    names.insert(entry->d_name);
  }
  closedir(directory);
  return names;
}

struct Resources {
  size_t descriptors;
  size_t threads;

  static Resources now() { return {listing("/proc/self/fd").size(), listing("/proc/self/task").size()}; }

  /// Detached workers end soon after their streams: gives them 10 s to be gone, then compares with now().
  void expectAtMost(const Resources &more) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    Resources current = now();
    while ((current.descriptors > descriptors + more.descriptors || current.threads > threads + more.threads) &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
      current = now();
    }
    if (current.descriptors > descriptors + more.descriptors || current.threads > threads + more.threads) {
      fail(__FILE__, __LINE__,
           "descriptors " + std::to_string(descriptors) + " -> " + std::to_string(current.descriptors) + ", threads " +
               std::to_string(threads) + " -> " + std::to_string(current.threads));
    }
  }
};

}  // namespace test

#endif  // NCCLFFM_TEST_CPU_RESOURCES_H_

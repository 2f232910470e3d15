// The rules and their counters.
#include "fault.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "error.h"

namespace ncclffm::cpu {

namespace {

struct Rule {
  std::optional<int> result;
  long after = 0;
  long times = -1;  // unlimited
  int delayMs = 0;
  int lateMs = 0;
  long calls = 0;  // so far
};

using Rules = std::map<std::string, Rule, std::less<>>;  // by function

struct Table {
  std::mutex mutex;
  Rules rules;
  std::atomic<bool> any{false};
};

[[noreturn]] void refuse(const std::string &part, const char *why) {
  throw NcclFailure(ncclInvalidArgument, format("fault rule \"%s\": %s", part.c_str(), why));
}

int numberOf(const std::string &part, const std::string &text) {
  char *end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0 || value > 1000000) {
    refuse(part, "a value is not a number from 0 to 1000000");
  }
  return static_cast<int>(value);
}

/// Calls use(piece) for every non-empty piece between separators.
template <class Use>
void forEachPiece(const std::string &text, char separator, Use use) {
  size_t start = 0;
  while (start <= text.size()) {
    const size_t end = std::min(text.find(separator, start), text.size());
    if (end > start) {
      use(text.substr(start, end - start));
    }
    start = end + 1;
  }
}

Rules parse(const std::string &text) {
  Rules rules;
  forEachPiece(text, ';', [&](const std::string &part) {
    const size_t colon = part.find(':');
    if (colon == std::string::npos || colon == 0) {
      refuse(part, "must be function:key=value,...");
    }
    Rule rule;
    forEachPiece(part.substr(colon + 1), ',', [&](const std::string &setting) {
      const size_t equals = std::min(setting.find('='), setting.size());
      const std::string key = setting.substr(0, equals);
      const int value = numberOf(part, setting.substr(std::min(equals + 1, setting.size())));
      if (key == "result") {
        rule.result = value;
      } else if (key == "after") {
        rule.after = value;
      } else if (key == "times") {
        rule.times = value;
      } else if (key == "delay_ms") {
        rule.delayMs = value;
      } else if (key == "late_ms") {
        rule.lateMs = value;
      } else {
        refuse(part, "the keys are result, after, times, delay_ms, late_ms");
      }
    });
    rules[part.substr(0, colon)] = rule;
  });
  return rules;
}

void replace(Table *table, Rules rules) {
  std::lock_guard<std::mutex> lock(table->mutex);
  table->rules = std::move(rules);
  table->any.store(!table->rules.empty());
}

Table &table() {
  static Table *const all = [] {
    auto *created = new Table;  // leaked, as every table of the backend
    const char *text = std::getenv("NCCLFFM_CPU_FAULTS");
    try {
      replace(created, parse(text == nullptr ? "" : text));
    } catch (const NcclFailure &failure) {
      std::fprintf(stderr, "ncclffm: NCCLFFM_CPU_FAULTS is ignored: %s\n", failure.what());
    }
    return created;
  }();
  return *all;
}

}  // namespace

std::optional<int> injectedFault(const char *function) {
  if (!table().any.load(std::memory_order_relaxed)) {
    return std::nullopt;
  }
  int delayMs = 0;
  std::optional<int> result;
  {
    std::lock_guard<std::mutex> lock(table().mutex);
    const auto found = table().rules.find(std::string_view(function));
    if (found == table().rules.end()) {
      return std::nullopt;
    }
    Rule &rule = found->second;
    const long number = rule.calls++;
    delayMs = rule.delayMs;
    if (number >= rule.after && (rule.times < 0 || number < rule.after + rule.times)) {
      result = rule.result;
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delayMs));
  return result;
}

int injectedLateness(const char *function) {
  if (!table().any.load(std::memory_order_relaxed)) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().rules.find(std::string_view(function));
  return found == table().rules.end() ? 0 : found->second.lateMs;
}

}  // namespace ncclffm::cpu

using namespace ncclffm::cpu;

ncclResult_t ncclFfmCpuSetFaults(const char *rules) {
  return guardNccl("ncclFfmCpuSetFaults", [&] {
    replace(&table(), parse(rules == nullptr ? "" : rules));
    return ncclSuccess;
  });
}

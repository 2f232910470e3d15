// Opaque handles: numbers that are never reused, so that a closed or foreign handle is recognised instead of
// dereferenced.
#ifndef NCCLFFM_CPU_HANDLES_H_
#define NCCLFFM_CPU_HANDLES_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ncclffm::cpu {

/// Maps handles of type Handle (a pointer to an incomplete type) to shared objects. Thread-safe.
template <class Handle, class Object>
class Handles {
 public:
  /// Handles count upwards from a number of this kind of object, so that no two kinds share one.
  explicit Handles(uintptr_t first) : next_(first) {}

  Handle add(std::shared_ptr<Object> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_ += 16;
    objects_[next_] = std::move(object);
    return reinterpret_cast<Handle>(next_);
  }

  /// The object, or null when the handle is not open.
  std::shared_ptr<Object> find(Handle handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }

  /// Closes the handle; the object, or null when it was not open.
  std::shared_ptr<Object> remove(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == objects_.end()) {
      return nullptr;
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  std::vector<std::shared_ptr<Object>> all() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Object>> result;
    result.reserve(objects_.size());
    for (const auto &entry : objects_) {
      result.push_back(entry.second);
    }
    return result;
  }

  /// Closes every handle whose object the predicate accepts.
  template <class Predicate>
  void removeIf(Predicate predicate) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = objects_.begin(); entry != objects_.end();) {
      entry = predicate(*entry->second) ? objects_.erase(entry) : std::next(entry);
    }
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uintptr_t, std::shared_ptr<Object>> objects_;
  uintptr_t next_;
};

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_HANDLES_H_

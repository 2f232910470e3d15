// Checks that print their values, and test cases that a program runs by name.
#ifndef NCCLFFM_TEST_CPU_CHECK_H_
#define NCCLFFM_TEST_CPU_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace test {

struct Case {
  const char *name;
  void (*run)();
};

inline std::vector<Case> &cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char *name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char *file, int line, const std::string &text) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  std::_Exit(1);  // other threads may be waiting for the one that failed
}

template <class A, class B>
void checkEqual(const char *file, int line, const char *expression, const A &got, const B &want,
                const std::string &context) {
  if (!(got == want)) {
    std::ostringstream text;
    text << expression << " is " << got << ", expected " << want;
    if (!context.empty()) {
      text << " (" << context << ")";
    }
    fail(file, line, text.str());
  }
}

}  // namespace test

// TEST lines start at column 0: CMake reads the names of the cases from them.
#define TEST(name)                                            \
  static void name();                                         \
  static test::Registration registration_##name(#name, name); \
  static void name()

#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) {                                     \
      test::fail(__FILE__, __LINE__, "false: " #condition); \
    }                                                       \
  } while (false)

#define CHECK_EQ(got, want) test::checkEqual(__FILE__, __LINE__, #got, got, want, "")
#define CHECK_EQ_IN(got, want, context) test::checkEqual(__FILE__, __LINE__, #got, got, want, context)

#define CUDA_OK(call) \
  test::checkEqual(__FILE__, __LINE__, #call, static_cast<int>(call), 0, cudaGetErrorName(cudaPeekAtLastError()))
#define NCCL_OK(call) test::checkEqual(__FILE__, __LINE__, #call, static_cast<int>(call), 0, ncclGetLastError(nullptr))

#define CHECK_CONTAINS(text, part)                                                                           \
  do {                                                                                                       \
    const std::string checked_ = (text);                                                                     \
    if (checked_.find(part) == std::string::npos) {                                                          \
      test::fail(__FILE__, __LINE__, "\"" + checked_ + "\" does not contain \"" + std::string(part) + "\""); \
    }                                                                                                        \
  } while (false)

#endif  // NCCLFFM_TEST_CPU_CHECK_H_

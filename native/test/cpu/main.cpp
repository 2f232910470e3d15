// Runs one test case by name, or serves as a rank of a multi-process test (see process_test.cpp).
#include <cstring>

#include "check.h"
#include "process_rank.h"

int main(int argc, char **argv) {
  if (argc > 2 && std::strcmp(argv[1], "--rank") == 0) {
    return test::runAsRank(argc - 2, argv + 2);
  }
  for (const test::Case &test : test::cases()) {
    if (argc == 2 && std::strcmp(argv[1], test.name) == 0) {
      test.run();
      std::printf("%s passed\n", test.name);
      return 0;
    }
  }
  std::fprintf(stderr, "usage: %s CASE, with CASE one of\n", argv[0]);
  for (const test::Case &test : test::cases()) {
    std::fprintf(stderr, "  %s\n", test.name);
  }
  return 2;
}

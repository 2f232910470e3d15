// Window arithmetic and the pattern, as host code: the bounds against 128-bit arithmetic, the kernels' bodies against a
// byte by byte definition.
#include <random>
#include <set>

#include "harness.h"  // first: it sets up the library

#include "../../include/ncclffm/impl/lsa_pattern.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250412;
constexpr uint64_t kMax = UINT64_MAX;

void *at(uint64_t address) {
  return reinterpret_cast<void *>(address);
}

void addressesAreNullUnlessEveryByteIsInside() {
  std::mt19937_64 random(kSeed);
  const uint64_t corners[] = {0, 1, 2, 63, 64, 65, 4096, uint64_t{1} << 63, kMax - 4096, kMax - 64, kMax - 1, kMax};
  auto pick = [&] {
    uint64_t corner = corners[random() % (sizeof corners / sizeof *corners)];
    return random() % 4 == 0 ? random() : corner + random() % 3 - 1;
  };
  int inside = 0;
  for (int i = 0; i < 2000000; ++i) {
    const LsaWindow window = {at(pick()), pick(), nullptr};
    const uint64_t offset = pick(), length = pick();
    using Wide = unsigned __int128;
    const Wide base = reinterpret_cast<uintptr_t>(window.base);
    const bool valid = base != 0 && base + window.bytes <= kMax && Wide{offset} + length <= window.bytes;
    void *expected = valid ? at(reinterpret_cast<uintptr_t>(window.base) + offset) : nullptr;
    void *got = lsaAddress(window, offset, length);
    check(got == expected, "seed %llu: window %p of %llu bytes, offset %llu, length %llu: %p, not %p",
          static_cast<unsigned long long>(kSeed), window.base, static_cast<unsigned long long>(window.bytes),
          static_cast<unsigned long long>(offset), static_cast<unsigned long long>(length), got, expected);
    inside += valid;
  }
  check(inside > 10000, "only %d of the cases were inside", inside);
}

void alignmentLooksAtAddressAndLength() {
  for (uint64_t alignment : {uint64_t{1}, uint64_t{8}, kLsaVectorBytes, kLsaLineBytes}) {
    for (uint64_t base : {uint64_t{4096}, uint64_t{4096 + 16}, uint64_t{4096 + 1}}) {
      for (uint64_t offset : {0u, 1u, 8u, 15u, 16u, 112u, 128u}) {
        for (uint64_t length : {0u, 1u, 16u, 128u, 136u}) {
          const bool expected = (base + offset) % alignment == 0 && length % alignment == 0;
          check(isLsaAligned({at(base), 1 << 20, nullptr}, offset, length, alignment) == expected,
                "base %llu, offset %llu, length %llu, alignment %llu", static_cast<unsigned long long>(base),
                static_cast<unsigned long long>(offset), static_cast<unsigned long long>(length),
                static_cast<unsigned long long>(alignment));
        }
      }
    }
  }
}

void wordsOfThePatternAreDistinct() {
  std::set<uint64_t> words;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    for (uint64_t offset = 0; offset < 8192; offset += 8) words.insert(lsaPattern(seed, offset));
  }
  check(words.size() == 64 * 1024, "%zu different words", words.size());
}

// A group of several threads, so that shares of threads and blocks are tried as on a GPU.
struct CoopOf {
  uint32_t threadRank, threads;
  uint32_t rank() const { return threadRank; }
  uint32_t size() const { return threads; }
};

// Every base and length modulo the vector, any offset, any number of threads and blocks: exactly the range is written,
// with the bytes that the pattern has there; and one wrong byte is found where it is.
void kernelsWriteAndCheckExactlyTheRange() {
  std::mt19937_64 random(kSeed);
  constexpr unsigned char kUntouched = 0xa5;
  constexpr uint64_t kRoom = 1024;
  for (int i = 0; i < 20000; ++i) {
    alignas(128) unsigned char memory[kRoom];
    memset(memory, kUntouched, sizeof memory);
    const uint64_t base = random() % 32, offset = random() % 64;
    const uint64_t bytes = 1 + random() % (random() % 2 == 0 ? 40 : kRoom - 96);
    const uint64_t seed = random();
    const LsaWindow window = {memory + base, kRoom - base, nullptr};
    const uint32_t threads = 1 + random() % 7;
    const int blocks = 1 + static_cast<int>(random() % 3);
    auto run = [&](auto body) {
      for (int block = 0; block < blocks; ++block) {
        for (uint32_t thread = 0; thread < threads; ++thread) body(CoopOf{thread, threads}, block);
      }
    };
    run([&](CoopOf coop, int block) { writeLsaPattern(coop, block, blocks, window, offset, bytes, seed); });
    for (uint64_t k = 0; k < kRoom; ++k) {
      const bool written = k >= base + offset && k < base + offset + bytes;
      const uint64_t o = k - base;
      const unsigned char expected =
          written ? static_cast<unsigned char>(lsaPattern(seed, o - o % 8) >> (o % 8 * 8)) : kUntouched;
      check(memory[k] == expected, "seed %llu, case %d: byte %llu is %02x, not %02x",
            static_cast<unsigned long long>(kSeed), i, static_cast<unsigned long long>(k), memory[k], expected);
    }
    auto firstBad = [&] {
      uint64_t bad = kMax;
      run([&](CoopOf coop, int block) { checkLsaPattern(coop, block, blocks, window, offset, bytes, seed, &bad); });
      return bad;
    };
    check(firstBad() == kMax, "seed %llu, case %d: a right pattern is refused at %llu",
          static_cast<unsigned long long>(kSeed), i, static_cast<unsigned long long>(firstBad()));
    const uint64_t wrong = offset + random() % bytes, later = offset + bytes - 1;
    memory[base + wrong] ^= 1u << (random() % 8);
    if (later != wrong) memory[base + later] ^= 0x10;
    check(firstBad() == wrong, "seed %llu, case %d: byte %llu is wrong, %llu is reported",
          static_cast<unsigned long long>(kSeed), i, static_cast<unsigned long long>(wrong),
          static_cast<unsigned long long>(firstBad()));
  }
}

// The lowest of what threads store at the same time stays.
void minimumOfManyThreadsIsTheLowest() {
  for (int round = 0; round < 200; ++round) {
    uint64_t value = kMax;
    inThreads(4, [&](int thread) {
      for (uint64_t k = 100; k > 0; --k) minRelaxedGpu(&value, k * 4 + static_cast<uint64_t>(thread));
    });
    check(value == 4, "the minimum is %llu, not 4", static_cast<unsigned long long>(value));
  }
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  addressesAreNullUnlessEveryByteIsInside();
  alignmentLooksAtAddressAndLength();
  wordsOfThePatternAreDistinct();
  kernelsWriteAndCheckExactlyTheRange();
  minimumOfManyThreadsIsTheLowest();
  return report("lsa_test");
}

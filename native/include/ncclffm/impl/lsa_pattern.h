// Kernel bodies that write a pattern into a window and compare one with it (ncclFfmLsaWritePattern,
// ncclFfmLsaCheckPattern), by plain loads and stores: the test that memory which a provider mapped is what it should
// be.
#ifndef NCCLFFM_IMPL_LSA_PATTERN_H_
#define NCCLFFM_IMPL_LSA_PATTERN_H_

#include "../atomics.h"
#include "../lsa.h"

namespace ncclffm {

struct alignas(kLsaVectorBytes) LsaVector {
  uint64_t word[2];
};

// The finaliser of SplitMix64, a bijection: no two places under one seed, and no two seeds at one place, share a word.
NCCLFFM_DEVICE uint64_t mixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The pattern's 8 bytes from an offset in the window on, the first one lowest.
NCCLFFM_DEVICE uint64_t lsaPattern(uint64_t seed, uint64_t offset) {
  uint64_t start = mixBits(seed), index = offset / 8;
  uint32_t shift = static_cast<uint32_t>(offset % 8) * 8;
  uint64_t word = mixBits(start + index);
  return shift == 0 ? word : (word >> shift) | (mixBits(start + index + 1) << (64 - shift));
}

NCCLFFM_DEVICE LsaVector lsaPatternVector(uint64_t seed, uint64_t offset) {
  return {{lsaPattern(seed, offset), lsaPattern(seed, offset + 8)}};
}

// A thread's share of the bytes from an address on: calls whole(i) for 16 bytes at the position i, which then are
// aligned, and single(i) for one byte, until every position of [0, bytes) has had its turn on one thread.
template <class Whole, class Single>
NCCLFFM_DEVICE void forEachLsaVector(const void *address, uint64_t bytes, uint64_t thread, uint64_t nThreads,
                                     Whole whole, Single single) {
  uint64_t head = (kLsaVectorBytes - reinterpret_cast<uintptr_t>(address) % kLsaVectorBytes) % kLsaVectorBytes;
  if (head > bytes) head = bytes;
  uint64_t vectors = (bytes - head) / kLsaVectorBytes;
  uint64_t tail = head + vectors * kLsaVectorBytes;
  for (uint64_t i = thread; i < vectors; i += nThreads) whole(head + i * kLsaVectorBytes);
  for (uint64_t i = thread; i < head + (bytes - tail); i += nThreads) single(i < head ? i : tail + (i - head));
}

// The range must be in the window; callers have checked it.
template <class Coop>
NCCLFFM_DEVICE void writeLsaPattern(Coop coop, int block, int nBlocks, const LsaWindow &window, uint64_t offset,
                                    uint64_t bytes, uint64_t seed) {
  unsigned char *to = static_cast<unsigned char *>(window.base) + offset;
  forEachLsaVector(
      to, bytes, static_cast<uint64_t>(block) * coop.size() + coop.rank(), static_cast<uint64_t>(nBlocks) * coop.size(),
      [=](uint64_t i) { *reinterpret_cast<LsaVector *>(to + i) = lsaPatternVector(seed, offset + i); },
      [=](uint64_t i) { to[i] = static_cast<unsigned char>(lsaPattern(seed, offset + i)); });
}

// Lowers *firstBad to the smallest offset in the window that this block finds wrong.
template <class Coop>
NCCLFFM_DEVICE void checkLsaPattern(Coop coop, int block, int nBlocks, const LsaWindow &window, uint64_t offset,
                                    uint64_t bytes, uint64_t seed, uint64_t *firstBad) {
  const unsigned char *from = static_cast<const unsigned char *>(window.base) + offset;
  const uint64_t none = ~uint64_t{0};
  uint64_t bad = none;
  auto compare = [&](uint64_t i, unsigned char got) {
    if (got != static_cast<unsigned char>(lsaPattern(seed, offset + i)) && offset + i < bad) bad = offset + i;
  };
  forEachLsaVector(
      from, bytes, static_cast<uint64_t>(block) * coop.size() + coop.rank(),
      static_cast<uint64_t>(nBlocks) * coop.size(),
      [&](uint64_t i) {
        LsaVector got = *reinterpret_cast<const LsaVector *>(from + i), want = lsaPatternVector(seed, offset + i);
        if (got.word[0] == want.word[0] && got.word[1] == want.word[1]) return;
        for (uint32_t k = 0; k < kLsaVectorBytes; ++k) {
          compare(i + k, static_cast<unsigned char>(got.word[k / 8] >> (k % 8 * 8)));
        }
      },
      [&](uint64_t i) { compare(i, from[i]); });
  if (bad != none) minRelaxedGpu(firstBad, bad);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_LSA_PATTERN_H_

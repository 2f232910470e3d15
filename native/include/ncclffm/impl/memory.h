// The buffers of a caller, in words of 8 bytes and in vectors of 16: any element offset, any length.
#ifndef NCCLFFM_IMPL_MEMORY_H_
#define NCCLFFM_IMPL_MEMORY_H_

#include "../atomics.h"

#ifndef __CUDACC_RTC__
#include <string.h>
#endif

namespace ncclffm {

template <class U>
NCCLFFM_DEVICE U loadAs(const char *address) {
#ifdef __CUDACC__
  return *reinterpret_cast<const U *>(address);
#else
  U value;
  memcpy(&value, address, sizeof value);
  return value;
#endif
}

template <class U>
NCCLFFM_DEVICE void storeAs(char *address, U value) {
#ifdef __CUDACC__
  *reinterpret_cast<U *>(address) = value;
#else
  memcpy(address, &value, sizeof value);
#endif
}

NCCLFFM_DEVICE uint64_t loadUpTo8(const char *address, uint32_t bytes) {
  return bytes == 8   ? loadAs<uint64_t>(address)
         : bytes == 4 ? loadAs<uint32_t>(address)
         : bytes == 2 ? loadAs<uint16_t>(address)
                      : loadAs<uint8_t>(address);
}

NCCLFFM_DEVICE void storeUpTo8(char *address, uint32_t bytes, uint64_t value) {
  if (bytes == 8) {
    storeAs<uint64_t>(address, value);
  } else if (bytes == 4) {
    storeAs<uint32_t>(address, static_cast<uint32_t>(value));
  } else if (bytes == 2) {
    storeAs<uint16_t>(address, static_cast<uint16_t>(value));
  } else {
    storeAs<uint8_t>(address, static_cast<uint8_t>(value));
  }
}

// A buffer of whole elements of 1, 2, 4 or 8 bytes, at a multiple of its element's size.
template <class Byte>
struct Span {
  Byte *base;
  uint64_t bytes;
  uint32_t elementBytes;

  NCCLFFM_DEVICE uint32_t alignment() const {
    return reinterpret_cast<uintptr_t>(base) % 8 == 0 ? 8 : reinterpret_cast<uintptr_t>(base) % 4 == 0 ? 4 : 1;
  }
};
using ConstSpan = Span<const char>;
using MutableSpan = Span<char>;

// Word number i of a buffer; what is beyond its end reads as 0, and is not stored. alignment is span.alignment().
NCCLFFM_DEVICE uint64_t loadWord(const ConstSpan &span, uint32_t alignment, uint64_t i) {
  if (i * 8 >= span.bytes) return 0;
  const char *address = span.base + i * 8;
  const uint64_t left = span.bytes - i * 8;
  if (left >= 8 && alignment == 8) return loadAs<uint64_t>(address);
  if (left >= 8 && alignment == 4) return loadAs<uint32_t>(address) | uint64_t{loadAs<uint32_t>(address + 4)} << 32;
  uint64_t word = 0;
  NCCLFFM_NO_UNROLL
  for (uint32_t b = 0; b < 8 && b < left; b += span.elementBytes) {
    word |= loadUpTo8(address + b, span.elementBytes) << 8 * b;
  }
  return word;
}

NCCLFFM_DEVICE void storeWord(const MutableSpan &span, uint32_t alignment, uint64_t i, uint64_t word) {
  if (i * 8 >= span.bytes) return;
  char *address = span.base + i * 8;
  const uint64_t left = span.bytes - i * 8;
  const bool whole = left >= 8 || !holds(Rule::kScalarTail);
  if (whole && alignment == 8) {
    storeAs<uint64_t>(address, word);
  } else if (whole && alignment == 4) {
    storeAs<uint32_t>(address, static_cast<uint32_t>(word));
    storeAs<uint32_t>(address + 4, static_cast<uint32_t>(word >> 32));
  } else {
    NCCLFFM_NO_UNROLL
    for (uint32_t b = 0; b < 8 && b < left; b += span.elementBytes) {
      storeUpTo8(address + b, span.elementBytes, word >> 8 * b);
    }
  }
}

// Which threads of how many share a loop: thread i takes i, i + size ...
struct Share {
  uint64_t thread;
  uint64_t nThreads;
};

// Accesses of one thread that are in flight at the same time.
constexpr int kInFlight = 4;

// The 16 bytes at an address that is a multiple of kWidth, 16 or 4. Loads of whole vectors stay where they are written:
// a compiler that moves each to where its value is used leaves one or two in flight, not all.
template <int kWidth>
NCCLFFM_DEVICE Vec16 loadVec16(const char *address) {
  if constexpr (kWidth == 16) {
#ifdef __CUDA_ARCH__
    Vec16 vec;
    asm volatile("ld.v2.u64 {%0, %1}, [%2];" : "=l"(vec.word[0]), "=l"(vec.word[1]) : "l"(address) : "memory");
    return vec;
#else
    return loadAs<Vec16>(address);
#endif
  } else {
    uint64_t part[4];
    NCCLFFM_UNROLL
    for (int k = 0; k < 4; ++k) part[k] = loadAs<uint32_t>(address + 4 * k);
    return {{part[0] | part[1] << 32, part[2] | part[3] << 32}};
  }
}

template <class U, int kWidth>
NCCLFFM_DEVICE U loadUnitAt(const char *address) {
  if constexpr (sizeof(U) == sizeof(Vec16)) {
    return loadVec16<kWidth>(address);
  } else {
    return loadAs<U>(address);
  }
}

// What a thread has of a loop at once: units i, i + stride ... all of which are there, or only those below `end`.
struct WholeStrip {
  uint64_t i, stride;

  NCCLFFM_DEVICE uint64_t at(int k) const { return i + k * stride; }
  NCCLFFM_DEVICE bool has(int) const { return true; }
};
struct PartialStrip {
  uint64_t i, stride, end;

  NCCLFFM_DEVICE uint64_t at(int k) const { return i + k * stride; }
  NCCLFFM_DEVICE bool has(int k) const { return at(k) < end; }
};

template <class U, int kWidth, int kAtOnce, class Strip>
NCCLFFM_DEVICE void copyStrip(char *to, const char *from, const Strip &strip) {
  U unit[kAtOnce] = {};
  NCCLFFM_UNROLL
  for (int k = 0; k < kAtOnce; ++k) {
    if (strip.has(k)) unit[k] = loadUnitAt<U, kWidth>(from + strip.at(k) * sizeof(U));
  }
  NCCLFFM_UNROLL
  for (int k = 0; k < kAtOnce; ++k) {
    if (strip.has(k)) storeAs(to + strip.at(k) * sizeof(U), unit[k]);
  }
}

// Copies n units from an address that is a multiple of kWidth.
template <class U, int kWidth>
NCCLFFM_DEVICE void copyUnits(Share share, char *to, const char *from, uint64_t n) {
  constexpr int kAtOnce = kWidth == sizeof(Vec16) ? 2 * kInFlight : kInFlight;
  uint64_t i = share.thread;
  NCCLFFM_NO_UNROLL
  for (; i + (kAtOnce - 1) * share.nThreads < n; i += kAtOnce * share.nThreads) {
    copyStrip<U, kWidth, kAtOnce>(to, from, WholeStrip{i, share.nThreads});
  }
  if (i < n) copyStrip<U, kWidth, kAtOnce>(to, from, PartialStrip{i, share.nThreads, n});
}

// Bytes from an address to the next multiple of 16, at most all.
NCCLFFM_DEVICE uint64_t headBytes(const void *address, uint64_t bytes) {
  uint64_t head = (16 - reinterpret_cast<uintptr_t>(address) % 16) % 16;
  return head < bytes ? head : bytes;
}

// What is left at an end, less than a vector.
NCCLFFM_DEVICE void copyEnd(Share share, char *to, const char *from, uint64_t bytes, uint32_t elementBytes) {
  NCCLFFM_NO_UNROLL
  for (uint64_t b = share.thread * elementBytes; b < bytes; b += share.nThreads * elementBytes) {
    storeUpTo8(to + b, elementBytes, loadUpTo8(from + b, elementBytes));
  }
}

// Copies whole elements, a share of them on each thread: in stores of 16 bytes, unless the distance between the two
// addresses is odd for words of 4.
NCCLFFM_DEVICE_CALL void copyBytes(Share share, char *to, const char *from, uint64_t bytes, uint32_t elementBytes) {
  const uintptr_t between = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (between % 4 == 0) {
    const uint64_t head = headBytes(to, bytes), vectors = (bytes - head) / 16, tail = head + vectors * 16;
    if (between % 16 == 0) {
      copyUnits<Vec16, 16>(share, to + head, from + head, vectors);
    } else {
      copyUnits<Vec16, 4>(share, to + head, from + head, vectors);
    }
    copyEnd(share, to, from, head, elementBytes);
    copyEnd(share, to + tail, from + tail, bytes - tail, elementBytes);
  } else if (elementBytes == 2) {
    copyUnits<uint16_t, 2>(share, to, from, bytes / 2);
  } else {
    copyUnits<uint8_t, 1>(share, to, from, bytes);
  }
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_MEMORY_H_

// What a task is, in three words: what its ranks must agree on, for hashes and for status records.
#ifndef NCCLFFM_IMPL_TASK_RECORD_H_
#define NCCLFFM_IMPL_TASK_RECORD_H_

#include "../types.h"

namespace ncclffm {

struct PackedRecord {
  uint64_t word[3];  // symbol, sequence | count, function, datatype, op, lane | root, check
};

constexpr int kCountBits = 41;  // counts are at most 2^40

NCCLFFM_DEVICE uint32_t mixOfRecord(const PackedRecord &record, uint32_t more) {
  uint64_t h = (record.word[0] ^ more) * 0x9e3779b97f4a7c15u;
  h = ((h ^ (h >> 32)) + record.word[1]) * 0xbf58476d1ce4e5b9u;
  h = ((h ^ (h >> 29)) + static_cast<uint32_t>(record.word[2])) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(h >> 32);
}

// function, root: as both ends of a pair have them, where it is one.
NCCLFFM_DEVICE PackedRecord packRecord(const Task &task, uint32_t sequence, uint32_t function, int32_t root) {
  const uint64_t what = static_cast<uint64_t>(function & 63) | static_cast<uint64_t>(task.datatype & 31) << 6 |
                        static_cast<uint64_t>(task.op & 15) << 11 | static_cast<uint64_t>(task.lane & 255) << 15;
  return {{static_cast<uint64_t>(task.symbol) | static_cast<uint64_t>(sequence) << 32,
           (task.count & ((uint64_t{1} << kCountBits) - 1)) | what << kCountBits, static_cast<uint32_t>(root)}};
}

// Makes the record one of an epoch, so that a reader knows whether it has all of it, and not the one before.
NCCLFFM_DEVICE PackedRecord sealed(PackedRecord record, uint32_t epoch) {
  record.word[2] |= static_cast<uint64_t>(mixOfRecord(record, epoch)) << 32;
  return record;
}

NCCLFFM_DEVICE bool isSealedFor(const PackedRecord &record, uint32_t epoch) {
  return record.word[2] >> 32 == mixOfRecord(record, epoch) && (record.word[0] | record.word[1]) != 0;
}

NCCLFFM_DEVICE TaskRecord unpackRecord(const PackedRecord &record) {
  const uint32_t what = static_cast<uint32_t>(record.word[1] >> kCountBits);
  return {1,
          static_cast<uint32_t>(record.word[0]),
          what >> 15 & 255,
          static_cast<uint32_t>(record.word[0] >> 32),
          what & 63,
          static_cast<int32_t>(what >> 6 & 31),
          static_cast<int32_t>(what >> 11 & 15),
          static_cast<int32_t>(record.word[2]),
          record.word[1] & ((uint64_t{1} << kCountBits) - 1)};
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_TASK_RECORD_H_

// Tasks in status records.
#ifndef NCCLFFM_IMPL_TASK_RECORD_FUNCS_H_
#define NCCLFFM_IMPL_TASK_RECORD_FUNCS_H_

#include "../protocol.h"

namespace ncclffm {

// A peer stores its record beside its letter, in no order: who has seen the one waits so long for the other.
constexpr uint64_t kRecordNs = 10000000;  // 10 ms

NCCLFFM_DEVICE PackedRecord loadRecord(const uint64_t *words) {
  return {{loadRelaxedSys(words), loadRelaxedSys(words + 1), loadRelaxedSys(words + 2)}};
}

NCCLFFM_DEVICE void storeRecord(uint64_t *words, const PackedRecord &record) {
  NCCLFFM_UNROLL
  for (int i = 0; i < 3; ++i) storeRelaxedSys(words + i, record.word[i]);
}

NCCLFFM_DEVICE void storeRecord(TaskRecord *to, const PackedRecord &packed) {
  const TaskRecord record = unpackRecord(packed);
  storeRelaxedSys(&to->symbol, record.symbol);
  storeRelaxedSys(&to->lane, record.lane);
  storeRelaxedSys(&to->sequence, record.sequence);
  storeRelaxedSys(&to->function, record.function);
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&to->datatype), static_cast<uint32_t>(record.datatype));
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&to->op), static_cast<uint32_t>(record.op));
  storeRelaxedSys(reinterpret_cast<uint32_t *>(&to->root), static_cast<uint32_t>(record.root));
  storeRelaxedSys(&to->count, record.count);
  storeRelaxedSys(&to->present, 1);
}

NCCLFFM_DEVICE_CALL void recordTasks(const DevComm &comm, Site site, ncclResult_t code, int peer, Status *status) {
  const TaskLane &lane = comm.lanes[laneOf(comm, site.channel)];
  const PackedRecord own = loadRecord(lane.running);
  // Only while it runs: not when the lane has gone on.
  const uint32_t sequence = static_cast<uint32_t>(own.word[0] >> 32);
  if (isSealedFor(own, sequence) && sequence == loadRelaxedGpu(&lane.done)) storeRecord(&status->task, own);
  if (code != ncclInvalidUsage || peer == kNobody || comm.peers == nullptr) return;
  const uint64_t *words = mailboxOf(comm, comm.rank, site.channel, peer)->task[site.epoch % 2].word;
  for (const uint64_t start = nowNs(); nowNs() - start < kRecordNs; pauseNs(kPauseNs)) {
    const PackedRecord theirs = loadRecord(words);
    if (!isSealedFor(theirs, site.epoch)) continue;
    storeRecord(&status->peerTask, theirs);
    return;
  }
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_TASK_RECORD_FUNCS_H_

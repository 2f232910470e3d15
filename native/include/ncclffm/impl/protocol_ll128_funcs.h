// Bodies of protocol_ll128.h.
#ifndef NCCLFFM_IMPL_PROTOCOL_LL128_FUNCS_H_
#define NCCLFFM_IMPL_PROTOCOL_LL128_FUNCS_H_

namespace ncclffm {

NCCLFFM_DEVICE bool endsLL128Line(uint32_t unit) {
  return unit % kLL128Lanes == kLL128Lanes - 1;
}

#ifdef __CUDACC__

NCCLFFM_DEVICE void LL128::put(char *slot, uint32_t unit, const uint64_t (&words)[kWords], uint32_t flag) {
  __syncwarp(Octet::mask());  // so that the line is one store of the warp
  storeVec16RelaxedSys(reinterpret_cast<Vec16 *>(slot) + unit,
                       {{words[0], endsLL128Line(unit) ? static_cast<uint64_t>(flag) : words[1]}});
}

NCCLFFM_DEVICE LL128::Line LL128::poll(const char *slot, uint32_t unit) {
  return {{loadVec16RelaxedSys(reinterpret_cast<const Vec16 *>(slot) + unit)}};
}

#else

// What the GPU's path does with one store: the flag is the last to be seen.
NCCLFFM_DEVICE void LL128::put(char *slot, uint32_t unit, const uint64_t (&words)[kWords], uint32_t flag) {
  uint64_t *line = reinterpret_cast<uint64_t *>(slot + static_cast<uint64_t>(unit) * kLL128LineBytes);
  for (int k = 0; k < kWords - 1; ++k) storeRelaxedSys(line + k, words[k]);
  NCCLFFM_STALL();
  storeReleaseSys(line + kWords - 1, static_cast<uint64_t>(flag));
}

NCCLFFM_DEVICE LL128::Line LL128::poll(const char *slot, uint32_t unit) {
  const uint64_t *from = reinterpret_cast<const uint64_t *>(slot + static_cast<uint64_t>(unit) * kLL128LineBytes);
  Line line;
  for (int k = 0; k < kWords - 1; ++k) line.vec[k / 2].word[k % 2] = loadRelaxedSys(from + k);
  NCCLFFM_STALL();
  line.vec[kVectors - 1].word[1] = loadAcquireSys(from + kWords - 1);
  return line;
}

#endif

NCCLFFM_DEVICE bool LL128::isComplete(const Line &line, uint32_t unit, uint32_t flag) {
  return !endsLL128Line(unit) || line.vec[kVectors - 1].word[1] == flag;
}

NCCLFFM_DEVICE LL128::Line LL128::reload(const char *slot, uint32_t unit, const Line &complete) {
  return holds(Rule::kWholeLine) ? poll(slot, unit) : complete;
}

NCCLFFM_DEVICE void LL128::unpack(const Line &line, uint64_t (&words)[kWords]) {
  NCCLFFM_UNROLL
  for (int k = 0; k < kWords; ++k) words[k] = line.vec[k / 2].word[k % 2];
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PROTOCOL_LL128_FUNCS_H_

// Bodies of protocol_ll.h.
#ifndef NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_
#define NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_

namespace ncclffm {

NCCLFFM_DEVICE void LL::put(char *slot, uint32_t unit, const uint64_t (&words)[kWords], uint32_t flag) {
  const uint64_t high = static_cast<uint64_t>(flag) << 32;
  storeVec16RelaxedSys(reinterpret_cast<Vec16 *>(slot) + unit,
                       {{high | (words[0] & 0xffffffffu), high | words[0] >> 32}});
}

NCCLFFM_DEVICE LL::Line LL::poll(const char *slot, uint32_t unit) {
  return {loadVec16RelaxedSys(reinterpret_cast<const Vec16 *>(slot) + unit)};
}

NCCLFFM_DEVICE bool LL::isComplete(const Line &line, uint32_t, uint32_t flag) {
  return static_cast<uint32_t>(line.vec.word[0] >> 32) == flag &&
         (!holds(Rule::kBothFlags) || static_cast<uint32_t>(line.vec.word[1] >> 32) == flag);
}

NCCLFFM_DEVICE LL::Line LL::reload(const char *, uint32_t, const Line &complete) {
  return complete;
}

NCCLFFM_DEVICE void LL::unpack(const Line &line, uint64_t (&words)[kWords]) {
  words[0] = (line.vec.word[0] & 0xffffffffu) | line.vec.word[1] << 32;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_

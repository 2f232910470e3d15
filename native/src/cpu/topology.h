// What the emulated devices are to each other, and the names that tell them apart across processes.
#ifndef NCCLFFM_CPU_TOPOLOGY_H_
#define NCCLFFM_CPU_TOPOLOGY_H_

namespace ncclffm::cpu {

/// Whether a device can address another one's memory: always, unless the environment says NCCLFFM_CPU_PEER_ACCESS=0.
bool canAccessPeer(int device, int peer);

/// 16 bytes that name the device of this ordinal on this machine until it boots again.
void fillUuid(int device, char *uuid);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_TOPOLOGY_H_

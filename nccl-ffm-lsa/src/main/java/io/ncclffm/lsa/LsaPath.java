package io.ncclffm.lsa;

/** What lies between a kernel of this rank and another rank's window. */
public enum LsaPath {
  /** This rank's own memory. */
  SELF,
  /** Another rank's, on the same GPU. */
  SAME_GPU,
  NVLINK,
  PCIE_P2P,
  /** Host memory; on the CPU backend that of another emulated device. */
  HOST_STAGED,
  /** No address: the rank is outside the LSA team, and only NCCL's own collectives reach it. */
  NETWORK
}

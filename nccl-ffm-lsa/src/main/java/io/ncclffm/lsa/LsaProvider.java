package io.ncclffm.lsa;

/** How the ranks of a communicator come to address one another's memory, in the order of choice. */
public enum LsaProvider {
  /**
   * NCCL's symmetric windows ({@code ncclCommWindowRegister}, peer addresses since NCCL 2.29.2).
   * The only one that goes beyond a host: there a window covers this rank's LSA team.
   */
  NCCL_WINDOW,
  /** The CPU backend's windows: shared memory. */
  CPU,
  /** CUDA's memory handles ({@code cudaIpcGetMemHandle}): every NCCL, ranks of one host. */
  CUDA_IPC,
  /** Pinned host memory that every rank of a host maps: works without peer access, slowly. */
  HOST_STAGED
}

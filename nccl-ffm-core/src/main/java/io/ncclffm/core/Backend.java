package io.ncclffm.core;

/** What stands under the API: real GPUs, or their emulation on the host's processors. */
public enum Backend {
  /** The user's libcudart and libnccl, and the shim built by nvcc. */
  CUDA,
  /** The development backend: emulated devices, real data movement, no GPU needed. */
  CPU
}

/**
 * NCCL for Java: finding and loading the native libraries, CUDA devices, streams and memory,
 * communicators and collectives. The generated bindings are exported as the raw escape hatch.
 */
// "module": the two modules that the internals are exported to are compiled after this one.
@org.jspecify.annotations.NullMarked
@SuppressWarnings("module")
module io.ncclffm.core {
  requires static transitive org.jspecify;
  requires io.ncclffm.natives;
  requires jdk.jfr;

  exports io.ncclffm.core;
  exports io.ncclffm.core.bootstrap;
  exports io.ncclffm.core.bindings.cudart;
  exports io.ncclffm.core.bindings.nccl;
  exports io.ncclffm.core.bindings.nvrtc;
  exports io.ncclffm.core.bindings.shim;
  exports io.ncclffm.core.internal to
      io.ncclffm.lsa,
      io.ncclffm.device;
}

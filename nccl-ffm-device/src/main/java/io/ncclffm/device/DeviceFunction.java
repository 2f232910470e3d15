package io.ncclffm.device;

import io.ncclffm.core.bindings.shim.ShimH;

/** What a kernel of a {@link DeviceCommunicator} does ({@code ncclFfmFunction}). */
public enum DeviceFunction {
  ALL_REDUCE(ShimH.ncclFfmFunctionAllReduce(), "ncclFfmAllReduce"),
  REDUCE_SCATTER(ShimH.ncclFfmFunctionReduceScatter(), "ncclFfmReduceScatter"),
  ALL_GATHER(ShimH.ncclFfmFunctionAllGather(), "ncclFfmAllGather"),
  BROADCAST(ShimH.ncclFfmFunctionBroadcast(), "ncclFfmBroadcast"),
  REDUCE(ShimH.ncclFfmFunctionReduce(), "ncclFfmReduce"),
  ALL_TO_ALL(ShimH.ncclFfmFunctionAllToAll(), "ncclFfmAllToAll"),
  BARRIER(ShimH.ncclFfmFunctionBarrier(), "ncclFfmBarrier"),
  HIERARCHICAL_ALL_REDUCE(
      ShimH.ncclFfmFunctionHierarchicalAllReduce(), "ncclFfmHierarchicalAllReduce"),
  SEND(ShimH.ncclFfmFunctionSend(), "ncclFfmSend"),
  RECV(ShimH.ncclFfmFunctionRecv(), "ncclFfmRecv"),
  SEND_RECV(ShimH.ncclFfmFunctionSendRecv(), "ncclFfmSendRecv");

  /** The {@code ncclFfmFunction}. */
  final int value;

  /** As exceptions name it. */
  final String operation;

  DeviceFunction(int value, String operation) {
    this.value = value;
    this.operation = operation;
  }

  /** The name of any {@code ncclFfmFunction}, as a status record holds it. */
  static String nameOf(int value) {
    for (DeviceFunction function : values()) {
      if (function.value == value) {
        return function.operation;
      }
    }
    if (value == ShimH.ncclFfmFunctionNone()) {
      return "placeholder";
    }
    if (value == ShimH.ncclFfmFunctionFusedScaleAllReduceSqrt()) {
      return FusedKernels.SCALE;
    }
    if (value == ShimH.ncclFfmFunctionFusedRmsNorm()) {
      return FusedKernels.RMS_NORM;
    }
    if (value == ShimH.ncclFfmFunctionFusedSgd()) {
      return FusedKernels.SGD;
    }
    if (value == ShimH.ncclFfmFunctionFusedAdamW()) {
      return FusedKernels.ADAMW;
    }
    return value == ShimH.ncclFfmFunctionGridSync() ? "grid-wide sync" : "device function " + value;
  }

  /** Whether an {@code ncclFfmFunction} has an operation. */
  static boolean reduces(int value) {
    return value == ALL_REDUCE.value
        || value == REDUCE_SCATTER.value
        || value == REDUCE.value
        || value == HIERARCHICAL_ALL_REDUCE.value;
  }
}

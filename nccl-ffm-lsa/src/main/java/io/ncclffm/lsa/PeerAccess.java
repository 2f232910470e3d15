package io.ncclffm.lsa;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaException;
import io.ncclffm.core.bindings.cudart.CudartH;
import java.util.HashMap;
import java.util.Map;

/**
 * Access of one device to another's memory in this process ({@code cudaDeviceEnablePeerAccess}):
 * switched on with the first window that needs it, off with the last; one that was on before stays.
 * CUDA keeps no count. Other code that finds the access on and relies on it, such as NCCL between
 * devices of one process with NCCL_CUMEM_ENABLE=0, must keep a window open as long, or switch the
 * access on first.
 */
final class PeerAccess {
  private record Pair(CudaDevice device, CudaDevice peer) {}

  private static final class State {
    int users;
    boolean ours;
  }

  private static final Map<Pair, State> PAIRS = new HashMap<>();

  private PeerAccess() {}

  static void acquire(CudaDevice device, CudaDevice peer) {
    synchronized (PAIRS) {
      State state = PAIRS.computeIfAbsent(new Pair(device, peer), pair -> new State());
      if (state.users == 0) {
        device.makeCurrent();
        int rc = CudartH.cudaDeviceEnablePeerAccess(peer.ordinal(), 0);
        state.ours = rc == 0;
        if (rc != 0) {
          clearLastError();
        }
        if (rc != 0 && rc != CudartH.cudaErrorPeerAccessAlreadyEnabled()) {
          PAIRS.remove(new Pair(device, peer));
          CudaException.check(rc, "cudaDeviceEnablePeerAccess(" + peer + ")", device);
        }
      }
      state.users++;
    }
  }

  static void release(CudaDevice device, CudaDevice peer) {
    synchronized (PAIRS) {
      State state = PAIRS.get(new Pair(device, peer));
      if (--state.users > 0) {
        return;
      }
      PAIRS.remove(new Pair(device, peer));
      if (state.ours && !device.isLost()) {
        device.makeCurrent();
        int rc = CudartH.cudaDeviceDisablePeerAccess(peer.ordinal());
        if (rc != 0) {
          clearLastError();
          CudaException.check(rc, "cudaDeviceDisablePeerAccess(" + peer + ")", device);
        }
      }
    }
  }

  /** Otherwise the next launch on this thread would report it as its own. */
  private static void clearLastError() {
    int unused = CudartH.cudaGetLastError();
  }
}

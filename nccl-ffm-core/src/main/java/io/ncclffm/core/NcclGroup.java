package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.internal.NativeLibraries;
import java.util.ArrayList;
import java.util.List;

/**
 * Several NCCL calls as one ({@code ncclGroupStart}, {@code ncclGroupEnd}). Needed where one thread
 * drives several ranks, and for sends and receives that only make progress together.
 *
 * <p>NCCL keeps the group per OS thread. A virtual thread may change its carrier between two calls,
 * so a group on a virtual thread is refused.
 */
public final class NcclGroup {
  private static final ThreadLocal<NcclGroup> CURRENT = ThreadLocal.withInitial(NcclGroup::new);

  private final List<Communicator> members = new ArrayList<>();
  private int depth;

  private NcclGroup() {}

  /**
   * Runs the body inside a group; the calls in it are carried out together when the outermost group
   * ends. If the body throws, the group is ended all the same, because NCCL cannot cancel one, and
   * the communicators used in it are failed: a half-filled group leaves ranks in disagreement.
   *
   * @throws IllegalStateException on a virtual thread
   * @throws NcclException if a call or the end of the group fails
   */
  public static void run(Runnable body) {
    if (Thread.currentThread().isVirtual()) {
      throw new IllegalStateException(
          "ncclGroupStart on a virtual thread: NCCL keeps groups per OS thread; run the group on a"
              + " platform thread");
    }
    NativeLibraries.load();
    CURRENT.get().runHere(body);
  }

  private void runHere(Runnable body) {
    int rc = NcclH.ncclGroupStart();
    if (rc != 0) {
      throw NcclException.of("ncclGroupStart", rc, "");
    }
    depth++;
    RuntimeException failure = null;
    Error error = null;
    try {
      body.run();
    } catch (RuntimeException e) {
      failure = e;
    } catch (Error e) {
      error = e;
    }
    depth--;
    rc = NcclH.ncclGroupEnd();
    if (rc != 0) {
      NcclException end = NcclException.of("ncclGroupEnd", rc, "");
      if (failure == null) {
        failure = end;
      } else {
        failure.addSuppressed(end);
      }
    }
    if (depth == 0) {
      if (failure != null || error != null) {
        for (Communicator member : members) {
          member.failedInGroup(failure != null ? failure : error);
        }
      }
      members.clear();
    }
    if (error != null) {
      throw error;
    }
    if (failure != null) {
      throw failure;
    }
  }

  /** Notes that the communicator takes part in the calling thread's group, if there is one. */
  static void note(Communicator communicator) {
    NcclGroup group = CURRENT.get();
    if (group.depth > 0 && !group.members.contains(communicator)) {
      group.members.add(communicator);
    }
  }
}

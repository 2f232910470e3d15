package io.ncclffm.core;

import static java.lang.foreign.ValueLayout.JAVA_FLOAT;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclSimInfo_t;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.util.ArrayList;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Several NCCL calls as one ({@code ncclGroupStart}, {@code ncclGroupEnd}). Needed where one thread
 * drives several ranks, and for sends and receives that only make progress together.
 *
 * <p>NCCL keeps the group per OS thread. A virtual thread may change its carrier between two calls,
 * so a group on a virtual thread is refused.
 */
public final class NcclGroup {
  private static final ThreadLocal<NcclGroup> CURRENT = ThreadLocal.withInitial(NcclGroup::new);
  private static final int SIM_INFO_MAGIC = 0x74685283;
  private static final int IN_PROGRESS = 7;

  private final List<Communicator> members = new ArrayList<>();
  private final List<Communicator> pending = new ArrayList<>();
  private int depth;
  private @Nullable Throwable firstTrouble;

  private NcclGroup() {}

  /**
   * Runs the body inside a group; the calls in it are carried out together when the outermost group
   * ends. Communicators made in it are initialising until then. If the body throws, the group is
   * ended all the same, because NCCL cannot cancel one, and the communicators used in it are
   * failed: a half-filled group leaves ranks in disagreement.
   *
   * @throws IllegalStateException on a virtual thread
   * @throws NcclException if a call or the end of the group fails
   */
  public static void run(Runnable body) {
    enterThread("ncclGroupStart").runHere(body, null);
  }

  /**
   * Asks how long a group would take, without carrying it out ({@code ncclGroupSimulateEnd},
   * 2.22.3).
   *
   * @return NCCL's estimate in microseconds
   */
  public static float simulate(Runnable body) {
    NativeLibraries.load();
    NativeLibraries.requireNccl("ncclGroupSimulateEnd", "2.22.3");
    NcclGroup group = enterThread("ncclGroupSimulateEnd");
    if (group.depth > 0) {
      throw new IllegalStateException("ncclGroupSimulateEnd inside another group");
    }
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment info = simulationInfo(scratch);
      group.runHere(body, info);
      return ncclSimInfo_t.estimatedTime(info);
    }
  }

  /** As {@code NCCL_SIM_INFO_INITIALIZER}. */
  static MemorySegment simulationInfo(Arena arena) {
    MemorySegment info = ncclSimInfo_t.allocate(arena);
    ncclSimInfo_t.size(info, ncclSimInfo_t.sizeof());
    ncclSimInfo_t.magic(info, SIM_INFO_MAGIC);
    ncclSimInfo_t.version(info, NcclH.NCCL_VERSION_CODE());
    info.set(JAVA_FLOAT, ncclSimInfo_t.estimatedTime$offset(), NcclH.NCCL_UNDEF_FLOAT());
    return info;
  }

  private static NcclGroup enterThread(String operation) {
    if (Thread.currentThread().isVirtual()) {
      throw new IllegalStateException(
          operation
              + " on a virtual thread: NCCL keeps groups per OS thread; run the group on a"
              + " platform thread");
    }
    NativeLibraries.load();
    return CURRENT.get();
  }

  private void runHere(Runnable body, @Nullable MemorySegment simulation) {
    @Nullable GroupEvent event = GroupEvent.PROBE.isEnabled() ? new GroupEvent() : null;
    if (event != null) {
      event.begin();
    }
    int rc = NcclH.ncclGroupStart();
    if (rc != 0) {
      throw NcclException.of("ncclGroupStart", rc, "");
    }
    depth++;
    @Nullable Throwable trouble = null;
    try {
      body.run();
    } catch (Throwable t) { // also a checked one, which Scala and Kotlin let out of a Runnable
      trouble = t;
    }
    depth--;
    rc = simulation == null ? NcclH.ncclGroupEnd() : NcclH.ncclGroupSimulateEnd(simulation);
    if (rc != 0 && rc != IN_PROGRESS) {
      String operation = simulation == null ? "ncclGroupEnd" : "ncclGroupSimulateEnd";
      NcclException end = NcclException.of(operation, rc, "");
      if (trouble == null) {
        trouble = end;
      } else {
        trouble.addSuppressed(end);
      }
    }
    // What an inner group failed with counts for the whole, also if the outer body has caught it.
    if (firstTrouble == null) {
      firstTrouble = trouble;
    }
    if (depth == 0) {
      members.forEach(Communicator::releaseAfterGroup);
      trouble = end(firstTrouble, rc == IN_PROGRESS);
      firstTrouble = null;
      if (event != null) {
        event.communicators = members.size();
        event.failed = trouble != null;
        event.commit();
      }
      members.clear();
      pending.clear();
    }
    if (trouble != null) {
      NcclGroup.<RuntimeException>rethrow(trouble);
    }
  }

  /** Throws what the body threw as it is, also where the compiler does not expect it. */
  @SuppressWarnings("unchecked")
  static <T extends Throwable> void rethrow(Throwable t) throws T {
    throw (T) t;
  }

  /** Tells members and new communicators how it went. */
  private @Nullable Throwable end(@Nullable Throwable trouble, boolean inProgress) {
    @Nullable Throwable first = trouble;
    for (int i = 0; i < pending.size(); i++) { // an iterator is an allocation
      try {
        pending.get(i).groupEnded(trouble, inProgress);
      } catch (RuntimeException e) {
        first = first == null ? e : first;
      }
    }
    for (int i = 0; i < members.size(); i++) {
      Communicator member = members.get(i);
      if (trouble != null) {
        member.failedInGroup(trouble);
      } else {
        try {
          member.concludeGroup(inProgress);
        } catch (RuntimeException e) {
          first = first == null ? e : first;
        }
      }
    }
    return first;
  }

  /** Whether the calling thread is inside a group. */
  public static boolean isActive() {
    return CURRENT.get().depth > 0;
  }

  /** Notes that the communicator takes part in the calling thread's group, if there is one. */
  static void note(Communicator communicator) {
    NcclGroup group = CURRENT.get();
    if (group.depth > 0 && !group.members.contains(communicator)) {
      group.members.add(communicator);
      communicator.holdForGroup(); // nobody may abort or close it while ncclGroupEnd works on it
    }
  }

  /** Notes that the communicator will exist when the calling thread's group ends. */
  static void awaits(Communicator communicator) {
    CURRENT.get().pending.add(communicator);
  }
}

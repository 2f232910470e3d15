package io.ncclffm.lsa;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.NcclWindow;
import io.ncclffm.core.Team;
import io.ncclffm.core.UnsupportedByLibraryException;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.MemorySegment;
import java.util.List;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/** {@link LsaProvider#NCCL_WINDOW} and {@link LsaProvider#CPU}: memory that NCCL maps. */
final class NcclWindowMemory implements WindowMemory {
  private final Communicator communicator;
  private final long bytes;
  private @Nullable DeviceBuffer local;
  private @Nullable NcclWindow window;
  private @Nullable LsaTeam team;

  NcclWindowMemory(Communicator communicator, long bytes) {
    this.communicator = communicator;
    this.bytes = bytes;
  }

  /** Why the loaded NCCL cannot do it on this communicator, or "". */
  static String refusal(Communicator communicator) {
    try {
      NativeLibraries.requireNccl("ncclCommWindowRegister", "2.27.3");
      NativeLibraries.requireNccl("ncclGetLsaDevicePointer", "2.29.2");
      return communicator.properties().deviceApiSupport()
          ? ""
          : "NCCL reports no device API support for this communicator";
    } catch (UnsupportedByLibraryException e) {
      return String.valueOf(e.getMessage());
    }
  }

  @Override
  public byte[] offer() {
    local = DeviceBuffer.allocateForWindow(communicator.device(), DataType.UINT8, bytes);
    return new byte[0];
  }

  @Override
  public DeviceBuffer local() {
    return Objects.requireNonNull(local);
  }

  @Override
  public long[] open(List<Card> ranks, byte[][] offers) {
    NcclWindow registered =
        communicator.registerWindow(local(), NcclWindow.Flag.COLLECTIVE_SYMMETRIC);
    communicator.disown(registered); // closed by the LSA window from now on, before its memory
    window = registered;
    Team lsa = communicator.teamLsa();
    LsaTeam members = new LsaTeam(lsa, communicator.rank());
    team = members;
    boolean oneHost = ranks.stream().allMatch(rank -> rank.isSameHost(ranks.get(0)));
    if (oneHost && lsa.size() < communicator.size()) {
      throw new LsaException(
          "NCCL joins only the " + members + ", though all ranks are on one host");
    }
    long[] bases = new long[communicator.size()];
    for (int i = 0; i < lsa.size(); i++) {
      int rank = members.worldRank(i);
      bases[rank] =
          i == lsa.rank()
              ? local().address(0).address()
              : registered.lsaPointer(i, 0).address(); // counted in the team, not in the world
      if (bases[rank] == 0) {
        throw new LsaException(
            "NCCL gave no address for rank " + rank + ", though it is in the team");
      }
    }
    return bases;
  }

  @Override
  public LsaTeam team() {
    return Objects.requireNonNull(team);
  }

  @Override
  public MemorySegment handle() {
    return Objects.requireNonNull(window).handle();
  }

  @Override
  public void closePeers() {
    if (window != null) {
      window.close();
    }
  }

  @Override
  public void closeLocal() {
    if (local != null) {
      local.close();
    }
  }
}

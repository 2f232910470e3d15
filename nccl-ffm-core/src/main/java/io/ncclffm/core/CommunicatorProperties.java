package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import io.ncclffm.core.bindings.nccl.ncclCommProperties;
import io.ncclffm.core.internal.NativeLibraries;
import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;

/**
 * What a communicator is and can do ({@code ncclCommProperties_t}, 2.29.2).
 *
 * @param cudaDevice CUDA's ordinal
 * @param nvmlDevice NVML's index
 * @param deviceApiSupport whether kernels can communicate through windows
 * @param multimemSupport whether multicast addresses exist
 * @param ginType how kernels reach the network, an {@code ncclGinType_t}; 0 is not at all
 * @param railedGinType the same along rails; 0 before 2.29.7
 * @param lsaTeams how many sets of mutually load/store-accessible ranks there are; 0 before 2.29.7
 * @param hostRmaSupport whether {@link Communicator#putSignal} works; false before 2.29.7
 */
public record CommunicatorProperties(
    int rank,
    int size,
    int cudaDevice,
    int nvmlDevice,
    boolean deviceApiSupport,
    boolean multimemSupport,
    int ginType,
    int railedGinType,
    int lsaTeams,
    boolean hostRmaSupport) {

  static CommunicatorProperties query(Communicator communicator) {
    try (Arena scratch = Arena.ofConfined()) {
      MemorySegment p = ncclCommProperties.allocate(scratch);
      ncclCommProperties.size(p, ncclCommProperties.sizeof());
      ncclCommProperties.magic(p, NcclH.NCCL_API_MAGIC());
      // An older library refuses a newer header's version; fields have only ever been added.
      int version = Math.min(NcclH.NCCL_VERSION_CODE(), NativeLibraries.load().ncclVersion());
      ncclCommProperties.version(p, version);
      communicator.call("ncclCommQueryProperties", comm -> NcclH.ncclCommQueryProperties(comm, p));
      return new CommunicatorProperties(
          ncclCommProperties.rank(p),
          ncclCommProperties.nRanks(p),
          ncclCommProperties.cudaDev(p),
          ncclCommProperties.nvmlDev(p),
          ncclCommProperties.deviceApiSupport(p),
          ncclCommProperties.multimemSupport(p),
          ncclCommProperties.ginType(p),
          ncclCommProperties.railedGinType(p),
          ncclCommProperties.nLsaTeams(p),
          ncclCommProperties.hostRmaSupport(p));
    }
  }
}

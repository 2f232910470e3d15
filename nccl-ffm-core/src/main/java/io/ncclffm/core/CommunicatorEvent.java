package io.ncclffm.core;

import jdk.jfr.Category;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;

/** A step in a communicator's life, with its duration, in a flight recording. */
@Name("io.ncclffm.Communicator")
@Label("NCCL Communicator")
@Category("NCCL")
@Description("A communicator was created, split, shrunk, grown, destroyed or aborted")
final class CommunicatorEvent extends Event {
  @Label("Step")
  String step = "";

  @Label("Rank")
  int rank;

  @Label("Ranks")
  int size;

  @Label("Device")
  int device;

  static CommunicatorEvent started() {
    CommunicatorEvent event = new CommunicatorEvent();
    event.begin();
    return event;
  }

  void ended(String what, int rank, int size, CudaDevice on) {
    end();
    if (shouldCommit()) {
      step = what;
      this.rank = rank;
      this.size = size;
      device = on.ordinal();
      commit();
    }
  }
}

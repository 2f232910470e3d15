package io.ncclffm.core;

import jdk.jfr.Category;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;

/** An outermost group, from its start to its end. */
@Name("io.ncclffm.Group")
@Label("NCCL Group")
@Category("NCCL")
@Description("Calls that NCCL carried out together")
final class GroupEvent extends Event {
  /** Tells whether anyone records. */
  static final GroupEvent PROBE = new GroupEvent();

  @Label("Communicators")
  int communicators;

  @Label("Failed")
  boolean failed;
}

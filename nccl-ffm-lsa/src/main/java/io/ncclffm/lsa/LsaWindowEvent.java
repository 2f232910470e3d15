package io.ncclffm.lsa;

import jdk.jfr.Category;
import jdk.jfr.DataAmount;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;

/** A window was made, and how long that took. */
@Name("io.ncclffm.LsaWindow")
@Label("LSA Window")
@Category("NCCL")
@Description("A load/store-accessible window was created")
final class LsaWindowEvent extends Event {
  @Label("Provider")
  String provider = "";

  @Label("Bytes")
  @DataAmount
  long bytes;

  @Label("Rank")
  int rank;

  @Label("Ranks")
  int size;
}

package io.ncclffm.core;

import jdk.jfr.Category;
import jdk.jfr.DataAmount;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;
import jdk.jfr.StackTrace;

/** An operation was enqueued, without a duration: when the work ends is not known here. */
@Name("io.ncclffm.Collective")
@Label("NCCL Collective")
@Category("NCCL")
@Description("A collective, send, receive or one-sided operation was enqueued on a stream")
@StackTrace(false)
final class CollectiveEvent extends Event {
  /** Tells whether anyone records; an event made for that alone would cost memory each time. */
  static final CollectiveEvent PROBE = new CollectiveEvent();

  @Label("Operation")
  String operation = "";

  @Label("Bytes")
  @DataAmount
  long bytes;

  @Label("Data type")
  String type = "";

  @Label("Reduction")
  String reduction = "";

  @Label("Peer or root")
  int peer;

  @Label("Stream")
  long stream;

  @Label("Rank")
  int rank;

  @Label("Ranks")
  int size;
}

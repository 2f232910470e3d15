package io.ncclffm.device;

import jdk.jfr.Category;
import jdk.jfr.DataAmount;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;
import jdk.jfr.StackTrace;

/** A task of the host, or a producer, was launched; when it is done is not known here. */
@Name("io.ncclffm.Task")
@Label("NCCL Task")
@Category("NCCL")
@Description("The host launched a task, or a kernel that appends tasks, to a task queue")
@StackTrace(false)
final class TaskEvent extends Event {
  /** Tells whether anyone records; an event made for that alone would cost memory each time. */
  static final TaskEvent PROBE = new TaskEvent();

  @Label("Symbol")
  String symbol = "";

  @Label("Operation")
  String operation = "";

  @Label("Bytes")
  @DataAmount
  long bytes;

  @Label("Data type")
  String type = "";

  @Label("Reduction")
  String reduction = "";

  @Label("Lane")
  int lane;

  @Label("Stream")
  long stream;

  @Label("Rank")
  int rank;

  @Label("Ranks")
  int size;
}

package io.ncclffm.device;

import io.ncclffm.core.NcclException;
import jdk.jfr.Category;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;

/** The host learned that a lane has failed, or that a task found no room. */
@Name("io.ncclffm.TaskFailure")
@Label("NCCL Task Failure")
@Category("NCCL")
@Description("A lane of a task queue has failed, or a task found no room in one")
final class TaskFailureEvent extends Event {
  @Label("Operation")
  String operation = "";

  @Label("Result code")
  int resultCode;

  @Label("Message")
  String message = "";

  @Label("Lane")
  int lane;

  @Label("Rank")
  int rank;

  static void emit(NcclException e, int lane, int rank) {
    TaskFailureEvent event = new TaskFailureEvent();
    if (event.shouldCommit()) {
      event.operation = e.operation();
      event.resultCode = e.resultCode();
      event.message = String.valueOf(e.getMessage());
      event.lane = lane;
      event.rank = rank;
      event.commit();
    }
  }
}

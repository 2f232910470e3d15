package io.ncclffm.core;

import jdk.jfr.Category;
import jdk.jfr.Description;
import jdk.jfr.Event;
import jdk.jfr.Label;
import jdk.jfr.Name;

/** An NCCL call failed, or a watchdog gave up waiting. */
@Name("io.ncclffm.Failure")
@Label("NCCL Failure")
@Category("NCCL")
@Description("An NCCL call returned an error, or a watchdog gave up waiting")
final class FailureEvent extends Event {
  @Label("Operation")
  String operation = "";

  @Label("Result code")
  int resultCode;

  @Label("Message")
  String message = "";

  static void emit(NcclException e) {
    FailureEvent event = new FailureEvent();
    if (event.shouldCommit()) {
      event.operation = e.operation();
      event.resultCode = e.resultCode();
      event.message = String.valueOf(e.getMessage());
      event.commit();
    }
  }
}

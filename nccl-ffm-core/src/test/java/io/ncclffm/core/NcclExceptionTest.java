package io.ncclffm.core;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.bindings.nccl.NcclH;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** What an NCCL failure tells; no native code. */
class NcclExceptionTest {
  @Test
  void namesOperationPlaceResultAndDetail() {
    NcclException e =
        new NcclException("ncclAllReduce", 5, " on rank 1 of 4 (device 1)", "the reason");
    assertEquals(
        "ncclAllReduce on rank 1 of 4 (device 1): ncclInvalidUsage (5): the reason",
        e.getMessage());
    assertEquals("ncclAllReduce", e.operation());
    assertEquals(5, e.resultCode());
  }

  @Test
  void leavesOutWhatIsUnknown() {
    assertEquals(
        "ncclGroupEnd: ncclInvalidArgument (4)",
        new NcclException("ncclGroupEnd", 4, "", "").getMessage());
  }

  // Rows 25 and 28 of the table of known faults: a failure whose text helps nobody.
  @ParameterizedTest
  @CsvSource({"1,NCCL_DEBUG=INFO", "2,/dev/shm", "3,NCCL_DEBUG=INFO", "6,another rank failed"})
  void hintsAtTheRemedy(int code, String hint) {
    String message = new NcclException("ncclSend", code, "", "detail").getMessage();
    assertTrue(message.contains("detail; "), message);
    assertTrue(message.contains(hint), message);
  }

  @ParameterizedTest
  @CsvSource({
    "0,ncclSuccess",
    "1,ncclUnhandledCudaError",
    "2,ncclSystemError",
    "3,ncclInternalError",
    "4,ncclInvalidArgument",
    "5,ncclInvalidUsage",
    "6,ncclRemoteError",
    "7,ncclInProgress",
    "8,ncclTimeout"
  })
  void resultNamesAreThoseOfTheHeader(int code, String name) throws Exception {
    assertEquals(name, NcclException.resultName(code));
    assertEquals(code, NcclH.class.getMethod(name).invoke(null));
  }

  @ParameterizedTest
  @ValueSource(ints = {9, 99, -1})
  void keepsResultsThatItDoesNotKnow(int code) {
    NcclException e = new NcclException("ncclSend", code, "", "");
    assertEquals(code, e.resultCode());
    assertEquals("ncclSend: unknown result (" + code + ")", e.getMessage());
    assertTrue(e.isCommunicatorFatal());
  }

  @Test
  void onlyInvalidArgumentLeavesTheCommunicatorUsable() {
    for (int code = 1; code <= 8; code++) {
      assertEquals(code != 4, new NcclException("f", code, "", "").isCommunicatorFatal());
    }
  }

  @Test
  void repeatedLoadFailureKeepsTheFirstAndItsText() {
    NativeLibraryException first = new NativeLibraryException("cannot load libnccl: a, b");
    NativeLibraryException again = new NativeLibraryException(first);
    assertEquals(first.getMessage(), again.getMessage());
    assertEquals(first, again.getCause());
    assertFalse(first.getMessage().isEmpty());
  }
}

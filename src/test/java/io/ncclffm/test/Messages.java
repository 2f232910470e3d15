package io.ncclffm.test;

import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

/** What an exception must tell. */
public final class Messages {
  private Messages() {}

  /** The message holds every one of the texts. */
  public static void assertNames(Throwable thrown, String... texts) {
    assertNotNull(thrown.getMessage(), thrown.getClass() + " without a message");
    for (String text : texts) {
      assertTrue(
          thrown.getMessage().contains(text),
          () -> "\"" + text + "\" is missing in: " + thrown.getMessage());
    }
  }
}

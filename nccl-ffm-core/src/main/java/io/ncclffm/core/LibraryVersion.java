package io.ncclffm.core;

import java.util.Set;

/**
 * One loaded library.
 *
 * @param version what the library says of itself
 * @param headerVersion of the headers that this project's bindings were generated from
 * @param file what is really mapped into the process
 * @param origin which rule of the search order found it
 * @param otherCopies further files of the same library in this process, as another component may
 *     have loaded; the usual cause of a version that nobody expected
 */
public record LibraryVersion(
    String version, String headerVersion, String file, String origin, Set<String> otherCopies) {

  @Override
  public String toString() {
    return version
        + " (bound against "
        + headerVersion
        + "), "
        + file
        + " ["
        + origin
        + "]"
        + (otherCopies.isEmpty() ? "" : "; ALSO in this process: " + otherCopies);
  }
}

package io.ncclffm.test;

import static org.junit.jupiter.api.Assumptions.assumeFalse;

import io.ncclffm.lsa.LsaProvider;

/** Which providers of windows there are on the backend under test. */
final class ProvidersHere {
  private ProvidersHere() {}

  /** Skips the test where there is no such provider. */
  static void assume(LsaProvider provider) {
    assumeFalse(
        provider == (TestRanks.onCpu() ? LsaProvider.NCCL_WINDOW : LsaProvider.CPU),
        provider + " is not on this backend");
  }
}

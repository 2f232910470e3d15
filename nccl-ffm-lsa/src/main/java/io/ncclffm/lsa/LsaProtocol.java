package io.ncclffm.lsa;

/** How data and its arrival travel together. */
public enum LsaProtocol {
  /** 8-byte words with a flag each: the lowest latency, half the bandwidth. */
  LL,
  /** 128-byte lines of which 8 bytes are flags: low latency at 15/16 of the bandwidth. */
  LL128,
  /** Plain data, then one flag: the full bandwidth. */
  SIMPLE
}

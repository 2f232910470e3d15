package io.ncclffm.core.bootstrap;

import java.time.Duration;

/**
 * What a connection to {@link TcpExchange}'s port may cost before it has proven to be a rank.
 *
 * @param handshake the longest it may take for that
 * @param strangers how many may try at once, besides one for each rank; one more ends the oldest
 */
record Limits(Duration handshake, int strangers) {
  static final Limits DEFAULT = new Limits(Duration.ofSeconds(5), 64);
}

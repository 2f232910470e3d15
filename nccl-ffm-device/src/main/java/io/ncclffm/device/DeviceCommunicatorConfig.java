package io.ncclffm.device;

import io.ncclffm.lsa.LsaProvider;
import java.time.Duration;
import org.jspecify.annotations.Nullable;

/** How a {@link DeviceCommunicator} is made. The same on every rank. Immutable. */
public final class DeviceCommunicatorConfig {
  /** Kernels wait 30 seconds at most, nothing is checked before a launch, the best provider. */
  public static final DeviceCommunicatorConfig DEFAULT = builder().build();

  private final Duration timeout;
  private final boolean checked;
  private final @Nullable LsaProvider provider;

  private DeviceCommunicatorConfig(Builder builder) {
    this.timeout = builder.timeout;
    this.checked = builder.checked;
    this.provider = builder.provider;
  }

  public static Builder builder() {
    return new Builder();
  }

  Duration timeout() {
    return timeout;
  }

  boolean isChecked() {
    return checked;
  }

  @Nullable LsaProvider provider() {
    return provider;
  }

  /** Collects what is set. */
  public static final class Builder {
    private Duration timeout = Duration.ofSeconds(30);
    private boolean checked;
    private @Nullable LsaProvider provider;

    private Builder() {}

    /**
     * How long a kernel waits for a peer before it gives up.
     *
     * @param value zero waits for ever
     * @throws IllegalArgumentException if negative
     */
    public Builder timeout(Duration value) {
      if (value.isNegative()) {
        throw new IllegalArgumentException("timeout " + value + ": must not be negative");
      }
      timeout = value;
      return this;
    }

    /**
     * Whether every launch first looks at all that the kernel is given ({@link
     * DeviceCommunicator#verify}), so that what would be an illegal memory access is an exception
     * that names it. Costs a copy a rank and launch. Not where the launch is captured into a graph,
     * nor when that is replayed: the check waits for its copies.
     */
    public Builder checked(boolean value) {
      checked = value;
      return this;
    }

    /** The only provider of the windows to take; by default the best that there is. */
    public Builder provider(LsaProvider value) {
      provider = value;
      return this;
    }

    public DeviceCommunicatorConfig build() {
      return new DeviceCommunicatorConfig(this);
    }
  }
}

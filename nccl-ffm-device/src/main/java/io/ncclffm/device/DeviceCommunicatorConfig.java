package io.ncclffm.device;

import io.ncclffm.core.bindings.shim.ShimH;
import io.ncclffm.lsa.LsaProtocol;
import io.ncclffm.lsa.LsaProvider;
import java.time.Duration;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/** How a {@link DeviceCommunicator} is made. The same on every rank. Immutable. */
public final class DeviceCommunicatorConfig {
  /** Kernels wait 30 seconds at most, nothing is checked before a launch, the best provider. */
  public static final DeviceCommunicatorConfig DEFAULT = builder().build();

  private static final Map<String, LsaProtocol> PROTOCOLS =
      Map.of("LL", LsaProtocol.LL, "LL128", LsaProtocol.LL128, "Simple", LsaProtocol.SIMPLE);
  private static final Map<String, DeviceAlgorithm> ALGORITHMS =
      Map.of(
          "oneshot", DeviceAlgorithm.ONE_SHOT,
          "twoshot", DeviceAlgorithm.TWO_SHOT,
          "ring", DeviceAlgorithm.RING);

  private final Duration timeout;
  private final boolean checked;
  private final boolean hostSignal;
  private final @Nullable LsaProvider provider;
  private final int channels;
  private final int slotBytes;
  private final @Nullable LsaProtocol protocol;
  private final @Nullable DeviceAlgorithm algorithm;

  private DeviceCommunicatorConfig(Builder builder) {
    this.timeout = builder.timeout;
    this.checked = builder.checked;
    this.hostSignal = builder.hostSignal;
    this.provider = builder.provider;
    this.channels = builder.channels;
    this.slotBytes = builder.slotBytes;
    this.protocol = builder.protocol;
    this.algorithm = builder.algorithm;
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

  boolean hostSignal() {
    return hostSignal;
  }

  @Nullable LsaProvider provider() {
    return provider;
  }

  int channels() {
    return channels;
  }

  int slotBytes() {
    return slotBytes;
  }

  /**
   * What is set here, else by {@code NCCLFFM_PROTO}.
   *
   * @throws IllegalArgumentException if that is not one
   */
  @Nullable LsaProtocol protocol() {
    return protocol != null ? protocol : fromEnvironment("NCCLFFM_PROTO", PROTOCOLS);
  }

  /**
   * What is set here, else by {@code NCCLFFM_ALGO}.
   *
   * @throws IllegalArgumentException if that is not one
   */
  @Nullable DeviceAlgorithm algorithm() {
    return algorithm != null ? algorithm : fromEnvironment("NCCLFFM_ALGO", ALGORITHMS);
  }

  private static <T> @Nullable T fromEnvironment(String variable, Map<String, T> values) {
    @Nullable String value = System.getenv(variable);
    if (value == null || value.isEmpty()) {
      return null;
    }
    for (Map.Entry<String, T> known : values.entrySet()) {
      if (known.getKey().equalsIgnoreCase(value)) {
        return known.getValue();
      }
    }
    throw new IllegalArgumentException(
        "environment variable "
            + variable
            + "="
            + value
            + ": must be one of "
            + values.keySet().stream().sorted().toList());
  }

  /** Collects what is set. */
  public static final class Builder {
    private Duration timeout = Duration.ofSeconds(30);
    private boolean checked;
    private boolean hostSignal;
    private @Nullable LsaProvider provider;
    private int channels = 16;
    private int slotBytes = 64 << 10;
    private @Nullable LsaProtocol protocol;
    private @Nullable DeviceAlgorithm algorithm;

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

    /**
     * Whether every kernel tells the host at its end that it has finished, so that {@link
     * DeviceCommunicator#awaitKernels} can wait for it without CUDA. Costs the kernel an atomic
     * access a block, and two accesses more. A kernel of one's own then calls {@code signalHost}
     * ({@code ncclffm/channel.h}) at its end, once for each such device communicator among its
     * arguments, or the wait ends at its deadline.
     */
    public Builder hostSignal(boolean value) {
      hostSignal = value;
      return this;
    }

    /** The only provider of the windows to take; by default the best that there is. */
    public Builder provider(LsaProvider value) {
      provider = value;
      return this;
    }

    /**
     * How many blocks may work on one collective; 16 by default. The window grows with it.
     *
     * @throws IllegalArgumentException if not positive
     */
    public Builder channels(int value) {
      if (value < 1) {
        throw new IllegalArgumentException("channels " + value + ": must be at least 1");
      }
      channels = value;
      return this;
    }

    /**
     * What one peer may have on the way on one channel, in bytes; 64 KiB by default. The window has
     * about twelve such slots for each peer and channel.
     *
     * @param value a multiple of 512, up to 64 MiB
     * @throws IllegalArgumentException if it is not
     */
    public Builder slotBytes(int value) {
      int unit = ShimH.NCCLFFM_SLOT_UNIT();
      if (value < unit || value > ShimH.NCCLFFM_MAX_SLOT_BYTES() || value % unit != 0) {
        throw new IllegalArgumentException(
            "slotBytes "
                + value
                + ": must be a multiple of "
                + unit
                + " up to "
                + ShimH.NCCLFFM_MAX_SLOT_BYTES());
      }
      slotBytes = value;
      return this;
    }

    /**
     * The protocol of calls that name none, where the path between the ranks carries it; by default
     * the environment variable {@code NCCLFFM_PROTO} ({@code LL}, {@code LL128} or {@code Simple}),
     * else it is chosen call by call.
     */
    public Builder protocol(LsaProtocol value) {
      protocol = value;
      return this;
    }

    /**
     * The algorithm of calls that name none, where the function has it; by default the environment
     * variable {@code NCCLFFM_ALGO} ({@code oneshot}, {@code twoshot} or {@code ring}), else it is
     * chosen call by call.
     */
    public Builder algorithm(DeviceAlgorithm value) {
      algorithm = value;
      return this;
    }

    public DeviceCommunicatorConfig build() {
      return new DeviceCommunicatorConfig(this);
    }
  }
}

package io.ncclffm.training;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.FusedKernels;
import io.ncclffm.device.GradientAverager;
import io.ncclffm.device.GradientBuckets;
import io.ncclffm.device.OptimizerState;
import io.ncclffm.device.Sgd;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import java.time.Duration;
import java.util.Arrays;

/**
 * Data-parallel training: every rank has the whole network and a share of each batch, and the
 * gradients are averaged over the ranks. So n ranks do what one does with n times the batch.
 */
public final class Training {
  /** How the gradients are averaged. */
  public enum Route {
    /** {@code ncclAllReduce}, from the host. */
    HOST,
    /** One kernel averages the gradients and updates the weights. */
    FUSED,
    /** Tasks, under way while the first layer's gradients are computed. */
    TASKS
  }

  public static final int STEPS = 200;
  public static final int BATCH = 64; // of all ranks together
  private static final int SAMPLES = 1920; // 30 batches
  private static final float RATE = 0.1f;
  private static final float MOMENTUM = 0.9f;
  private static final long BUCKET_BYTES = 2048; // the second layer makes one
  private static final long DATA_SEED = 11;
  private static final long TEST_SEED = 12;
  private static final long WEIGHTS_SEED = 13;
  private static final TaskSymbol GRADIENTS = TaskSymbol.of("gradients");
  private static final Duration PATIENCE = Duration.ofSeconds(30);

  /**
   * What came of it.
   *
   * @param losses the mean over all ranks, of each step
   * @param accuracy on samples that were not trained on
   * @param weights the first layer's, which are the same on every rank
   */
  public record Result(double[] losses, double accuracy, float[] weights) {}

  private final Communicator communicator;
  private final CudaStream stream;
  private final Digits data = Digits.generate(SAMPLES, DATA_SEED);
  private final Network network = new Network(WEIGHTS_SEED);
  private final float[][] velocity = new Network(0).gradients; // 0

  private Training(Communicator communicator, CudaStream stream) {
    this.communicator = communicator;
    this.stream = stream;
  }

  /** One rank's training. Collective. */
  public static Result run(Communicator communicator, CudaStream stream, Route route) {
    Training training = new Training(communicator, stream);
    if (route == Route.HOST) {
      try (GradientAverager averager = GradientAverager.of(communicator)) {
        return training.run(averager);
      }
    }
    DeviceCommunicatorConfig small =
        DeviceCommunicatorConfig.builder().channels(2).timeout(PATIENCE).build();
    if (route == Route.FUSED) {
      try (DeviceCommunicator comm = DeviceCommunicator.create(communicator, small)) {
        return training.run(comm);
      }
    }
    try (DeviceCommunicator comm = DeviceCommunicator.create(communicator, small);
        TaskQueue queue = TaskQueue.create(comm, TaskQueueConfig.builder().lanes(2).build());
        GradientAverager averager = GradientAverager.of(queue, GRADIENTS, PATIENCE)) {
      return training.run(averager);
    }
  }

  private int first(int step) {
    return step * BATCH % SAMPLES + communicator.rank() * share();
  }

  private int share() {
    return BATCH / communicator.size();
  }

  /** Averaged in buckets, while the backward pass goes on; updated in Java. */
  private Result run(GradientAverager averager) {
    double[] losses = new double[STEPS];
    try (GradientBuckets buckets =
            GradientBuckets.create(
                communicator.device(), DataType.FLOAT32, Network.COUNTS, BUCKET_BYTES, averager);
        DeviceBuffer loss = DeviceBuffer.allocate(communicator.device(), DataType.FLOAT64, STEPS)) {
      for (int step = 0; step < STEPS; step++) {
        losses[step] = network.forward(data, first(step), share());
        network.backwardOfOutput();
        handOver(buckets, 3, 2);
        network.backwardOfHidden(data, first(step)); // meanwhile the second layer's are averaged
        handOver(buckets, 1, 0);
        buckets.finish();
        update(buckets);
      }
      return result(losses, loss);
    }
  }

  /** Averaged, and the weights updated, by one kernel; weights and momentum are on the device. */
  private Result run(DeviceCommunicator comm) {
    double[] losses = new double[STEPS];
    long all = Arrays.stream(Network.COUNTS).sum();
    CudaDevice device = communicator.device();
    try (DeviceBuffer gradients = DeviceBuffer.allocate(device, DataType.FLOAT32, all);
        DeviceBuffer weights = DeviceBuffer.allocate(device, DataType.FLOAT32, all);
        DeviceBuffer momentum = DeviceBuffer.allocate(device, DataType.FLOAT32, all);
        DeviceBuffer loss = DeviceBuffer.allocate(device, DataType.FLOAT64, STEPS)) {
      OptimizerState state = OptimizerState.ofSgd(weights, momentum);
      momentum.fill((byte) 0, stream);
      copyEach(network.parameters, weights, true);
      for (int step = 0; step < STEPS; step++) {
        losses[step] = network.forward(data, first(step), share());
        network.backwardOfOutput();
        network.backwardOfHidden(data, first(step));
        copyEach(network.gradients, gradients, true);
        FusedKernels.sgd(comm, gradients, state, new Sgd(RATE, MOMENTUM), stream);
        copyEach(network.parameters, weights, false);
      }
      return result(losses, loss);
    }
  }

  private void copyEach(float[][] parts, DeviceBuffer buffer, boolean toDevice) {
    long at = 0;
    for (float[] part : parts) {
      DeviceBuffer slice =
          DeviceBuffer.wrap(buffer.device(), buffer.type(), part.length, buffer.address(at));
      if (toDevice) {
        slice.copyFrom(part, stream);
      } else {
        slice.copyTo(part, stream);
      }
      at += part.length;
    }
  }

  private Result result(double[] losses, DeviceBuffer loss) {
    loss.copyFrom(losses, stream);
    communicator.allReduce(loss, loss, ReduceOp.AVG, stream);
    loss.copyTo(losses, stream);
    double accuracy = network.accuracy(Digits.generate(1000, TEST_SEED));
    return new Result(losses, accuracy, network.parameters[0]);
  }

  private void handOver(GradientBuckets buckets, int... gradients) {
    for (int i : gradients) {
      buckets.gradient(i).copyFrom(network.gradients[i], stream);
      buckets.ready(i, stream);
    }
  }

  /** Gradient descent with momentum, in Java. */
  private void update(GradientBuckets buckets) {
    for (int i = 0; i < Network.COUNTS.length; i++) {
      float[] gradient = network.gradients[i];
      buckets.gradient(i).copyTo(gradient, stream);
      for (int k = 0; k < gradient.length; k++) {
        velocity[i][k] = MOMENTUM * velocity[i][k] + gradient[k];
        network.parameters[i][k] -= RATE * velocity[i][k];
      }
    }
  }
}

package io.ncclffm.training;

import io.ncclffm.core.Communicator;
import io.ncclffm.core.CudaStream;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.ReduceOp;
import io.ncclffm.device.DeviceCommunicator;
import io.ncclffm.device.DeviceCommunicatorConfig;
import io.ncclffm.device.GradientAverager;
import io.ncclffm.device.GradientBuckets;
import io.ncclffm.device.TaskQueue;
import io.ncclffm.device.TaskQueueConfig;
import io.ncclffm.device.TaskSymbol;
import java.time.Duration;

/**
 * Data-parallel training: every rank has the whole network and a share of each batch, and the
 * gradients are averaged over the ranks. So n ranks do what one does with n times the batch.
 */
public final class Training {
  /** How the gradients are averaged. */
  public enum Route {
    /** {@code ncclAllReduce}, from the host. */
    HOST,
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
    try (DeviceCommunicator comm = DeviceCommunicator.create(communicator, small);
        TaskQueue queue = TaskQueue.create(comm, TaskQueueConfig.builder().lanes(2).build());
        GradientAverager averager = GradientAverager.of(queue, GRADIENTS, PATIENCE)) {
      return training.run(averager);
    }
  }

  private Result run(GradientAverager averager) {
    int share = BATCH / communicator.size();
    double[] losses = new double[STEPS];
    try (GradientBuckets buckets =
            GradientBuckets.create(
                communicator.device(), DataType.FLOAT32, Network.COUNTS, BUCKET_BYTES, averager);
        DeviceBuffer loss = DeviceBuffer.allocate(communicator.device(), DataType.FLOAT64, STEPS)) {
      for (int step = 0; step < STEPS; step++) {
        int first = step * BATCH % SAMPLES + communicator.rank() * share;
        losses[step] = network.forward(data, first, share);
        network.backwardOfOutput();
        handOver(buckets, 3, 2);
        network.backwardOfHidden(data, first); // meanwhile the second layer's are averaged
        handOver(buckets, 1, 0);
        buckets.finish();
        update(buckets);
      }
      loss.copyFrom(losses, stream);
      communicator.allReduce(loss, loss, ReduceOp.AVG, stream);
      loss.copyTo(losses, stream);
      double accuracy = network.accuracy(Digits.generate(1000, TEST_SEED));
      return new Result(losses, accuracy, network.parameters[0]);
    }
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

package io.ncclffm.device;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.ncclffm.core.CudaDevice;
import io.ncclffm.core.DataType;
import io.ncclffm.core.DeviceBuffer;
import io.ncclffm.core.LocalWorld;
import io.ncclffm.test.Messages;
import io.ncclffm.test.TestRanks;
import java.lang.foreign.MemorySegment;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** What is checked before a kernel is loaded or launched; no kernel runs here. */
class KernelArgumentsTest {
  private static final CudaDevice DEVICE = new CudaDevice(0);

  private static IllegalArgumentException refused(int[] sizes, Object... values) {
    return assertThrows(
        IllegalArgumentException.class,
        () -> new KernelArguments("kernel f", DEVICE, sizes, values));
  }

  @SuppressWarnings("restricted")
  private static MemorySegment at(KernelArguments arguments, int index, long bytes) {
    return arguments.table().getAtIndex(ADDRESS, index).reinterpret(bytes);
  }

  @Test
  void valuesLieWhereTheTableSays() {
    try (DeviceBuffer buffer = DeviceBuffer.allocate(DEVICE, DataType.FLOAT32, 8)) {
      byte[] struct = {1, 2, 3, 4, 5};
      KernelArguments arguments =
          new KernelArguments(
              "kernel f",
              DEVICE,
              new int[] {8, 4, 8, 4, 8, 5},
              new Object[] {buffer, 7, 1L << 40, 2.5f, 0.25, MemorySegment.ofArray(struct)});
      assertEquals(buffer.address(0).address(), at(arguments, 0, 8).get(JAVA_LONG, 0));
      assertEquals(7, at(arguments, 1, 4).get(JAVA_INT, 0));
      assertEquals(1L << 40, at(arguments, 2, 8).get(JAVA_LONG, 0));
      assertEquals(2.5f, at(arguments, 3, 4).get(JAVA_FLOAT, 0));
      assertArrayEquals(struct, at(arguments, 5, 5).toArray(JAVA_BYTE));
      long table = arguments.table().getAtIndex(ADDRESS, 1).address();
      arguments.set(1, 8);
      arguments.set(0, buffer, 3);
      assertEquals(table, arguments.table().getAtIndex(ADDRESS, 1).address());
      assertEquals(8, at(arguments, 1, 4).get(JAVA_INT, 0));
      assertEquals(buffer.address(3).address(), at(arguments, 0, 8).get(JAVA_LONG, 0));
    }
  }

  @Test
  void aWrongCountOrSizeIsNamed() {
    Messages.assertNames(
        refused(new int[] {8, 4}, 1L), "kernel f takes 2 arguments", "[8, 4]", "1: (Long)");
    Messages.assertNames(
        refused(new int[] {8, 4}, 1L, 2L),
        "kernel f: argument 1 (of 0 to 1)",
        "a long takes 8 bytes, the kernel's parameter 4");
    Messages.assertNames(refused(new int[] {8}, 1), "argument 0", "an int takes 4 bytes");
    Messages.assertNames(refused(new int[] {8}, "text"), "argument 0", "java.lang.String");
    Messages.assertNames(refused(new int[] {8}, (Object) null), "argument 0", "null");
    KernelArguments one = new KernelArguments("kernel f", DEVICE, new int[] {4}, new Object[] {1});
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> one.set(1, 5)), "argument 1");
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> one.set(0, 5.0)), "a double takes 8");
    // An older CUDA does not tell: then what was given first is the size.
    KernelArguments untold = new KernelArguments("kernel f", DEVICE, null, new Object[] {1});
    assertThrows(IllegalArgumentException.class, () -> untold.set(0, 5L));
  }

  @Test
  void whatIsClosedOrElsewhereIsRefused() {
    DeviceBuffer closed = DeviceBuffer.allocate(DEVICE, DataType.INT8, 1);
    closed.close();
    assertThrows(
        IllegalStateException.class,
        () -> new KernelArguments("kernel f", DEVICE, null, new Object[] {closed}));
    if (CudaDevice.count() > 1) {
      try (DeviceBuffer other = DeviceBuffer.allocate(new CudaDevice(1), DataType.INT8, 1)) {
        Messages.assertNames(refused(null, other), "argument 0", "device 1", "device 0");
      }
    }
  }

  @Test
  void aDeviceCommunicatorIsPassedByValue() {
    TestRanks.assumeCpu("on a GPU KernelModuleTest does it with a kernel");
    try (LocalWorld world = TestRanks.open(1)) {
      world.run(
          r -> {
            DeviceCommunicator comm = DeviceCommunicator.create(r.communicator());
            int bytes = (int) comm.struct().byteSize();
            KernelArguments arguments =
                new KernelArguments("kernel f", r.device(), new int[] {bytes}, new Object[] {comm});
            assertEquals(-1, at(arguments, 0, bytes).mismatch(comm.struct()));
            comm.beginKernel("kernel f", r.stream());
            comm.communicator().end();
            comm.close();
            Messages.assertNames(
                assertThrows(
                    IllegalStateException.class, () -> comm.beginKernel("kernel f", r.stream())),
                "kernel f");
          });
    }
  }

  // ------------------------------------------------------------------ images

  private static KernelImage ptx(String target) {
    return KernelImage.of(
        ("//\n.version 9.0\n.target " + target + "\n.address_size 64\n")
            .getBytes(StandardCharsets.US_ASCII));
  }

  private static KernelImage cubin(int abi, int flags) {
    ByteBuffer elf = ByteBuffer.allocate(64).order(ByteOrder.LITTLE_ENDIAN);
    elf.putInt(0, 0x464c457f).put(8, (byte) abi).putShort(18, (short) 190).putInt(48, flags);
    return KernelImage.of(elf.array());
  }

  @ParameterizedTest
  @CsvSource({"sm_90, true", "sm_80, true", "sm_100, false", "'sm_90a, debug', true"})
  void ptxRunsFromItsArchitectureOn(String target, boolean runs) {
    KernelImage image = ptx(target);
    assertEquals(KernelImage.Form.PTX, image.form());
    if (runs) {
      assertEquals(null, image.problemOn(90));
    } else {
      Messages.assertNames(
          new RuntimeException(image.problemOn(90)),
          "PTX 9.0 for sm_100",
          "older",
          "compute_90 or lower");
    }
  }

  @ParameterizedTest
  @CsvSource({
    "7, 0x5a, 90, true",
    "7, 0x56, 90, false",
    "8, 0x6005a02, 90, true",
    "8, 0x6006402, 90, false",
    "7, 0x50, 86, true",
    "7, 0x56, 80, false"
  })
  void cubinsRunOnTheirMajorNumber(int abi, int flags, int device, boolean runs) {
    assertEquals(runs, cubin(abi, flags).problemOn(device) == null);
  }

  @Test
  void fatbinThatWasCutOffIsRefused() {
    ByteBuffer fatbin = ByteBuffer.allocate(100).order(ByteOrder.LITTLE_ENDIAN);
    fatbin.putInt(0xBA55ED50).putShort((short) 1).putShort((short) 16).putLong(84);
    assertEquals("fatbin", KernelImage.of(fatbin.array()).toString());
    fatbin.putLong(8, 85);
    Messages.assertNames(
        assertThrows(IllegalArgumentException.class, () -> KernelImage.of(fatbin.array())),
        "fatbin of 100 bytes",
        "101",
        "cut off");
  }

  @Test
  void whatIsNoImageIsRefused() {
    for (byte[] bytes : new byte[][] {{}, "a text".getBytes(), new byte[100]}) {
      assertTrue(
          assertThrows(IllegalArgumentException.class, () -> KernelImage.of(bytes))
              .getMessage()
              .contains("neither a cubin"));
    }
  }
}

package io.ncclffm.test;

import io.ncclffm.device.KernelCompiler;
import io.ncclffm.device.KernelImage;
import io.ncclffm.device.KernelSource;

/** A child JVM's main class: compiles a kernel of the device library when told to. */
final class CompilesKernel {
  private CompilesKernel() {}

  public static void main(String[] arguments) throws Exception {
    System.out.println("READY");
    System.in.read();
    long start = System.nanoTime();
    try {
      KernelImage image =
          KernelCompiler.compile(KernelSource.of(KernelCompilerTest.FUSED), "sm_90");
      long millis = (System.nanoTime() - start) / 1_000_000;
      System.out.println("DONE " + image + " " + image.isCached() + " " + millis);
    } catch (RuntimeException e) {
      System.out.println("FAILED " + e.getMessage());
    }
  }
}

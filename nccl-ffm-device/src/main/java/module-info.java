/** Communication inside kernels: the device communicator and the kernels that use it. */
@org.jspecify.annotations.NullMarked
module io.ncclffm.device {
  requires static transitive org.jspecify;
  requires transitive io.ncclffm.lsa;
  requires jdk.jfr;

  exports io.ncclffm.device;
}

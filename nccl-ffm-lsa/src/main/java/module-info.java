/** Windows of memory that a kernel of one rank can load from and store to on another. */
@org.jspecify.annotations.NullMarked
module io.ncclffm.lsa {
  requires static transitive org.jspecify;
  requires transitive io.ncclffm.core;
  requires jdk.jfr;

  exports io.ncclffm.lsa;
}

/** A program that uses nccl-ffm. */
module example {
  requires io.ncclffm.device;
}

/** Holds the native libraries of nccl-ffm as resources, by platform; no Java code. */
module io.ncclffm.natives {}

/**
 * How ranks that a launcher started come to the same {@link io.ncclffm.core.NcclUniqueId}: rank and
 * size from the environment of torchrun, Slurm or Open MPI ({@link RankInfo}), the id over TCP
 * ({@link TcpExchange}), by a file ({@link FileExchange}), or by what a program already has ({@link
 * UniqueIdExchange}). Every wait has a deadline, and names the ranks that are missing at its end.
 */
package io.ncclffm.core.bootstrap;

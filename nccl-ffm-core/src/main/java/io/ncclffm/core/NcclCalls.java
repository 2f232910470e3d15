package io.ncclffm.core;

import io.ncclffm.core.bindings.nccl.NcclH;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;

/**
 * NCCL's operations with device pointers as numbers. By the bindings alone a pointer is a {@link
 * MemorySegment} from one method to the next, and whether the compiler removes its allocation
 * depends on which of them it compiles first. Here it only exists within a method handle, which is
 * compiled as a whole.
 */
final class NcclCalls {
  private static final MethodHandle SEGMENT;

  static {
    try {
      SEGMENT =
          MethodHandles.publicLookup()
              .findStatic(
                  MemorySegment.class,
                  "ofAddress",
                  MethodType.methodType(MemorySegment.class, long.class));
    } catch (ReflectiveOperationException e) {
      throw new ExceptionInInitializerError(e);
    }
  }

  // A class each, so that a function that this libnccl lacks is looked for when it is called.

  private static final class AllReduce {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclAllReduce$handle());
  }

  private static final class Broadcast {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclBroadcast$handle());
  }

  private static final class Reduce {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclReduce$handle());
  }

  private static final class AllGather {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclAllGather$handle());
  }

  private static final class ReduceScatter {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclReduceScatter$handle());
  }

  private static final class Send {
    static final MethodHandle HANDLE = withPointer(NcclH.ncclSend$handle());
  }

  private static final class Recv {
    static final MethodHandle HANDLE = withPointer(NcclH.ncclRecv$handle());
  }

  private static final class AlltoAll {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclAlltoAll$handle());
  }

  private static final class Gather {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclGather$handle());
  }

  private static final class Scatter {
    static final MethodHandle HANDLE = withTwoPointers(NcclH.ncclScatter$handle());
  }

  private static final class PutSignal {
    static final MethodHandle HANDLE = withPointer(NcclH.ncclPutSignal$handle());
  }

  private NcclCalls() {}

  private static MethodHandle withPointer(MethodHandle call) {
    return MethodHandles.filterArguments(call, 0, SEGMENT);
  }

  private static MethodHandle withTwoPointers(MethodHandle call) {
    return MethodHandles.filterArguments(call, 0, SEGMENT, SEGMENT);
  }

  private static AssertionError unexpected(Throwable e) {
    if (e instanceof RuntimeException runtime) {
      throw runtime;
    }
    if (e instanceof Error error) {
      throw error;
    }
    return new AssertionError("a downcall declares no exception", e);
  }

  static int ncclAllReduce(
      long send,
      long recv,
      long count,
      int type,
      int op,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) AllReduce.HANDLE.invokeExact(send, recv, count, type, op, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclBroadcast(
      long send,
      long recv,
      long count,
      int type,
      int root,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) Broadcast.HANDLE.invokeExact(send, recv, count, type, root, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclReduce(
      long send,
      long recv,
      long count,
      int type,
      int op,
      int root,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) Reduce.HANDLE.invokeExact(send, recv, count, type, op, root, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclAllGather(
      long send, long recv, long sendCount, int type, MemorySegment comm, MemorySegment stream) {
    try {
      return (int) AllGather.HANDLE.invokeExact(send, recv, sendCount, type, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclReduceScatter(
      long send,
      long recv,
      long recvCount,
      int type,
      int op,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) ReduceScatter.HANDLE.invokeExact(send, recv, recvCount, type, op, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclSend(
      long buffer, long count, int type, int peer, MemorySegment comm, MemorySegment stream) {
    try {
      return (int) Send.HANDLE.invokeExact(buffer, count, type, peer, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclRecv(
      long buffer, long count, int type, int peer, MemorySegment comm, MemorySegment stream) {
    try {
      return (int) Recv.HANDLE.invokeExact(buffer, count, type, peer, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclAlltoAll(
      long send, long recv, long count, int type, MemorySegment comm, MemorySegment stream) {
    try {
      return (int) AlltoAll.HANDLE.invokeExact(send, recv, count, type, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclGather(
      long send,
      long recv,
      long count,
      int type,
      int root,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) Gather.HANDLE.invokeExact(send, recv, count, type, root, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclScatter(
      long send,
      long recv,
      long count,
      int type,
      int root,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int) Scatter.HANDLE.invokeExact(send, recv, count, type, root, comm, stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }

  static int ncclPutSignal(
      long buffer,
      long count,
      int type,
      int peer,
      MemorySegment window,
      long windowOffset,
      int signal,
      int context,
      int flags,
      MemorySegment comm,
      MemorySegment stream) {
    try {
      return (int)
          PutSignal.HANDLE.invokeExact(
              buffer,
              count,
              type,
              peer,
              window,
              windowOffset,
              signal,
              context,
              flags,
              comm,
              stream);
    } catch (Throwable e) {
      throw unexpected(e);
    }
  }
}

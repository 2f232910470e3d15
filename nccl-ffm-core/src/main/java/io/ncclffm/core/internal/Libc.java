package io.ncclffm.core.internal;

import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_INT;

import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.invoke.MethodHandle;
import org.jspecify.annotations.Nullable;

/**
 * The few libc functions that Java does not offer: {@code dlopen}, so that the system's reason for
 * a failure is known; the C environment, which CUDA and NCCL read and {@link System#getenv} only
 * mirrors as it was at JVM start; and files in memory that have no name.
 */
@SuppressWarnings("restricted") // downcall handles and C strings: what this class is for
final class Libc {
  private static final int RTLD_NOW = 2;
  private static final int RTLD_NOLOAD = 4;

  private static final MethodHandle DLOPEN =
      handle("dlopen", FunctionDescriptor.of(ADDRESS, ADDRESS, JAVA_INT));
  private static final MethodHandle DLSYM =
      handle("dlsym", FunctionDescriptor.of(ADDRESS, ADDRESS, ADDRESS));
  private static final MethodHandle DLERROR = handle("dlerror", FunctionDescriptor.of(ADDRESS));
  private static final MethodHandle SETENV =
      handle("setenv", FunctionDescriptor.of(JAVA_INT, ADDRESS, ADDRESS, JAVA_INT));
  private static final MethodHandle GETENV =
      handle("getenv", FunctionDescriptor.of(ADDRESS, ADDRESS));

  private static final MethodHandle MEMFD_CREATE =
      handle("memfd_create", FunctionDescriptor.of(JAVA_INT, ADDRESS, JAVA_INT));
  private static final MethodHandle CLOSE =
      handle("close", FunctionDescriptor.of(JAVA_INT, JAVA_INT));

  private Libc() {}

  private static MethodHandle handle(String name, FunctionDescriptor descriptor) {
    Linker linker = Linker.nativeLinker();
    return linker.downcallHandle(linker.defaultLookup().findOrThrow(name), descriptor);
  }

  /** What {@code dlopen} said: a handle, or the reason why not. */
  record Opened(@Nullable MemorySegment handle, String error) {}

  /**
   * Opens a library for the life of the process. {@code RTLD_LOCAL}: its symbols are looked up
   * through the handle and never satisfy or disturb those of another library.
   */
  static Opened open(String fileOrSoname) {
    return open(fileOrSoname, RTLD_NOW);
  }

  /** Like {@link #open}, but only if the process has that very library mapped already. */
  static Opened openIfMapped(String fileOrSoname) {
    return open(fileOrSoname, RTLD_NOW | RTLD_NOLOAD);
  }

  private static Opened open(String fileOrSoname, int flags) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment handle =
          (MemorySegment) DLOPEN.invokeExact(arena.allocateFrom(fileOrSoname), flags);
      if (handle.address() != 0) {
        return new Opened(handle, "");
      }
      MemorySegment text = (MemorySegment) DLERROR.invokeExact();
      return new Opened(
          null, text.address() == 0 ? "not mapped in this process" : NativeText.copy(text));
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** The address of a symbol in a library opened before, or null if the library lacks it. */
  static @Nullable MemorySegment symbol(MemorySegment library, String name) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment address = (MemorySegment) DLSYM.invokeExact(library, arena.allocateFrom(name));
      return address.address() == 0 ? null : address;
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** A file without a name, in memory; -1 if the system gives none. */
  static int memfdCreate(String name, int flags) {
    try (Arena arena = Arena.ofConfined()) {
      return (int) MEMFD_CREATE.invokeExact(arena.allocateFrom(name), flags);
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** Closes a file descriptor. */
  static int close(int fd) {
    try {
      return (int) CLOSE.invokeExact(fd);
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** The C environment's value, or null. */
  static @Nullable String getenv(String name) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment value = (MemorySegment) GETENV.invokeExact(arena.allocateFrom(name));
      return value.address() == 0 ? null : NativeText.copy(value);
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }

  /** Sets a variable of the C environment that is not set yet; a value set by the user stays. */
  static void setenvIfUnset(String name, String value) {
    try (Arena arena = Arena.ofConfined()) {
      int rc = (int) SETENV.invokeExact(arena.allocateFrom(name), arena.allocateFrom(value), 0);
      if (rc != 0) {
        throw new IllegalStateException("setenv(" + name + ", " + value + ") failed");
      }
    } catch (Throwable t) {
      throw NativeText.rethrow(t);
    }
  }
}

/**
 * The part of NVRTC, CUDA's compiler at run time, that this project uses as jextract sees it: raw functions, constants and struct layouts. Written by {@code
 * native/bindings/generate.sh}, never by hand.
 *
 * <p>This is the escape hatch below the API: no checks, no exceptions, no lifetimes, C's rules. Functions return C's
 * result codes. A function that the loaded library lacks fails at its first use with {@link
 * java.lang.ExceptionInInitializerError}.
 *
 * <p>Made from nvrtc.h of CUDA 13.0 by jextract 25, Debian clang version 14.0.6.
 */
package io.ncclffm.core.bindings.nvrtc;

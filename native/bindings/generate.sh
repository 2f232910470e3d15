#!/bin/sh
# Regenerates the four packages io.ncclffm.core.bindings.{nccl,cudart,nvrtc,shim} with jextract, and layouts.txt with the C++
# compiler ($CXX, else c++), and replaces the committed ones. A second run with the same tools and headers changes
# nothing. See README.md beside this file.
set -eu
export LC_ALL=C

if [ $# -lt 4 ] || [ $# -gt 5 ]; then
  echo "usage: generate.sh JEXTRACT NCCL_INCLUDE CUDA_INCLUDE CLANG_INCLUDE [NVRTC_INCLUDE]
  JEXTRACT       the jextract executable (built for JDK 25)
  NCCL_INCLUDE   folder of nccl.h and nccl_device/
  CUDA_INCLUDE   folder of cuda_runtime_api.h
  CLANG_INCLUDE  clang's own headers (stddef.h ...), of the libclang that JEXTRACT uses: lib/clang/VERSION/include
  NVRTC_INCLUDE  folder of nvrtc.h, where that is not CUDA_INCLUDE" >&2
  exit 2
fi
jextract=$(realpath "$(command -v "$1")") nccl=$(realpath "$2") cuda=$(realpath "$3") clang=$(realpath "$4")
nvrtc=$(realpath "${5:-$3}")
here=$(cd "$(dirname "$0")" && pwd)
root=io/ncclffm/core/bindings
loader=io.ncclffm.core.internal.NativeLibraries
target=$here/../../nccl-ffm-core/src/main/java/$root

for file in "$nccl/nccl.h" "$cuda/cuda_runtime_api.h" "$clang/stddef.h" "$nvrtc/nvrtc.h"; do
  [ -f "$file" ] || { echo "generate.sh: $file does not exist" >&2; exit 2; }
done

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# jextract feeds a compile_flags.txt of the current folder to clang: run it where there is none.
cd "$out"

macro() { # FILE NAME: the number that the header defines NAME as
  sed -n "s/^# *define  *$2  *\([0-9][0-9]*\).*/\1/p" "$1" | head -1
}

"$jextract" --version > version 2>&1
tools="$(sed -n 's/^jextract /jextract /p' version), $(sed -n 's/^LibClang version //p' version)"
nccl_code=$(macro "$nccl/nccl.h" NCCL_VERSION_CODE)
cuda_code=$(macro "$cuda/cuda_runtime_api.h" CUDART_VERSION)
nccl_version="$((nccl_code / 10000)).$((nccl_code / 100 % 100)).$((nccl_code % 100))"
cuda_version="$((cuda_code / 1000)).$((cuda_code % 1000 / 10))"

generate() { # PACKAGE CLASS LIBRARY SOURCE HEADER [INCLUDE...]: one package
  package=$1 class=$2 library=$3 source=$4 header=$5
  shift 5
  set -- "$clang" "$@"
  for dir in "$@"; do # turns each folder into -I folder
    shift
    set -- "$@" -I "$dir"
  done
  # Warnings about skipped types (long double, opaque structs) concern nothing that is generated.
  "$jextract" "@$here/$package.args" "$@" --output . -t io.ncclffm.core.bindings."$package" \
    --header-class-name "${class}H" --symbols-class-name "${class}Layouts" "$header" > "$package.log" 2>&1 ||
    { cat "$package.log" >&2; exit 1; }
  dir=$root/$package

  # 1. Symbols come from our loader, at the first use of a function: constants and layouts need no library.
  # 2. The arena that jextract would load a library into is not used.
  sed -i \
    -e "s|= SymbolLookup.loaderLookup()|=\n            name -> $loader.$package().find(name);|" \
    -e '/^ *\.or(Linker.nativeLinker().defaultLookup());$/d' \
    -e '/LIBRARY_ARENA = Arena.ofAuto();$/,+1d' \
    "$dir/${class}H.java"
  # 3. Linking and calling native code is what this package is for: javac need not warn at each place.
  sed -i -e 's/^public \(final \)\{0,1\}class /@SuppressWarnings("restricted")\n&/' "$dir"/*.java

  if [ "$(grep -c "$loader.$package()" "$dir/${class}H.java")" != 1 ] ||
    grep -rnE 'LIBRARY_ARENA|loaderLookup|defaultLookup|libraryLookup' "$dir" ||
    grep -rnF -e "$nccl" -e "$cuda" -e "$clang" -e "$nvrtc" -e "$here" -e "$out" "$dir"; then
    echo "generate.sh: jextract's output has changed its shape; adapt the substitutions" >&2
    exit 1
  fi

  cat > "$dir/package-info.java" << END
/**
 * $library as jextract sees it: raw functions, constants and struct layouts. Written by {@code
 * native/bindings/generate.sh}, never by hand.
 *
 * <p>This is the escape hatch below the API: no checks, no exceptions, no lifetimes, C's rules. Functions return C's
 * result codes. A function that the loaded library lacks fails at its first use with {@link
 * java.lang.ExceptionInInitializerError}.
 *
 * <p>Made from $source by $tools.
 */
package io.ncclffm.core.bindings.$package;
END
}

generate nccl Nccl "The host API of NCCL" "nccl.h and nccl_device/ of NCCL $nccl_version" \
  "$here/nccl_device_host.h" "$nccl" "$cuda"
generate cudart Cudart "The part of the CUDA runtime that this project uses" \
  "cuda_runtime_api.h of CUDA $cuda_version" "$cuda/cuda_runtime_api.h" "$cuda"
generate nvrtc Nvrtc "The part of NVRTC, CUDA's compiler at run time, that this project uses" \
  "nvrtc.h of CUDA $cuda_version" "$nvrtc/nvrtc.h"
generate shim Shim "The C ABI of the nccl-ffm shim" "native/include/ncclffm.h" \
  "$here/../include/ncclffm.h"

"$here/layouts.sh" "$nccl" "$cuda" > layouts.txt
cp layouts.txt "$here/layouts.txt"
for package in nccl cudart nvrtc shim; do
  mkdir -p "$target"
  rm -rf "${target:?}/$package"
  cp -R "$root/$package" "$target/$package"
done
echo "generated $(find "$root" -name '*.java' | wc -l) files: NCCL $nccl_version, CUDA $cuda_version, $tools"

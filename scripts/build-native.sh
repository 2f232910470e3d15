#!/usr/bin/env bash
# Builds the native libraries with CMake and runs their C++ tests; called by native/pom.xml, everything goes to
# native/target.
#
# Usage: build-native.sh libraries     build them and put them into classes/META-INF/ncclffm/<platform>/
#        build-native.sh test          run the C++ tests as they are, then built with ThreadSanitizer and AddressSanitizer
#        build-native.sh bundle FOLDER build the tests that need a GPU and put them into FOLDER
set -euo pipefail

native=$(cd "$(dirname "${BASH_SOURCE[0]}")/../native" && pwd)
target=$native/target
# More compilers than this at a time make a small machine swap.
jobs=2
# Seconds for one C++ test that sets no limit of its own.
test_timeout=300

fail() {
  echo "$1" >&2
  exit 1
}

# property NAME : its value in the file of fetch-real-libraries.sh; nothing where that found nothing.
property() {
  if [[ -f $target/real-libraries.properties ]]; then
    sed -n "s|^$1=||p" "$target/real-libraries.properties"
  fi
}

# configure FOLDER SANITIZER : prepares native/target/FOLDER; of what CMake tells only our own lines are shown.
configure() {
  local nccl cuda
  nccl=$(property nccl.include)
  cuda=$(property cuda.include)
  cmake -S "$native" -B "$target/$1" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DNCCLFFM_SANITIZER="$2" \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$target/$1/lib" \
    ${nccl:+"-DNCCLFFM_NCCL_INCLUDE=$nccl"} ${cuda:+"-DNCCLFFM_CUDA_INCLUDE=$cuda"} |
    sed -n 's/^-- ncclffm/ncclffm/p'
}

# build FOLDER TARGET...
build() {
  local folder=$target/$1
  shift
  cmake --build "$folder" --parallel "$jobs" --target "$@"
}

# targets NAME... : those of the names that native/target/cmake can build; what is CUDA's exists only with nvcc.
targets() {
  local known
  known=$(cmake --build "$target/cmake" --target help)
  for name in "$@"; do
    ! grep -qw -- "$name" <<<"$known" || echo "$name"
  done
}

# run_tests FOLDER [LAUNCHER...]
run_tests() {
  local folder=$target/$1
  shift
  (cd "$folder" && "$@" ctest --output-on-failure --no-tests=error --parallel "$jobs" --timeout "$test_timeout")
}

command -v cmake >/dev/null ||
  fail "CMake 3.18 or newer is needed: install it (Debian, Ubuntu: apt-get install cmake)."
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  fail "A C++17 compiler is needed: install one (Debian, Ubuntu: apt-get install g++)."
command -v make >/dev/null || [[ -n ${CMAKE_GENERATOR:-} ]] ||
  fail "GNU make is needed by CMake: install it (Debian, Ubuntu: apt-get install make)."

case $1 in
  libraries)
    configure cmake ""
    mapfile -t libraries < <(targets ncclffm_cpu ncclffm_cuda)
    build cmake "${libraries[@]}" ncclffm_cpu_nccl_2_19 host_route # the last two are for the Java tests
    platform=linux-$(uname -m)
    folder=$target/classes/META-INF/ncclffm/${platform/arm64/aarch64}
    mkdir -p "$folder"
    mkdir -p "$target/stripped"
    for library in "${libraries[@]}"; do
      file=$target/cmake/lib/lib$library.so
      # Symbols for debuggers are nine tenths of the CPU backend. A compiler may come without strip.
      if command -v strip >/dev/null; then
        strip --strip-unneeded -o "$target/stripped/lib$library.so" "$file"
        file=$target/stripped/lib$library.so
      fi
      cmake -E copy_if_different "$file" "$folder"
    done
    ;;
  test)
    build cmake all
    run_tests cmake env
    # TSan maps its shadow at fixed addresses, which a kernel with much address randomisation may have given away.
    configure cmake-tsan thread
    build cmake-tsan all
    run_tests cmake-tsan setarch "$(uname -m)" --addr-no-randomize
    configure cmake-asan address
    build cmake-asan all
    run_tests cmake-asan env
    ;;
  bundle)
    mapfile -t programs < <(targets device_cuda_test device_calls_cuda_test device_start_cuda task_cuda_test device_route fused_route host_route blocking_calls)
    if ((${#programs[@]} > 0)); then
      build cmake "${programs[@]}"
      mkdir -p "$2"
      for kernel in $(targets nccl_lsa_sum nccl_lsa_all_reduce); do # which Java loads
        build cmake "$kernel"
        find "$target/cmake" -name "$kernel.fatbin" -exec cp {} "$2" \;
      done
      for file in "${programs[@]}" libncclffm_cuda.so; do # which the programs look for in their own folder
        find "$target/cmake" -name "$file" -type f -exec strip -o "$2/$file" {} \;
      done
    fi
    ;;
  *)
    fail "usage: $0 libraries|test|bundle FOLDER"
    ;;
esac

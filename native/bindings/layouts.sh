#!/bin/sh
# Prints "struct field offset size" (bytes; field "-" is the struct itself) for everything in layouts.list, as the C++
# compiler sees it in the real headers of NCCL, CUDA and the shim, then "INITIALIZER hex" for what NCCL's macros make of
# the structs that programs fill in. layouts.txt beside this file is its committed output.
set -eu
export LC_ALL=C

if [ $# -ne 2 ]; then
  echo "usage: layouts.sh NCCL_INCLUDE CUDA_INCLUDE
  NCCL_INCLUDE  folder of nccl.h and nccl_device/
  CUDA_INCLUDE  folder of cuda_runtime_api.h
  the C++ compiler is \$CXX, else c++" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

{
  cat << 'END'
#include <cstddef>
#include <cstdio>
// nccl.h includes these three but names none of their types; they need CCCL, which is not in CUDA's runtime package.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <nccl_device/impl/comm__types.h>
#include <ncclffm.h>
#define STRUCT(s) std::printf("%s - 0 %zu\n", #s, sizeof(s))
#define FIELD(s, f) std::printf("%s %s %zu %zu\n", #s, #f, offsetof(s, f), sizeof(static_cast<s *>(nullptr)->f))
#define INITIALIZER(s, macro) { static const s value = macro; print(#macro, &value, sizeof(value)); }
static void print(const char *name, const void *value, std::size_t bytes) {
  std::printf("%s ", name);
  for (std::size_t i = 0; i < bytes; i++) {
    std::printf("%02x", static_cast<const unsigned char *>(value)[i]);
  }
  std::printf("\n");
}
int main() {
END
  awk '/^#/ || NF == 0 { next }
       { first = 1 }
       !/^ / { name = $1; first = 2; print "  STRUCT(" name ");" }
       { for (i = first; i <= NF; i++) print "  FIELD(" name ", " $i ");" }' "$here/layouts.list"
  echo '  INITIALIZER(ncclConfig_t, NCCL_CONFIG_INITIALIZER)'
  echo '  INITIALIZER(ncclSimInfo_t, NCCL_SIM_INFO_INITIALIZER)'
  echo '  INITIALIZER(ncclDevCommRequirements_t, NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)'
  echo '}'
} > "$work/layouts.cpp"

# -isystem: warnings inside foreign headers are not ours to fix.
"${CXX:-c++}" -std=c++17 -Wall -Wextra -Werror -isystem "$1" -isystem "$2" -I "$here/../include" \
  -o "$work/layouts" "$work/layouts.cpp"
"$work/layouts"

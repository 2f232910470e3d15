#!/usr/bin/env bash
# Looks for the real NCCL, the real CUDA runtime and NVRTC, which the tests of level 3 (real libraries, no GPU) use, and
# writes what it found as Java properties: nccl.library, nccl.include, cudart.library, cuda.include, nvrtc.library
# (ncclffm.nccl, ncclffm.cudart and ncclffm.nvrtc repeat the libraries under the names that the loader obeys), and, when
# any of them is missing, reason.
# It never fails the build: without the libraries those tests are skipped, with the reason.
#
# Usage: fetch-real-libraries.sh OUTPUT [true|false]
#   false: take only what is on this machine, download nothing.
#
# Order: the pinned Python packages in the user's cache (downloaded there once), then, for CUDA, an installed toolkit.
set -u

output=$1
download=${2:-true}

nccl_version=2.30.7
cuda_version=13.0
nvrtc_version=13.0.88
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nccl-ffm
# Seconds that all downloads together may take.
budget=300

log=${output%.properties}.log
mkdir -p "$(dirname "$output")"
: >"$log"
reason=""
scratch=""
trap '[[ -n $scratch ]] && rm -rf "$scratch"' EXIT

# fetch FOLDER PACKAGE... : makes sure that the cache has FOLDER with the unpacked packages in it; all or nothing.
fetch() {
  local name=$1 wheel
  shift
  [[ -d $cache/$name ]] && return 0
  if [[ $download != true ]]; then
    reason="$* not in the cache, and this build downloads nothing"
    return 1
  fi
  if ! python3 -m pip --version >>"$log" 2>&1; then
    reason="python3 with pip is needed to download $*"
    return 1
  fi
  # Beside the final folder, so that the rename below stays within one file system.
  if [[ -z $scratch ]] && ! { mkdir -p "$cache" && scratch=$(mktemp -d "$cache/partial.XXXXXX"); } 2>>"$log"; then
    reason="cannot write to the cache folder $cache"
    return 1
  fi
  if ((SECONDS >= budget)) || ! timeout $((budget - SECONDS)) python3 -m pip download --quiet --no-deps \
    --only-binary=:all: --dest "$scratch/$name.wheels" "$@" >>"$log" 2>&1; then
    reason="pip could not download $* ($log)"
    return 1
  fi
  for wheel in "$scratch/$name.wheels"/*.whl; do
    if ! python3 -m zipfile -e "$wheel" "$scratch/$name" >>"$log" 2>&1; then
      reason="cannot unpack $wheel ($log)"
      return 1
    fi
  done
  # One atomic step; where another build was faster, its folder is as good.
  mv -T "$scratch/$name" "$cache/$name" 2>>"$log"
  [[ -d $cache/$name ]]
}

# first PATH... : prints the first path that exists.
first() {
  local path
  for path in "$@"; do
    if [[ -e $path ]]; then
      printf '%s' "$path"
      return 0
    fi
  done
  return 1
}

missing=()
nccl_library="" nccl_include="" cudart_library="" cuda_include="" nvrtc_library=""

if fetch "nccl-$nccl_version" "nvidia-nccl-cu13==$nccl_version"; then
  nccl_library=$(first "$cache/nccl-$nccl_version/nvidia/nccl/lib/libnccl.so.2")
  nccl_include=$(first "$cache/nccl-$nccl_version/nvidia/nccl/include")
else
  missing+=("$reason")
fi

if fetch "cuda-$cuda_version" "nvidia-cuda-runtime==$cuda_version.*" "nvidia-cuda-crt==$cuda_version.*"; then
  cudart_library=$(first "$cache/cuda-$cuda_version"/nvidia/cu13/lib/libcudart.so.*)
  cuda_include=$(first "$cache/cuda-$cuda_version/nvidia/cu13/include")
else
  for toolkit in ${CUDA_HOME:+"$CUDA_HOME"} ${CUDA_PATH:+"$CUDA_PATH"} /usr/local/cuda /usr/local/cuda-* /opt/cuda; do
    [[ -n $cudart_library ]] || cudart_library=$(first "$toolkit"/lib64/libcudart.so "$toolkit"/lib64/libcudart.so.* \
      "$toolkit"/targets/*/lib/libcudart.so.*)
    [[ -n $cuda_include || ! -e $toolkit/include/cuda_runtime.h ]] || cuda_include=$toolkit/include
  done
  [[ -n $cudart_library && -n $cuda_include ]] || missing+=("$reason, and no CUDA toolkit was found")
fi

if fetch "nvrtc-$nvrtc_version" "nvidia-cuda-nvrtc==$nvrtc_version"; then
  nvrtc_library=$(first "$cache/nvrtc-$nvrtc_version"/nvidia/cu13/lib/libnvrtc.so.*)
else
  for toolkit in ${CUDA_HOME:+"$CUDA_HOME"} ${CUDA_PATH:+"$CUDA_PATH"} /usr/local/cuda /usr/local/cuda-* /opt/cuda; do
    [[ -n $nvrtc_library ]] || nvrtc_library=$(first "$toolkit"/lib64/libnvrtc.so)
  done
  [[ -n $nvrtc_library ]] || missing+=("$reason, and no CUDA toolkit with NVRTC was found")
fi

# A second reader may be looking at the old file: replace it in one step.
{
  echo "# Written by scripts/fetch-real-libraries.sh."
  [[ -n $nccl_library ]] && printf '%s\n' "nccl.library=$nccl_library" "ncclffm.nccl=$nccl_library"
  [[ -n $nccl_include ]] && echo "nccl.include=$nccl_include"
  [[ -n $cudart_library ]] && printf '%s\n' "cudart.library=$cudart_library" "ncclffm.cudart=$cudart_library"
  [[ -n $cuda_include ]] && echo "cuda.include=$cuda_include"
  [[ -n $nvrtc_library ]] && printf '%s\n' "nvrtc.library=$nvrtc_library" "ncclffm.nvrtc=$nvrtc_library"
  ((${#missing[@]} > 0)) && printf 'reason=%s\n' "$(IFS=';' && echo "${missing[*]}")"
} >"$output.new"
mv "$output.new" "$output"

echo "Real libraries: NCCL ${nccl_library:-none}, CUDA runtime ${cudart_library:-none}, NVRTC ${nvrtc_library:-none}${missing[*]:+ (${missing[*]})}"
exit 0

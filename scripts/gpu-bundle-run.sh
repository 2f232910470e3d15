#!/usr/bin/env bash
# Runs the demo, the doctor, the tests or the benchmarks of nccl-ffm from this folder. The host needs an NVIDIA driver,
# libcudart and libnccl.
set -euo pipefail

usage() {
  cat <<'END'
usage: run.sh demo [ARGUMENT...]   the demo: --ranks N, --processes ...
       run.sh doctor [ARGUMENT...] what is wrong with this machine, and what helps: --json, --no-self-test ...
       run.sh test [ARGUMENT...]   the tests; arguments as of JUnit's console launcher, for example -c CLASS
       run.sh bench FOLDER [quick]    all benchmarks, within ten minutes; results go to FOLDER/date-gpu
       run.sh compare OLD NEW         two results.json: what has become slower against the rest of its run

environment:
  NCCLFFM_BACKEND   cuda (default) or cpu
  NCCLFFM_NCCL      the libnccl to load; default: the system's
  NCCLFFM_CUDART    the libcudart to load; default: the system's
  NCCLFFM_NVRTC     the libnvrtc to load; default: the system's; the tests of kernels compiled at run time need one
  NCCLFFM_MPS       1: run under an MPS daemon of its own, so that processes share a GPU side by side
  JDK_JAVA_OPTIONS  options for the Java virtual machine
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A machine with a GPU is what the bundle is for: falling back to the CPU backend would hide that CUDA does not work.
export NCCLFFM_BACKEND=${NCCLFFM_BACKEND:-cuda}

java() {
  "$here/runtime/bin/java" --enable-native-access=ALL-UNNAMED -cp "$here/lib/*" \
    "-Dncclffm.test.ncclKernel=$here/native-test/nccl_lsa_sum.fatbin" \
    "-Dncclffm.bench.ncclKernel=$here/native-test/nccl_lsa_all_reduce.fatbin" "$@"
}

tests() {
  local argument scan=("--scan-class-path=$(echo "$here"/lib/nccl-ffm-tests-*.jar)")
  for argument in "$@"; do
    # The console launcher refuses a scan beside a selection.
    case $argument in
      -[cdfimopru] | -[cdfimopru]=* | --select* | --uid*) scan=() ;;
    esac
  done
  # The tests of the tag real-library expect a machine without a GPU.
  java org.junit.platform.console.ConsoleLauncher execute --disable-banner --details=tree --fail-if-no-tests \
    --exclude-tag=real-library --config=junit.jupiter.execution.timeout.default=120s \
    --config=junit.jupiter.execution.timeout.threaddump.enabled=true "${scan[@]}" "$@"
}

start_mps() {
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "NCCLFFM_MPS=1 needs nvidia-cuda-mps-control, which comes with the NVIDIA driver." >&2
    exit 1
  fi
  mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
  mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  trap stop_mps EXIT
  nvidia-cuda-mps-control -d
}

stop_mps() {
  echo quit | timeout 30 nvidia-cuda-mps-control || echo "The MPS daemon did not stop; its log: $mps/log" >&2
  rm -rf "$mps"
}

command=${1:-}
case $command in
  demo | doctor | test | bench | compare) shift ;;
  *)
    usage >&2
    exit 2
    ;;
esac
[[ ${NCCLFFM_MPS:-} != 1 ]] || start_mps
case $command in
  demo) java io.ncclffm.benchmarks.Demo "$@" ;;
  doctor) java io.ncclffm.device.doctor.Doctor "$@" ;;
  test) tests "$@" ;;
  bench) java "-Dncclffm.bench.command=./run.sh bench $*" io.ncclffm.benchmarks.Bench "$here/native-test" "$@" ;;
  compare) java io.ncclffm.benchmarks.Compare "$@" ;;
esac

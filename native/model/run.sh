#!/bin/sh
# Checks the models with spin and a C compiler (run.sh SPIN [CC]): as they are, and that broken ones are noticed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
spin=$1 cc=${2:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

verify() { # MODEL [DEFINE...]: 0 if no error was found
  model=$1
  shift
  "$spin" -a "$@" "$here/$model.pml" > generated.txt 2>&1 || { cat generated.txt; exit 1; }
  "$cc" -O2 -w -DVECTORSZ=2048 -DNFAIR=8 -o pan pan.c
  ./pan -a -f -m2000000 > out.txt 2>&1
  grep -E "errors: |states, stored" out.txt | sed "s/^/$model $*: /"
  if grep -q "max search depth too small\|out of memory" out.txt; then
    cat out.txt
    exit 1
  fi
  grep -q "errors: 0" out.txt
}

broken() {
  if verify "$@"; then
    echo "model: $* was not noticed"
    exit 1
  fi
}

verify task_ring || exit 1
verify task_ring -DABORT || exit 1
for rule in NO_RECHECK NO_ROOM NO_GENERATION NO_BOUND; do
  broken task_ring -D$rule
done
verify task_lanes -DROUNDS=1 || exit 1
broken task_lanes -DROUNDS=1 -DNO_LATER
broken task_lanes -DROUNDS=2 -DNO_PARK
echo "model: PASS"

#!/bin/sh
# Checks task_ring.pml with spin and a C compiler (run.sh SPIN [CC]): the model, with and without an abort, and that a
# broken one is noticed.
set -eu
model=$(cd "$(dirname "$0")" && pwd)/task_ring.pml
spin=$1 cc=${2:-cc}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

verify() { # DEFINES: 0 if no error was found
  "$spin" -a $1 "$model" > generated.txt 2>&1 || { cat generated.txt; exit 1; }
  "$cc" -O2 -w -DVECTORSZ=2048 -DNFAIR=6 -o pan pan.c
  ./pan -a -f -m1000000 > "out.txt" 2>&1
  grep -E "errors: |states, stored" out.txt | sed "s/^/model${1:+ }$1: /"
  if grep -q "max search depth too small\|out of memory" out.txt; then
    cat out.txt
    exit 1
  fi
  grep -q "errors: 0" out.txt
}

verify "" || exit 1
verify -DABORT || exit 1
for rule in NO_RECHECK NO_ROOM NO_GENERATION NO_BOUND; do
  if verify -D$rule; then
    echo "model: $rule was not noticed"
    exit 1
  fi
done
echo "model: PASS"

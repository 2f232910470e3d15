#!/usr/bin/env bash
# Completes the GPU bundle, whose jars and Java runtime Maven has put there: adds the tests, the C++ tests of the CUDA
# shim where nvcc was found, and run.sh; packs it; called by src/test/pom.xml.
#
# Usage: gpu-bundle.sh BUNDLE TESTS_JAR
set -euo pipefail

bundle=$1 tests=$2
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# MB (10^6 bytes) that the unpacked bundle may take.
limit=80

cp "$tests" "$bundle/lib/"
install -m 755 "$scripts/gpu-bundle-run.sh" "$bundle/run.sh"

# jlink leaves the symbol table in: a sixth of the largest file.
strip --strip-unneeded "$bundle/runtime/lib/server/libjvm.so"

"$scripts/build-native.sh" bundle "$bundle/native-test"

tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=2025-01-01T00:00:00Z -C "$(dirname "$bundle")" \
  -c "$(basename "$bundle")" | gzip -n >"$bundle.tar.gz"

megabytes() { # PATH, in 10^6 bytes, rounded up
  echo $((($(du --apparent-size --bytes --summarize "$1" | cut -f1) + 999999) / 1000000))
}

size=$(megabytes "$bundle")
echo "GPU bundle: $bundle, $size MB; $bundle.tar.gz, $(megabytes "$bundle.tar.gz") MB"
if ((size >= limit)); then
  echo "The GPU bundle has grown to $size MB; it must stay under $limit MB." >&2
  exit 1
fi

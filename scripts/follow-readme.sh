#!/usr/bin/env bash
# Does what a new user is told to: clones this tree into an empty folder and runs there, in their order, the blocks
# "sh build" and "sh" of README.md and CONTRIBUTING.md, and what docs/testing.md says of a single class. What CI runs
# anyway is left out (the tests of mvn verify, the C++ tests), and what needs jextract. Takes minutes, and writes to the local Maven
# repository, as it tells users to.
#
# Usage: follow-readme.sh [FOLDER]      default: a temporary one, removed afterwards
set -euo pipefail

java=$(java --version | head -1)
if [[ ! $java =~ ^[a-z]+\ ([0-9]+) ]] || ((BASH_REMATCH[1] < 25)); then
  echo "follow-readme.sh: needs the java of a JDK 25 first on the PATH, there is $java" >&2
  exit 1
fi
JAVA_HOME=$(dirname "$(dirname "$(realpath "$(command -v java)")")") # for the project of a user's
export JAVA_HOME

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -n ${1:-} ]]; then
  folder=$1
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi

git clone --quiet "$root" "$folder/nccl-ffm"
cd "$folder/nccl-ffm"

# The first block of Java in the README.
sed -n '/^```java/,/^```/{/^```/!p;}' README.md | sed '/^}$/q' >Hello.java

left_out='^scripts/build-native.sh|^ctest|^sh native/model|jextract|clang.include'
for document in README.md CONTRIBUTING.md docs/testing.md; do
  sed -nE '/^```sh( build)?$/,/^```$/p' "$document" | grep -vE "$left_out" |
    sed 's/^mvn verify/mvn -DskipTests verify/' >commands
  block=""
  while IFS= read -r line; do
    case $line in
      '```sh'*) block="" ;;
      '```')
        echo "== $document: $block"
        bash -euo pipefail -c "$block" </dev/null
        ;;
      *) block+=$line$'\n' ;;
    esac
  done <commands
done
echo "follow-readme: PASS"

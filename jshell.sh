#!/usr/bin/env bash
# Opens jshell with nccl-ffm on the module path and its packages imported. Arguments go to jshell. Needs a JDK 25 and
# the jars, which `mvn -DskipTests package` builds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

is_jdk() { # FOLDER: of a JDK 25 or later, with jshell
  [[ -x $1/bin/jshell && -f $1/release ]] || return 1
  local version
  version=$(sed -n 's/^JAVA_VERSION="\([0-9]*\).*/\1/p' "$1/release")
  ((${version:-0} >= 25))
}

jdk=""
on_path=$(command -v jshell || true)
for folder in "${JAVA_HOME:-}" "${on_path:+$(dirname "$(dirname "$(realpath "$on_path")")")}" \
  $(sed -n 's|.*<jdkHome>\(.*\)</jdkHome>.*|\1|p' "$HOME/.m2/toolchains.xml" 2>/dev/null) \
  /usr/lib/jvm/* /opt/java/* /opt/jdk* "$HOME"/.sdkman/candidates/java/* "$HOME"/.jdks/*; do
  if is_jdk "$folder"; then
    jdk=$folder
    break
  fi
done

missing=()
[[ -n $jdk ]] || missing+=("a JDK 25 with jshell: set JAVA_HOME to one")
path=""
for module in native nccl-ffm-core nccl-ffm-lsa nccl-ffm-device; do
  jar=$(find "$root/$module/target" -maxdepth 1 -name 'nccl-ffm-*.jar' ! -name '*-sources.jar' ! -name '*-javadoc.jar' \
    2>/dev/null | sort | tail -1 || true)
  [[ -n $jar ]] || missing+=("the jar of $module: run mvn -DskipTests package")
  path+=${path:+:}$jar
done
if ((${#missing[@]} > 0)); then
  printf 'jshell.sh: missing is %s\n' "${missing[@]}" >&2
  exit 1
fi

exec "$jdk/bin/jshell" --module-path "$path" --add-modules io.ncclffm.device \
  -R--enable-native-access=io.ncclffm.core,io.ncclffm.lsa,io.ncclffm.device \
  --startup DEFAULT --startup "$root/scripts/jshell-startup.jsh" "$@"

#!/usr/bin/env bash
# Lays the guides out for javadoc, which renders Markdown: FOLDER/doc-files has README.md, CONTRIBUTING.md, docs and what they
# link to, in the folders that they have in the tree, FOLDER/overview.md is the first page; called by
# nccl-ffm-device/pom.xml (profile site).
#
# Usage: site-guides.sh FOLDER
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1

rm -rf "$folder"
mkdir -p "$folder/doc-files"
cp --parents -r LICENSE README.md CONTRIBUTING.md docs native/bindings/README.md benchmarks/results \
  src/test/consumer/pom.xml "$folder/doc-files"

cat >"$folder/overview.md" <<END
NCCL for Java: [what it is](io.ncclffm.core/doc-files/README.html), [the guides](io.ncclffm.core/doc-files/docs/index.html), and
the Javadoc of each module.
END

# Outside blocks of code: links lead to what javadoc makes of a guide, and to GitHub's anchors of headings, which javadoc
# names otherwise.
find "$folder/doc-files" -name '*.md' -exec sed -E -i '/^```/,/^```/!{
  s/(\]\([^):]*)\.md([#)])/\1.html\2/g
  /^#+ /{
    h
    s/^#+ (.*)/\L\1/
    s/[^a-z0-9_ -]//g
    s/ /-/g
    s/.*/<a id="&"><\/a>\n/
    G
  }
}' {} +

#!/usr/bin/env bash
# Makes sure that there is a bubblewrap, in which the trainer runs model-written code: the one on PATH, or Debian's, which
# is installed (as root) or unpacked into the virtual environment given as first argument.
set -euo pipefail
venv=${1:-.venv}

if command -v bwrap >/dev/null || [ -x "$venv/bin/bwrap" ]; then
  exit 0
fi
unavailable() {
  echo "scripts/bubblewrap.sh: $1; the tests of the sandbox will be skipped (they fail where CI=true)" >&2
  exit 0
}
command -v apt-get >/dev/null || unavailable "no bwrap on PATH, and no apt-get to get it with"

if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 ||
    unavailable "apt-get could not install bubblewrap"
else
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  mkdir -p "$download/lists/partial" "$download/cache/archives/partial"
  apt() { apt-get -qq -o Dir::State::lists="$download/lists" -o Dir::Cache="$download/cache" "$@"; }
  (cd "$download" && apt update && apt download bubblewrap) >/dev/null 2>&1 ||
    unavailable "apt-get could not download bubblewrap"
  dpkg -x "$download"/bubblewrap_*.deb "$download/root"
  cp "$download/root/usr/bin/bwrap" "$venv/bin/bwrap"
fi

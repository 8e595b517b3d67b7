#!/usr/bin/env bash
# Makes sure that Mooncake's engine finds the RDMA library it is linked with: the one of the system, or Debian's
# `libibverbs1`, which is installed (as root) or unpacked into the virtual environment given as first argument.
set -euo pipefail
venv=${1:-.venv}

if /sbin/ldconfig -p | grep libibverbs.so.1 >/dev/null || ls "$venv"/mooncake/usr/lib/*/libibverbs.so.1 >/dev/null 2>&1; then
  exit 0
fi
unavailable() {
  echo "scripts/mooncake.sh: $1; the tests of this transport will be skipped (they fail where CI=true)" >&2
  exit 0
}
command -v apt-get >/dev/null || unavailable "no libibverbs.so.1, and no apt-get to get it with"

if [ "$(id -u)" = 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 libnuma1 libcurl4; } >/dev/null 2>&1 ||
    unavailable "apt-get could not install libibverbs1"
else
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  mkdir -p "$download/lists/partial" "$download/cache/archives/partial" "$venv/mooncake"
  apt() { apt-get -qq -o Dir::State::lists="$download/lists" -o Dir::Cache="$download/cache" "$@"; }
  (cd "$download" && apt update && apt download libibverbs1 libnl-3-200 libnl-route-3-200) >/dev/null 2>&1 ||
    unavailable "apt-get could not download libibverbs1"
  for package in "$download"/*.deb; do dpkg -x "$package" "$venv/mooncake"; done
fi
